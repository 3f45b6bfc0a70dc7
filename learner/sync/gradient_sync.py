"""The seam between a trainer and the other learners of its run.

A trainer that uses it in this order need not know how many learners there are:

    everyone = sync.sync_control(own)    # in every turn, with or without a batch of its own
    for each update of the batch:
        optimizer.zero_grad()
        ... backward of all but the last micro-batch ...
        sync.prepare_backward(optimizer, total)    # total: samples of all, from ``everyone``
        ... the last backward ...
        sync.step(optimizer, total, env_steps)

A learner without samples does the same without the backward passes. Gradients are sums over
samples, so that their sum over learners, divided by the total, is the mean over all samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from penstock.core.params import Floats
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import GROWTH

FLAGS = ("stop", "nan", "checkpoint", "regroup")


class GroupLostError(Exception):
    """The group of learners does not hold together any more; those who live make a new one."""


@dataclass
class ControlMessage:
    """What a learner says before a step, and the sum of what all have said.

    ``counts`` are the samples of each update of the batch, float64 ``[updates]``; ``growth`` is
    `Progress.growth`. ``stop``: the run is to end. ``nan``: a number was not finite.
    ``checkpoint``: the run is to be saved. ``regroup``: the members have changed.
    """

    counts: Floats
    growth: Floats = field(default_factory=lambda: np.zeros(GROWTH))
    stop: bool = False
    nan: bool = False
    checkpoint: bool = False
    regroup: bool = False

    def pack(self) -> Floats:
        """All in one vector, whose sum over learners `unpack` reads."""
        flags = [float(getattr(self, flag)) for flag in FLAGS]
        return np.concatenate((self.counts, flags, self.growth))

    @classmethod
    def unpack(cls, vector: Floats) -> ControlMessage:
        counts, flags, growth = np.split(vector, [-GROWTH - len(FLAGS), -GROWTH])
        return cls(counts, growth, *(bool(flag > 0) for flag in flags))


class GradientSync(Protocol):
    """How one learner's updates become those of all."""

    world: int  # learners that take part

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        """What all learners say. Every learner calls it in every turn."""

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        """The next backward pass completes the gradients of ``optimizer``, sums over samples of
        which all learners together have ``total``."""

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        """Update the parameters; the norm of the gradient that did it (float32 ``[]``)."""

    def sum(self, values: Tensor) -> None:
        """Sum small values over the learners whose gradients are averaged, in place."""

    def all_reduce_min(self, value: float) -> float:
        """The least of what those learners say."""

    def close(self) -> None:
        """Part from the other learners, who notice."""


class SingleLearner:
    """The only learner of its run."""

    world = 1

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        return mine

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        pass

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        return optimizer.step(total, env_steps)

    def sum(self, values: Tensor) -> None:
        pass

    def all_reduce_min(self, value: float) -> float:
        return value

    def close(self) -> None:
        pass
