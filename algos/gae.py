"""Moved: `penstock.algos.ops.gae`. Gone after 0.1."""

import warnings

from penstock.algos.ops.gae import gae

__all__ = ["gae"]

warnings.warn("import penstock.algos.ops.gae, not penstock.algos.gae", DeprecationWarning, 2)
