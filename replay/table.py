"""The table: slots of a store that are kept, row by row, until the oldest are evicted.

A row is one decision of one environment. A slot has T steps of E environments, and the row of step
t of environment e has the index ``(slot * T + t) * E + e`` in every array, its *physical row*.
`Table.valid` marks the rows that may be sampled. Writers in this process fill an open slot row by
row, and its rows count at once. Slots of writers elsewhere are *foreign*, and count when they are
published. Slots are evicted whole, the oldest first, and

    inserted = stored + evicted{reason}

with each term counted on its own. Slots of one stream are linked, so that frame stacks and n-step
returns cross their edges. All methods run under the lock of the buffer that owns the table.

`SlotStream` is the stream of one writer of this process. `place_columns` and `frame_rows` tell
where rows lie in the store's memory, and `RecordReader` reads the small columns of a batch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.foreign_slots import (
    SlotChecks,
    StreamEnd,
    ages_continue,
    infer_marks,
    read_marks,
    stream_start,
    unknown_end,
)
from penstock.replay.samplers import Sampler, are_priorities
from penstock.transport.shm.store import Slot, SlotStore, SlotWriter

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

# Stands for no slot, and for no row.
NONE = -1
# A key has its row in the lower 32 bits and the slot's generation above. Both are arrays, because
# numpy takes twice as long with an int.
ROW_BITS = np.array(32)
ROW_OF_KEY = np.array((1 << 32) - 1)
# The least number of writers that may be open at a time, in this process and with others.
LANES_PRIVATE = 16
LANES_SHARED = 64
# So many foreign streams are remembered besides those that have a slot in the table.
MAX_STREAMS_WITHOUT_SLOT = 1024


class TableListener:
    """Is notified of what a `Table` takes in and evicts; see `Table.subscribe`.

    A listener overrides the methods that it needs. They are called under the buffer's lock, in the
    thread that adds, samples or collects.
    """

    def on_ingested(self, slot: Slot) -> None:
        """The table took in ``slot`` of a foreign writer."""

    def on_rejected(self, slot: Slot, fault: str) -> None:
        """The table gives back ``slot`` of a foreign writer, which has the ``fault``."""

    def on_row(self) -> None:
        """A writer of this process stored a row by `Table.commit`."""

    def on_evict(self, slot: int) -> None:
        """The table is about to evict ``slot``."""


class Table:
    """The rows of all slots: which of them count, which slots follow each other, and which leave.

    Args:
        spec: the layout of a slot.
        slots: number of slots.
        sampler: notified of rows that were written and removed.
        shared: use memory that other processes can map.
        history: number of earlier rows in a row's frame stack.
        writers: least number of writers at a time.
    """

    def __init__(
        self,
        spec: SlotSpec,
        slots: int,
        sampler: Sampler,
        *,
        shared: bool = False,
        history: int = 0,
        writers: int = 0,
    ) -> None:
        self.spec = spec
        self.slots = slots
        self.history = history
        self.rows_per_slot = spec.unroll * spec.envs
        self.rows = slots * self.rows_per_slot
        self._envs = spec.envs
        # An array, with which numpy is twice as fast as with an int.
        self._rows_per_slot = np.array(self.rows_per_slot)

        # The memory of all slots, and the columns in it by physical row.
        lanes = max(LANES_SHARED if shared else LANES_PRIVATE, writers + 2)
        self.store = SlotStore(spec, slots, lanes, shared=shared)
        self.records, self.columns, self.frames, self.sides = place_columns(spec, self.store.blocks)
        self.frame_rows = frame_rows(spec)
        has_alive = "alive" in (self.records.dtype.names or ())
        self._alive: Array | None = self.records["alive"] if has_alive else None

        # By row: whether it may be sampled.
        self.valid: npt.NDArray[np.bool_] = np.zeros(self.rows, bool)
        self._all_envs: npt.NDArray[np.bool_] = np.ones(spec.envs, bool)

        # By slot: the steps that were written, the neighbours in its stream, and how often it was
        # begun or evicted, so that a key tells whether its row was overwritten.
        self.length: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.prev: npt.NDArray[np.int32] = np.full(slots, NONE, np.int32)
        self.next: npt.NDArray[np.int32] = np.full(slots, NONE, np.int32)
        self.generation: npt.NDArray[np.int64] = np.zeros(slots, np.int64)

        # The slots that hold rows. First come the `closed` published ones, the oldest first, and
        # then those that writers of this process have open.
        self.order: deque[int] = deque()
        self.closed = 0
        self._open: set[int] = set()

        # Counts of rows, see above; those that left by the reason.
        self.inserted = 0
        self.stored = 0
        self.evicted: Counter[str] = Counter()

        # The version of the acting policy, which the slots that are opened here get.
        self.version = 0

        # Foreign slots: where their streams ended, the checks of their columns, and those that were
        # checked before they were published.
        self._foreign_streams = ForeignStreams(spec.envs, slots + MAX_STREAMS_WITHOUT_SLOT)
        self.checks = SlotChecks(spec, history)
        self.checked_slots: set[int] = set()

        self._sampler = sampler
        self.listeners: tuple[TableListener, ...] = ()
        """In the order of their subscription."""

    def subscribe(self, listener: TableListener) -> None:
        """Notify ``listener`` from now on, after those that subscribed before."""
        self.listeners = (*self.listeners, listener)

    def unsubscribe(self, listener: TableListener) -> None:
        """Notify ``listener`` no longer; nothing happens if it was not subscribed."""
        self.listeners = tuple(other for other in self.listeners if other is not listener)

    # ------------------------------------------------------------------------- adding slots

    def open_lane(self) -> tuple[int, SlotWriter]:
        """Open a lane of the store for a writer of this process.

        Returns:
            The number of the lane, and the writer.

        Raises:
            ReplayError: all lanes are open.
        """
        store = self.store
        if len(store.lanes) == store.geometry.lanes:
            raise ReplayError(
                f"{store.geometry.lanes} streams are open; make the replay with a larger writers=, "
                "and close() streams that have ended"
            )
        lane = store.open_lane(want=1)
        return lane, store.local_writer(lane)

    def close_lane(self, lane: int, slot: int) -> None:
        """Close the lane of a writer.

        Args:
            lane: the number of the lane.
            slot: the slot that the writer opened without writing a row; NONE if there is none.
        """
        if slot != NONE:
            self._forget_open(slot)
            self._unlink(slot)
        self.store.close_lane(lane)

    def acquire(self, writer: SlotWriter) -> Slot:
        """Get a slot for ``writer``; the oldest is evicted for it if none is free.

        Raises ReplayError if all slots are being written.
        """
        while (slot := writer.acquire(0)) is None:
            self.collect()
            if writer.available:
                continue
            if not self.closed:
                raise ReplayError(
                    f"all {self.slots} slots of {self.spec.unroll} steps are being written; "
                    "give a larger capacity or a smaller unroll, or use fewer writers"
                )
            self.evict_oldest("capacity")
        return slot

    def open(self, slot: int, follows: int = NONE) -> None:
        """Begin ``slot`` for a writer of this process.

        ``follows`` is its stream's previous slot; NONE if there is none.
        """
        self._begin(slot, follows)
        self.store.slots[slot].header["version"] = self.version
        preset(self.store.slots[slot].columns)
        self._open.add(slot)
        self.order.append(slot)

    def commit(
        self,
        slot: int,
        t: int,
        counts: npt.NDArray[np.bool_] | None = None,
        priorities: Array | None = None,
    ) -> None:
        """Count the rows of step ``t`` of an open slot, which were written.

        Args:
            slot: the open slot.
            t: the step; those before it were committed.
            counts: ``[E]`` bool, which of its rows may be sampled; None: all.
            priorities: ``[E]``, as for `Sampler.insert`.
        """
        start = slot * self.rows_per_slot + t * self._envs
        stop = start + self._envs
        if counts is None:
            self.valid[start:stop] = self._all_envs
            new_rows = self._envs
        else:
            self.valid[start:stop] = counts
            new_rows = int(np.count_nonzero(counts))
            if self._alive is not None:
                self._alive[start:stop] = counts
        self.length[slot] = t + 1
        self.inserted += new_rows
        self.stored += new_rows

        self._sampler.insert(start, stop, priorities)
        if t < self.history:
            self.cut_history(slot)
        for listener in self.listeners:
            listener.on_row()

    def commit_all(self, slot: int, t: int, rows: slice) -> None:
        """Count step ``t`` of an open slot, as `commit`, in tables without frame stacks.

        ``rows`` are those of all environments at this step; all of them may be sampled.
        """
        self.valid[rows] = self._all_envs
        self.length[slot] = t + 1
        self.inserted += self._envs
        self.stored += self._envs
        self._sampler.insert(rows.start, rows.stop, None)

    def count_refused(self, count: int, reason: str) -> None:
        """Count ``count`` rows that could not be stored, and the ``reason``."""
        self.inserted += count
        self.evicted[reason] += count

    def collect(self) -> None:
        """Take in published slots, and evict the oldest while a writer waits for a slot."""
        store = self.store
        if store.collect():
            while store.ready:
                slot = store.ready.popleft()
                store.hold_slot(slot)
                if slot in self._open:
                    self._close(slot)
                else:
                    self.ingest(store.slots[slot])
            store.lend()

        while store.lacks_slots and self.closed:
            self.evict_oldest("capacity")

    def ingest(self, slot: Slot) -> None:
        """Take in a slot of a foreign writer: find its stream, and which of its rows count.

        The header's ``rows`` is the number of steps whose column ``alive`` the writer recorded. If
        it is 0, the columns follow NEXT_STEP: the row after an episode's end is not ``alive``, or
        not a decision. A gap in the stream's sequence breaks the link to the previous slot, and so
        does a slot that is rejected because its columns hold invalid values.
        """
        index = slot.index
        rows = self.records.reshape(-1, self.spec.unroll, self.spec.envs)[index]
        names = rows.dtype.names or ()
        marked_steps = 0
        if "alive" in names:
            marked_steps = min(int(slot.header["rows"]), self.spec.unroll)

        if index in self.checked_slots:
            self.checked_slots.remove(index)
        elif fault := self.checks.fault(rows[: marked_steps or None], marked=marked_steps > 0):
            self._reject(slot, rows, marked_steps, fault)
            return

        # Place the slot behind the previous one of its stream.
        first_ages = rows["age"][0] if marked_steps and "age" in names else None
        previous_end = self._link(slot, first_ages)
        if marked_steps:
            decisions, end = read_marks(rows, marked_steps)
        else:
            decisions, end = infer_marks(rows, previous_end)
        self._foreign_streams.set_last(slot, end)
        self.order.insert(self.closed, index)
        self.closed += 1
        self.length[index] = marked_steps or self.spec.unroll

        # Count its rows.
        start = index * self.rows_per_slot
        stop = start + self.rows_per_slot
        self.valid[start:stop] = decisions.reshape(-1)
        new_rows = int(np.count_nonzero(decisions))
        self.inserted += new_rows
        self.stored += new_rows

        self._sampler.insert(start, stop, _read_priorities(rows))
        self.cut_history(index)
        for listener in self.listeners:
            listener.on_ingested(slot)

    def streams(self) -> list[Any]:
        """Returns where each foreign stream ended, for `resume_streams`: JSON values and arrays."""
        return self._foreign_streams.to_list()

    def resume_streams(self, streams: list[Any]) -> None:
        """Let foreign streams go on in this table, which was restored at the same time.

        ``streams`` is what `streams` returned. Raises ValueError if they do not fit to the table.
        """
        self._foreign_streams.load(streams, {*self.order, NONE})

    def insert_all(self) -> None:
        """Insert all rows into the sampler as new ones, after a snapshot without its state."""
        for slot in self.order:
            start = slot * self.rows_per_slot
            self._sampler.insert(start, start + int(self.length[slot]) * self._envs, None)

    def _reject(self, slot: Slot, rows: Array, marked_steps: int, fault: str) -> None:
        """Give a foreign slot back, and count the rows that it would have had as invalid.

        Args:
            slot: the slot.
            rows: its records ``[T, E]``.
            marked_steps: as in `ingest`.
            fault: what is wrong with it.
        """
        count = rows.size
        if "alive" in (rows.dtype.names or ()):
            count = int(np.count_nonzero(rows["alive"][: marked_steps or None]))
        self.count_refused(count, "invalid")
        for listener in self.listeners:
            listener.on_rejected(slot, fault)

        # At last, because this lends the slot to a writer, which may be another process.
        self.store.release(slot.index)

    def _link(self, slot: Slot, ages: Array | None) -> StreamEnd:
        """Link a foreign slot to the previous one of its stream.

        Args:
            slot: the slot.
            ages: ``[E]``, the ages of its first row, if its writer recorded them; the slots are
                only linked if these continue the ages of the previous slot.

        Returns:
            How the previous slot ended, as far as that is known.
        """
        sequence = int(slot.header["sequence"])
        last = self._foreign_streams.last_slot(slot)
        if last is None or sequence != last.sequence + 1:
            self._begin(slot.index, NONE)
            envs = self.spec.envs
            return stream_start(envs) if sequence == 0 else unknown_end(envs)

        follows = ages is None or ages_continue(last.end.age, ages)
        self._begin(slot.index, last.slot if follows else NONE)
        return last.end

    def _begin(self, slot: int, follows: int) -> None:
        """Begin ``slot`` anew without steps, after the slot ``follows`` of its stream, or NONE."""
        self.generation[slot] += 1
        self.length[slot] = 0
        self.prev[slot] = follows
        self.next[slot] = NONE
        if follows != NONE:
            self.next[follows] = slot

    def _close(self, slot: int) -> None:
        """Take in an open slot that its writer has published."""
        self._forget_open(slot)
        self.store.slots[slot].header["published_s"] = time.monotonic()
        self.order.insert(self.closed, slot)
        self.closed += 1

    def _forget_open(self, slot: int) -> None:
        """Remove ``slot`` from the open ones."""
        self._open.remove(slot)
        self.order.remove(slot)

    # ------------------------------------------------------------------------- evicting

    def evict_oldest(self, reason: str) -> None:
        """Evict the oldest published slot, and count its rows by the ``reason``.

        The store lends it again.
        """
        slot = self.order.popleft()
        for listener in self.listeners:
            listener.on_evict(slot)
        self.closed -= 1

        start = slot * self.rows_per_slot
        stop = start + self.rows_per_slot
        count = int(np.count_nonzero(self.valid[start:stop]))
        self.valid[start:stop] = False
        self.stored -= count
        self.evicted[reason] += count
        self._sampler.remove(start, stop)

        # Keys of the slot's rows are stale from now on, before it is overwritten.
        self.length[slot] = 0
        self._unlink(slot)
        self.generation[slot] += 1
        self.store.release(slot)

    def remove_rows(self, rows: Rows, reason: str) -> None:
        """Remove single valid rows from sampling, and count them by the ``reason``.

        ``rows`` [n] has each of them once.
        """
        self.valid[rows] = False
        self.stored -= len(rows)
        self.evicted[reason] += len(rows)
        self._sampler.remove_rows(rows)

    def _unlink(self, slot: int) -> None:
        """Remove ``slot`` from its stream; rows of the next slot may lose their history."""
        self._foreign_streams.forget_slot(slot)
        previous_slot = int(self.prev[slot])
        next_slot = int(self.next[slot])
        self.prev[slot] = NONE
        self.next[slot] = NONE
        if previous_slot != NONE:
            self.next[previous_slot] = NONE
        if next_slot != NONE:
            self.prev[next_slot] = NONE
            self.cut_history(next_slot)

    def cut_history(self, slot: int) -> None:
        """Remove the rows whose frame stacks begin before the oldest stored step of their stream.

        They are looked for in ``slot`` and in the slots that follow it.
        """
        while slot != NONE and (earlier_steps := self._earlier_steps(slot)) < self.history:
            rows = self._rows_without_history(slot, earlier_steps)
            if len(rows):
                self.remove_rows(rows, "history")
            slot = int(self.next[slot])

    def lacks_history(self, slot: int) -> bool:
        """Returns whether rows of ``slot`` count though first frames of their stacks are gone."""
        earlier_steps = self._earlier_steps(slot)
        if earlier_steps >= self.history:
            return False
        return len(self._rows_without_history(slot, earlier_steps)) > 0

    def _rows_without_history(self, slot: int, earlier_steps: int) -> Rows:
        """Returns the rows of ``slot`` that count though their stacks begin before stored steps.

        ``earlier_steps`` steps of the stream are stored before the slot.
        """
        # Only the first steps of the slot can reach back so far.
        envs = self._envs
        steps = min(self.history - earlier_steps, int(self.length[slot]))
        start = slot * self.rows_per_slot
        rows = slice(start, start + steps * envs)

        # A row is the step `age` of its episode, and its stack reaches back as far as that.
        stored_before = np.arange(earlier_steps, earlier_steps + steps)[:, None]
        ages = self.records["age"][rows].reshape(steps, envs)
        lacks = self.valid[rows].reshape(steps, envs) & (ages > stored_before)
        without_history: Rows = start + np.flatnonzero(lacks)
        return without_history

    def _earlier_steps(self, slot: int) -> int:
        """Returns how many steps of its stream are stored before ``slot``, counted to `history`."""
        steps = 0
        while steps < self.history and (slot := int(self.prev[slot])) != NONE:
            steps += int(self.length[slot])
        return steps

    # ------------------------------------------------------------------------- keys

    def keys(self, rows: Rows) -> Rows:
        """Returns keys ``[n]`` of ``rows`` [n], which name them until they are overwritten."""
        keys: Rows = self.generation.take(rows // self._rows_per_slot)
        keys <<= ROW_BITS
        keys |= rows
        return keys

    def fresh(self, keys: Rows) -> npt.NDArray[np.bool_]:
        """Returns whether each of ``keys`` [n] still names a row that counts."""
        rows = keys & ROW_OF_KEY
        try:
            generation = self.generation.take(rows // self._rows_per_slot)
        except IndexError:
            # Some of the keys name rows that do not exist.
            exists = rows < self.rows
            is_fresh = np.zeros(len(keys), bool)
            is_fresh[exists] = self.fresh(keys[exists])
            return is_fresh

        is_current: npt.NDArray[np.bool_] = generation == keys >> ROW_BITS
        is_current &= self.valid.take(rows)
        return is_current


class LastSlot(NamedTuple):
    """The last slot of a foreign stream that was taken in.

    Args:
        sequence: its number in the stream.
        slot: the slot; NONE once it was evicted.
        end: how it ended.
    """

    sequence: int
    slot: int
    end: StreamEnd


class ForeignStreams:
    """The last slot of each foreign stream, so that the next slot continues the stream.

    A stream is one incarnation of one actor. The one whose last slot was taken in first is
    forgotten first.

    Args:
        envs: environments of a slot.
        most: streams that are remembered, more than there are slots.
    """

    def __init__(self, envs: int, most: int) -> None:
        self._envs = envs
        self._most = most
        self._last_slots: dict[tuple[int, int], LastSlot] = {}
        self._keys_by_slot: dict[int, tuple[int, int]] = {}
        """The streams whose last slot is still in the table, by that slot."""

    def last_slot(self, slot: Slot) -> LastSlot | None:
        """Returns the last slot of the stream of ``slot``; None if the stream is not known."""
        return self._last_slots.get(self._key(slot))

    def set_last(self, slot: Slot, end: StreamEnd) -> None:
        """Make ``slot`` the last one of its stream; ``end`` tells how it ended."""
        key = self._key(slot)
        previous = self._last_slots.pop(key, None)
        if previous is not None:
            self._keys_by_slot.pop(previous.slot, None)
        self._last_slots[key] = LastSlot(int(slot.header["sequence"]), slot.index, end)
        self._keys_by_slot[slot.index] = key

        if len(self._last_slots) > self._most:
            without_slot = (key for key, last in self._last_slots.items() if last.slot == NONE)
            self._last_slots.pop(next(without_slot))

    def forget_slot(self, slot: int) -> None:
        """Note that ``slot`` was evicted; streams that ended in it may still go on."""
        key = self._keys_by_slot.pop(slot, None)
        if key is not None:
            self._last_slots[key] = self._last_slots[key]._replace(slot=NONE)

    def to_list(self) -> list[Any]:
        """Returns JSON values and arrays, from which `load` makes the streams again."""
        return [
            [*key, last.sequence, last.slot, *last.end] for key, last in self._last_slots.items()
        ]

    def load(self, streams: list[Any], slots: set[int]) -> None:
        """Load the streams that `to_list` returned.

        Raises ValueError for one that has other environments, or does not end in one of ``slots``.
        """
        for actor, incarnation, sequence, slot, done, reset, age in streams:
            if slot not in slots or not done.shape == reset.shape == age.shape == (self._envs,):
                raise ValueError(f"a stream of actor {actor} that ends in slot {slot}")
            end = StreamEnd(done.astype(bool), reset.astype(bool), age.astype(np.int64))
            key = (int(actor), int(incarnation))
            self._last_slots[key] = LastSlot(int(sequence), int(slot), end)
            if slot != NONE:
                self._keys_by_slot[int(slot)] = key

    @staticmethod
    def _key(slot: Slot) -> tuple[int, int]:
        return int(slot.header["actor"]), int(slot.header["incarnation"])


class SlotStream:
    """The stream of one writer of this process, and the place of the step that it writes next."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._unroll = table.spec.unroll
        self._envs = table.spec.envs
        self._lane, self._writer = table.open_lane()

        # The slot that is being written, NONE before its first step; the step that is next, and the
        # physical row of its first environment.
        self.slot = NONE
        self.t = 0
        self.start = 0

        # The slot before it, and the generation that this slot had.
        self._last_slot = NONE
        self._last_generation = 0
        self._closed = False

    @property
    def previous(self) -> int:
        """The previous slot; NONE if there is none or it was evicted."""
        slot = self._last_slot
        if slot != NONE and self._table.generation[slot] == self._last_generation:
            return slot
        return NONE

    def begin(self) -> None:
        """Open a slot; if none is free, the oldest of the table is evicted for it.

        Raises ReplayError if the stream is closed, or all slots are being written.
        """
        if self._closed:
            raise ReplayError("this stream is closed; take another from writer()")

        self._lent = self._table.acquire(self._writer)
        self.slot = self._lent.index
        self._table.open(self.slot, self.previous)
        self._lent.header["steps"] = 0
        self.t = 0
        self.start = self.slot * self._table.rows_per_slot

    def advance(self) -> None:
        """Move to the next step, after the present one was committed."""
        self.t += 1
        self.start += self._envs
        if self.t == self._unroll:
            self.end()

    def end(self) -> None:
        """Publish the slot with the steps that it has."""
        self._last_slot = self.slot
        self._last_generation = int(self._table.generation[self.slot])
        self.slot = NONE
        self._writer.publish(self._lent)
        self._table.collect()

    def close(self) -> None:
        """Publish the steps that were written, and free the lane."""
        if self._closed:
            return
        self._closed = True
        if self.slot != NONE and self.t:
            self.end()
        self._table.close_lane(self._lane, self.slot)
        self.slot = NONE


