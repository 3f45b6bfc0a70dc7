"""The source of algorithms that draw from replay: kept slots, sampled again and again.

A step counts as trained when it is taken into the replay, once, however often it is drawn later;
how often that is, `replay.samples_per_insert` says: who is ahead, actors or learner, waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.algos import algorithm
from penstock.configs.schema import Config
from penstock.configs.sections import ReplayConfig
from penstock.core.interfaces import HostValues, StepResult, Transitions
from penstock.learner.progress import Progress
from penstock.learner.sources.kept_replay import KeptReplay
from penstock.learner.sources.source import Consumer
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import (
    Accounting,
    Batch,
    Linear,
    Prioritized,
    RateLimiter,
    Replay,
    Sampler,
    Uniform,
)
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import Slot

SHARE_S = 0.005  # that a snapshot waits for its turn, at most, where there is nothing to train on


class ReplayBatch(NamedTuple):
    """A batch of transitions; of a prioritized one the least probability of its rows, and the
    exponent of their importance weights."""

    data: Batch
    least_probability: float
    beta: float


class ReplayDataSource:
    """An `ActorSource` of batches drawn from replay."""

    def __init__(
        self,
        config: Config,
        consumer: Consumer,
        accounting: Accounting,
        actors: int,
        lanes: int,
        ledger: TimeLedger,
        *,
        shared: bool = True,
    ) -> None:
        """Memory for ``actors`` that play at a time, and ``lanes`` for those that come and go; not
        ``shared`` where all are in one process. ``ledger`` is that of the thread that trains."""
        replay, spec = config.replay, consumer.spec
        self._consumer = consumer
        self._accounting = accounting
        self._ledger = ledger
        self._batch_size = replay.batch_size
        in_hand = actors * config.transport.slots
        self._limiter = make_limiter(replay, insert=spec.unroll * spec.envs * in_hand)
        self._stack = config.transport.frame_stack or 1
        data = algorithm(config.algo).data(config.algo)
        assert isinstance(data, Transitions), data
        seed = np.random.SeedSequence([config.run.seed, consumer.progress.learner_steps])
        self._sampler = make_sampler(replay, consumer.progress)
        self._replay = Replay(
            spec,
            replay.capacity,
            n_step=data.n_step,
            discount=config.algo.discount,
            frame_stack=self._stack,
            sampler=self._sampler,
            writers=lanes,
            in_hand=in_hand,
            shared=shared,
            limiter=self._limiter,
            seed=int(seed.generate_state(1)[0]),
        )
        self._table = self._replay.table
        self._table.arrived, self._table.rejected = self._arrived, self._rejected
        self.store = self._table.store
        # Errors that a GPU may still be computing: asked for one batch later, it is not waited for.
        self._errors: deque[tuple[Batch, HostValues]] = deque()
        self._behind = int(consumer.device.type == "cuda")
        self.stacks_on_device = consumer.device.type == "cuda" and self._stack > 1
        self._kept = KeptReplay(self._replay, wanted=replay.checkpoint)
        self._host: ShmHost | None = None

    def open(self, host: ShmHost) -> None:
        self._host = host

    def next(self, timeout_s: float) -> ReplayBatch | None:
        self._hear(0.0)
        if not self._limiter.may_sample(self._batch_size):
            self._collect()
        if not self._limiter.may_sample(self._batch_size):
            self._hear(timeout_s)
            self._collect()
            return None
        sampler = self._sampler
        beta = sampler.beta if isinstance(sampler, Prioritized) else 0.0
        self._ledger.switch(Part.GATHER)
        data = self._replay.sample(self._batch_size, stacked=not self.stacks_on_device)
        least = sampler.probabilities.min() if isinstance(sampler, Prioritized) else 1.0
        return ReplayBatch(data, float(least), beta)

    def release(self, batch: ReplayBatch, result: StepResult) -> None:
        if result.errors is not None:
            self._errors.append((batch.data, result.errors))
        if len(self._errors) > self._behind:
            drawn, known = self._errors.popleft()
            values = known.get()  # computed before the batch that is computed now
            self._ledger.switch(Part.GATHER)
            self._replay.update_priorities(drawn.keys, values)

    def restore(self, folder: Path) -> str:
        return self._kept.resume(folder)

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        if beat is None:
            self._kept.begin(folder)
        else:
            self._kept.finish(folder, beat)

    def stop(self) -> None:
        """What comes from now on is still taken in."""

    def in_flight_steps(self) -> int:
        self._collect()
        return 0

    def fill_fraction(self) -> float:
        return self._table.stored / self._table.rows

    def figures(self) -> dict[str, float]:
        counts = self._limiter.counts
        return {
            "replay_size": self._table.stored,
            "samples_per_insert": counts.sampled / max(1, counts.inserted),
        }

    def close(self) -> None:
        self._errors.clear()
        self._table.arrived = self._table.rejected = None
        self._replay.close()

    def _hear(self, timeout_s: float) -> None:
        """Hear of what was published, and lend slots on if the learner keeps up."""
        store, table = self.store, self._table
        ahead = not self._limiter.may_insert(table.rows_per_slot)
        store.held_back = store.lanes if ahead else set()
        if self._host is not None:
            with self._replay.lock:  # a snapshot wants to know whose slots are whose
                self._host.poll(min(timeout_s, SHARE_S) if self._kept.saving else timeout_s)

    def _collect(self) -> None:
        """Take in what was published; the replay does it itself before it is sampled."""
        with self._replay.lock:
            self._replay.collect()

    def _arrived(self, slot: Slot) -> None:
        progress, steps = self._consumer.progress, int(slot.header["steps"])
        progress.start(float(slot.header["started_s"]))
        self._accounting.arrived(slot.header)
        self._accounting.trained += steps
        progress.played(slot.columns, steps)

    def _rejected(self, slot: Slot, fault: str) -> None:
        self._accounting.arrived(slot.header)
        self._accounting.dropped["invalid"] += int(slot.header["steps"])


def make_limiter(replay: ReplayConfig, insert: int) -> RateLimiter:
    """What keeps actors and learner in step; ``insert``: steps that may come at once."""
    least = max(replay.min_size, replay.batch_size)
    return RateLimiter(
        replay.samples_per_insert,
        least,
        batch=replay.batch_size,
        insert=insert,
        capacity=replay.capacity,
    )


def make_sampler(replay: ReplayConfig, progress: Progress) -> Sampler:
    """What `replay` asks for; beta follows the optimizer steps of the whole run."""
    if not replay.prioritized:
        return Uniform()
    if replay.beta_steps is None:
        return Prioritized(replay.alpha, replay.beta)
    rise = Linear(replay.beta, 1.0, replay.beta_steps)
    return Prioritized(replay.alpha, lambda _: rise(progress.learner_steps))
