"""The control message that learners exchange in every turn, and the sync of a single learner.

The seam between a trainer and the other learners is `core.interfaces.GradientSync`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from penstock.core import interfaces
from penstock.core.params import Arrays, Floats
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED, GROWTH

# The flags of a message, in the order in which they are packed.
FLAGS = ("stop", "nan", "checkpoint", "regroup")


class GroupLostError(Exception):
    """The group of learners has broken; the remaining ones form a new one."""


@dataclass
class ControlMessage:
    """One learner's control message before a step, or the sum of all learners' messages."""

    counts: Floats
    """Samples of each update of the batch, float64 ``[updates]``."""
    growth: Floats = field(default_factory=lambda: np.zeros(GROWTH))
    """`Progress.growth`, float64 ``[GROWTH]``."""
    stop: bool = False
    """Whether the run must end."""
    nan: bool = False
    """Whether too many updates in a row had a number that was not finite."""
    checkpoint: bool = False
    """Whether the run must be saved."""
    regroup: bool = False
    """Whether the members have changed."""

    def pack(self) -> Floats:
        """Encode it as one vector; `unpack` reads the sum of such vectors over learners."""
        flags = [float(getattr(self, flag)) for flag in FLAGS]
        return np.concatenate((self.counts, flags, self.growth))

    @classmethod
    def unpack(cls, vector: Floats) -> ControlMessage:
        """Decode a sum of vectors that `pack` has made; a flag is set if any learner has set it."""
        counts, flags, growth = np.split(vector, [-GROWTH - len(FLAGS), -GROWTH])
        return cls(counts, growth, *(bool(flag > 0) for flag in flags))


GradientSync = interfaces.GradientSync[ControlMessage, FlatOptimizer]
"""`GradientSync` with this room's messages and optimizers."""


class OwnUpdates:
    """The part of a `GradientSync` in which every learner's updates are its own."""

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        pass

    def all_reduce(self, values: Tensor) -> None:
        pass

    def all_reduce_min(self, value: float) -> float:
        return value


class SingleLearner(OwnUpdates):
    """The only learner of its run."""

    world = 1
    rounds = 0
    unsent: Floats = np.zeros(len(BOOKED))

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        return mine

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        return optimizer.step(total, env_steps)

    def state_dict(self, *, saves: bool) -> Arrays:
        return {}

    def load_state_dict(self, state: Arrays) -> None:
        pass

    def close(self) -> None:
        pass
