"""The replay buffer: add steps, sample batches, from any thread.

    with Replay.from_env(env, capacity=1_000_000, n_step=3, frame_stack=4) as rb:
        rb.add(obs=o, action=a, reward=r, terminated=te, truncated=tr, next_obs=o2, info=info)
        batch = rb.sample(256)

Rows lie in a `Table` of slots. A `BufferCore` holds the table with its lock, limiter and threads;
an `Evictor` removes what is too old. One lock guards everything; large copies release the
interpreter lock while they hold it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay import snapshot
from penstock.replay.batch import Batch
from penstock.replay.errors import ReplayError
from penstock.replay.factory import (
    bind_sampler,
    check_numbers,
    columns_of,
    describe_sampler,
    envs_of,
    lay_out,
    make_gather,
    make_table,
    positive_int,
    read_sampler,
    resets_of,
    slots_in_hand,
    wrap_sampler,
)
from penstock.replay.layout import Layout
from penstock.replay.limiter import RateLimitedTable, RateLimiter, expect_sizes
from penstock.replay.prefetch import batches
from penstock.replay.samplers import Sampler, check_priorities, load_moved
from penstock.replay.sequences import Sequences, SequenceSampler, draw_future, no_priorities
from penstock.replay.sharing import StoreServer
from penstock.replay.snapshot import FolderReader
from penstock.replay.steps import Autoreset, StepArguments, StepWriter
from penstock.replay.table import ROW_OF_KEY, Table
from penstock.replay.writer import StepAdder
from penstock.transport.shm.arena import Prefault

# Options that the stored rows depend on.
ROW_OPTIONS = ("capacity", "frame_stack", "autoreset", "writers", "in_hand")
# Options that a sampler's state depends on.
SAMPLER_OPTIONS = ("sequences", "max_times_sampled")
# The types of whole numbers; a union of types would be made anew at each use.
INTEGER_TYPES = (int, np.integer)
# The time between two attempts to draw a batch, in seconds.
RETRY_S = 0.01


class Replay:
    """A replay buffer that keeps at least the ``capacity`` newest rows in full slots.

    Steps that only reset, and the rest of a slot that ends early (`StreamWriter.close`, `flush` of
    a writer elsewhere), take up room too.

    A row is one step of one environment. Any thread may add and sample; with ``shared``, other
    processes of this host may add too (`serve`). Use it in a ``with`` block, or call `close`.

    Args:
        columns: what a row holds: a mapping from ``obs``, ``action`` and further names to a
            gymnasium space or ``(dtype, shape)`` (nested mappings allowed); or the `SlotSpec` of
            slots that other processes fill.
        capacity: number of rows kept.
        n_step: rows that one sampled transition spans, from 1.
        discount: gamma, from 0 to 1.
        frame_stack: frames of a stacked observation, for all of them or by column name; 1: no
            stacks. Frames are stored once, not once per stack.
        sampler: `Uniform` by default.
        envs: environments per `add`.
        autoreset: how the environments are reset, see `penstock.replay.steps`.
        unroll: steps per slot; None chooses.
        writers: threads or processes that write at the same time.
        in_hand: slots that all writers hold together, in addition to ``capacity``; None: one per
            writer, two in a ``shared`` replay.
        shared: use memory that other processes can map.
        sequences: draw sequences instead of single transitions.
        max_times_sampled: remove a row after it was drawn so often, so that no row is trained on
            more often; not with ``sequences``. None: no limit.
        ttl_s: remove slots that were published longer ago, in seconds; None: no limit.
        max_policy_lag: remove slots that are more policy versions behind `version`; None: no limit.
        limiter: keeps `add` and `sample` in step: the side that is ahead waits.
        timeout_s: longest wait for the limiter, in seconds.
        seed: of the random draws; None: from the operating system.

    Raises:
        ReplayError: an option is invalid, or there is not enough memory, which is checked before
            any is taken.
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
        self.capacity = positive_int("capacity", capacity)
        self.n_step = positive_int("n_step", n_step)
        self.writers = positive_int("writers", writers)
        self.in_hand = slots_in_hand(in_hand, self.writers, shared=shared)
        envs = positive_int("envs", envs)
        check_numbers(self.capacity, discount, envs, autoreset)
        self.discount = discount
        self.sequences = sequences
        self.eviction = EvictionPolicy(ttl_s, max_policy_lag)
        self.autoreset: Autoreset = autoreset
        self.max_times_sampled = max_times_sampled
        self.sampler = wrap_sampler(sampler, self.n_step, sequences, max_times_sampled)
        self.layout = lay_out(
            columns,
            capacity=self.capacity,
            envs=envs,
            frame_stack=frame_stack,
            unroll=unroll,
            shared=shared,
            follow=self.n_step > 1 or sequences is not None,
        )
        if limiter is not None:
            expect_sizes(limiter, self.layout.spec, self.capacity, shared=shared)

        # All options were checked: now memory is taken. From here on, `close` frees it.
        self.table = make_table(
            self.layout,
            capacity=self.capacity,
            in_hand=self.in_hand,
            writers=self.writers,
            sampler=self.sampler,
            shared=shared,
        )
        self.rate_limited: RateLimitedTable | None = None
        if limiter is not None:
            self.rate_limited = RateLimitedTable(limiter, self.table, timeout_s)
        self._core = BufferCore(
            self.table,
            self.layout,
            autoreset=self.autoreset,
            eviction=self.eviction,
            rate_limited=self.rate_limited,
        )
        self._finalizer = weakref.finalize(self, self._core.close)

        self.lock = self._core.lock
        self._streams = self._core.streams
        self.gather = make_gather(
            self.table,
            self.layout,
            n_step=self.n_step,
            discount=discount,
            sequences=sequences,
        )
        bind_sampler(self.sampler, self.table, seed)

        self.stale_updates = 0
        """Priorities that `update_priorities` ignored, as their rows were overwritten."""
        self.slots_moved = False
        """Whether `restore` loaded slots into other places than they had in the snapshot."""

    @classmethod
    def from_env(
        cls,
        env: Any,
        capacity: int,
        *,
        columns: Mapping[str, Any] | None = None,
        n_step: int = 1,
        discount: float = 0.99,
        frame_stack: int | Mapping[str, int] = 1,
        sampler: Sampler | None = None,
        autoreset: Autoreset | None = None,
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
    ) -> Self:
        """Make a replay for a gymnasium environment.

        Args:
            env: a single or a vector environment; its spaces and its number of environments are
                those of the replay.
            capacity: number of rows kept.
            columns: columns besides ``obs`` and ``action``.
            autoreset: how the environments are reset; None: the mode in the metadata of ``env``.

        The other options are those of `Replay`. Raises ReplayError as `Replay` does.
        """
        if autoreset is None:
            autoreset = resets_of(env)
        return cls(
            columns_of(env) | dict(columns or {}),
            capacity,
            n_step=n_step,
            discount=discount,
            frame_stack=frame_stack,
            sampler=sampler,
            envs=envs_of(env),
            autoreset=autoreset,
            unroll=unroll,
            writers=writers,
            in_hand=in_hand,
            shared=shared,
            sequences=sequences,
            max_times_sampled=max_times_sampled,
            ttl_s=ttl_s,
            max_policy_lag=max_policy_lag,
            limiter=limiter,
            timeout_s=timeout_s,
            seed=seed,
        )

    @classmethod
    def load(cls, folder: str | Path, sampler: Sampler | None = None) -> Self:
        """Load the replay that `save` wrote.

        It continues exactly as the saved one would have: the next batch has the same rows. Streams
        start anew.

        Args:
            folder: of the snapshot.
            sampler: needed if the replay was made with a sampler or schedule of your own.

        Raises:
            ReplayError: the folder holds no snapshot, or a damaged one.
        """
        reader = FolderReader(Path(folder))
        with reader.reporting_damage():
            spec = SlotSpec.from_dict(reader.about["table"]["spec"])
            saved = reader.about["others"]
            options = dict(saved["options"])
            if options["sequences"] is not None:
                options["sequences"] = Sequences(**options["sequences"])

        chosen = read_sampler(reader, saved["sampler"]) if sampler is None else sampler
        replay = cls(spec, **options, sampler=chosen)
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
        """Load the rows that `save` wrote into a replay that draws them in another way.

        No row is removed because of its age. The options are those of `Replay`.

        Raises:
            ReplayError: as `load`; also if ``n_step`` or ``sequences`` need to know which rows
                follow each other and the rows were stored without that.
        """
        reader = FolderReader(Path(folder))
        with reader.reporting_damage():
            spec = SlotSpec.from_dict(reader.about["table"]["spec"])
            saved_options = reader.about["others"]["options"]
            row_options = {name: saved_options[name] for name in ROW_OPTIONS}

        replay = cls(
            spec,
            **row_options,
            n_step=n_step,
            discount=discount,
            sampler=sampler,
            sequences=sequences,
            seed=seed,
        )
        try:
            needs_ages = bool(replay.layout.inline) and (n_step > 1 or sequences is not None)
            if needs_ages and not replay.layout.has_ages:
                raise ReplayError(
                    f"{folder} does not hold which rows follow each other; record it with n_step "
                    "above 1 or with sequences"
                )

            with replay.lock, reader.reporting_damage():
                snapshot.restore(reader, replay.table)
                replay.table.insert_all()
        except BaseException:
            replay.close()
            raise
        return replay

    # ------------------------------------------------------------------------- adding

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
        """Store one step of each environment.

        The steps of each thread are a stream of their own: they must follow each other. Use
        `writer` for other streams.

        Args:
            obs: observation before the step, arrays ``[envs, *shape]``, nested like the space. With
                one environment, the first axis may be left out, here and below.
            action: ``[envs, *shape]``, nested like the space.
            reward: ``[envs]`` float.
            terminated: ``[envs]`` bool.
            truncated: ``[envs]`` bool; ignored where ``terminated`` is set.
            next_obs: observation after the step, like ``obs``.
            info: as the environment returned it; holds final observations with autoreset
                "same_step".
            priority: ``[envs]``, for a sampler that uses priorities; None: the sampler chooses.
            extra: the further columns, ``[envs, *shape]`` each.

        Raises:
            ReplayError: a value does not fit its column, or the limiter gave no room in time.
                Nothing is stored then.
        """
        if priority is not None and self.sequences is not None:
            raise no_priorities()
        core = self._core
        rate_limited = self.rate_limited
        if rate_limited is not None:
            core.check()
            rate_limited.before_insert(self.table.spec.envs)
        step = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)

        # A waiting thread goes first, as in `with self.lock`, in a fifth of the time.
        lock = self.lock
        with lock.turn:
            pass
        with lock.inner:
            if core.ended is not None:
                core.check()
            try:
                writer = self._streams.of_thread.writer
            except AttributeError:
                writer = self._open_stream_of_thread()
            if rate_limited is None:
                writer.add(*step)
            else:
                self.write(writer, *step)

    def _open_stream_of_thread(self) -> StepWriter:
        """Open the stream of the calling thread, at its first step. Needs the lock.

        Raises ReplayError if too many streams are open, after the limiter took back this step.
        """
        try:
            return self._streams.open_for_thread()
        except ReplayError:
            if self.rate_limited is not None:
                self.rate_limited.pass_on_counts(already_counted=self.table.spec.envs)
            raise

    def write(self, writer: StepWriter, *given: Any) -> None:
        """Add a step that the limiter has already counted. Needs the lock.

        If the step is not stored, the limiter's count is taken back.

        Args:
            writer: of the stream.
            given: the arguments of `StepWriter.add`, in order.
        """
        self._core.check()
        if self.rate_limited is None:
            writer.add(*given)
            return
        try:
            writer.add(*given)
        finally:
            self.rate_limited.pass_on_counts(already_counted=self.table.spec.envs)

    def writer(self) -> StreamWriter:
        """Open a separate stream, for steps that do not follow those of the calling thread."""
        with self.lock:
            self._core.check()
            return StreamWriter(self, self._streams.open_stream())

    def serve(self, path: str | Path | None = None) -> str:
        """Let other processes of this host add.

        Args:
            path: of the Unix socket; None: in a new private folder.

        Returns:
            The address for `Writer.attach`.

        Raises:
            ReplayError: the replay was not made with ``shared=True``, or another process listens at
                ``path``.
        """
        return self._core.serve(path).address

    # ------------------------------------------------------------------------- sampling

    def sample(self, count: int, *, stacked: bool = True) -> Batch:
        """Draw ``count`` rows with the sampler.

        Args:
            count: rows, or sequences, from 1; rows may repeat.
            stacked: False returns frame stacks as the frames that they consist of, to be stacked on
                a device with `unstack`.

        Returns:
            A `Batch`; for sequences the keys are those of `SequenceGather`.

        Raises:
            ReplayError: fewer than ``count`` rows are stored, no sequence is complete, or the
                limiter allowed no sample in time.
        """
        return self._sample_within(None, count, stacked=stacked)

    def _sample_within(self, timeout_s: float | None, count: int, *, stacked: bool) -> Batch:
        """Sample as `sample` does, and wait for the limiter for up to ``timeout_s`` seconds.

        None: for as long as the option ``timeout_s`` of the replay.
        """
        rate_limited = self.rate_limited
        if rate_limited is None:
            return self._draw(count, stacked)

        # The limiter's band would grow with a larger batch for good.
        if not is_count(count) or count > self.capacity:
            raise cannot_sample(count, self.table.stored, self.capacity)

        # The last draw may have removed rows, and slots that were not collected may let this draw
        # proceed.
        with self.lock:
            rate_limited.pass_on_counts()
        if not rate_limited.limiter.may_sample(count):
            with self.lock:
                self.collect()

        rate_limited.before_sample(count, timeout_s)
        try:
            return self._draw(count, stacked)
        except BaseException:
            rate_limited.take_back_sample(count)
            raise

    def _draw(self, count: int, stacked: bool) -> Batch:
        """Draw a batch as `sample` does, without the limiter."""
        core = self._core
        with self.lock:
            if core.ended is not None:
                core.check()
            core.collect_for_draw()

            # Sequences may overlap, so that there can be more of them than rows at their starts.
            stored = self.table.stored
            most = self.capacity if self.sequences else stored
            if not is_count(count) or count > most:
                raise cannot_sample(count, stored, self.capacity)
            rows, weights = self.sampler.sample(count)
            return self.gather.batch(rows, weights, stacked=stacked)

    def collect(self) -> None:
        """Take in published slots, and remove rows that are too old. Needs `lock`."""
        self._core.collect()

    def update_priorities(self, keys: npt.ArrayLike, priorities: npt.ArrayLike) -> int:
        """Set new priorities of sampled rows.

        Priorities of rows that were overwritten since are ignored, and counted in `stats`.

        Args:
            keys: ``[n]`` int64, `Batch.keys`.
            priorities: ``[n]``; their magnitudes count, so TD errors may be passed as they are.

        Returns:
            The number of rows that were still stored.

        Raises:
            ReplayError: the lengths differ, or a priority is not finite.
        """
        key_array, magnitudes = check_priorities(keys, priorities)
        with self.lock:
            is_fresh = self.table.fresh(key_array)
            count = int(np.count_nonzero(is_fresh))
            if count < len(key_array):
                self.stale_updates += len(key_array) - count
                key_array = key_array[is_fresh]
                magnitudes = magnitudes[is_fresh]

            self.sampler.update(key_array & ROW_OF_KEY, magnitudes)
            return count

    def future(self, keys: npt.ArrayLike, horizon: int, rng: np.random.Generator) -> Batch:
        """Draw, for each given row, a row of the same episode at or after it.

        It is drawn evenly among the row itself and those that follow it, at most ``horizon`` rows
        in all: the "future" strategy of hindsight relabelling (Andrychowicz et al. 2017, arXiv
        1707.01495, section 4.5).

        Args:
            keys: ``[n]`` int64, `Batch.keys`.
            horizon: rows to draw from, the row itself included, from 1.
            rng: the random generator of the draw.

        Returns:
            A `Batch` of n rows, as from `sample`.

        Raises:
            ReplayError: a row was overwritten since, or the replay draws sequences.
        """
        key_array = np.asarray(keys, np.int64)
        horizon = positive_int("horizon", horizon)
        if self.sequences is not None:
            raise ReplayError("future rows are drawn for single steps; take them from the sequence")

        with self.lock:
            if stale := int(np.count_nonzero(~self.table.fresh(key_array))):
                raise ReplayError(f"{stale} of {len(key_array)} rows were overwritten; draw anew")
            rows = draw_future(self.table, key_array & ROW_OF_KEY, horizon, rng)
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
        """Yield batches as from `sample` without end; a thread draws them ahead.

        Closing the generator ends the thread.

        Args:
            count: rows of a batch.
            prefetch: batches drawn ahead.
            device: a torch device: everything but the keys is returned as tensors on it; None:
                numpy.
            stacked: as in `sample`.
            timeout_s: longest wait for a batch, in seconds.

        Raises:
            ReplayError: an option is out of range, or no batch could be drawn within ``timeout_s``.
        """
        source = ReplaySource(self, positive_int("batch size", count), stacked)
        return batches(source, prefetch=prefetch, device=device, timeout_s=timeout_s)

    def save(
        self,
        folder: str | Path,
        *,
        more: Callable[[], dict[str, Any]] | None = None,
        give_up: threading.Event | None = None,
    ) -> None:
        """Write a snapshot, complete or not at all, while other threads add and sample.

        Args:
            folder: to write to; the snapshot there before is replaced only by a complete one.
            more: returns JSON values to store with the snapshot. Called once, under `lock`, at the
                instant of the snapshot.
            give_up: ends the writing once it is set.

        Raises:
            ReplayError: it cannot be written, or was given up. The previous snapshot stays.
        """

        def describe_replay() -> dict[str, Any]:
            """Returns what the snapshot holds beside the table, at the instant of the snapshot."""
            return {
                "options": self._options(),
                "sampler": describe_sampler(self.sampler),
                "state": self.sampler.state_dict(),
                "limiter": self.rate_limited.state_dict() if self.rate_limited else None,
                "counters": {"stale_updates": self.stale_updates, "version": self.version},
                "more": more() if more is not None else {},
            }

        with self.lock:
            self.collect()
        snapshot.save(Path(folder), self.table, self.lock, describe_replay, give_up)

    def _options(self) -> dict[str, Any]:
        """Returns the constructor's options of this replay, as JSON values.

        They lack the columns, the sampler, and options that need not be those of the saved replay.
        """
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
            "max_times_sampled": self.max_times_sampled,
            **asdict(self.eviction),
        }

    def restore(self, folder: str | Path) -> dict[str, Any]:
        """Load a snapshot into this replay, which must be new and have the same options.

        Only ``capacity``, ``writers``, ``in_hand`` and the limiter may differ. If this replay has
        fewer slots than the snapshot, the newest are loaded. `slots_moved` is true if the numbers
        of slots differ.

        Returns:
            What ``more`` returned to `save`.

        Raises:
            DamagedSnapshotError: the snapshot is damaged. Do not use this replay afterwards.
            ReplayError: it was saved with other options, and nothing was loaded.
        """
        return self._restore(FolderReader(Path(folder)))

    def _restore(self, reader: FolderReader) -> dict[str, Any]:
        """Load the snapshot of ``reader``, as `restore` does."""
        with self.lock, reader.reporting_damage():
            snapshot.check_new(reader, self.table)
            self._check_sampler_options(reader.folder, reader.about["others"])
            saved, origin = snapshot.restore(reader, self.table)

            self.slots_moved = origin is not None
            if origin is None:
                self.sampler.load_state_dict(saved["state"])
            else:
                load_moved(self.sampler, saved["state"], origin)
            if self.rate_limited is not None:
                self.rate_limited.load_state_dict(saved.get("limiter"))

            counters = saved["counters"]
            self.stale_updates = int(counters["stale_updates"])
            # Older snapshots have neither a version nor what `more` returned.
            self.table.version = int(counters.get("version", 0))
            more: dict[str, Any] = saved.get("more", {})
            return more

    def _check_sampler_options(self, folder: Path, saved: dict[str, Any]) -> None:
        """Raise ReplayError if the state of this replay's sampler cannot be taken from a snapshot.

        Args:
            folder: of the snapshot, for the error.
            saved: what the snapshot holds beside the table.
        """
        sampler = describe_sampler(self.sampler) or {}
        saved_sampler = saved["sampler"] or {}
        if sampler.get("kind") != saved_sampler.get("kind"):
            raise ReplayError(
                f"{folder} has the state of another sampler: {saved_sampler or 'one of your own'}; "
                "give the sampler that the replay was made with"
            )

        options = self._options()
        saved_options = saved["options"]
        for name in SAMPLER_OPTIONS:
            if saved_options.get(name) != options[name]:
                raise ReplayError(
                    f"{folder} was saved with {name}={saved_options.get(name)} and the replay has "
                    f"{options[name]}; give the same, or take its rows with Replay.load_rows"
                )

    @property
    def version(self) -> int:
        """The version of the policy that acts now; `max_policy_lag` is counted from it."""
        return self.table.version

    @version.setter
    def version(self, version: int) -> None:
        with self.lock:
            self.table.version = version

    def __len__(self) -> int:
        """The number of rows that may be sampled."""
        return self.table.stored

    def stats(self) -> dict[str, Any]:
        """Returns counts of rows, with ``inserted = stored + evicted``, and memory in bytes.

        Raises ReplayError if the replay is closed.
        """
        table = self.table
        with self.lock:
            self._core.check()
            self.collect()
            slots_nbytes = table.store.geometry.nbytes
            return {
                "capacity": self.capacity,
                "stored": table.stored,
                "inserted": table.inserted,
                "evicted": dict(table.evicted),
                "stale_updates": self.stale_updates,
                "writers": self._core.writers,
                "slots": table.slots,
                "rows": table.rows,
                "nbytes": slots_nbytes + table.valid.nbytes,
                "nbytes_per_row": slots_nbytes / table.rows,
            }

    def close(self) -> None:
        """Detach writers and free the memory; batches stay valid.

        A replay that is garbage-collected is closed too.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StreamWriter(StepAdder):
    """One explicit stream of a replay in this process, with the `add` of `Replay`.

    It is for steps that do not follow those of a thread's own stream. `close`, or leaving a
    ``with`` block, ends it.
    """

    def __init__(self, replay: Replay, writer: StepWriter) -> None:
        self._replay = replay
        self._writer = writer

    def _add(self, step: StepArguments, timeout_s: float | None) -> None:
        """Add ``step``; the limiter may let it wait for up to ``timeout_s`` seconds."""
        replay = self._replay
        if replay.rate_limited is not None:
            replay.rate_limited.before_insert(replay.table.spec.envs, timeout_s)
        with replay.lock:
            replay.write(self._writer, *step)

    def close(self) -> None:
        """End the stream; its rows stay."""
        with self._replay.lock:
            self._writer.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReplaySource:
    """Draws batches of a replay, for a thread that prefetches them.

    Args:
        replay: that they are drawn from.
        count: rows, or sequences, of a batch.
        stacked: as in `Replay.sample`.
    """

    def __init__(self, replay: Replay, count: int, stacked: bool) -> None:
        self._replay = replay
        self._count = count
        self._stacked = stacked

    def draw(self, timeout_s: float) -> Batch | None:
        """Draw a batch; returns None if that was not possible within ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if not self.why_not():
                wait_s = max(0.0, deadline_s - time.monotonic())
                try:
                    return self._replay._sample_within(wait_s, self._count, stacked=self._stacked)
                except ReplayError:
                    # If something is missing now, another thread has drawn what was there.
                    if not self.why_not():
                        raise
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(RETRY_S)

    def why_not(self) -> str:
        """Returns why no batch can be drawn yet, as a sentence; empty if one can be drawn."""
        replay = self._replay
        with replay.lock:
            replay.collect()

        if isinstance(replay.sampler, SequenceSampler):
            with replay.lock:
                if not len(replay.sampler):
                    return "no sequence is complete; is anything added?"
        elif min(self._count, replay.capacity) > len(replay):
            return f"{len(replay)} of {self._count} rows are stored; is anything added?"

        if replay.rate_limited is None:
            return ""
        return replay.rate_limited.why_not_sample(self._count)


