"""The table: slots of a store that are kept, row by row, until the oldest are evicted.

A row is one decision of one environment. Physical row ``(slot * T + t) * E + e`` is its index in
every array; `valid` marks the rows that may be sampled. Writers in this process fill an open slot
row by row, and its rows count at once; slots of writers elsewhere ("foreign") count when they are
published. Slots are evicted whole, the oldest first, and

    inserted = stored + evicted{reason}

with each term counted on its own. Slots of one stream are linked, so that frame stacks and n-step
returns cross their edges. All methods run under the lock of the buffer that owns the table.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.history import (
    OLDEST,
    REPEAT,
    SIDE,
    ZEROS,
    Before,
    lost_sight,
    start_of_stream,
    survey,
    told,
)
from penstock.replay.placement import frame_rows, place_columns, preset
from penstock.replay.samplers import MAX_PRIORITY, Sampler
from penstock.transport.shm.store import Slot, SlotStore, SlotWriter

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

NONE = -1
ROW_BITS = np.array(32)  # of a key, as an array: numpy takes twice as long with an int
ROW_OF_KEY = np.array((1 << 32) - 1)
LANES_PRIVATE = 16
STREAMS_KEPT = 1024  # besides those of streams that have a slot
LANES_SHARED = 64


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
        self._per_slot = np.array(self.rows_per_slot)  # numpy takes twice as long with an int
        lanes = max(LANES_SHARED if shared else LANES_PRIVATE, writers + 2)
        self.store = SlotStore(spec, slots, lanes, shared=shared)
        placed = place_columns(spec, self.store.blocks)
        self.records, self.columns, self.frames, self.sides = placed
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
        # called with each slot before it is evicted
        self.leaving: Callable[[int], None] | None = None
        self.stepped: Callable[[], None] | None = None  # called after each row that is stored here
        self._envs = spec.envs
        self._all: npt.NDArray[np.bool_] = np.ones(spec.envs, bool)
        self._open: set[int] = set()
        # How each foreign stream ended so far: sequence, slot (NONE once evicted), state.
        self._ends: dict[tuple[int, int], tuple[int, int, Before]] = {}
        self._sampler = sampler
        marked = "alive" in (self.records.dtype.names or ())
        self._marks: Array | None = self.records["alive"] if marked else None
        self.checks = SlotChecks(spec, history)
        self.checked: set[int] = set()  # foreign slots that were checked before they were published
        self.arrived: Callable[[Slot], None] | None = None  # called with each foreign slot taken in
        # called with each that is not, and why
        self.rejected: Callable[[Slot, str], None] | None = None

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
            self.valid[start:stop] = self._all
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
        if self.stepped is not None:
            self.stepped()

    def commit_all(self, slot: int, t: int, rows: slice) -> None:
        """Mark row ``t`` of an open slot written, with all environments; only without stacks."""
        self.valid[rows] = self._all
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
        elif fault := self.checks.fault(rows[: length or None], told=length > 0):
            self._reject(slot, rows, length, fault)
            return
        before = self._link(slot, rows["age"][0] if length and "age" in names else None)
        decisions, after = told(rows, length) if length else survey(rows, before)
        self._note_end(slot, after)
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
            with np.errstate(invalid="ignore"):  # of NaN that signals
                priorities = priorities.astype(np.float64)
            sound = (priorities >= 0) & (priorities <= MAX_PRIORITY)
            if not sound.all():  # NaN: the sampler rates the row
                priorities = np.where(sound, priorities, np.nan)
        self._sampler.insert(start, start + self.rows_per_slot, priorities)
        self.cut_history(index)
        if self.arrived is not None:
            self.arrived(slot)

    def streams(self) -> list[Any]:
        """How each foreign stream ended so far, as JSON values and arrays, for `resume_streams`."""
        return [
            [*key, sequence, slot, *after] for key, (sequence, slot, after) in self._ends.items()
        ]

    def resume_streams(self, streams: list[Any]) -> None:
        """Let the foreign streams of `streams` go on, in the table that was restored beside them.

        Raises ValueError where they do not fit.
        """
        kept, envs = {*self.order, NONE}, self.spec.envs
        for actor, incarnation, sequence, slot, done, reset, age in streams:
            if slot not in kept or not done.shape == reset.shape == age.shape == (envs,):
                raise ValueError(f"a stream of actor {actor} that ends in slot {slot}")
            after = Before(done.astype(bool), reset.astype(bool), age.astype(np.int64))
            self._ends[int(actor), int(incarnation)] = int(sequence), int(slot), after

    def rate_anew(self) -> None:
        """Insert all rows into the sampler as new ones: for a snapshot without its state."""
        for slot in self.order:
            start = slot * self.rows_per_slot
            self._sampler.insert(start, start + int(self.length[slot]) * self._envs, None)

    def _reject(self, slot: Slot, rows: Array, length: int, fault: str) -> None:
        """Give a foreign slot back; its rows that would have counted are counted as invalid."""
        marked = "alive" in (rows.dtype.names or ())
        counts = rows["alive"][: length or None] if marked else rows
        self.refuse(int(np.count_nonzero(counts)) if marked else counts.size, "invalid")
        if self.rejected is not None:
            self.rejected(slot, fault)
        self.store.release(slot.index)  # lends it to a writer, which may be another process

    def _link(self, slot: Slot, ages: Array | None) -> Before:
        """Link a foreign slot to the previous one of its stream; returns how that one ended.

        ``ages`` [E] of its first row, if its writer recorded them: they must continue the last
        ones.
        """
        sequence = int(slot.header["sequence"])
        last_sequence, last, after = self._ends.get(self._stream_of(slot), (NONE, NONE, None))
        if after is None or sequence != last_sequence + 1:
            self._begin(slot.index, NONE)
            envs = self.spec.envs
            return start_of_stream(envs) if sequence == 0 else lost_sight(envs)
        goes_on = ages is None or continues(after.age, ages)
        self._begin(slot.index, last if goes_on else NONE)
        return after

    def _note_end(self, slot: Slot, after: Before) -> None:
        """Remember how a stream ended so far, and forget the oldest streams."""
        stream = self._stream_of(slot)
        self._ends.pop(stream, None)
        self._ends[stream] = (int(slot.header["sequence"]), slot.index, after)
        if len(self._ends) > STREAMS_KEPT + self.slots:
            gone = (key for key, (_, last, _) in self._ends.items() if last == NONE)
            self._ends.pop(next(gone))

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
        if self.leaving is not None:
            self.leaving(slot)
        self.closed -= 1
        start = slot * self.rows_per_slot
        stop = start + self.rows_per_slot
        gone = int(np.count_nonzero(self.valid[start:stop]))
        self.valid[start:stop] = False
        self.stored -= gone
        self.evicted[reason] += gone
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
        before, after = int(self.prev[slot]), int(self.next[slot])
        for stream, (sequence, last, end) in self._ends.items():
            if last == slot:
                self._ends[stream] = (sequence, NONE, end)
        self.prev[slot] = self.next[slot] = NONE
        if before != NONE:
            self.next[before] = NONE
        if after != NONE:
            self.prev[after] = NONE
            self.cut_history(after)

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
        keys: Rows = self.generation.take(rows // self._per_slot)
        keys <<= ROW_BITS
        keys |= rows
        return keys

    def fresh(self, keys: Rows) -> npt.NDArray[np.bool_]:
        """Whether keys still name a row that counts."""
        rows = keys & ROW_OF_KEY
        try:
            generation = self.generation.take(rows // self._per_slot)
        except IndexError:  # some name no row at all
            known = rows < self.rows
            fresh = np.zeros(len(keys), bool)
            fresh[known] = self.fresh(keys[known])
            return fresh
        current: npt.NDArray[np.bool_] = generation == keys >> ROW_BITS  # neither is negative
        current &= self.valid.take(rows)
        return current


FLAGS = ("terminated", "truncated")


class SlotChecks:
    """Checks the columns of a foreign slot before any of its rows count.

    `side`, `pad` and `age` of a row refer to other rows, and flags index tables of two. A value out
    of range would crash a later draw, or return another slot's frames. Ages grow by one or restart:
    only then a drawn row, and those that follow it, refer to rows that exist. For slots of
    ``spec``, whose frame stacks reach ``history`` rows back.
    """

    def __init__(self, spec: SlotSpec, history: int) -> None:
        fields = {c.name: np.dtype(c.dtype) for c in spec.columns if c.rows == "unroll"}
        self._flags = [name for name in FLAGS if fields.get(name) == np.bool_]
        most_pad = max(ZEROS, SIDE + spec.side - history)
        ranges = {"pad": (REPEAT, most_pad), "side": (-1, spec.side - 1), "age": (0, 1 << 62)}
        self._has_age = "age" in fields
        self._ranges = [
            (name, low, high)
            for name, (low, high) in ranges.items()
            if name in fields and (name != "age" or fields[name].kind == "i")
        ]

    def fault(self, rows: npt.NDArray[Any], *, told: bool) -> str | None:
        """What is wrong with ``rows``, a slot's records [T, E]; None: nothing.

        ``told``: the writer filled in `age` and `side`; else they are derived later.
        """
        for name in self._flags:
            if (largest := int(rows[name].view(np.uint8).max())) > 1:
                return f"column {name} holds the byte {largest}, and a flag is 0 or 1"
        for name, low, high in self._ranges:
            if not told and name != "pad":
                continue
            values = rows[name]
            least, most = int(values.min()), int(values.max())
            if least < low or most > high:
                return f"column {name} holds {least} to {most}, and must be {low} to {high}"
        if told and self._has_age and not continues(rows["age"][:-1], rows["age"][1:]):
            return "column age holds steps that are neither 0 nor one more than the step before"
        return None


def continues(before: npt.NDArray[Any], ages: npt.NDArray[Any]) -> bool:
    """Whether each of ``ages`` is 0, or one more than that of the same place in ``before``."""
    older = np.minimum(before.astype(np.int64) + 1, OLDEST)
    return bool(((ages == 0) | (ages == older)).all())
