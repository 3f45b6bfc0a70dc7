"""The data source of algorithms that train once on each fresh unroll: a trajectory queue.

A feeder thread takes in filled slots and gathers them into staging batches ahead of the trainer,
as soon as a slot arrives, and at the latest during its backward pass, which needs no interpreter
lock (`UnrollSource.backward_begins`).
No more slots are lent or filled at a time than `transport.max_policy_lag` allows. Where that is
below the optimizer steps of a batch, there is no thread: the learner lends the slots of one batch
at a time, within the training on the batch before it (`learner.role`), or after that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock.configs.policy_lag import batches_ahead, lent_by_batch, slots_within_lag
from penstock.configs.schema import Config
from penstock.configs.transports import TransportConfig
from penstock.core.cores import most_actors
from penstock.core.interfaces import StepResult
from penstock.core.notes import note_logger
from penstock.core.specs import SlotSpec
from penstock.learner.sources.feeder_thread import FeederThread
from penstock.learner.sources.source import Consumer
from penstock.learner.sources.staging import Copier, StagingBatch, gather_threads
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore

logger = note_logger(__name__)

MOST_ACTORS = 1024  # actors that hold slots at a time; further ones take turns


class UnrollSource:
    """An `ActorSource` of staging batches; one more than `configs.policy_lag.batches_ahead`."""

    def __init__(
        self,
        config: Config,
        consumer: Consumer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
        feeder: TimeLedger | None = None,
    ) -> None:
        """``ledger`` is that of the learner's thread, ``feeder`` that of the thread that gathers
        ahead."""
        transport, learner = config.transport, config.learner
        slots = actors * transport.slots
        grows = transport.bind is not None or most_actors(config) > actors
        most = most_slots(transport, consumer.spec, slots) if grows else slots
        self.store = SlotStore(consumer.spec, slots, lanes, most=most)
        self._by_batch, self._batches_ahead = lent_by_batch(config), batches_ahead(config)
        if self._by_batch and learner.batch_slots < config.first_actors:
            logger.info(
                "transport.max_policy_lag %d lends the %d slots of one batch at a time, and %d "
                "actors play: some of them wait; raise learner.batch_slots",
                transport.max_policy_lag,
                learner.batch_slots,
                config.first_actors,
            )
        within_lag = min(most, slots_within_lag(config))
        if within_lag < slots and not self._by_batch:
            logger.info(
                "transport.max_policy_lag %d allows %d slots at a time, fewer than the %d that "
                "actors would hold: they take turns",
                transport.max_policy_lag,
                within_lag,
                slots,
            )
        if self._by_batch:
            self.store.quota = 0  # until `Feeder` lends for the first batch
        elif within_lag < most:
            self.store.quota = within_lag
        self._max_policy_lag = transport.max_policy_lag
        self._learner = learner
        self._consumer = consumer
        self._accounting = accounting
        self._ledger, self._feeder_ledger = ledger, feeder
        self._queue = SlotQueue(
            self.store,
            accounting,
            max_policy_lag=transport.max_policy_lag,
            overflow=transport.overflow,
            deep=self._by_batch,
        )

    def open(self, host: ShmHost) -> None:
        self._host = host
        learner, consumer = self._learner, self._consumer
        self._copier = Copier(gather_threads(learner.gather_threads, consumer.device))
        batches = [
            StagingBatch(consumer.spec, learner.batch_slots, consumer.device, self._copier)
            for _ in range(self._batches_ahead + 1)
        ]
        self._feeder = Feeder(
            host,
            self._queue,
            batches,
            learner.batch_slots,
            lambda: consumer.progress.version,
            self._ledger,
            feeder=self._feeder_ledger,
            prefetch=self._batches_ahead > 0,
            paced=self.store if self._by_batch else None,
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

    def backward_begins(self) -> None:
        """Let the feeder thread gather while the learner's thread does not need the interpreter."""
        self._feeder.go_on()

    def restore(self, folder: Path) -> str:
        return ""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Does nothing: waiting unrolls are too old for a resumed run."""

    def stop(self) -> None:
        self._feeder.stop()

    def serve(self, timeout_s: float) -> None:
        self._host.poll(timeout_s)

    def in_flight_steps(self) -> int:
        return self._queue.in_flight_steps() + self._feeder.staged_steps()

    def fill_fraction(self) -> float:
        return self.store.fill_fraction()

    def figures(self) -> dict[str, float]:
        return {"policy_lag_limit": self._max_policy_lag}

    def close(self) -> None:
        self._feeder.__exit__(None, None, None)
        self._copier.close()


class Feeder:
    """Keeps the next batches ready while the learner trains.

    It gathers into free staging batches and hands them over, in a `FeederThread`. With ``prefetch``
    false the learner's own thread does the same work when it requests a batch, which shows the cost
    of not prefetching. Gathering releases the interpreter lock.

    Use as a context manager; leaving it stops the thread.
    """

    def __init__(
        self,
        host: ShmHost,
        queue: SlotQueue,
        batches: list[StagingBatch],
        batch_slots: int,
        version: Callable[[], int],
        ledger: TimeLedger,
        *,
        prefetch: bool,
        feeder: TimeLedger | None = None,
        paced: SlotStore | None = None,
    ) -> None:
        """``ledger`` is that of the learner's thread, ``feeder`` that of the thread of
        ``prefetch``.

        ``paced``: the queue's store, where its slots are lent for one batch at a time; only
        without ``prefetch``.
        """
        assert paced is None or not prefetch
        self._host = host
        self._queue = queue
        self._batches = batches
        self._batch_slots = batch_slots
        self._version = version
        feeder = feeder or TimeLedger()
        self._ledger = feeder if prefetch else ledger  # of the thread that gathers
        self._paced = paced
        self._free = deque(batches)
        self._returned = False  # a batch, since the thread was last woken
        self._thread: FeederThread[StagingBatch] | None = None
        if prefetch:
            self._thread = FeederThread(host, self._gather, host.poll, feeder, ledger)

    def __enter__(self) -> Feeder:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.close()

    def get(self, timeout_s: float) -> StagingBatch | None:
        """The oldest ready batch, or None when there was none within ``timeout_s`` seconds."""
        if self._thread is not None:
            return self._thread.take(timeout_s)
        # attaching and leaving actors are served even if there is always a batch
        self._host.poll(0.0)
        batch = self._gather()
        if batch is None:
            self._host.poll(timeout_s)
            batch = self._gather()
        return batch

    def give_back(self, batch: StagingBatch) -> None:
        """Take back a batch that the learner has used. The thread is woken by `go_on`, or at once
        where no other batch is ready."""
        batch.let_go()
        self._free.append(batch)
        self._returned = self._thread is not None
        if self._thread is not None and not self._thread.ready:
            self.go_on()

    def go_on(self) -> None:
        """Wake the thread if a batch was returned, so that it looks for slots to gather."""
        if self._returned:
            self._returned = False
            assert self._thread is not None
            self._thread.wake()

    def stop(self) -> None:
        """End the thread; from then on store and queue belong to the caller."""
        if self._thread is not None:
            self._thread.stop()

    def staged_steps(self) -> int:
        """Agent steps in gathered batches that were not trained on."""
        return sum(batch.steps for batch in self._batches)

    def _gather(self) -> StagingBatch | None:
        """Fill one free batch; None when there is no free batch or not enough data."""
        self._queue.collect()
        if not self._free:
            return None
        if self._paced is not None:
            self._lend_batch(self._paced)
        slots = self._queue.take(self._batch_slots, self._version())
        if not slots:
            return None
        if self._paced is not None:
            self._paced.quota = 0
        batch = self._free.popleft()
        self._ledger.switch(Part.GATHER)
        batch.gather(slots)
        self._queue.release(slots)
        self._ledger.switch(Part.WAIT)
        return batch

    def _lend_batch(self, store: SlotStore) -> None:
        """Lend the slots of the next batch, if they are not lent yet, once the weights of the last
        one are published.
        """
        published = self._host.published
        if published is not None and published.version == self._version():
            store.lend_up_to(self._batch_slots)


def most_slots(transport: TransportConfig, spec: SlotSpec, least: int) -> int:
    """How many slots a store may grow to as actors join.

    Enough for `MOST_ACTORS`, if a quarter of the memory that is free now holds them.
    """
    in_memory = available_nbytes() // 4 // spec.payload_nbytes
    return max(least, min(MOST_ACTORS * transport.slots, in_memory))
