"""The data source of algorithms that train once on each fresh unroll: a trajectory queue.

A feeder thread takes in filled slots and gathers them into staging batches ahead of the trainer,
as soon as a slot arrives, and at the latest during its backward pass, which needs no interpreter
lock (`UnrollSource.on_backward`).
No more slots are lent or filled at a time than `transport.max_policy_lag` allows. Where that is
below the optimizer steps of a batch, there is no thread: the learner lends the slots of one batch
at a time, within the training on the batch before it (`learner.role`), or after that.

In lockstep mode, where actors and learner take turns in one process, there is no thread either, and
no bound on the lag.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.configs.policy_lag import batches_ahead, lent_by_batch, slots_within_lag
from penstock.configs.schema import Config
from penstock.configs.transports import TransportConfig
from penstock.core.cores import most_actors
from penstock.core.interfaces import Link, StepResult
from penstock.core.notes import note_logger
from penstock.core.specs import HEADER, SlotSpec
from penstock.learner.sources.source import Consumer
from penstock.learner.sources.staging import Copier, StagingBatch, gather_threads
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.replay.prefetch import PrefetchThread
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore

logger = note_logger(__name__)

# Actors that hold slots at a time; further ones take turns.
MOST_ACTORS = 1024
# Fields of a header that depend on the process, and are of no effect in lockstep.
OF_PROCESS = ("generation", "started_s", "published_s")
# A policy lag, in versions, that is never reached.
UNBOUNDED = 1 << 62


class UnrollSource:
    """An `ActorSource` of staging batches.

    It gathers slots into free staging batches and hands these over, in a `PrefetchThread`. There is
    one more of them than `configs.policy_lag.batches_ahead`. Without batches ahead the learner's
    own thread gathers when it requests a batch. Gathering releases the interpreter lock.
    """

    def __init__(
        self,
        config: Config,
        consumer: Consumer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
        *,
        feeder: TimeLedger | None = None,
        shared: bool = True,
    ) -> None:
        """Allocate slots and staging batches.

        Args:
            config: of the run.
            consumer: the trainer.
            accounting: counts arrived and trained steps.
            actors: number of actors at the start, for which there are slots.
            lanes: writers, which may join and leave.
            ledger: of the learner's thread.
            feeder: ledger of the thread that gathers ahead.
            shared: False where all are in one process, and take turns.
        """
        self._consumer = consumer
        self._accounting = accounting
        self._batch_slots = config.learner.batch_slots
        self._lends_by_batch = shared and lent_by_batch(config)
        self._constant_figures: dict[str, float] = {}
        """Figures that stay the same during the run."""
        if shared:
            self.store = _shared_store(config, consumer.spec, actors, lanes)
            self._max_policy_lag = config.transport.max_policy_lag
            self._constant_figures["policy_lag_limit"] = self._max_policy_lag
            self._queue = SlotQueue(
                self.store,
                accounting,
                max_policy_lag=self._max_policy_lag,
                overflow=config.transport.overflow,
                deep=self._lends_by_batch,
            )
        else:
            # Enough for one turn's unrolls and the rest of the last batch.
            slots = actors * (1 + -(-self._batch_slots // actors))
            self.store = SlotStore(consumer.spec, slots, lanes, shared=False)
            self._max_policy_lag = UNBOUNDED
            self._queue = SlotQueue(self.store, accounting, max_policy_lag=self._max_policy_lag)

        ahead = batches_ahead(config) if shared else 0
        self._prefetches = ahead > 0
        self._learner_ledger = ledger
        self._ledger = ledger
        """The time ledger of the thread that gathers."""
        if self._prefetches:
            self._ledger = feeder or TimeLedger()

        self._copier = Copier(gather_threads(config.learner.gather_threads, consumer.device))
        self._batches = [
            StagingBatch(
                consumer.spec,
                slots=self._batch_slots,
                device=consumer.device,
                copier=self._copier,
                record=config.env.record,
                store=self.store,
            )
            for _ in range(ahead + 1)
        ]
        self._free = deque(self._batches)
        """Batches that can be filled."""
        self._has_returned = False
        """Whether a batch was returned since the thread was last woken."""
        self._host: ShmHost | None = None
        """The socket for actors of this host; None where all are in one process."""
        self._feeder: PrefetchThread[StagingBatch] | None = None

    def open(self, host: ShmHost) -> None:
        """Start to take in published slots, and to gather ahead."""
        self._host = host
        if self._prefetches:
            self._feeder = PrefetchThread(
                self._gather,
                name="feeder",
                host=host,
                poll=host.poll,
                ledger=self._ledger,
                consumer=self._learner_ledger,
            )
            self._feeder.start()

    def next(self, timeout_s: float) -> StagingBatch | None:
        if self._feeder is not None:
            batch = self._feeder.take(timeout_s)
        else:
            batch = self._gather_now(timeout_s)
        if batch is None:
            return None

        # A batch that was gathered before the league has reset the weights is too old.
        progress = self._consumer.progress
        if progress.version - batch.version > self._max_policy_lag:
            self._take_back(batch)
            return None
        progress.start(batch.started_s)
        return batch

    def release(self, batch: StagingBatch, result: StepResult) -> None:
        """Take back a batch.

        The thread is woken by the next backward pass, or at once if no other batch is ready.
        """
        self._accounting.count_batch(batch.steps, result.trained_steps)
        batch.on_last_use()
        self._take_back(batch)

    def _take_back(self, batch: StagingBatch) -> None:
        """Let the thread fill a batch again; it counts steps that are still in the batch."""
        self._free.append(batch)
        self._has_returned = self._feeder is not None
        if self._feeder is not None and not self._feeder.ready:
            self.on_backward()

    def on_backward(self) -> None:
        """Let the feeder thread gather while the learner's thread does not need the interpreter."""
        if self._has_returned:
            self._has_returned = False
            assert self._feeder is not None
            self._feeder.wake()

    def plan_checkpoints(self, folder: Path) -> str:
        return ""

    def restore(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        return ""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Does nothing: waiting unrolls are too old for a resumed run, or in its `state_dict`."""

    def state_dict(self) -> list[Any]:
        """Returns the unrolls that are not trained on yet, where all are in one process.

        Each is a list of arrays: the header as bytes, and the blocks of its payload.
        """
        state = []
        for slot in self._queue.waiting():
            header = slot.header.copy()
            for name in OF_PROCESS:
                header[name] = 0
            state.append([np.frombuffer(header.tobytes(), np.uint8), *slot.payload])
        return state

    def load_state_dict(self, state: list[Any], links: Sequence[Link]) -> None:
        """Write the unrolls of a `state_dict` as their actors did.

        ``links`` are those of the actors, by index. Raises ValueError or LookupError if the state
        does not fit.
        """
        for raw_header, *payload in state:
            header = raw_header.view(HEADER).reshape(())
            with links[int(header["actor"])].slot(0.0) as slot:
                if slot is None:
                    raise ValueError(f"{len(state)} unrolls, and fewer slots")

                slot.header[...] = header
                slot.header["started_s"] = slot.header["published_s"] = time.monotonic()
                for block, values in zip(slot.payload, payload, strict=True):
                    block[...] = values
            self._queue.collect()

        # Their steps were counted before the resume.
        self._consumer.progress.resumed_in_flight(self._queue.in_flight_steps())

    def stop(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()

    def serve(self, timeout_s: float) -> None:
        assert self._host is not None
        self._host.poll(timeout_s)

    def in_flight_steps(self) -> int:
        return self._queue.in_flight_steps() + sum(batch.steps for batch in self._batches)

    def figures(self) -> dict[str, float]:
        return {"queue_fill": self.store.fill_fraction()} | self._constant_figures

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        self._copier.close()

    def _gather_now(self, timeout_s: float) -> StagingBatch | None:
        """Gather a batch in this thread, which also polls the host, unless all are in one process.

        Returns None if there is not enough data within ``timeout_s`` seconds.
        """
        if self._host is None:
            return self._gather()

        self._host.poll(0.0)  # actors that attach or leave are served even if data never runs out
        batch = self._gather()
        if batch is None:
            self._host.poll(timeout_s)
            batch = self._gather()
        return batch

    def _gather(self) -> StagingBatch | None:
        """Fill one free batch. Returns None if there is no free batch or not enough data."""
        self._queue.collect()
        if not self._free:
            return None

        version = self._consumer.progress.version
        if self._lends_by_batch:
            self._lend_batch(version)
        slots = self._queue.take(self._batch_slots, version)
        if not slots:
            return None
        if self._lends_by_batch:  # no more until the next batch is lent
            self.store.quota = 0

        # The slots are free again as soon as they are copied.
        batch = self._free.popleft()
        if batch.steps:  # it was too old
            self._accounting.dropped["lag"] += batch.steps
        self._ledger.switch(Part.GATHER)
        batch.gather(slots)
        batch.version = version
        self._queue.release(slots)
        self._ledger.switch(Part.WAIT)
        return batch

    def _lend_batch(self, version: int) -> None:
        """Lend the slots of the next batch, if they are not lent yet, once the weights of the
        present ``version`` are published."""
        assert self._host is not None
        published = self._host.published
        if published is not None and published.version == version:
            self.store.set_quota(self._batch_slots)


def _shared_store(config: Config, spec: SlotSpec, actors: int, lanes: int) -> SlotStore:
    """Make a store that actors in other processes fill.

    It lends no more slots at a time than the policy lag allows. Logs that some of the actors wait
    for that, if they do.

    Args:
        config: of the run.
        spec: of a slot.
        actors: number of actors at the start, for which there are slots.
        lanes: writers, which may join and leave.
    """
    transport = config.transport
    batch_slots = config.learner.batch_slots
    slots = actors * transport.slots
    grows = transport.bind is not None or most_actors(config) > actors
    most = most_slots(transport, spec, slots) if grows else slots
    store = SlotStore(spec, slots, lanes, most=most)

    if lent_by_batch(config):
        if batch_slots < config.first_actors:
            logger.info(
                "transport.max_policy_lag %d lends the %d slots of one batch at a time, and %d "
                "actors play: some of them wait; raise learner.batch_slots",
                transport.max_policy_lag,
                batch_slots,
                config.first_actors,
            )
        store.quota = 0  # until `UnrollSource` lends for the first batch
        return store

    within_lag = min(most, slots_within_lag(config))
    if within_lag < slots:
        logger.info(
            "transport.max_policy_lag %d allows %d slots at a time, fewer than the %d that "
            "actors would hold: they take turns",
            transport.max_policy_lag,
            within_lag,
            slots,
        )
    if within_lag < most:
        store.quota = within_lag
    return store


def most_slots(transport: TransportConfig, spec: SlotSpec, least: int) -> int:
    """Returns how many slots a store may grow to as actors join, but not fewer than ``least``.

    Enough for `MOST_ACTORS`, if a quarter of the memory that is free now holds them.
    """
    in_memory = available_nbytes() // 4 // spec.payload_nbytes
    return max(least, min(MOST_ACTORS * transport.slots, in_memory))