def preset(columns: dict[str, Array]) -> None:
    """Set the ``columns`` of a fresh slot: every row counts, and the sampler rates it."""
    if "alive" in columns:
        columns["alive"][...] = 1
    if "priority" in columns:
        columns["priority"][...] = np.nan


def _read_priorities(rows: Array) -> Array | None:
    """Returns the priorities of a foreign slot's records ``[T, E]``, one after the other.

    Values that are no priorities become NaN: the sampler rates these rows. None without the column.
    """
    if "priority" not in (rows.dtype.names or ()):
        return None

    # Converting a signalling NaN would warn.
    with np.errstate(invalid="ignore"):
        priorities = rows["priority"].reshape(-1).astype(np.float64)
    is_sound = are_priorities(priorities)
    if is_sound.all():
        return priorities
    return np.where(is_sound, priorities, np.nan)


class PlacedColumns(NamedTuple):
    """The columns of all slots, as arrays over the memory of a store.

    Args:
        records: ``[rows]``, the small columns side by side.
        columns: the big ones, ``[rows, *shape]`` each.
        frames: columns stored as frames, ``[frames, *shape]`` each; see `frame_rows`.
        sides: side rows, ``[side rows, *shape]`` each.
    """

    records: Array
    columns: dict[str, Array]
    frames: dict[str, Array]
    sides: dict[str, Array]


