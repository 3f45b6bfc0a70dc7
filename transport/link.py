"""Moved: `penstock.core.interfaces` has `Link` and what goes with it. Gone after 0.1."""

from penstock.core.interfaces import LearnerGoneError as LearnerGoneError
from penstock.core.interfaces import Link as Link
from penstock.core.interfaces import Welcome as Welcome
from penstock.core.params import Stamp as Stamp
