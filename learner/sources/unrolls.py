"""The source of algorithms that train once on each unroll, while it is fresh: a trajectory queue.

A feeder thread takes filled slots in and gathers them into staging batches ahead of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.configs.schema import Config
from penstock.configs.sections import TransportConfig
from penstock.core.specs import SlotSpec
from penstock.learner.sources.copying import Copier, gather_threads
from penstock.learner.sources.feeder import Feeder
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.sync.gradient_sync import Floats, GroupLostError
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore

MOST_ACTORS = 1024  # that hold slots at a time; further ones take turns


class UnrollSource:
    """A `Source` of staging batches."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
    ) -> None:
        """``ledger`` is that of the thread that gathers."""
        transport, learner = config.transport, config.learner
        slots = actors * transport.slots
        most = most_slots(transport, trainer.spec, slots) if transport.bind else slots
        self.store = SlotStore(trainer.spec, slots, lanes, most=most)
        self._learner = learner
        self._trainer = trainer
        self._accounting = accounting
        self._ledger = ledger
        self._queue = SlotQueue(
            self.store,
            accounting,
            max_policy_lag=transport.max_policy_lag,
            overflow=transport.overflow,
        )

    def open(self, host: ShmHost) -> None:
        learner, trainer = self._learner, self._trainer
        self._copier = Copier(gather_threads(learner.gather_threads, trainer.device))
        batches = [
            StagingBatch(trainer.spec, learner.batch_slots, trainer.device, self._copier)
            for _ in range(learner.prefetch + 1)
        ]
        self._feeder = Feeder(
            host,
            self._queue,
            batches,
            learner.batch_slots,
            lambda: trainer.progress.version,
            self._ledger,
            prefetch=learner.prefetch > 0,
        )
        self._feeder.__enter__()

    def get(self, timeout_s: float) -> StagingBatch | None:
        batch = self._feeder.get(timeout_s)
        if batch is not None:
            self._trainer.progress.start(batch.started_s)
        return batch

    def plan_updates(self, batch: StagingBatch | None) -> Floats:
        if batch is None:
            return np.zeros(self._trainer.updates)
        return self._trainer.plan_updates(batch)

    def train(self, batch: StagingBatch | None, totals: Floats) -> bool:
        if batch is None:
            return self._trainer.train(None, totals)
        for span in batch.spans:
            self._trainer.progress.aged(*span)
        try:
            due = self._trainer.train(batch, totals)
        except GroupLostError:
            done = self._trainer.steps_done()
            self._accounting.trained += done
            self._accounting.dropped["group_lost"] += batch.steps - done
            self._feeder.give_back(batch)
            raise
        self._accounting.trained += batch.steps
        self._feeder.give_back(batch)
        return due

    def resume(self, folder: Path) -> str:
        return ""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Unrolls are fresh or worth nothing."""

    def stop(self) -> None:
        self._feeder.stop()

    def in_flight_steps(self) -> int:
        return self._queue.in_flight_steps() + self._feeder.staged_steps()

    def fill_fraction(self) -> float:
        return self.store.fill_fraction()

    def figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._feeder.__exit__(None, None, None)
        self._copier.close()


def most_slots(transport: TransportConfig, spec: SlotSpec, least: int) -> int:
    """How many slots a store may grow to as actors join from elsewhere: enough for `MOST_ACTORS`,
    if a quarter of the memory that is free now holds them."""
    in_memory = available_nbytes() // 4 // spec.payload_nbytes
    return max(least, min(MOST_ACTORS * transport.slots, in_memory))