class BufferCore:
    """A table with everything around it besides sampling: lock, streams, eviction and threads.

    The buffer's own threads refer to this and not to the `Replay`. So a Replay that is
    garbage-collected ends them, and frees descriptors, threads and memory as `close` would have.
    """

    def __init__(
        self,
        table: Table,
        layout: Layout,
        *,
        autoreset: Autoreset,
        eviction: EvictionPolicy,
        rate_limited: RateLimitedTable | None,
    ) -> None:
        self.table = table
        self.rate_limited = rate_limited
        self.lock = FairLock()
        self.streams = OwnStreams(table, layout, autoreset)
        # The error that adding and sampling raise from now on; None while they are possible.
        self.ended: Exception | None = None
        self._evictor = Evictor(eviction, table)

        # Without a call of `add`, other processes publish slots, and rows become too old.
        is_shared = table.store.arena.fd is not None
        self._needs_collect_before_draw = is_shared or eviction != EvictionPolicy()

        # What writers in other processes learn when they attach, and the thread that serves them.
        self._attach_info = {"autoreset": autoreset, "frame_stack": layout.frame_stack}
        self._server: StoreServer | None = None
        # The process that owns the threads; a fork of it does not.
        self._pid = os.getpid()
        self._prefault = Prefault(table.store.arena)

    def collect(self) -> None:
        """Take in published slots, and evict what is too old. Needs `lock`."""
        self.streams.close_ended()
        self.table.collect()
        self._evictor.evict()
        if self.rate_limited is not None:
            self.rate_limited.pass_on_counts()

    def collect_for_draw(self) -> None:
        """Collect only what may change the rows of a draw. Needs `lock`.

        Rows of writers in this process count as soon as they are written, and their streams collect
        their slots.
        """
        if self._needs_collect_before_draw or self.rate_limited is not None:
            self.collect()
        else:
            self.streams.close_ended()

    def check(self) -> None:
        """Raise ReplayError if this buffer is closed, or its service thread failed."""
        if self.ended is not None:
            raise ReplayError(str(self.ended)) from self.ended.__cause__

    def serve(self, path: str | Path | None) -> StoreServer:
        """Let processes of this host write; returns the server, which each further call returns.

        Args:
            path: of the Unix socket; None: in a new private folder.

        Raises:
            ReplayError: the memory is private, or another process listens at ``path``.
        """
        self.check()
        if self._server is None:
            self._server = self._start_server(None if path is None else Path(path))
        return self._server

    @property
    def writers(self) -> int:
        """The number of processes that may write now."""
        return self._server.writers if self._server else 0

    def close(self) -> None:
        """Detach writers, end the threads, and free the memory."""
        # A fork has no threads to end, and may have copied the lock while it was held.
        if os.getpid() != self._pid:
            return
        self.ended = self.ended or ReplayError("this replay is closed; make another one")
        self._prefault.stop()

        # The server refers to this object: both are freed once this reference is gone.
        server, self._server = self._server, None
        if server is not None:
            server.close(then=self._close_store)
        else:
            self._close_store()

    def _close_store(self) -> None:
        with self.lock:
            self.table.store.close()

    def _start_server(self, path: Path | None) -> StoreServer:
        """Start the thread that serves writers in other processes."""
        if self.table.store.arena.fd is None:
            raise ReplayError(
                "this replay's memory is its own; make it with shared=True to let others write"
            )

        def may_lend() -> bool:
            return self.rate_limited is None or self.rate_limited.may_lend()

        return StoreServer(
            self.table.store,
            self.lock,
            path,
            collect=self.collect,
            on_failed=self._on_server_failed,
            may_lend=may_lend,
            attach_info=self._attach_info,
        )

    def _on_server_failed(self, error: BaseException) -> None:
        """Let every further call raise ``error``, as rows may be missing from now on."""
        failure = ReplayError(
            f"other processes can no longer add to this replay: what served them failed with "
            f"{type(error).__name__}: {error}; save() what is stored and make another replay"
        )
        failure.__cause__ = error
        self.ended = self.ended or failure


