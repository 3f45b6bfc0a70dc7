"""The data source of algorithms that draw from replay: slots are kept and sampled repeatedly.

`learner.sources.batch_sampler` samples the batches: transitions or sequences.

With `learner.prefetch` a feeder thread takes in slots, draws the next batches and sets priorities,
while the learner trains; else the learner's thread does, when it requests a batch. A batch that is
drawn ahead is sampled before the priorities of the `learner.prefetch` batches before it are set.

The feeder thread needs the interpreter lock, which a small network's forward pass takes for each of
its short operations, and which a backward pass releases as a whole. So the thread begins to draw
with the backward pass (`on_backward`), unless no batch is ready: then at once.

A step counts as trained once, when it enters the replay. `replay.samples_per_insert` limits how
often it is sampled: the side that is ahead, actors or learner, waits.

With `replay.checkpoint` a `KeptReplay` saves the replay with the run's checkpoints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.algos.base import ReplayAlgorithm
from penstock.algos.registry import algorithm
from penstock.algos.slots import UnrollSummary
from penstock.configs.policy_lag import batches_ahead
from penstock.configs.schema import Config
from penstock.configs.sections import ReplayConfig
from penstock.core.interfaces import SampleSpec, StepResult, TransitionSequences
from penstock.device.choice import device_of
from penstock.learner.sources.batch_sampler import (
    BatchConsumer,
    BatchSampler,
    ReplayBatch,
    make_sampler,
    n_step_of,
    seed_of,
    sequences_of,
)
from penstock.learner.sources.kept_replay import KeptReplay
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Accounting, RateLimiter, Replay
from penstock.replay.prefetch import PrefetchThread
from penstock.replay.table import TableListener
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import Slot

# Longest poll in seconds while a snapshot is being saved, so that it gets the lock.
SHARE_S = 0.005


class Arrival(NamedTuple):
    """A slot that was collected, and is not counted in the learner's progress yet."""

    started_s: float
    """When it was begun (CLOCK_MONOTONIC of its writer)."""
    steps: int
    """Its agent steps."""
    unrolls: UnrollSummary


