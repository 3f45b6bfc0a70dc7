"""The source of algorithms that train once on each unroll, while it is fresh: a trajectory queue.

A feeder thread takes filled slots in and gathers them into staging batches ahead of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.configs.schema import Config
from penstock.configs.sections import TransportConfig
from penstock.core.interfaces import StepResult
from penstock.core.specs import SlotSpec
from penstock.learner.sources.copying import Copier, gather_threads
from penstock.learner.sources.feeder import Feeder
from penstock.learner.sources.source import Consumer
from penstock.learner.sources.staging import StagingBatch
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore

MOST_ACTORS = 1024  # that hold slots at a time; further ones take turns


class UnrollSource:
    """An `ActorSource` of staging batches."""

    def __init__(
        self,
        config: Config,
        consumer: Consumer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
    ) -> None:
        """``ledger`` is that of the thread that gathers."""
        transport, learner = config.transport, config.learner
        slots = actors * transport.slots
        most = most_slots(transport, consumer.spec, slots) if transport.bind else slots
        self.store = SlotStore(consumer.spec, slots, lanes, most=most)
        self._learner = learner
        self._consumer = consumer
        self._accounting = accounting
        self._ledger = ledger
        self._queue = SlotQueue(
            self.store,
            accounting,
            max_policy_lag=transport.max_policy_lag,
            overflow=transport.overflow,
        )

    def open(self, host: ShmHost) -> None:
        learner, consumer = self._learner, self._consumer
        self._copier = Copier(gather_threads(learner.gather_threads, consumer.device))
        batches = [
            StagingBatch(consumer.spec, learner.batch_slots, consumer.device, self._copier)
            for _ in range(learner.prefetch + 1)
        ]
        self._feeder = Feeder(
            host,
            self._queue,
            batches,
            learner.batch_slots,
            lambda: consumer.progress.version,
            self._ledger,
            prefetch=learner.prefetch > 0,
        )
        self._feeder.__enter__()

    def next(self, timeout_s: float) -> StagingBatch | None:
        batch = self._feeder.get(timeout_s)
        if batch is not None:
            self._consumer.progress.start(batch.started_s)
        return batch

    def release(self, batch: StagingBatch, result: StepResult) -> None:
        self._accounting.used(batch.steps, result.trained_steps)
        self._feeder.give_back(batch)

    def restore(self, folder: Path) -> str:
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