class FairLock:
    """A lock for ``with`` that lets waiting threads go first.

    A thread that holds a plain `threading.Lock` most of the time, as a loop of adds does, gets it
    again before a waiting thread has woken: a snapshot beside such a loop took a minute. Here a
    thread that waits for the lock ``inner`` holds the lock ``turn``, and all others wait for that.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.inner = threading.Lock()

    def __enter__(self) -> None:
        with self.turn:
            self.inner.acquire()

    def __exit__(self, *error: object) -> None:
        self.inner.release()


class _Presence:
    """An object that is garbage-collected when its thread ends."""


class OwnStreams:
    """The streams of threads that call `Replay.add`: one per thread, opened at its first step.

    When a thread has ended, its stream is closed at the next collect, so that the rows of its last
    slot can be evicted like all others. Used under the buffer's lock.
    """

    def __init__(self, table: Table, layout: Layout, autoreset: Autoreset) -> None:
        self._table = table
        self._layout = layout
        self._autoreset = autoreset
        self.of_thread = threading.local()
        """Has the attribute ``writer``, the stream of the calling thread, once it is open."""
        # The streams of threads that have ended. Any thread may append, without the lock.
        self._ended_writers: deque[StepWriter] = deque()

    def open_stream(self) -> StepWriter:
        """Open a stream that belongs to no thread."""
        return StepWriter(self._table, self._layout, self._autoreset)

    def open_for_thread(self) -> StepWriter:
        """Open a stream for the calling thread."""
        self.close_ended()
        writer = self.open_stream()
        presence = _Presence()
        self.of_thread.writer = writer
        self.of_thread.presence = presence
        weakref.finalize(presence, self._ended_writers.append, writer).atexit = False
        return writer

    def close_ended(self) -> None:
        """Publish the last rows of ended threads, and free their lanes."""
        while self._ended_writers:
            self._ended_writers.popleft().close()


@dataclass(frozen=True)
class EvictionPolicy:
    """Limits on the age of rows; None: no limit.

    Args:
        ttl_s: seconds since publication.
        max_policy_lag: policy versions behind the acting one.
    """

    ttl_s: float | None = None
    max_policy_lag: int | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ReplayError(f"ttl_s {self.ttl_s} must be above 0 seconds; None keeps all")
        if self.max_policy_lag is not None and self.max_policy_lag < 0:
            raise ReplayError(
                f"max_policy_lag {self.max_policy_lag} must be at least 0 versions; None keeps all"
            )


class _LagCheck(NamedTuple):
    """What a check for slots of too old policies depends on; an equal check finds none.

    Args:
        oldest_version: the oldest policy version whose slots stay.
        newest_slot: the slot that was published last.
        generation: of that slot.
    """

    oldest_version: int
    newest_slot: int
    generation: int


class Evictor:
    """Evicts rows that are too old to learn from, under the buffer's lock.

    Whole slots are evicted, and counted by the reason. "ttl": the slot was published longer ago
    than ``ttl_s`` seconds. "lag": it was played by a policy more than ``max_policy_lag`` versions
    behind; its version is that of its first step. A slot that is still being written stays.
    """

    def __init__(self, policy: EvictionPolicy, table: Table) -> None:
        self._policy = policy
        self._table = table
        self._headers = table.store.geometry.headers(table.store.arena)
        self._last_check: _LagCheck | None = None

    def evict(self) -> None:
        """Evict slots that are too old now."""
        policy = self._policy
        if policy.ttl_s is not None:
            self._evict_expired(time.monotonic() - policy.ttl_s)
        if policy.max_policy_lag is not None:
            self._evict_lagging(self._table.version - policy.max_policy_lag)

    def _evict_expired(self, oldest_s: float) -> None:
        """Evict slots that were published before ``oldest_s``, a time of the monotonic clock.

        Slots are in the order of their publication, so only the oldest are checked.
        """
        table = self._table
        while table.closed and self._headers["published_s"][table.order[0]] < oldest_s:
            table.evict_oldest("ttl")

    def _evict_lagging(self, oldest_version: int) -> None:
        """Evict slots that were played by a policy older than ``oldest_version``.

        They may also lie behind fresh slots in the order of the table: a slow writer's slots are
        published after those of others.
        """
        table = self._table
        if not table.closed:
            return
        newest_slot = table.order[table.closed - 1]
        check = _LagCheck(oldest_version, newest_slot, int(table.generation[newest_slot]))
        if check == self._last_check:
            return

        slots = np.fromiter(table.order, np.int64, len(table.order))[: table.closed]
        versions = self._headers["version"][slots]
        lagging = slots[versions < np.uint64(max(0, oldest_version))]
        for slot in lagging.tolist():
            table.order.remove(slot)
            table.order.appendleft(slot)
            table.evict_oldest("lag")
        self._last_check = check


def is_count(value: Any) -> bool:
    """Returns whether ``value`` is a whole number of at least 1."""
    return isinstance(value, INTEGER_TYPES) and bool(value > 0)


def cannot_sample(count: int, stored: int, capacity: int) -> ReplayError:
    """Returns the error for a batch of ``count`` rows that cannot be drawn.

    ``stored`` rows of at most ``capacity`` are stored.
    """
    if not is_count(count):
        return ReplayError(f"batch size {count!r} must be a whole number and at least 1")
    if count > capacity:
        return ReplayError(
            f"a batch of {count} is larger than the capacity of {capacity}; lower one or raise the "
            "other"
        )
    return ReplayError(
        f"a batch of {count} needs as many rows, and {stored} rows are stored; add more"
    )
