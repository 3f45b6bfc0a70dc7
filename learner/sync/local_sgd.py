"""Local SGD: learners step alone and average parameters every ``learner.local_steps`` updates.

After McMahan et al. 2017 (arXiv 1602.05629, algorithm 1), with stateful optimizers: their moments
are averaged with the parameters, both weighted by the samples trained on since the last round, so
that all learners are equal after it. The number of steps for Adam's bias correction stays each
learner's own. Between rounds learners differ, and each publishes its own weights to its own actors,
so that samples always meet the policy that made them.

A learner begins a round when it has made its updates, when it has no samples, or when a flag of its
control message is set; it then waits for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.configs.sections import LearnerConfig
from penstock.core.params import Arrays
from penstock.learner.group.process_group import LearnerGroup
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync
from penstock.learner.sync.pace import PaceContext
from penstock.profiling.ledger import Part, TimeLedger


class LocalSgd:
    """Learners that average parameters periodically.

    ``optimizers`` by name, the same on every rank.
    """

    def __init__(
        self,
        group: LearnerGroup,
        optimizers: Mapping[str, FlatOptimizer],
        cfg: LearnerConfig,
        ledger: TimeLedger,
        launched: Callable[[], None] | None = None,
    ) -> None:
        """``launched`` is called when an average is queued on the device
        (`DeviceQueue.launched`)."""
        self.world = group.world
        self.rounds = 0
        self._group = group
        self._optimizers = optimizers
        self._every = cfg.local_steps
        self._ledger = ledger
        self._launched = launched or (lambda: None)
        self._updates = 0  # since the last round
        self._samples = 0.0
        self.unsent = np.zeros(len(BOOKED))
        self._recent = np.zeros(3)

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        """The sum over all learners in a round, else this learner's own message.

        ``counts`` are always its own.
        """
        unsent = self.unsent + mine.growth[: len(BOOKED)]
        flags = (mine.stop, mine.nan, mine.checkpoint, mine.regroup)
        if self._updates < self._every and mine.counts.any() and not any(flags):
            self.unsent = unsent
            return ControlMessage(
                mine.counts, np.concatenate((np.zeros(len(BOOKED)), self._recent))
            )
        self._ledger.switch(Part.REDUCE)
        growth = np.concatenate((unsent, mine.growth[len(BOOKED) :]))
        summed = self._sum(ControlMessage(np.array([self._samples]), growth, *flags))
        if summed.counts[0]:
            self._average(self._samples / float(summed.counts[0]))
        self._updates, self._samples = 0, 0.0
        self.unsent = np.zeros(len(BOOKED))
        self._recent = summed.growth[len(BOOKED) :]
        self.rounds += 1
        summed.counts = mine.counts
        return summed

    def prepare_backward(self, optimizer: FlatOptimizer, total: float) -> None:
        pass

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        self._updates += 1
        self._samples += total
        return optimizer.step(total, env_steps)

    def all_reduce(self, values: Tensor) -> None:
        """Does nothing: every learner's update is its own."""

    def all_reduce_min(self, value: float) -> float:
        return value

    def state_dict(self, *, saves: bool) -> Arrays:
        """Random states; no other state is kept between rounds."""
        return self._group.collect_states({})

    def load_state_dict(self, state: Arrays) -> None:
        self._group.restore_own(state)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _sum(self, message: ControlMessage) -> ControlMessage:
        vector = torch.from_numpy(message.pack())
        self._group.control.all_reduce(vector)
        return ControlMessage.unpack(vector.numpy())

    @torch.no_grad()
    def _average(self, share: float) -> None:
        """Average parameters and moments over learners, this learner's with weight ``share``.

        They are replaced only when all values have arrived: a learner may die meanwhile. Over NCCL
        the host does not wait for them: `StateCopies` restores them if the average is lost.
        """
        kept = [
            values
            for optimizer in self._optimizers.values()
            for values in (optimizer.values, *optimizer.moments.values())
        ]
        means = [values * share for values in kept]
        for mean in means:
            self._group.gradients.all_reduce(mean)
        for values, mean in zip(kept, means, strict=True):
            values.copy_(mean)
        self._launched()
        self._ledger.switch(Part.REDUCE)


class LocalSgdPace:
    """Makes `LocalSgd` for each group; a `core.interfaces.Pace`."""

    def __init__(self, context: PaceContext) -> None:
        self._context = context

    def join(self, group: LearnerGroup | None, source: int = 0) -> GradientSync:
        assert group is not None
        ctx, config, trainer = self._context
        launched = trainer.queue.launched
        return LocalSgd(group, trainer.optimizers(), config.learner, ctx.ledger, launched)