class ReplayDataSource(TableListener):
    """An `ActorSource` of batches drawn from replay."""

    def __init__(
        self,
        config: Config,
        consumer: BatchConsumer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
        *,
        first: int | None = None,
        feeder: TimeLedger | None = None,
        shared: bool = True,
        rank: int = 0,
    ) -> None:
        """Allocate the replay.

        Args:
            config: of the run.
            consumer: the trainer.
            accounting: counts arrived and trained steps.
            actors: most actors that play at the same time.
            first: number of actors at the start; None: all. The band of the rate limiter has room
                for their slots alone, as the others may never play.
            lanes: writers, which may join and leave.
            ledger: of the learner's thread.
            feeder: ledger of the thread that draws ahead, with `learner.prefetch`.
            shared: False where all are in one process.
            rank: of the learner; each learner draws by other random numbers.
        """
        replay = config.replay
        spec = consumer.spec
        algo = algorithm(config.algo)
        assert isinstance(algo, ReplayAlgorithm), algo
        draws = algo.data(config.algo)
        self._least_exploring = lru_cache(partial(algo.least_exploring, config))
        """Returns which environments of an actor explore least."""
        assert isinstance(draws, SampleSpec), draws
        self._consumer = consumer
        self._device = device_of(consumer.device)
        self._accounting = accounting
        self._batch_size = replay.batch_size
        self._record = config.env.record
        self._steps_per_sample = draws.length if isinstance(draws, TransitionSequences) else 1

        # The replay, whose store the actors fill. The slots that they hold may arrive at once.
        slots_in_hand = actors * config.transport.slots
        first_slots = (first or actors) * config.transport.slots
        self._limiter = make_limiter(
            replay, spec.unroll * spec.envs * first_slots, self._steps_per_sample
        )
        sampler = make_sampler(replay, consumer.progress)
        self._replay = Replay(
            spec,
            replay.capacity,
            n_step=n_step_of(draws),
            discount=config.algo.discount,
            frame_stack=config.transport.frame_stack or 1,
            sampler=sampler,
            writers=lanes,
            in_hand=slots_in_hand,
            shared=shared,
            sequences=sequences_of(draws),
            limiter=self._limiter,
            seed=seed_of(config, consumer.progress, rank),
        )
        self._table = self._replay.table
        self._table.subscribe(self)
        self.store = self._table.store
        self._arrivals: deque[Arrival] = deque()
        """Slots that were collected, in any thread, until `_count_arrivals`."""
        self._host: ShmHost | None = None
        """The socket for actors of this host; None where all are in one process."""

        # Batches, which are drawn ahead in a thread with `learner.prefetch`.
        self._prefetch = batches_ahead(config) if shared else 0
        self._learner_ledger = ledger
        self._ledger = ledger
        """The time ledger of the thread that draws."""
        if self._prefetch:
            self._ledger = feeder or TimeLedger()
        self._batches = BatchSampler(
            self._replay,
            sampler=sampler,
            draws=draws,
            config=config,
            consumer=consumer,
            ledger=self._ledger,
            rank=rank,
        )
        self._feeder: PrefetchThread[ReplayBatch] | None = None
        self._defers = False
        """Whether the feeder leaves its reserve as it is until the next backward pass."""
        self._kept = KeptReplay(
            self._replay,
            mode=replay.checkpoint,
            grace_s=config.run.grace_s,
            learners=config.learner.most_count,
            more=None if shared else self._moment,
        )

    def open(self, host: ShmHost) -> None:
        """Start to take in published slots, and to draw ahead."""
        self._host = host
        if self._prefetch:
            self._feeder = PrefetchThread(
                self._draw_ahead,
                name="feeder",
                host=host,
                poll=self.serve,
                ledger=self._ledger,
                consumer=self._learner_ledger,
            )
            self._feeder.start()

    def next(self, timeout_s: float) -> ReplayBatch | None:
        """Returns the next batch, or None if there was none within ``timeout_s`` seconds.

        Counts what has arrived meanwhile.
        """
        if self._feeder is None:
            batch = self._draw_now(timeout_s)
        else:
            batch = self._feeder.take(timeout_s)
            self._defers = batch is not None
            if not self._feeder.ready:
                self.on_backward()
        if batch is not None:
            self._learner_ledger.switch(Part.COUNT)
        self._count_arrivals()
        return batch

    def release(self, batch: ReplayBatch, result: StepResult) -> None:
        if self._feeder is None:
            self._batches.release(batch, result)
            return
        self._batches.take_errors(batch, result)  # the feeder sets priorities before it draws
        self.on_backward()  # an update may have had no backward pass

    def on_backward(self) -> None:
        """Let the feeder thread draw while the learner's thread does not need the interpreter."""
        if self._defers:
            self._defers = False
            assert self._feeder is not None
            self._feeder.wake()

    def plan_checkpoints(self, folder: Path) -> str:
        return self._kept.plan(folder)

    def restore(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        return self._kept.resume(folder, beat)

    def continue_streams(self) -> bool:
        """Let the writers go on where the restored snapshot was taken, once as many are linked.

        Only where all are in one process.

        Returns:
            False, without doing anything, if no snapshot of the present optimizer step was restored
            or its slots have moved.

        Raises:
            ValueError: the snapshot does not fit.
            LookupError: the same.
        """
        moment = self._kept.restored
        is_present = moment.get("learner_steps") == self._consumer.progress.learner_steps
        if not is_present or self._replay.slots_moved:
            return False

        self.store.restore_loans(moment["loans"])
        self._table.resume_streams(moment["streams"])
        self._batches.load_state_dict(moment["draws"])
        if moment["limiter"]["settings"] == self._limiter.state_dict()["settings"]:
            self._limiter.load_state_dict(moment["limiter"])
        return True

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        if beat is None:
            self._kept.begin(folder)
        else:
            self._kept.finish(folder, beat)

    def stop(self) -> None:
        """Draw nothing more; slots that arrive from now on are still stored."""
        if self._feeder is not None:
            self._feeder.stop()
            self._batches.set_priorities()

    def in_flight_steps(self) -> int:
        self._collect()
        self._count_arrivals()
        return 0

    def figures(self) -> dict[str, float]:
        """Returns figures for metrics.jsonl."""
        counts = self._limiter.counts
        return {
            "queue_fill": self._table.stored / self._table.rows,
            "replay_size": self._table.stored,
            "samples_per_insert": (
                counts.sampled * self._steps_per_sample / max(1, counts.inserted)
            ),
        }

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
        self._batches.close()
        self._table.unsubscribe(self)
        self._replay.close()

    def _moment(self) -> dict[str, Any]:
        """Returns what `continue_streams` needs beside the replay's own state."""
        self._device.enter_thread()  # this thread saves, and may read errors that a GPU computes
        return {
            "learner_steps": self._consumer.progress.learner_steps,
            "loans": self.store.loans(),
            "streams": self._table.streams(),
            "draws": self._batches.state_dict(),
            "limiter": self._limiter.state_dict(),
        }

    def _draw_now(self, timeout_s: float) -> ReplayBatch | None:
        """Take in slots and draw a batch, in the learner's thread.

        Without a batch, waits for slots for up to ``timeout_s`` seconds and returns None.
        """
        self._ledger.switch(Part.GATHER)
        self.serve(0.0)
        batch = self._draw()

        if batch is None:
            self._ledger.switch(Part.WAIT)
            self.serve(timeout_s)
            self._collect()
        return batch

    def _draw_ahead(self) -> ReplayBatch | None:
        """Draw a batch if there is room for one, and it is time; called in the feeder thread.

        A reserve that is neither empty nor full is filled up in the next backward pass.
        """
        assert self._feeder is not None
        self._device.enter_thread()  # errors may be on their way from a GPU
        self._ledger.switch(Part.GATHER)
        self._batches.set_priorities()

        ready = self._feeder.ready
        if not ready or (ready < self._prefetch and not self._defers):
            return self._draw()
        self._collect()
        return None

    def _draw(self) -> ReplayBatch | None:
        """Draw a batch. Returns None if the learner is ahead of the actors, or too little is
        stored."""
        if not self._limiter.may_sample(self._batch_size):
            self._collect()
        if not self._limiter.may_sample(self._batch_size) or not self._batches.ready:
            return None
        return self._batches.draw()

    def serve(self, timeout_s: float) -> None:
        """Store published slots, and lend slots unless the learner lags behind.

        Waits for up to ``timeout_s`` seconds for something to do.
        """
        # Until a sequence is complete there is nothing to draw, which is no lag of the learner.
        may_insert = self._limiter.may_insert(self._table.rows_per_slot)
        actors_ahead = not may_insert and self._batches.ready
        # All lanes are held back, also those of actors that attach meanwhile.
        lanes = self.store.geometry.lanes
        self.store.held_back = set(range(lanes)) if actors_ahead else set()
        if self._host is None:
            return

        if self._kept.saving:
            timeout_s = min(timeout_s, SHARE_S)
        with self._replay.lock:  # a snapshot reads the owners of slots
            self._host.poll(timeout_s)

    def _collect(self) -> None:
        """Store published slots; the replay does this itself before it is sampled."""
        with self._replay.lock:
            self._replay.collect()

    def on_ingested(self, slot: Slot) -> None:
        """Count a collected slot. May be called in any thread, under the replay's lock."""
        self._accounting.arrived(slot.header)
        started_s = float(slot.header["started_s"])
        steps = int(slot.header["steps"])
        least_exploring = self._least_exploring(int(slot.header["actor"]))
        unrolls = UnrollSummary.of(slot.columns, self._record, least_exploring)
        self._arrivals.append(Arrival(started_s, steps, unrolls))

    def _count_arrivals(self) -> None:
        """Count the steps of collected slots as trained.

        The learner's thread calls it, since no other thread changes the progress.
        """
        progress = self._consumer.progress
        while self._arrivals:
            arrival = self._arrivals.popleft()
            progress.start(arrival.started_s)
            self._accounting.trained += arrival.steps
            progress.count_unrolls(arrival.unrolls, arrival.steps)
            progress.count_lag(arrival.unrolls)

    def on_rejected(self, slot: Slot, fault: str) -> None:
        """Count the steps of a slot that was refused as dropped."""
        self._accounting.arrived(slot.header)
        self._accounting.dropped["invalid"] += int(slot.header["steps"])


def make_limiter(replay: ReplayConfig, insert: int, steps: int = 1) -> RateLimiter:
    """Make the rate limiter of the section `replay`.

    Args:
        replay: the section.
        insert: steps that may arrive at once.
        steps: steps of one sample.
    """
    ratio = replay.samples_per_insert
    return RateLimiter(
        None if ratio is None else ratio / steps,
        max(replay.min_size, replay.batch_size),
        batch=replay.batch_size,
        insert=insert,
        capacity=replay.capacity,
    )
