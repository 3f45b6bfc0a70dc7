"""The exchange of learners that have a parameter server: each goes on as its pace allows.

Nobody hears the others at once: what a learner books or says goes with its next push, and what all
have said comes with parameters. So every learner's counters get to the same sums, at other times,
and a learner that is told to stop may stop some steps after another. `Progress.version` counts the
server's updates, those of all learners. Advantages are normalised over a learner's own samples.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from penstock.configs.schema import LearnerConfig
from penstock.learner.exchange.base import Word
from penstock.learner.optimizer import FlatOptimizer
from penstock.learner.progress import BOOKED, GROWTH, Progress
from penstock.learner.server.client import ServerClient
from penstock.learner.server.protocol import NOTHING
from penstock.profiling.ledger import TimeLedger

LOOK_S = 0.1


class Served:
    """One learner's side. ``optimizer`` holds what the run has seen, as ``progress`` counts it."""

    def __init__(
        self,
        address: str,
        rank: int,
        optimizer: FlatOptimizer,
        progress: Progress,
        cfg: LearnerConfig,
        ledger: TimeLedger,
        waiting: Callable[[], bool],
        curve: Path | None = None,
    ) -> None:
        """``waiting`` is called again and again while this waits: beats, and says whether to."""
        self.world = cfg.count
        self._progress = progress
        self._ledger = ledger
        self._waiting = waiting
        self._told = np.array([float(getattr(progress, name)) for name in BOOKED])
        self._owed = np.zeros(GROWTH)
        self._stop = self._nan = self._checkpoint = False
        self._may_push = False
        self._save = False  # another has said so
        self._left = 0  # updates of this turn
        self.client = ServerClient(
            address,
            rank,
            optimizer,
            cfg,
            version=progress.learner_steps,
            samples=progress.trained_steps,
            tally=(*self._told.tolist(), *NOTHING[len(BOOKED) :]),
            curve=curve,
        )
        self._reply = self.client.last

    def agree(self, mine: Word) -> Word:
        """What is known of the others by now; ``counts`` are always one's own."""
        self._ledger.switch("reduce_exposed")
        self._owed[: len(BOOKED)] += mine.growth[: len(BOOKED)]
        self._owed[len(BOOKED) :] = mine.growth[len(BOOKED) :]
        self._stop |= mine.stop
        self._nan |= mine.nan
        self._checkpoint |= mine.checkpoint
        if not self._may_push:
            self._pull()
        if not mine.counts.any():
            self._push(0)
        if mine.stop or not mine.counts.size:  # the last word: the counters should be whole
            self._pull()
        self._left = mine.counts.size
        heard = self._reply
        growth = np.array(heard.tally)
        growth[: len(BOOKED)] -= self._told
        self._told = np.array(heard.tally[: len(BOOKED)])
        save, self._save = mine.checkpoint or self._save, False
        return Word(mine.counts, growth, mine.stop or heard.stop, mine.nan or heard.nan, save)

    def arm(self, optimizer: FlatOptimizer, total: float) -> None:
        """Gradients go whole, when they are complete."""

    def step(self, optimizer: FlatOptimizer, total: float, env_steps: int) -> Tensor:
        self._ledger.switch("reduce_exposed")
        norm = self._push(int(total))
        assert norm is not None
        self._left -= 1
        if self._left > 0:
            self._pull(uncounted=1)
        self._ledger.switch("compute")
        return norm

    def sum(self, values: Tensor) -> None:
        """Every learner's batch is its own."""

    def least(self, value: float) -> float:
        return value

    def fetch(self) -> bool:
        """Bring parameters and optimizer up to what is to be saved; False where that failed."""
        return self.client.fetch(5.0) is not None

    def close(self) -> None:
        """Leave; the others go on."""
        self.client.close()

    def _push(self, samples: int) -> Tensor | None:
        norm = self.client.push(
            samples,
            tuple(self._owed.tolist()),
            stop=self._stop,
            nan=self._nan,
            checkpoint=self._checkpoint,
        )
        self._owed[: len(BOOKED)] = 0.0
        self._checkpoint = self._may_push = False
        return norm

    def _pull(self, uncounted: int = 0) -> None:
        """The parameters of now, as soon as the pace allows, unless waiting ends before.

        ``uncounted``: updates that the trainer has yet to count.
        """
        while (reply := self.client.pull(LOOK_S)) is None:
            if not self._waiting():
                return
        self._may_push = True
        self._reply = reply
        self._save |= reply.checkpoint
        counted = self._progress.learner_steps + uncounted
        self._progress.updated(max(0, reply.version - counted))
