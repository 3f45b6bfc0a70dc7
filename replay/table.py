"""The table: slots of a store that are kept, row by row, until the oldest are evicted.

A row is one decision of one environment. Physical row ``(slot * T + t) * E + e`` is its index in
every array; `valid` marks the rows that may be sampled. Writers in this process fill an open slot
row by row, and its rows count at once; slots of writers elsewhere ("foreign") count when they are
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

NONE = -1
ROW_BITS = np.array(32)  # of a key, as an array: numpy takes twice as long with an int
ROW_OF_KEY = np.array((1 << 32) - 1)
LANES_PRIVATE = 16
STREAMS_KEPT = 1024  # besides those of streams that have a slot
LANES_SHARED = 64


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
    """Arrays over all slots, by physical row; which rows count; which slots follow each other."""

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
        """Allocate the store.

        Args:
            spec: the layout of a slot.
            slots: number of slots.
            sampler: notified of rows that were written and removed.
            shared: use memory that other processes can map.
            history: number of earlier rows in a row's frame stack.
            writers: least number of writers at a time.
        """
        self.spec, self.slots, self.history = spec, slots, history
        self.rows_per_slot = spec.unroll * spec.envs
        self.rows = slots * self.rows_per_slot
        self._rows_per_slot = np.array(self.rows_per_slot)  # twice as fast as an int in numpy
        lanes = max(LANES_SHARED if shared else LANES_PRIVATE, writers + 2)
        self.store = SlotStore(spec, slots, lanes, shared=shared)
        self.records, self.columns, self.frames, self.sides = place_columns(spec, self.store.blocks)
        self.frame_rows = frame_rows(spec)
        self.valid: npt.NDArray[np.bool_] = np.zeros(self.rows, bool)
        self.length: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.prev: npt.NDArray[np.int32] = np.full(slots, NONE, np.int32)
        self.next: npt.NDArray[np.int32] = np.full(slots, NONE, np.int32)
        self.generation: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.order: deque[int] = deque()  # kept slots, oldest first; the open ones are last
        self.closed = 0
        self.inserted = 0
        self.stored = 0
        self.evicted: Counter[str] = Counter()
        self.version = 0  # of the acting policy; stamped on the slots that are opened here
        self.listeners: tuple[TableListener, ...] = ()  # in the order of their subscription
        self._envs = spec.envs
        self._all_envs: npt.NDArray[np.bool_] = np.ones(spec.envs, bool)
        self._open: set[int] = set()
        # How each foreign stream ended so far: sequence, slot (NONE once evicted), state.
        self._ends: dict[tuple[int, int], tuple[int, int, StreamEnd]] = {}
        self._sampler = sampler
        has_marks = "alive" in (self.records.dtype.names or ())
        self._marks: Array | None = self.records["alive"] if has_marks else None
        self.checks = SlotChecks(spec, history)
        self.checked: set[int] = set()  # foreign slots that were checked before they were published

    def subscribe(self, listener: TableListener) -> None:
        """Notify ``listener`` from now on, after those that subscribed before."""
        self.listeners = (*self.listeners, listener)

    def unsubscribe(self, listener: TableListener) -> None:
        """Notify ``listener`` no longer; nothing happens if it was not subscribed."""
        self.listeners = tuple(other for other in self.listeners if other is not listener)

    # ------------------------------------------------------------------------- adding slots

    def open_lane(self) -> tuple[int, SlotWriter]:
        """Open a lane of the store for a writer of this process."""
        store = self.store
        if len(store.lanes) == store.geometry.lanes:
            raise ReplayError(
                f"{store.geometry.lanes} streams are open; make the replay with a larger writers=, "
                "and close() streams that have ended"
            )
        lane = store.open_lane(want=1)
        return lane, store.local_writer(lane)

    def close_lane(self, lane: int, slot: int) -> None:
        """Close the lane of a writer; ``slot`` is one that it opened without writing a row, or
        NONE.
        """
        if slot != NONE:
            self._forget_open(slot)
            self._unlink(slot)
        self.store.close_lane(lane)

    def acquire(self, writer: SlotWriter) -> Slot:
        """Get a slot to write, evicting the oldest. ReplayError if all are being written."""
        while (slot := writer.acquire(0)) is None:
            self.collect()
            if not writer.available:
                if not self.closed:
                    raise ReplayError(
                        f"all {self.slots} slots of {self.spec.unroll} steps are being written; "
                        "give a larger capacity or a smaller unroll, or use fewer writers"
                    )
                self.evict_oldest("capacity")
        return slot

    def open(self, slot: int, follows: int = NONE) -> None:
        """Begin ``slot`` for a writer of this process.

        ``follows`` is its stream's previous slot.
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
        """Mark row ``t`` of an open slot written.

        ``counts`` [E]: which can be sampled; None: all.
        """
        start = slot * self.rows_per_slot + t * self._envs
        stop = start + self._envs
        if counts is None:
            self.valid[start:stop] = self._all_envs
            new = self._envs
        else:
            self.valid[start:stop] = counts
            new = int(np.count_nonzero(counts))
            if self._marks is not None:
                self._marks[start:stop] = counts
        self.length[slot] = t + 1
        self.inserted += new
        self.stored += new
        self._sampler.insert(start, stop, priorities)
        if t < self.history:
            self.cut_history(slot)
        for listener in self.listeners:
            listener.on_row()

    def commit_all(self, slot: int, t: int, rows: slice) -> None:
        """Mark row ``t`` of an open slot written, with all environments; only without stacks."""
        self.valid[rows] = self._all_envs
        self.length[slot] = t + 1
        self.inserted += self._envs
        self.stored += self._envs
        self._sampler.insert(rows.start, rows.stop, None)

    def refuse(self, count: int, reason: str) -> None:
        """Count rows that could not be stored."""
        self.inserted += count
        self.evicted[reason] += count

    def collect(self) -> None:
        """Take in published slots, and evict the oldest where a writer waits for a slot."""
        store = self.store
        if store.collect():
            while store.ready:
                index = store.ready.popleft()
                store.keep(index)
                if index in self._open:
                    self._close(index)
                else:
                    self.ingest(store.slots[index])
            store.lend()
        while store.wanting and self.closed:
            self.evict_oldest("capacity")

    def ingest(self, slot: Slot) -> None:
        """Take in a slot of a foreign writer: find its stream, and which of its rows count.

        Where the writer did not record that (``rows`` of the header is 0), the columns follow
        NEXT_STEP: the row after an episode's end is not ``alive``, or not a decision. A gap in the
        stream's sequence breaks the link to the slot before, and so does a slot that is rejected
        because its columns hold invalid values.
        """
        index, envs = slot.index, self.spec.envs
        rows = self.records.reshape(-1, self.spec.unroll, envs)[index]
        length = min(int(slot.header["rows"]), self.spec.unroll)
        names = rows.dtype.names or ()
        if "alive" not in names:
            length = 0  # only a slot with that column can tell
        if index in self.checked:
            self.checked.remove(index)
        elif fault := self.checks.fault(rows[: length or None], marked=length > 0):
            self._reject(slot, rows, length, fault)
            return
        previous = self._link(slot, rows["age"][0] if length and "age" in names else None)
        decisions, end = read_marks(rows, length) if length else infer_marks(rows, previous)
        self._note_end(slot, end)
        self.order.insert(self.closed, index)
        self.closed += 1
        self.length[index] = length or self.spec.unroll
        start = index * self.rows_per_slot
        self.valid[start : start + self.rows_per_slot] = decisions.reshape(-1)
        new = int(np.count_nonzero(decisions))
        self.inserted += new
        self.stored += new
        priorities = rows["priority"].reshape(-1) if "priority" in rows.dtype.names else None
        if priorities is not None:
            # Converting a signalling NaN would warn.
            with np.errstate(invalid="ignore"):
                priorities = priorities.astype(np.float64)
            sound = are_priorities(priorities)
            if not sound.all():  # NaN: the sampler rates the row
                priorities = np.where(sound, priorities, np.nan)
        self._sampler.insert(start, start + self.rows_per_slot, priorities)
        self.cut_history(index)
        for listener in self.listeners:
            listener.on_ingested(slot)

    def streams(self) -> list[Any]:
        """How each foreign stream ended so far, as JSON values and arrays, for `resume_streams`."""
        return [[*key, sequence, slot, *end] for key, (sequence, slot, end) in self._ends.items()]

    def resume_streams(self, streams: list[Any]) -> None:
        """Let the foreign streams of `streams` go on, in the table that was restored beside them.

        Raises ValueError where they do not fit.
        """
        slots, envs = {*self.order, NONE}, self.spec.envs
        for actor, incarnation, sequence, slot, done, reset, age in streams:
            if slot not in slots or not done.shape == reset.shape == age.shape == (envs,):
                raise ValueError(f"a stream of actor {actor} that ends in slot {slot}")
            end = StreamEnd(done.astype(bool), reset.astype(bool), age.astype(np.int64))
            self._ends[int(actor), int(incarnation)] = int(sequence), int(slot), end

    def rate_anew(self) -> None:
        """Insert all rows into the sampler as new ones: for a snapshot without its state."""
        for slot in self.order:
            start = slot * self.rows_per_slot
            self._sampler.insert(start, start + int(self.length[slot]) * self._envs, None)

    def _reject(self, slot: Slot, rows: Array, length: int, fault: str) -> None:
        """Give a foreign slot back; its rows that would have counted are counted as invalid."""
        count = rows.size
        if "alive" in (rows.dtype.names or ()):
            count = int(np.count_nonzero(rows["alive"][: length or None]))
        self.refuse(count, "invalid")
        for listener in self.listeners:
            listener.on_rejected(slot, fault)
        self.store.release(slot.index)  # lends it to a writer, which may be another process

    def _link(self, slot: Slot, ages: Array | None) -> StreamEnd:
        """Link a foreign slot to the previous one of its stream; returns how that one ended.

        ``ages`` [E] of its first row, if its writer recorded them: they must continue the last
        ones.
        """
        sequence = int(slot.header["sequence"])
        last_sequence, last, end = self._ends.get(self._stream_of(slot), (NONE, NONE, None))
        if end is None or sequence != last_sequence + 1:
            self._begin(slot.index, NONE)
            envs = self.spec.envs
            return stream_start(envs) if sequence == 0 else unknown_end(envs)
        follows = ages is None or ages_continue(end.age, ages)
        self._begin(slot.index, last if follows else NONE)
        return end

    def _note_end(self, slot: Slot, end: StreamEnd) -> None:
        """Remember how a stream ended so far, and forget the oldest streams."""
        stream = self._stream_of(slot)
        self._ends.pop(stream, None)
        self._ends[stream] = (int(slot.header["sequence"]), slot.index, end)
        if len(self._ends) > STREAMS_KEPT + self.slots:
            evicted = (key for key, (_, last, _) in self._ends.items() if last == NONE)
            self._ends.pop(next(evicted))

    @staticmethod
    def _stream_of(slot: Slot) -> tuple[int, int]:
        return int(slot.header["actor"]), int(slot.header["incarnation"])

    def _begin(self, slot: int, follows: int) -> None:
        self.generation[slot] += 1
        self.length[slot] = 0
        self.prev[slot] = follows
        self.next[slot] = NONE
        if follows != NONE:
            self.next[follows] = slot

    def _close(self, slot: int) -> None:
        self._forget_open(slot)
        self.store.slots[slot].header["published_s"] = time.monotonic()
        self.order.insert(self.closed, slot)
        self.closed += 1

    def _forget_open(self, slot: int) -> None:
        self._open.remove(slot)
        self.order.remove(slot)

    # ------------------------------------------------------------------------- evicting

    def evict_oldest(self, reason: str) -> None:
        """Evict the oldest published slot; the store lends it again."""
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
        self.length[slot] = 0
        self._unlink(slot)
        self.generation[slot] += 1  # its keys are stale before it is overwritten
        self.store.release(slot)

    def remove_rows(self, rows: Rows, reason: str) -> None:
        """Remove single valid rows, each given once, from sampling."""
        self.valid[rows] = False
        self.stored -= len(rows)
        self.evicted[reason] += len(rows)
        self._sampler.remove_rows(rows)

    def _unlink(self, slot: int) -> None:
        previous, following = int(self.prev[slot]), int(self.next[slot])
        for stream, (sequence, last, end) in self._ends.items():
            if last == slot:
                self._ends[stream] = (sequence, NONE, end)
        self.prev[slot] = self.next[slot] = NONE
        if previous != NONE:
            self.next[previous] = NONE
        if following != NONE:
            self.prev[following] = NONE
            self.cut_history(following)

    def cut_history(self, slot: int) -> None:
        """Remove rows from ``slot`` on whose frames begin before the rest of their stream."""
        while slot != NONE and (behind := self._behind(slot)) < self.history:
            lost = self._without_history(slot, behind)
            if len(lost):
                self.remove_rows(lost, "history")
            slot = int(self.next[slot])

    def lacks_history(self, slot: int) -> bool:
        """Whether rows of ``slot`` count though their first frames are gone."""
        behind = self._behind(slot)
        return behind < self.history and len(self._without_history(slot, behind)) > 0

    def _without_history(self, slot: int, behind: int) -> Rows:
        """Rows of ``slot`` that count and need more than its own and the ``behind`` steps before
        it.
        """
        envs, start = self._envs, slot * self.rows_per_slot
        steps = min(self.history - behind, int(self.length[slot]))
        rows = slice(start, start + steps * envs)
        stored = np.arange(behind, behind + steps)[:, None]  # steps before each
        ages = self.records["age"][rows].reshape(steps, envs)
        lost: Rows = start + np.flatnonzero(self.valid[rows].reshape(steps, envs) & (ages > stored))
        return lost

    def _behind(self, slot: int) -> int:
        """Steps of its stream stored before ``slot``; counted up to `history`."""
        steps = 0
        while steps < self.history and (slot := int(self.prev[slot])) != NONE:
            steps += int(self.length[slot])
        return steps

    # ------------------------------------------------------------------------- keys

    def keys(self, rows: Rows) -> Rows:
        """Keys of rows until they are overwritten: generation and row."""
        keys: Rows = self.generation.take(rows // self._rows_per_slot)
        keys <<= ROW_BITS
        keys |= rows
        return keys

    def fresh(self, keys: Rows) -> npt.NDArray[np.bool_]:
        """Whether keys still name a row that counts."""
        rows = keys & ROW_OF_KEY
        try:
            generation = self.generation.take(rows // self._rows_per_slot)
        except IndexError:  # some name no row at all
            exist = rows < self.rows
            fresh = np.zeros(len(keys), bool)
            fresh[exist] = self.fresh(keys[exist])
            return fresh
        current: npt.NDArray[np.bool_] = generation == keys >> ROW_BITS  # neither is negative
        current &= self.valid.take(rows)
        return current


class SlotStream:
    """The steps of one writer of this process: row ``t`` of ``slot`` is the next to be written."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lane, self._writer = table.open_lane()
        self._unroll, self._envs = table.spec.unroll, table.spec.envs
        self._last = (NONE, 0)  # the previous slot, and its generation
        self.slot = NONE
        self.t = 0
        self.start = 0  # physical row of (t, environment 0)
        self._closed = False

    @property
    def previous(self) -> int:
        """The previous slot; NONE if there is none or it was evicted."""
        slot, generation = self._last
        return slot if slot != NONE and self._table.generation[slot] == generation else NONE

    def begin(self) -> None:
        """Open a slot; the oldest of the table is evicted for it."""
        if self._closed:
            raise ReplayError("this stream is closed; take another from writer()")
        self._lent = self._table.acquire(self._writer)
        self.slot = self._lent.index
        self._table.open(self.slot, self.previous)
        self._lent.header["steps"] = 0
        self.t = 0
        self.start = self.slot * self._table.rows_per_slot

    def advance(self) -> None:
        """Move to the next row."""
        self.t += 1
        self.start += self._envs
        if self.t == self._unroll:
            self.end()

    def end(self) -> None:
        """Publish the slot with its rows."""
        slot, self.slot = self.slot, NONE
        self._last = (slot, int(self._table.generation[slot]))
        self._writer.publish(self._lent)
        self._table.collect()

    def close(self) -> None:
        """Publish the written rows and free the lane."""
        if self._closed:
            return
        self._closed = True
        if self.slot != NONE and self.t:
            self.end()
        self._table.close_lane(self._lane, self.slot)
        self.slot = NONE


def preset(columns: dict[str, Array]) -> None:
    """Set the columns of a fresh slot: every row counts, and the sampler rates it."""
    if "alive" in columns:
        columns["alive"][...] = 1
    if "priority" in columns:
        columns["priority"][...] = np.nan


def place_columns(
    spec: SlotSpec, blocks: dict[str, Array]
) -> tuple[Array, dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Records, big columns, frames and side rows of all slots, by physical row.

    ``blocks`` are those of a store.
    """
    rows = {column.name: column.rows for column in spec.columns}
    columns: dict[str, Array] = {}
    frames: dict[str, Array] = {}
    sides: dict[str, Array] = {}
    places = {"unroll": columns, "unroll+1": frames, "frames": frames, "side": sides}
    for block in spec.blocks:
        if (kind := rows.get(block.name, "")) in places:
            shape = block.shape[1:] if kind == "side" else block.shape[2:]
            places[kind][block.name] = blocks[block.name].reshape(-1, *shape)
    return blocks["records"].reshape(-1), columns, frames, sides


class FrameRows(NamedTuple):
    """Strides of frames: row ``slot * slots + t * steps + env * envs`` of `Table.frames`."""

    slots: int
    steps: int
    envs: int


def frame_rows(spec: SlotSpec) -> FrameRows:
    """Strides of the frames of ``spec``.

    Frames lie by step, as actors fill them, or by environment (rows "frames"), which is fastest to
    sample. Raises ReplayError where one spec has both.
    """
    kinds = {column.rows for column in spec.columns} & {"unroll+1", "frames"}
    if len(kinds) == 2:
        raise ReplayError('columns of rows "unroll+1" and "frames" cannot be mixed; choose one')
    steps = spec.unroll + 1
    by_environment = "frames" in kinds
    strides = (1, steps) if by_environment else (spec.envs, 1)
    return FrameRows(steps * spec.envs, *strides)


class RecordReader:
    """Reads ``records`` [rows], the small columns of a row, which lie side by side.

    Records of a batch are read whole, in one gather, and then each field is copied into an array of
    its own. numpy copies a field of several numbers element by element, row after row; here such a
    field is one opaque word, which it copies in one piece, in a fifth of the time.
    """

    def __init__(self, records: Array) -> None:
        fields = records.dtype.fields
        assert fields is not None
        self._plain = records.view(f"V{records.dtype.itemsize}")
        self._words = {name: f[0].subdtype for name, f in fields.items() if f[0].subdtype}
        formats = [f"V{f[0].itemsize}" if f[0].subdtype else f[0] for f in fields.values()]
        offsets = [f[1] for f in fields.values()]
        self._dtype = np.dtype(
            {
                "names": list(fields),
                "formats": formats,
                "offsets": offsets,
                "itemsize": records.dtype.itemsize,
            }
        )

    def take(self, rows: Rows) -> Array:
        """The records of ``rows`` [n], in which a field of several numbers is one word."""
        return self._plain.take(rows, mode="clip").view(self._dtype)

    def column(self, records: Array, name: str) -> Array:
        """A field of ``records`` [n] from `take`, as a new array [n, *shape]."""
        columns: dict[str, Array] = {}
        self.copy(records, (name,), columns)
        return columns[name]

    def copy(self, records: Array, names: Iterable[str], into: dict[str, Any]) -> None:
        """Put each field of ``records`` [n] from `take` ``into`` a dict, as `column` returns it."""
        words = self._words
        for name in names:
            copied = records[name].copy()
            if name in words:
                dtype, shape = words[name]
                copied = np.ndarray((len(copied), *shape), dtype, copied)
            into[name] = copied

    def write(self, records: Array, name: str, out: Array) -> None:
        """Copy a field of ``records`` from `take` to ``out`` [*records.shape, *shape].

        ``out`` must be contiguous.
        """
        if name in self._words:
            out = out.reshape(*records.shape, -1).view(records.dtype[name])[..., 0]
        out[...] = records[name]
