"""The replay buffer: add steps, sample batches, from any thread.

    with Replay.from_env(env, capacity=1_000_000, n_step=3, frame_stack=4) as rb:
        rb.add(obs=o, action=a, reward=r, terminated=te, truncated=tr, next_obs=o2, info=info)
        batch = rb.sample(256)

It stands on a `Table` of slots, which with its lock, limiter and threads is a `BufferCore`. One
lock is around everything; the large copies release the interpreter lock under it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay import snapshot
from penstock.replay.adding import Adds, Given
from penstock.replay.batch import Batch
from penstock.replay.buffer_core import BufferCore
from penstock.replay.checks import (
    cannot_sample,
    check_numbers,
    check_priorities,
    slots_in_hand,
    whole,
)
from penstock.replay.errors import ReplayError
from penstock.replay.eviction import EvictionPolicy
from penstock.replay.factory import (
    bind_sampler,
    columns_of,
    describe_sampler,
    envs_of,
    lay_out,
    make_gather,
    make_table,
    read_sampler,
    resets_of,
    wrap_sampler,
)
from penstock.replay.limiter import RateLimiter
from penstock.replay.prefetch import batches
from penstock.replay.rate_limited_table import RateLimitedTable
from penstock.replay.samplers import Sampler
from penstock.replay.sequence_gather import draw_future
from penstock.replay.sequences import Sequences, SequenceSampler, no_priorities
from penstock.replay.snapshot_files import FolderReader
from penstock.replay.steps import Autoreset, StepWriter

COUNTERS = ("stale_updates",)  # kept in a snapshot
SIZE = ("capacity", "frame_stack", "autoreset", "writers", "in_hand")  # options that rows go by
RETRY_S = 0.01  # between two attempts to draw


class Replay:
    """At least the ``capacity`` newest rows, each one step of one environment.

    ``columns``: a gymnasium space or (dtype, shape) for obs, action and further columns, or the
    spec of slots that others fill. ``envs``: environments that each `add` brings a step of.
    ``autoreset``: what resets them, see `penstock.replay.steps`. ``unroll``: steps of a slot, by
    default chosen. ``writers``: how many threads or processes write at a time. ``in_hand``: slots
    that they hold together meanwhile, which come on top of the capacity; by default one each, or
    two of a ``shared`` replay. ``max_times_sampled``: after which a row leaves. ``limiter``: keeps
    `add` and `sample` in step; whoever is ahead waits for the other side, at most ``timeout_s``.
    """

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
        in_hand: int | None = None,
        shared: bool = False,
        sequences: Sequences | None = None,
        max_times_sampled: int | None = None,
        ttl_s: float | None = None,
        max_policy_lag: int | None = None,
        limiter: RateLimiter | None = None,
        timeout_s: float = 60.0,
        seed: int | None = None,
    ) -> None:
        """Raises ReplayError for what cannot be, and before memory is taken that is not there."""
        self.capacity, self.n_step = whole("capacity", capacity), whole("n_step", n_step)
        self.writers, envs = whole("writers", writers), whole("envs", envs)
        self.in_hand = slots_in_hand(in_hand, self.writers, shared=shared)
        check_numbers(self.capacity, discount, envs, autoreset)
        self.discount, self.sequences, self.cuts = (
            discount,
            sequences,
            EvictionPolicy(ttl_s, max_policy_lag),
        )
        self.autoreset: Autoreset = autoreset
        self.sampler = wrap_sampler(sampler, self.n_step, sequences, max_times_sampled)
        self._lay_out(columns, envs, frame_stack, unroll, shared=shared)
        bind_sampler(self.sampler, self.table, seed)
        flow = (
            None
            if limiter is None
            else RateLimitedTable(limiter, self.table, self.capacity, timeout_s)
        )
        self.flow = self._stock.flow = flow
        self.stale_updates = 0

    def _lay_out(
        self,
        columns: SlotSpec | Mapping[str, Any],
        envs: int,
        frame_stack: int | Mapping[str, int],
        unroll: int | None,
        *,
        shared: bool,
    ) -> None:
        """Take the memory, and what is around it."""
        follow = self.n_step > 1 or self.sequences is not None
        self.layout = lay_out(
            columns, self.capacity, envs, frame_stack, unroll, shared=shared, follow=follow
        )
        self.table = make_table(
            self.layout, self.capacity, self.in_hand, self.writers, self.sampler, shared=shared
        )
        self._stock = BufferCore(self.table, self.layout, self.autoreset, self.cuts)
        self._end = weakref.finalize(self, self._stock.close)
        self.lock, self._streams = self._stock.lock, self._stock.streams
        steps, discount, sequences = self.n_step, self.discount, self.sequences
        self.gather = make_gather(self.table, self.layout, steps, discount, sequences)

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
        reader = FolderReader(Path(folder))
        with reader.refusing():
            others, spec = reader.about["others"], SlotSpec.from_dict(reader.about["table"]["spec"])
            options = dict(others["options"])
            if options["sequences"] is not None:
                options["sequences"] = Sequences(**options["sequences"])
        replay = cls(spec, **options, sampler=sampler or read_sampler(reader, others["sampler"]))
        try:
            replay._restore(reader)
        except BaseException:
            replay.close()
            raise
        return replay

    @classmethod
    def load_rows(
        cls,
        folder: str | Path,
        *,
        n_step: int = 1,
        discount: float = 0.99,
        sampler: Sampler | None = None,
        sequences: Sequences | None = None,
        seed: int | None = None,
    ) -> Self:
        """A replay of the rows that `save` wrote, drawn in another way than the saved one drew.

        No row leaves because of its age. Raises ReplayError as `load` does, and where rows were
        stored without telling which follow each other, and are to be followed.
        """
        reader = FolderReader(Path(folder))
        with reader.refusing():
            spec = SlotSpec.from_dict(reader.about["table"]["spec"])
            saved = reader.about["others"]["options"]
            size = {name: saved[name] for name in SIZE}
        replay = cls(
            spec,
            **size,
            n_step=n_step,
            discount=discount,
            sampler=sampler,
            sequences=sequences,
            seed=seed,
        )
        try:
            if replay.layout.inline and (n_step > 1 or sequences) and not replay.layout.ages:
                raise ReplayError(
                    f"{folder} does not hold which rows follow each other; record it with n_step "
                    "above 1 or with sequences"
                )
            with replay.lock, reader.refusing():
                snapshot.restore(reader, replay.table)
                replay.table.rate_anew()
        except BaseException:
            replay.close()
            raise
        return replay

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
        stock = self._stock
        if self.flow is not None:
            stock.check()
            self.flow.before_insert(self.table.spec.envs)
        given = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)
        lock = self.lock
        with lock.turn:  # as entering the lock does, in a fifth of the time
            pass
        with lock.inner:
            if stock.ended is not None:
                stock.check()
            try:
                writer = self._streams.here.writer
            except AttributeError:
                writer = self._streams.begin()
            if self.flow is None:
                writer.add(*given)
            else:
                self.write(writer, *given)

    def write(self, writer: StepWriter, *given: Any) -> None:
        """Add, under the lock, what the limiter has counted before."""
        self._stock.check()
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
            self._stock.check()
            return StreamWriter(self, self._streams.make())

    def serve(self, path: str | Path | None = None) -> str:
        """Let other processes of this host add; the address for `Writer.attach`.

        Needs ``shared=True``. Raises ReplayError where another listens at ``path``.
        """
        return self._stock.serve(path).address

    # ------------------------------------------------------------------------- out

    def sample(self, count: int, *, stacked: bool = True) -> Batch:
        """``count`` rows as the sampler draws them: see `Batch`.

        ``stacked=False``: frame stacks come as the frames that make them up, for stacking on a
        device. Raises ReplayError when there is nothing to sample from, or too little.
        """
        flow = self.flow
        if flow is None:
            return self._draw(count, stacked)
        if not flow.limiter.may_sample(count):
            with self.lock:
                self.collect()
        flow.before_sample(count)
        try:
            return self._draw(count, stacked)
        except BaseException:
            flow.not_sampled(count)
            raise

    def _draw(self, count: int, stacked: bool) -> Batch:
        stock = self._stock
        with self.lock:
            if stock.ended is not None:
                stock.check()
            stock.collect()
            stored = self.table.stored
            if not 0 < count <= (self.capacity if self.sequences else stored):
                raise cannot_sample(count, stored, self.capacity)
            rows, weights = self.sampler.sample(count)
            return self.gather.batch(rows, weights, stacked=stacked)

    def collect(self) -> None:
        """Take in what others published, and let go of what is too old. Under `lock`."""
        self._stock.collect()

    def update_priorities(self, keys: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """New priorities [n] for rows by their `keys` [n]; returns how many still were there.

        Magnitudes count, so TD errors may be given as they are. Those of rows that were overwritten
        since are ignored, and counted in `stats`. Raises ReplayError for priorities that are not
        finite.
        """
        names, values = check_priorities(keys, priorities)
        with self.lock:
            fresh = self.table.fresh(names)
            count = int(np.count_nonzero(fresh))
            if count < len(names):
                self.stale_updates += len(names) - count
                names, values = names[fresh], values[fresh]
            self.sampler.update(names & 0xFFFFFFFF, values)
            return count

    def future(self, keys: npt.ArrayLike, horizon: int, rng: np.random.Generator) -> Batch:
        """For each row of a batch, by its `keys` [n], a row of the same episode, as of `sample`:
        drawn evenly among the row itself and those that follow it, ``horizon`` rows at most.

        Raises ReplayError for rows that were overwritten since, and for sequences.
        """
        names, horizon = np.asarray(keys, np.int64), whole("horizon", horizon)
        if self.sequences is not None:
            raise ReplayError("future rows are drawn for single steps; take them from the sequence")
        with self.lock:
            if gone := int(np.count_nonzero(~self.table.fresh(names))):
                raise ReplayError(f"{gone} of {len(names)} rows were overwritten; draw anew")
            rows = draw_future(self.table, names & 0xFFFFFFFF, horizon, rng)
            return self.gather.batch(rows, None)

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
        source = ReplaySource(self, count, stacked)
        return batches(source, prefetch=prefetch, device=device, timeout_s=timeout_s)

    def save(self, folder: str | Path, *, more: Callable[[], dict[str, Any]] | None = None) -> None:
        """Write a snapshot, complete or not at all, while others go on adding and sampling.

        ``more`` gives JSON values to keep with it; it is called once, under `lock`, at the instant
        of which the snapshot is. Raises ReplayError where it cannot be written; the one before then
        stays.
        """

        def others() -> dict[str, Any]:
            return {
                "options": self._options(),
                "sampler": describe_sampler(self.sampler),
                "state": self.sampler.state_dict(),
                "limiter": self.flow.state_dict() if self.flow else None,
                "counters": {name: getattr(self, name) for name in COUNTERS},
                "more": more() if more is not None else {},
            }

        with self.lock:
            self.collect()
        snapshot.save(Path(folder), self.table, self.lock, others)

    def _options(self) -> dict[str, Any]:
        """What the constructor makes such a replay of, besides columns and sampler."""
        return {
            "capacity": self.capacity,
            "n_step": self.n_step,
            "discount": self.discount,
            "frame_stack": self.layout.frame_stack,
            "autoreset": self.autoreset,
            "writers": self.writers,
            "in_hand": self.in_hand,
            "shared": self.table.store.arena.fd is not None,
            "sequences": None if self.sequences is None else asdict(self.sequences),
            "max_times_sampled": getattr(self.sampler, "most", None),
            **asdict(self.cuts),
        }

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Take over the snapshot of a replay made alike; this one must be new. Returns what
        ``more`` gave `save`.

        Raises DamagedError where it is damaged, another ReplayError where it was made otherwise;
        use this replay no more then.
        """
        return self._restore(FolderReader(Path(folder)))

    def _restore(self, reader: FolderReader) -> dict[str, Any]:
        with self.lock, reader.refusing():
            others = snapshot.restore(reader, self.table)
            mine, theirs = describe_sampler(self.sampler), others["sampler"]
            if (mine or {}).get("kind") != (theirs or {}).get("kind"):
                raise ReplayError(
                    f"{reader.folder} has the state of another sampler: "
                    f"{theirs or 'one of your own'}; give the sampler that the replay was made with"
                )
            self.sampler.load_state_dict(others["state"])
            if self.flow is not None:
                self.flow.load_state_dict(others.get("limiter"))
            for name in COUNTERS:
                setattr(self, name, int(others["counters"][name]))
            more: dict[str, Any] = others.get("more", {})
            return more

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
            self._stock.check()
            self.collect()
            return {
                "capacity": self.capacity,
                "stored": table.stored,
                "inserted": table.inserted,
                "evicted": dict(table.evicted),
                "stale_updates": self.stale_updates,
                "writers": self._stock.writers,
                "slots": table.slots,
                "rows": table.rows,
                "nbytes": table.store.geometry.nbytes + table.valid.nbytes,
                "nbytes_per_row": table.store.geometry.nbytes / table.rows,
            }

    def close(self) -> None:
        """Let writers go and give the memory back; batches stay as they are. A replay that nobody
        refers to any more is closed too."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StreamWriter(Adds):
    """`Replay.add` for one explicit stream of this process, for steps that do not follow a thread's
    own; `close` ends it, and `with` does."""

    def __init__(self, replay: Replay, writer: StepWriter) -> None:
        self._replay, self._writer = replay, writer

    def _take(self, given: Given, timeout_s: float | None) -> None:
        replay = self._replay
        if replay.flow is not None:
            replay.flow.before_insert(replay.table.spec.envs, timeout_s)
        with replay.lock:
            replay.write(self._writer, *given)

    def close(self) -> None:
        """Its rows stay."""
        with self._replay.lock:
            self._writer.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReplaySource:
    """Batches of ``count`` of a replay, as soon as they can be drawn."""

    def __init__(self, replay: Replay, count: int, stacked: bool) -> None:
        self._replay, self._count, self._stacked = replay, count, stacked

    def draw(self, timeout_s: float) -> Batch | None:
        """None where nothing could be drawn in time."""
        ends_s = time.monotonic() + timeout_s
        while self.missing():
            if time.monotonic() >= ends_s:
                return None
            time.sleep(RETRY_S)
        return self._replay.sample(self._count, stacked=self._stacked)

    def missing(self) -> str:
        """What a batch waits for; empty when it can be drawn."""
        replay = self._replay
        with replay.lock:
            replay.collect()
        if isinstance(replay.sampler, SequenceSampler):
            with replay.lock:
                return "" if len(replay.sampler) else "no sequence is complete; is anything added?"
        if min(self._count, replay.capacity) > len(replay):
            return f"{len(replay)} of {self._count} rows are there; is anything added?"
        return replay.flow.missing(self._count) if replay.flow else ""
