"""The arguments of a pace. `core.interfaces.Pace` is the seam; `registry` makes one by its name.

The paces without a server stand beside their sync, in `bsp` and `local_sgd`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.configs.schema import Config
from penstock.core import interfaces
from penstock.core.role import RoleContext
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.group.process_group import LearnerGroup
from penstock.learner.sync.gradient_sync import GradientSync


class PaceContext(NamedTuple):
    """The arguments of a pace."""

    ctx: RoleContext
    """The context of the learner's role: its rank, the addresses of its servers, its ledgers, the
    signal to stop."""
    config: Config
    trainer: BaseTrainer[Any]
    """The trainer. Its optimizers have the parameters and gradients, its `Progress` the counts."""


Pace = interfaces.Pace[LearnerGroup, GradientSync]
"""`Pace` with this room's groups."""
PaceFactory = interfaces.PaceFactory[PaceContext, LearnerGroup, GradientSync]