def place_columns(spec: SlotSpec, blocks: dict[str, Array]) -> PlacedColumns:
    """Returns the columns of slots with the layout ``spec``; ``blocks`` are those of a store."""
    columns: dict[str, Array] = {}
    frames: dict[str, Array] = {}
    sides: dict[str, Array] = {}
    columns_by_kind = {"unroll": columns, "unroll+1": frames, "frames": frames, "side": sides}

    # A block that is no column, such as the records, has no kind.
    kinds = {column.name: column.rows for column in spec.columns}
    for block in spec.blocks:
        kind = kinds.get(block.name, "")
        if kind in columns_by_kind:
            shape = block.shape[1:] if kind == "side" else block.shape[2:]
            columns_by_kind[kind][block.name] = blocks[block.name].reshape(-1, *shape)
    return PlacedColumns(blocks["records"].reshape(-1), columns, frames, sides)


class FrameRows(NamedTuple):
    """How far frames lie apart in the arrays of `Table.frames`.

    The frame of step t of an environment is row ``slot * slots + t * steps + environment * envs``.

    Args:
        slots: rows from one slot to the next.
        steps: rows from one step to the next.
        envs: rows from one environment to the next.
    """

    slots: int
    steps: int
    envs: int


def frame_rows(spec: SlotSpec) -> FrameRows:
    """Returns how far frames lie apart in slots with the layout ``spec``.

    Frames lie by step, as actors fill them, or by environment (rows "frames"), which is fastest to
    sample. Raises ReplayError if one spec has both.
    """
    kinds = {column.rows for column in spec.columns} & {"unroll+1", "frames"}
    if len(kinds) == 2:
        raise ReplayError('columns of rows "unroll+1" and "frames" cannot be mixed; choose one')

    # A slot has one frame more than steps, for the observation after the last.
    frames = spec.unroll + 1
    if "frames" in kinds:
        return FrameRows(slots=frames * spec.envs, steps=1, envs=frames)
    return FrameRows(slots=frames * spec.envs, steps=spec.envs, envs=1)


