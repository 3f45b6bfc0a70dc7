"""The replay buffer: add steps, sample batches, from any thread.

    rb = Replay.from_env(env, capacity=1_000_000, n_step=3, frame_stack=4)
    rb.add(obs=o, action=a, reward=r, terminated=te, truncated=tr, next_obs=o2, info=info)
    batch = rb.sample(256)

It stands on a `Table` of slots: this module decides what is stored, how much, and who may write.
One lock is around everything; the large copies release the interpreter lock under it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay import persistence
from penstock.replay.batch import Batch
from penstock.replay.checks import cannot_sample, check_numbers
from penstock.replay.cuts import Cuts, Cutter
from penstock.replay.environment import columns_of, envs_of, resets_of
from penstock.replay.errors import ReplayError
from penstock.replay.fair_lock import FairLock
from penstock.replay.flow import Flow
from penstock.replay.gather import Gather
from penstock.replay.layout import layout_of_spec, make_layout
from penstock.replay.limiter import RateLimiter
from penstock.replay.prefetch import Source, batches
from penstock.replay.samplers import Sampler, Uniform
from penstock.replay.sequence_gather import SequenceGather
from penstock.replay.sequences import Sequences, SequenceSampler, no_priorities
from penstock.replay.sharing import WRITER_SLOTS, StoreServer, serve
from penstock.replay.sizing import refuse_what_cannot_fit
from penstock.replay.snapshot_files import FolderReader
from penstock.replay.steps import Autoreset, StepWriter
from penstock.replay.stream_writer import StreamWriter
from penstock.replay.table import Table
from penstock.replay.times_sampled import TimesSampled

MOST_ROWS = 1 << 31  # keys have 32 bits for the row


class Replay:
    """At least the ``capacity`` newest rows, each one step of one environment."""

    def __init__(
        self,
        columns: SlotSpec | Mapping[str, Any],
        capacity: int,
        *,
        n_step: int = 1,
        discount: float = 0.99,
        frame_stack: int | Mapping[str, int] = 1,
        sampler: Sampler | None = None,
        envs: int = 1,
        autoreset: Autoreset = "none",
        unroll: int | None = None,
        writers: int = 1,
        shared: bool = False,
        sequences: Sequences | None = None,
        max_times_sampled: int | None = None,
        ttl_s: float | None = None,
        max_policy_lag: int | None = None,
        limiter: RateLimiter | None = None,
        timeout_s: float = 60.0,
        seed: int | None = None,
    ) -> None:
        """``columns``: a gymnasium space or (dtype, shape) for obs, action and further columns, or
        the spec of slots that others fill.

        ``envs``: environments that each `add` brings a step of. ``autoreset``: what resets them,
        see `penstock.replay.steps`. ``writers``: how many threads or processes write at a time;
        each more takes a slot from the capacity. ``unroll``: steps of a slot, by default chosen.
        ``max_times_sampled``: after which a row leaves. ``limiter``: keeps `add` and `sample` in
        step; whoever is ahead waits for the other side, at most ``timeout_s``.

        Raises ReplayError for what cannot be, and where the memory is not there, before it is
        taken.
        """
        check_numbers(capacity, n_step, discount, envs, writers, autoreset)
        if isinstance(columns, SlotSpec):
            self.layout = layout_of_spec(columns, frame_stack)
        else:
            self.layout = make_layout(
                columns,
                capacity,
                envs,
                frame_stack,
                unroll,
                shared=shared,
                follow=n_step > 1 or sequences is not None,
            )
        spec = self.layout.spec
        # The oldest slot's first rows lose their frame stacks with the slot before them.
        kept = capacity + self.layout.history * spec.envs
        slots = max(2, math.ceil(kept / (spec.unroll * spec.envs)))
        slots += writers * (WRITER_SLOTS if shared else 1)
        if slots * spec.unroll * spec.envs > MOST_ROWS:
            raise ReplayError(f"capacity {capacity} is above the {MOST_ROWS} rows that keys name")
        self.capacity, self.n_step, self.discount = capacity, n_step, discount
        self.autoreset: Autoreset = autoreset
        refuse_what_cannot_fit(spec, slots, shared=shared, capacity=capacity)
        self.sampler: Sampler = Uniform() if sampler is None else sampler
        self.sequences, self.cuts = sequences, Cuts(ttl_s, max_policy_lag)
        if sequences is not None:
            sequences.refuse_n_step(n_step)
            self.sampler = SequenceSampler(sequences, self.sampler)
        if max_times_sampled is not None:
            if sequences is not None:
                raise ReplayError("max_times_sampled counts rows, not sequences; leave one out")
            self.sampler = TimesSampled(self.sampler, max_times_sampled)
        self.writers = writers
        self.table = Table(
            spec, slots, self.sampler, shared=shared, history=self.layout.history, writers=writers
        )
        if isinstance(self.sampler, SequenceSampler | TimesSampled):
            self.sampler.place(self.table)
        self.sampler.bind(self.table.valid, np.random.default_rng(seed))
        if sequences is None:
            self.gather = Gather(self.table, self.layout, n_step, discount)
        else:
            self.gather = SequenceGather(self.table, self.layout, discount, sequences)
        self._cutter = Cutter(self.cuts, self.table)
        self.flow = Flow(limiter, self.table, capacity, timeout_s) if limiter else None
        self.lock = FairLock()
        self.stale_updates = 0
        self._server: StoreServer | None = None
        self._here = threading.local()  # .writer: the calling thread's own
        self._writers: dict[threading.Thread, StepWriter] = {}

    @classmethod
    def from_env(cls, env: Any, capacity: int, **options: Any) -> Replay:
        """A replay for a gymnasium environment, single or vector; ``options`` as for `Replay`,
        ``columns`` being those besides obs and action."""
        declared = columns_of(env) | dict(options.pop("columns", {}))
        options.setdefault("autoreset", resets_of(env))
        return cls(declared, capacity, envs=envs_of(env), **options)

    @classmethod
    def load(cls, folder: str | Path, sampler: Sampler | None = None) -> Self:
        """The replay that `save` wrote; ``sampler`` where it was made with one of your own.

        It goes on as the saved one would have: the next batch has the same rows. Streams begin
        anew. Raises ReplayError where the folder holds no snapshot, or a damaged one.
        """
        return persistence.load(cls, folder, sampler)

    # ------------------------------------------------------------------------- in

    def add(
        self,
        *,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None = None,
        priority: Any = None,
        **extra: Any,
    ) -> None:
        """Store one step of each environment: arrays [envs, ...], or without the first axis if
        there is one environment. ``info`` as the environment gave it; ``priority`` [envs] where
        the sampler knows any; ``extra``: the further columns.

        Each thread is a stream of its own. Raises ReplayError for what does not fit, and then
        stores nothing.
        """
        if priority is not None and self.sequences is not None:
            raise no_priorities()
        if self.flow is not None:
            self.flow.before_insert(self.table.spec.envs)
        given = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)
        lock = self.lock
        with lock.turn:  # as entering the lock does, in a fifth of the time
            pass
        with lock.inner:
            try:
                writer = self._here.writer
            except AttributeError:
                writer = self._own_writer()
            if self.flow is None:
                writer.add(*given)
            else:
                self.write(writer, *given)

    def write(self, writer: StepWriter, *given: Any) -> None:
        """Add under the lock what was counted before by the limiter."""
        if self.flow is None:
            writer.add(*given)
            return
        try:
            writer.add(*given)
        finally:
            self.flow.note(counted=self.table.spec.envs)

    def writer(self) -> StreamWriter:
        """A stream of its own, for steps that do not follow those of the calling thread."""
        with self.lock:
            return StreamWriter(self, StepWriter(self.table, self.layout, self.autoreset))

    def _own_writer(self) -> StepWriter:
        for thread in [t for t in self._writers if not t.is_alive()]:
            self._writers.pop(thread).close()
        made = StepWriter(self.table, self.layout, self.autoreset)
        self._writers[threading.current_thread()] = self._here.writer = made
        return made

    def serve(self, path: str | Path | None = None) -> str:
        """Let other processes of this host add; the address for `Writer.attach`.

        Needs ``shared=True``. Raises ReplayError where another listens at ``path``.
        """
        if self._server is None:
            self._server = serve(self, path)
        return self._server.address

    # ------------------------------------------------------------------------- out

    def sample(self, count: int, *, stacked: bool = True) -> Batch:
        """``count`` rows as the sampler draws them: see `Batch`.

        ``stacked=False``: frame stacks come as the frames that make them up, for stacking on a
        device. Raises ReplayError when there is nothing to sample from, or too little.
        """
        flow = self.flow
        if flow is None:
            return self._draw(count, stacked)
        with self.lock:
            self.collect()
        flow.before_sample(count)
        try:
            return self._draw(count, stacked)
        except BaseException:
            flow.not_sampled(count)
            raise

    def _draw(self, count: int, stacked: bool) -> Batch:
        with self.lock:
            self.collect()
            stored = self.table.stored
            if not 0 < count <= (self.capacity if self.sequences else stored):
                raise cannot_sample(count, stored, self.capacity)
            rows, weights = self.sampler.sample(count)
            return self.gather.batch(rows, weights, stacked=stacked)

    def collect(self) -> None:
        """Take in what others published, and let go of what is too old. Under `lock`."""
        self.table.collect()
        self._cutter.cut()
        if self.flow is not None:
            self.flow.note()

    def update_priorities(self, keys: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """New priorities [n] for rows by their `keys` [n]; returns how many still were there.

        Magnitudes count, so TD errors may be given as they are. Those of rows that were overwritten
        since are ignored, and counted in `stats`. Raises ReplayError for priorities that are not
        finite.
        """
        names = np.asarray(keys, np.int64).reshape(-1)
        values = np.abs(np.asarray(priorities, np.float64)).reshape(-1)
        if names.shape != values.shape:
            raise ReplayError(f"{len(values)} priorities came for {len(names)} keys; give one each")
        if not (finite := np.isfinite(values)).all():
            wrong = int(np.argmin(finite))
            raise ReplayError(
                f"priority {values[wrong]} at position {wrong} must be finite; look for what made "
                "it so before it reaches the network"
            )
        with self.lock:
            fresh = self.table.fresh(names)
            count = int(np.count_nonzero(fresh))
            if count < len(names):
                self.stale_updates += len(names) - count
                names, values = names[fresh], values[fresh]
            self.sampler.update(names & 0xFFFFFFFF, values)
            return count

    def batches(
        self,
        count: int,
        *,
        prefetch: int = 3,
        device: Any = None,
        stacked: bool = True,
        timeout_s: float = 60.0,
    ) -> Generator[Batch, None, None]:
        """Batches as of `sample` without end, ``prefetch`` of them drawn ahead by a thread.

        ``device``: as torch tensors there, but for keys. Raises ReplayError when nothing could be
        drawn for ``timeout_s``. Closing the generator ends the thread.
        """
        source = Source(self, count, stacked)
        return batches(source, prefetch=prefetch, device=device, timeout_s=timeout_s)

    def save(self, folder: str | Path) -> None:
        """Write a snapshot, complete or not at all, while others go on adding and sampling.

        Raises ReplayError where it cannot be written; the one before then stays.
        """
        persistence.save(self, folder)

    def restore(self, folder: str | Path) -> None:
        """Take over the snapshot of a replay made alike; this one must be new.

        Raises ReplayError where it is damaged or was made otherwise; use this replay no more then.
        """
        persistence.restore(self, FolderReader(Path(folder)))

    @property
    def version(self) -> int:
        """Of the policy that acts now: what `max_policy_lag` counts from."""
        return self.table.version

    @version.setter
    def version(self, version: int) -> None:
        with self.lock:
            self.table.version = version

    def __len__(self) -> int:
        """Rows that may be sampled."""
        return self.table.stored

    def stats(self) -> dict[str, Any]:
        """Counts of rows, with ``inserted = stored + evicted``, and bytes."""
        table = self.table
        with self.lock:
            self.collect()
            return {
                "capacity": self.capacity,
                "stored": table.stored,
                "inserted": table.inserted,
                "evicted": dict(table.evicted),
                "stale_updates": self.stale_updates,
                "slots": table.slots,
                "rows": table.rows,
                "nbytes": table.store.geometry.nbytes + table.valid.nbytes,
                "nbytes_per_row": table.store.geometry.nbytes / table.rows,
            }

    def close(self) -> None:
        """Let writers go and give the memory back; batches stay as they are."""
        if self._server is not None:
            self._server.close()
        with self.lock:
            self._writers.clear()
            self._here = threading.local()
            self.table.store.close()
