"""Alias of names that moved to `penstock.core.interfaces`, such as `Link`; removed after 0.1."""

from penstock.core.interfaces import LearnerGoneError as LearnerGoneError
from penstock.core.interfaces import Link as Link
from penstock.core.interfaces import Welcome as Welcome
from penstock.core.params import Stamp as Stamp