class RecordReader:
    """Reads ``records`` [rows], the small columns of a row, which lie side by side.

    The records of a batch are read whole, in one gather, and then each field is copied into an
    array of its own. numpy copies a field of several numbers element by element, row after row.
    Here such a field is one opaque word, which it copies in one piece, in a fifth of the time.
    """

    def __init__(self, records: Array) -> None:
        fields = records.dtype.fields
        assert fields is not None
        itemsize = records.dtype.itemsize
        self._whole_records = records.view(f"V{itemsize}")

        # The dtype and shape of each field that is one word, and the dtype of records with words.
        self._words: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        formats: list[Any] = []
        offsets: list[int] = []
        for name, (dtype, offset, *_) in fields.items():
            if dtype.subdtype is None:
                formats.append(dtype)
            else:
                self._words[name] = dtype.subdtype
                formats.append(f"V{dtype.itemsize}")
            offsets.append(offset)
        self._dtype = np.dtype(
            {
                "names": list(fields),
                "formats": formats,
                "offsets": offsets,
                "itemsize": itemsize,
            }
        )

    def take(self, rows: Rows) -> Array:
        """Returns the records of ``rows`` [n], in which a field of several numbers is one word."""
        return self._whole_records.take(rows, mode="clip").view(self._dtype)

    def column(self, records: Array, name: str) -> Array:
        """Returns a field of ``records`` [n] from `take`, as a new array ``[n, *shape]``."""
        columns: dict[str, Array] = {}
        self.copy(records, (name,), columns)
        return columns[name]

    def copy(self, records: Array, names: Iterable[str], into: dict[str, Any]) -> None:
        """Copy fields of ``records`` [n] from `take` ``into`` a dictionary, as `column` does."""
        words = self._words
        for name in names:
            array = records[name].copy()
            if name in words:
                dtype, shape = words[name]
                array = np.ndarray((len(array), *shape), dtype, array)
            into[name] = array

    def write(self, records: Array, name: str, out: Array) -> None:
        """Copy a field of ``records`` from `take` to ``out``.

        ``out`` is a contiguous array ``[*records.shape, *shape]``.
        """
        if name in self._words:
            out = out.reshape(*records.shape, -1).view(records.dtype[name])[..., 0]
        out[...] = records[name]
