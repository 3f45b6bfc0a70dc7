"""Local SGD: learners step alone and average parameters every ``learner.local_steps`` updates.

After McMahan et al. 2017 (arXiv 1602.05629, algorithm 1), with stateful optimizers: their moments
are averaged with the parameters, both weighted by the samples trained on since the last round, so
that all learners are equal after it. The number of steps for Adam's bias correction stays each
learner's own. Between rounds learners differ, and each publishes its own weights to its own actors,
so that samples always meet the policy that made them.

A learner enters a round when it has made its updates, or when a flag of its control message is set,
and waits there for the others. One without samples takes part without steps: it enters shortly
before the others have made theirs, by the time that they needed for the last round, so that they
need not wait for it, and it trains on samples that come until then. (It stays out for half of
`learner.reduce.timeout_s` at most, after which the others would take it for stuck.) Every learner
enters every round once, so all make the same collective calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.configs.sections import LearnerConfig
from penstock.core.params import Arrays
from penstock.learner.group.process_group import LearnerGroup
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED, GROWTH
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync, OwnUpdates
from penstock.learner.sync.pace import PaceContext
from penstock.profiling.ledger import Part, TimeLedger


class RoundCounts(NamedTuple):
    """What a learner sends in a round as the counts of its control message."""

    samples: float
    """Samples that it trained on since the last round."""
    busy_s: float
    """Seconds that it needed for its updates, if it has made all of them."""
    has_made_updates: float
    """1 if so, else 0; their sum is the number of learners that have."""


class LocalSgd(OwnUpdates):
    """Learners that average parameters periodically: the `GradientSync` of one group."""

    def __init__(
        self,
        group: LearnerGroup,
        optimizers: Mapping[str, FlatOptimizer],
        cfg: LearnerConfig,
        ledger: TimeLedger,
        launched: Callable[[], None],
    ) -> None:
        """Make the sync of one group.

        Args:
            group: the connected learners.
            optimizers: by name, the same on every rank.
            cfg: the section `learner`.
            ledger: time ledger of the training thread.
            launched: called when an average is queued on the device
                (`DeviceQueue.on_batch_queued`).
        """
        self.world = group.world
        self.rounds = 0
        self.unsent = np.zeros(len(BOOKED))
        self._group = group
        self._optimizers = optimizers
        self._local_steps = cfg.local_steps
        self._wait_s = cfg.reduce.wait_s
        self._longest_s = cfg.reduce.timeout_s / 2
        self._ledger = ledger
        self._launched = launched

        # Since the last round.
        self._updates = 0
        self._samples = 0.0
        self._round_began_s = time.monotonic()

        # By the last round.
        self._expected_s = 0.0
        """Seconds in which learners with samples make their updates."""
        self._stopped = False
        """Whether the run stops."""
        self._recent_returns = np.zeros(GROWTH - len(BOOKED))
        """The sums over all learners' last episodes."""

    def sync_control(self, mine: ControlMessage) -> ControlMessage:
        """Enter a round if it is time.

        Returns:
            The sum over all learners in a round, else this learner's own message, with counters of
            the run that do not grow. ``counts`` are always its own.
        """
        unsent = self.unsent + mine.growth[: len(BOOKED)]
        elapsed_s = time.monotonic() - self._round_began_s
        if not self._enters(mine, elapsed_s):
            self.unsent = unsent
            growth = np.concatenate((np.zeros(len(BOOKED)), self._recent_returns))
            return ControlMessage(mine.counts, growth)

        # All learners sum up their messages, and average their parameters by their samples.
        self._ledger.switch(Part.REDUCE)
        counts = RoundCounts(
            samples=self._samples,
            busy_s=elapsed_s if self._is_due else 0.0,
            has_made_updates=float(self._is_due),
        )
        growth = np.concatenate((unsent, mine.growth[len(BOOKED) :]))
        summed = self._sum(replace(mine, counts=np.array(counts), growth=growth))
        totals = RoundCounts(*summed.counts.tolist())
        if totals.samples:
            self._average(self._samples / totals.samples)

        # The next round begins.
        if totals.has_made_updates:
            mean_s = totals.busy_s / totals.has_made_updates
            self._expected_s = min(mean_s, self._longest_s)
        self._updates = 0
        self._samples = 0.0
        self._round_began_s = time.monotonic()
        self._stopped = summed.stop
        self.unsent = np.zeros(len(BOOKED))
        self._recent_returns = summed.growth[len(BOOKED) :]
        self.rounds += 1
        summed.counts = mine.counts
        return summed

    @property
    def _is_due(self) -> bool:
        """Whether this learner has made its updates of the round."""
        return self._updates >= self._local_steps

    def _enters(self, mine: ControlMessage, elapsed_s: float) -> bool:
        """Returns whether this learner enters a round, ``elapsed_s`` seconds after the last one."""
        if mine.stop or mine.nan or mine.checkpoint or mine.regroup or self._is_due:
            return True
        if self._stopped:  # only the last counts are left to be sent
            return True
        if mine.counts.any():
            return False
        # It looks again when it has waited so long for samples once more.
        return elapsed_s + self._wait_s >= self._expected_s

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        self._updates += 1
        self._samples += total
        return optimizer.step(total, env_steps)

    def state_dict(self, *, saves: bool) -> Arrays:
        """Returns the random states; no other state is kept between rounds."""
        return self._group.collect_states({})

    def load_state_dict(self, state: Arrays) -> None:
        self._group.restore_own(state)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _sum(self, message: ControlMessage) -> ControlMessage:
        """Sum up the messages of all learners."""
        vector = torch.from_numpy(message.pack())
        self._group.control.all_reduce(vector)
        return ControlMessage.unpack(vector.numpy())

    @torch.no_grad()
    def _average(self, share: float) -> None:
        """Average parameters and moments over learners, this learner's with weight ``share``.

        They are replaced only when all means have arrived, as a learner may die meanwhile. Over
        NCCL the host does not wait for that: `StateCopies` restores them if the average is lost.
        """
        parameters_and_moments = [
            values
            for optimizer in self._optimizers.values()
            for values in (optimizer.values, *optimizer.moments.values())
        ]
        means = [values * share for values in parameters_and_moments]
        for mean in means:
            self._group.gradients.all_reduce(mean)

        for values, mean in zip(parameters_and_moments, means, strict=True):
            values.copy_(mean)
        self._launched()
        self._ledger.switch(Part.REDUCE)


class LocalSgdPace:
    """Makes `LocalSgd` for each group; a `core.interfaces.Pace`."""

    def __init__(self, context: PaceContext) -> None:
        self._context = context

    def join(self, group: LearnerGroup | None, source: int = 0) -> GradientSync:
        """Make the sync of a group; nothing of it depends on ``source``."""
        assert group is not None
        ctx, config, trainer = self._context
        return LocalSgd(
            group,
            trainer.optimizers(),
            config.learner,
            ledger=ctx.ledger,
            launched=trainer.queue.on_batch_queued,
        )
