"""Snapshots of a table, taken while writers continue.

Which rows count and how slots follow each other is copied at once under the buffer's lock; the
slots are then written one by one, oldest first, as they were at that instant (`Cut`), into a folder
of raw files that is replaced completely or not at all (`FolderWriter`, `FolderReader`):

    ckpt/replay.json            the manifest: sizes and checksums of the files, and their folder
    ckpt/replay-<number>/*.bin  the bytes, and a marker file

Files are written into a folder of a new number and synced; then `replay.json` is replaced
atomically, which makes them the snapshot, and only then the previous folder is removed. A failure
or a killed process on the way leaves the previous snapshot untouched. Only files written here are
removed: files of these names in folders of that name, with the marker file, of this user. Symbolic
links are never followed.

A loaded table has no writers. Slots that were being written end with the rows they had. Later adds
begin new streams, and writers in other processes attach again.

The number of slots follows from the capacity and from how many slots all writers hold together, so
a table may have another number of slots than the snapshot that it loads. Then the newest slots, as
many as the table has room for, move to its first places and keep their links; older ones are
evicted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.files import DAMAGE, sync_folder
from penstock.core.specs import HEADER, Bytes, SlotSpec, plain_dtype
from penstock.replay.errors import DamagedSnapshotError, ReplayError
from penstock.replay.table import NONE, Array, Rows, Table, TableListener
from penstock.transport.shm.arena import available_nbytes

Lock = AbstractContextManager[Any]
Valid = npt.NDArray[np.bool_]

# Arrays of a table with one value for each slot, and its counts of rows.
PER_SLOT = ("length", "prev", "next", "generation")
COUNTS = ("inserted", "stored")

# Bytes that are copied and written together, while the lock is held.
PIECE_NBYTES = 4 << 20

# Bytes of a file that may wait for the disk. More would delay the files of others, and could not be
# given up.
UNSYNCED_NBYTES = 64 << 20

# The least that is copied of a slot at each step that is stored meanwhile.
LEAST_SHARE_NBYTES = 1 << 18

# Copies of slots for which memory is kept ready.
SPARES = 2

# What `Column.rows` says of blocks whose existing rows do not change.
GROWING = ("frames", "unroll+1", "unroll")

# The manifest, and the version of its format.
MANIFEST = "replay.json"
TEMPORARY = f".{MANIFEST}.tmp"
FORMAT = 1

# Key of an array in the manifest, whose bytes are a file.
ARRAY = "$array"

# Folders of files are numbered, and marked as ours by a file.
PREFIX = "replay-"
GENERATION = re.compile(rf"{PREFIX}([0-9]{{1,15}})")
FILE = re.compile(r"[^/\0.][^/\0]*\.bin", re.DOTALL)
MARKER = ".penstock-replay"
MARK = b"A snapshot of a replay of Penstock, which removes it once there is a newer one.\n"

PRIVATE = 0o600
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Restored(NamedTuple):
    """What `restore` returns."""

    others: dict[str, Any]
    """The values that ``others`` of `save` returned."""
    origin: Rows | None
    """``[slots]``, the slot of the snapshot that each slot of the table holds, -1 for none. None
    where each slot has kept its place."""


def save(
    folder: Path,
    table: Table,
    lock: Lock,
    others: Callable[[], dict[str, Any]],
    give_up: threading.Event | None = None,
) -> None:
    """Replace the snapshot in ``folder``.

    Args:
        folder: of the snapshot.
        table: to save.
        lock: of the table's buffer.
        others: called under ``lock`` at the same instant; returns JSON values and arrays to keep
            with the table, which must not be changed afterwards.
        give_up: ends the writing once it is set.

    Raises:
        ReplayError: it cannot be written, or was given up. The previous snapshot stays complete.
    """
    try:
        writer = FolderWriter(folder)
    except OSError as error:
        raise _unwritten(folder, error) from error

    try:
        # All of this is as of one instant.
        cut = Cut(table, lock)
        with lock:
            about = {"table": _state(table), "others": others()}
            cut.begin()

        # The slots follow while writers continue. Each block has a file, even if no slot is kept.
        try:
            for block in table.spec.blocks:
                writer.append(block.name, np.empty(0, block.dtype))
            for name, piece in cut.pieces(about["table"]["order"]):
                if give_up is not None and give_up.is_set():
                    raise ReplayError(f"snapshot {folder} was given up; any before it is whole")
                writer.append(name, piece)
        finally:
            with lock:
                cut.end()
        writer.finish(about)
    except BaseException as error:
        writer.abandon()
        if isinstance(error, OSError):
            raise _unwritten(folder, error) from error
        raise


class _SavedSlots(NamedTuple):
    """The slots of a snapshot: which of them hold rows, and which rows count."""

    slot_count: int
    order: list[int]
    """The slots that hold rows, the oldest first."""
    valid: Valid
    """Which rows count, bool [slots, rows of a slot]."""


class _SlotMoves(NamedTuple):
    """Where the slots of a snapshot go in the table that loads it."""

    origin: Rows
    """The snapshot's slot that each slot of the table gets; NONE for none."""
    place: Rows
    """The table's slot that gets each slot of the snapshot; NONE where it is evicted."""

    @property
    def used(self) -> Valid:
        """Which slots of the table get one of the snapshot."""
        used: Valid = self.origin != NONE
        return used


def restore(reader: FolderReader, table: Table) -> Restored:
    """Fill a table that is as it was made from the snapshot of one with the same spec.

    Raises:
        ReplayError: the snapshot is damaged or of another kind.
    """
    with reader.reporting_damage():
        state = reader.about["table"]
        spec = SlotSpec.from_dict(state["spec"])
        if difference := spec.difference(table.spec, "snapshot", "replay"):
            raise ReplayError(f"{reader.folder} is of another replay: {difference}; load its own")

        saved = _read_saved_slots(state, table)
        moves = _plan_moves(saved, table)
        _restore_slots(reader, table, saved, moves)
        _restore_bookkeeping(state, table, saved, moves)
        _evict_unplaced(state, table, saved, moves)
        for slot in table.order:
            _check_rows(slot, table)

        has_moved = saved.slot_count != table.slots
        return Restored(reader.about["others"], moves.origin if has_moved else None)


def check_new(reader: FolderReader, table: Table) -> None:
    """Raise ReplayError unless a table is as it was made."""
    if table.inserted or table.store.lanes:
        raise ReplayError(
            f"{reader.folder} can only be restored into a replay that is new; use Replay.load"
        )


def _read_saved_slots(state: dict[str, Any], table: Table) -> _SavedSlots:
    """Read which slots and rows of a snapshot count. Raises ValueError for what cannot be."""
    slot_count, order = _slots_and_order(state)
    bits = np.unpackbits(state["valid"], count=slot_count * table.rows_per_slot)
    valid = bits.view(bool).reshape(slot_count, table.rows_per_slot)
    saved = _SavedSlots(slot_count, order, valid)
    _check_links(state, saved)
    _check_counts(state, saved, table)
    return saved


def _plan_moves(saved: _SavedSlots, table: Table) -> _SlotMoves:
    """Choose the place of each saved slot: its own, or the first places for the newest slots."""
    origin = np.full(table.slots, NONE)
    if saved.slot_count == table.slots:
        origin[:] = np.arange(saved.slot_count)
    else:
        origin[: len(saved.order)] = saved.order[-table.slots :]

    used = origin != NONE
    place = np.full(saved.slot_count, NONE)
    place[origin[used]] = np.flatnonzero(used)
    return _SlotMoves(origin, place)


def _restore_slots(
    reader: FolderReader, table: Table, saved: _SavedSlots, moves: _SlotMoves
) -> None:
    """Read the bytes and headers of the slots into their places."""
    # Files hold the slots in order. Those that are evicted are read too, for the checksum.
    places = [int(moves.place[slot]) for slot in saved.order]
    for i, block in enumerate(table.spec.blocks):
        unused = np.empty(block.nbytes, np.uint8)
        payloads = (
            unused if place == NONE else table.store.slots[place].payload[i] for place in places
        )
        reader.read(block.name, payloads)

    # A slot keeps its age: the clock may be that of another boot.
    state = reader.about["table"]
    headers = state["headers"].reshape(-1).view(HEADER)
    for place, header in zip(places, headers, strict=True):
        header["published_s"] += time.monotonic() - state["now_s"]
        if place != NONE:
            table.store.slots[place].header[...] = header


def _restore_bookkeeping(
    state: dict[str, Any], table: Table, saved: _SavedSlots, moves: _SlotMoves
) -> None:
    """Restore which rows count, how slots follow each other, and the table's counts."""
    used = moves.used
    for name in PER_SLOT:
        values = state[name][moves.origin]
        if name in ("prev", "next"):
            values = np.where(values == NONE, NONE, moves.place[values])
        getattr(table, name)[used] = values[used]
    table.valid[...] = (saved.valid[moves.origin] & used[:, None]).reshape(-1)

    places = [int(moves.place[slot]) for slot in saved.order]
    table.order = deque(place for place in places if place != NONE)
    table.closed = len(table.order)
    table.evicted = Counter({str(k): int(n) for k, n in state["evicted"].items()})
    for name in COUNTS:
        setattr(table, name, int(state[name]))

    # Free slots are lent in the order of the snapshot, then those that it did not have.
    free = [int(moves.place[slot]) for slot in state["free"] if moves.place[slot] != NONE]
    table.store.hold_all_but([*free, *np.flatnonzero(~used).tolist()])


def _evict_unplaced(
    state: dict[str, Any], table: Table, saved: _SavedSlots, moves: _SlotMoves
) -> None:
    """Count the rows of slots for which there is no room as evicted.

    Rows whose stacks began in such a slot go with them.
    """
    is_unplaced = moves.place == NONE
    if lost := int(np.count_nonzero(saved.valid[is_unplaced])):
        table.stored -= lost
        table.evicted["capacity"] += lost

    for slot, previous in zip(saved.order, state["prev"][saved.order], strict=True):
        if previous != NONE and is_unplaced[previous] and not is_unplaced[slot]:
            table.cut_history(int(moves.place[slot]))


def _slots_and_order(state: dict[str, Any]) -> tuple[int, list[int]]:
    """The number of slots in a snapshot, and those that hold rows, oldest first.

    Raises ValueError for what cannot be.
    """
    slots = state["slots"]
    if type(slots) is not int or slots < 1 or any(len(state[name]) != slots for name in PER_SLOT):
        raise ValueError(f"its number of slots {slots} is impossible")
    order = [int(slot) for slot in state["order"]]
    if len(set(order)) != len(order) or not set(order) <= set(range(slots)):
        raise ValueError(f"its order of slots {order} is impossible")
    return slots, order


def _check_links(state: dict[str, Any], saved: _SavedSlots) -> None:
    """Raise ValueError for slots that occur twice, or with impossible neighbours."""
    free = [int(slot) for slot in state["free"]]
    if sorted([*saved.order, *free]) != list(range(saved.slot_count)):
        raise ValueError("some slots are missing, or there twice")

    # A slot follows one that is older, holds rows, and names it as its next one; and so back.
    previous_of = [int(slot) for slot in state["prev"]]
    next_of = [int(slot) for slot in state["next"]]
    position = {slot: i for i, slot in enumerate(saved.order)}
    for slot in range(saved.slot_count):
        previous = previous_of[slot]
        if previous != NONE and not (
            previous in position
            and position[previous] < position.get(slot, -1)
            and next_of[previous] == slot
        ):
            raise ValueError(f"slot {slot} cannot follow slot {previous}")
        following = next_of[slot]
        if following != NONE and not (following in position and previous_of[following] == slot):
            raise ValueError(f"slot {following} cannot follow slot {slot}")


def _check_counts(state: dict[str, Any], saved: _SavedSlots, table: Table) -> None:
    """Raise ValueError for rows that cannot count, or counts that do not add up."""
    length = state["length"]
    if length.min() < 0 or length.max() > table.spec.unroll:
        raise ValueError(f"slots of {length.min()} to {length.max()} steps")
    generation = state["generation"]
    if generation.min() < 0 or generation.max() >= 1 << 31:
        raise ValueError(f"generations {generation.min()} to {generation.max()}")

    # Only rows that were written can count, in slots that hold rows.
    has_rows = np.zeros(saved.slot_count, bool)
    has_rows[saved.order] = True
    is_written = (np.arange(table.spec.unroll) < length[:, None]) & has_rows[:, None]
    valid = saved.valid.reshape(saved.slot_count, table.spec.unroll, -1)
    if (valid & ~is_written[:, :, None]).any():
        raise ValueError("rows count that were never written")

    # Every row that was inserted is stored or evicted.
    inserted = state["inserted"]
    stored = state["stored"]
    evicted = list(state["evicted"].values())
    numbers = [inserted, stored, *evicted]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"counts {numbers}")
    if stored != np.count_nonzero(saved.valid) or inserted != stored + sum(evicted):
        raise ValueError(f"counts {numbers} do not add up")


def _check_rows(slot: int, table: Table) -> None:
    """Raise ValueError for columns of a restored slot that refer to rows which do not exist."""
    length = int(table.length[slot])
    if not length:
        return
    records = table.records.reshape(-1, table.spec.unroll, table.spec.envs)[slot]
    if fault := table.checks.fault(records[:length], marked=True):
        raise ValueError(fault)
    if table.lacks_history(slot):
        raise ValueError(f"rows of slot {slot} reach back to slots that are gone")


def _state(table: Table) -> dict[str, Any]:
    """A copy of everything about the table but the bytes of its slots; needs the lock."""
    # Slots that are lent will be lent first again.
    order = list(table.order)
    free = table.store.free
    at_rest = {*order, *free}
    lent = [slot for slot in range(table.slots) if slot not in at_rest]

    state: dict[str, Any] = {name: getattr(table, name).copy() for name in PER_SLOT}
    state |= {name: getattr(table, name) for name in COUNTS}

    # Slots that are being written end here.
    headers = table.store.geometry.headers(table.store.arena)[order].copy()
    headers["published_s"][table.closed :] = time.monotonic()
    return state | {
        "spec": table.spec.to_dict(),
        "slots": table.slots,
        "now_s": time.monotonic(),
        "order": order,
        "free": lent + free,
        "valid": np.packbits(table.valid),
        "headers": headers.view(np.uint8),
        "evicted": dict(table.evicted),
    }


def _unwritten(folder: Path, error: OSError) -> ReplayError:
    """The error for a snapshot that could not be written."""
    return ReplayError(
        f"snapshot {folder} could not be written ({error.strerror}), and any before it is whole; "
        "free some space or give another folder"
    )


@dataclass
class _Copy:
    """A copy of a slot that is evicted before it was read: ``done`` bytes so far."""

    blocks: list[Bytes]
    done: int = 0

    def extend(self, payload: Sequence[Bytes], nbytes: int) -> bool:
        """Copy at most ``nbytes`` more of a slot's blocks.

        Returns:
            Whether the copy is complete.
        """
        block_start = 0
        for target, source in zip(self.blocks, payload, strict=True):
            start = self.done - block_start
            if nbytes and 0 <= start < len(target):
                stop = min(len(target), start + nbytes)
                np.copyto(target[start:stop], source[start:stop])
                self.done += stop - start
                nbytes -= stop - start
            block_start += len(target)
        return self.done == block_start


class Cut(TableListener):
    """The slots of ``table`` as they are at one instant, read while writers continue.

    A published slot does not change until it is evicted. One that is about to be evicted before it
    was read is copied first, a share of it at every step that is stored meanwhile. In a slot that
    is still being written, existing rows do not change either, except for what the next row may
    move to side rows: the records, the side rows, and the frames that the newest row led to. Those
    are copied at the instant itself. No thread waits for longer than the copy of a piece or a share
    takes, or, where a slot must be evicted at once, of the rest of that slot.

    The instant lasts from `begin` to `end`; both are called under ``lock``.
    """

    def __init__(self, table: Table, lock: Lock) -> None:
        self._table = table
        self._lock = lock
        self._blocks = table.spec.blocks
        self._slot_nbytes = sum(block.nbytes for block in self._blocks)

        rows = {column.name: column.rows for column in table.spec.columns}
        self._growing = {b.name for b in self._blocks if rows.get(b.name) in GROWING}
        """Names of blocks whose existing rows do not change while a slot is written."""

        self._waiting: set[int] = set()
        """Slots that are still to be read."""

        self._copies: dict[int, list[Bytes]] = {}
        """Complete copies of slots that were evicted before they were read: their blocks."""

        self._partial_copies: dict[int, _Copy] = {}
        """Copies that are extended at each step, of slots that will be evicted next."""

        steps = max(1, table.spec.unroll - 1)
        self._share_nbytes = max(LEAST_SHARE_NBYTES, -(-self._slot_nbytes // steps))
        """Bytes that are copied ahead at each step, so that a copy is complete in time."""

        self._open_ends: dict[int, _OpenSlotEnd] = {}
        """The changing part of each slot that was being written at the instant."""

        # Memory is slow when it is first touched: that is done here, where no thread waits for it.
        self._staging = np.ones(PIECE_NBYTES, np.uint8)
        self._spares = [self._spare() for _ in range(SPARES)]

    def begin(self) -> None:
        """Start: from now on the kept slots wait to be read.

        Raises:
            ReplayError: another cut is still being read.
        """
        table = self._table
        if any(isinstance(listener, Cut) for listener in table.listeners):
            raise ReplayError("a snapshot of this replay is being written; wait for it to end")
        table.subscribe(self)
        self._waiting = set(table.order)
        for slot in list(table.order)[table.closed :]:
            self._open_ends[slot] = _OpenSlotEnd(table, slot, self._growing)

    def pieces(self, order: Sequence[int]) -> Iterator[tuple[str, Bytes]]:
        """Yield the bytes of the kept slots, one after the other: block name, and next bytes of it.

        Bytes are valid until the next piece. The lock is taken for each large slot, and once for as
        many small slots as make a piece, since a busy writer may hold it for long.
        """
        group_size = PIECE_NBYTES // self._slot_nbytes
        if group_size < 2:
            for slot in order:
                yield from self._read_large(slot)
            return

        for first in range(0, len(order), group_size):
            slots = order[first : first + group_size]
            with self._lock:
                copies = [[block.copy() for block in self._source(slot)] for slot in slots]
                for slot in slots:
                    self._on_read(slot)
            for slot, blocks in zip(slots, copies, strict=True):
                yield from self._finish_small(slot, blocks)

    def _finish_small(self, slot: int, blocks: list[Bytes]) -> Iterator[tuple[str, Bytes]]:
        """Yield the blocks of a slot that was copied whole, as of the instant."""
        end = self._open_ends.pop(slot, None)
        for block, data in zip(self._blocks, blocks, strict=True):
            if end is not None and block.name in end.blocks:
                yield block.name, end.blocks[block.name]
                continue
            if end is not None:
                end.restore_bytes(block.name, 0, data)
            yield block.name, data

    def _read_large(self, slot: int) -> Iterator[tuple[str, Bytes]]:
        """Yield the blocks of a slot in pieces, as of the instant."""
        end = self._open_ends.pop(slot, None)
        for i, block in enumerate(self._blocks):
            if end is not None and block.name in end.blocks:
                yield block.name, end.blocks[block.name]
                continue

            for start in range(0, block.nbytes, PIECE_NBYTES):
                piece = self._staging[: min(PIECE_NBYTES, block.nbytes - start)]
                with self._lock:
                    np.copyto(piece, self._source(slot)[i][start : start + len(piece)])
                if end is not None:
                    end.restore_bytes(block.name, start, piece)
                yield block.name, piece

        with self._lock:
            self._on_read(slot)
            needs_spare = len(self._spares) < SPARES
        if needs_spare:
            self._spares.append(self._spare())

    def _source(self, slot: int) -> Sequence[Bytes]:
        """The blocks of a slot; needs the lock."""
        return self._copies.get(slot) or self._table.store.slots[slot].payload

    def end(self) -> None:
        """Stop copying slots that are evicted."""
        self._table.unsubscribe(self)

    def _on_read(self, slot: int) -> None:
        """Note that a slot was read, and reuse the memory of its copy; needs the lock."""
        self._waiting.discard(slot)
        blocks = self._copies.pop(slot, None)
        if blocks is not None:
            self._spares.append(blocks)
        partial_copy = self._partial_copies.pop(slot, None)
        if partial_copy is not None:
            self._spares.append(partial_copy.blocks)

    def on_evict(self, slot: int) -> None:
        """Copy all that is missing of a slot that is about to be evicted."""
        self._copy(slot, self._slot_nbytes)

    def on_row(self) -> None:
        """Copy a share at each stored step, so that none has to wait for all of a slot."""
        if self._table.closed:
            self._copy(self._table.order[0], self._share_nbytes)

    def _copy(self, slot: int, nbytes: int) -> None:
        """Copy ``nbytes`` more of a slot, if it is still to be read."""
        if slot not in self._waiting or slot in self._copies:
            return
        copy = self._partial_copies.get(slot)
        if copy is None:
            blocks = self._spares.pop() if self._spares else self._empty_blocks()
            copy = self._partial_copies[slot] = _Copy(blocks)
        if copy.extend(self._table.store.slots[slot].payload, nbytes):
            self._copies[slot] = self._partial_copies.pop(slot).blocks

    def _empty_blocks(self) -> list[Bytes]:
        """Memory for the blocks of a slot."""
        return [np.empty(block.nbytes, np.uint8) for block in self._blocks]

    def _spare(self) -> list[Bytes]:
        """Memory for the blocks of a slot, which is touched already."""
        spare = self._empty_blocks()
        for block in spare:
            block.fill(1)
        return spare


class _OpenSlotEnd:
    """A copy of the part of a slot being written that may still change.

    ``blocks`` holds all bytes of the blocks that do not merely grow, by name.
    """

    def __init__(self, table: Table, slot: int, growing: set[str]) -> None:
        self.blocks: dict[str, Bytes] = {}

        self._frames: dict[str, npt.NDArray[np.uint8]] = {}
        """The frames that the newest row led to, by block: uint8 [envs, bytes of a frame]."""

        strides = table.frame_rows
        length = int(table.length[slot])
        self._rows = length * strides.steps + np.arange(table.spec.envs) * strides.envs
        """The rows of these frames within the slot, [envs]."""

        payload = table.store.slots[slot].payload
        for block, data in zip(table.spec.blocks, payload, strict=True):
            if block.name not in growing:
                self.blocks[block.name] = data.copy()
            elif block.name in table.frames:
                frames = data.reshape(strides.slots, -1)
                self._frames[block.name] = frames[self._rows]

    def restore_bytes(self, name: str, start: int, piece: Bytes) -> None:
        """Put the copied frames of a block into a piece of it that was read later.

        Args:
            name: of the block.
            start: the position of the piece in it.
            piece: bytes of the block; changed.
        """
        for row, frame in zip(self._rows.tolist(), self._frames.get(name, ()), strict=False):
            frame_start = row * len(frame) - start
            first = max(frame_start, 0)
            stop = min(frame_start + len(frame), len(piece))
            if first < stop:
                piece[first:stop] = frame[first - frame_start : stop - frame_start]


class _File:
    """A new file of a snapshot, with its size and checksum so far."""

    def __init__(self, path: Path) -> None:
        self.stream: IO[bytes] = _create(path)
        self.nbytes = 0
        self.crc32 = 0
        self._synced_nbytes = 0

    def write(self, array: Array) -> None:
        """Append the bytes of an array."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += data.nbytes
        if self.nbytes - self._synced_nbytes >= UNSYNCED_NBYTES:
            _sync(self.stream)
            self._synced_nbytes = self.nbytes


class FolderWriter:
    """Writes a new snapshot below ``folder``; readers do not see it before `finish`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

        matches = [GENERATION.fullmatch(name) for name in os.listdir(folder)]
        numbers = [int(match[1]) for match in matches if match]
        self._data_folder = folder / f"{PREFIX}{max(numbers, default=0) + 1}"
        self._data_folder.mkdir(mode=0o700)
        self._files: dict[str, _File] = {}
        try:
            with _create(self._data_folder / MARKER) as marker:
                marker.write(MARK)
        except OSError:
            self.abandon()
            raise

    def append(self, name: str, array: Array) -> None:
        """Append the bytes of ``array`` to the file ``name``."""
        if name not in self._files:
            self._files[name] = _File(self._data_folder / f"{name}.bin")
        self._files[name].write(array)

    def finish(self, about: dict[str, Any]) -> None:
        """Make it the snapshot, and remove the previous one.

        Args:
            about: JSON values and arrays, which become files.
        """
        body = {
            "about": self._extract(about),
            "folder": self._data_folder.name,
            "files": {n: {"nbytes": f.nbytes, "crc32": f.crc32} for n, f in self._files.items()},
        }
        for file in self._files.values():
            _sync(file.stream)
            file.stream.close()
        sync_folder(self._data_folder)

        # All files are on the disk before a manifest names them.
        text = json.dumps(body)
        manifest = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "body": text}
        previous = _named_folder(self._folder)
        temporary = self._folder / TEMPORARY
        temporary.unlink(missing_ok=True)
        with _create(temporary) as stream:
            stream.write(json.dumps(manifest).encode())
            _sync(stream)
        temporary.replace(self._folder / MANIFEST)
        sync_folder(self._folder)

        # The new manifest is on the disk too before the old files go.
        _remove_generations(self._folder, previous, but=self._data_folder.name)

    def abandon(self) -> None:
        """Remove the files written so far."""
        for file in self._files.values():
            # Bytes that are not written yet may not fit either.
            with contextlib.suppress(OSError):
                file.stream.close()
        _remove_generation(self._data_folder, named=True)
        with contextlib.suppress(OSError):
            (self._folder / TEMPORARY).unlink(missing_ok=True)

    def _extract(self, value: Any) -> Any:
        """The JSON of a nested value, whose arrays are written to files."""
        if isinstance(value, np.ndarray):
            name = f"array-{len(self._files)}"
            self.append(name, value)
            return {ARRAY: name, "dtype": value.dtype.str, "shape": list(value.shape)}
        if isinstance(value, dict):
            return {key: self._extract(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self._extract(child) for child in value]
        return value.item() if isinstance(value, np.generic) else value


class FolderReader:
    """Reads the snapshot in ``folder``.

    ``about`` holds the values and arrays that `FolderWriter.finish` was given.

    Raises:
        ReplayError: there is none.
        DamagedSnapshotError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names_read: set[str] = set()
        path = folder / MANIFEST
        if not path.is_file():
            raise ReplayError(
                f"{folder} holds no {MANIFEST}; give the folder that Replay.save was given"
            )
        with self.reporting_damage():
            body = _read_body(path)
            self._files: dict[str, dict[str, int]] = body["files"]
            if not GENERATION.fullmatch(body["folder"]):
                raise ValueError(f"its folder {body['folder']!r} is none of a snapshot")
            self._data_folder = folder / body["folder"]
            if self._data_folder.is_symlink():
                raise ValueError(f"{self._data_folder} is a symbolic link")
            self._check_sizes()
            self.about: dict[str, Any] = self._insert(body["about"])

    @contextlib.contextmanager
    def reporting_damage(self) -> Iterator[None]:
        """Turn an error inside the block into one that says that the snapshot is damaged.

        Raises:
            DamagedSnapshotError: the block raised another error than ReplayError.
        """
        try:
            yield
        except ReplayError:
            raise
        except DAMAGE as error:
            raise DamagedSnapshotError(
                f"{self.folder} is damaged or no snapshot of a replay ({error}); load another one"
            ) from error

    def read(self, name: str, parts: Iterator[Array]) -> None:
        """Fill ``parts``, one after the other, with all bytes of a file, which is read once.

        Raises:
            ValueError: the file has another size or checksum than the manifest says.
        """
        # A short manifest could else ask for any amount of memory.
        if name in self._names_read:
            raise ValueError(f"{name} is named twice")
        self._names_read.add(name)

        about = self._files[name]
        crc32 = 0
        nbytes = 0
        with _open(self._path(name)) as stream:
            for part in parts:
                data = part.reshape(-1).view(np.uint8).data
                nbytes += data.nbytes
                if nbytes > about["nbytes"] or stream.readinto(data) != data.nbytes:
                    raise ValueError(f"{name} ends too early")
                crc32 = zlib.crc32(data, crc32)
        if (crc32, nbytes) != (about["crc32"], about["nbytes"]):
            raise ValueError(f"the checksum or size of {name} is wrong")

    def _check_sizes(self) -> None:
        """Raise ValueError for a file that is none, or has another size than the manifest says."""
        for name, about in self._files.items():
            status = self._path(name).lstat()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is no file")
            if type(about["nbytes"]) is not int or status.st_size != about["nbytes"]:
                raise ValueError(f"{name} has {status.st_size} bytes, not {about['nbytes']}")

    def _path(self, name: str) -> Path:
        """The path of a file. Raises ValueError for a name that could lead elsewhere."""
        if not FILE.fullmatch(f"{name}.bin"):
            raise ValueError(f"no file of a snapshot is called {name!r}")
        path: Path = self._data_folder / f"{name}.bin"
        return path

    def _insert(self, value: Any) -> Any:
        """A nested value of the manifest, with the arrays that are files."""
        if isinstance(value, list):
            return [self._insert(child) for child in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {key: self._insert(child) for key, child in value.items()}

        name = value[ARRAY]
        dtype = plain_dtype(value["dtype"])
        shape = tuple(value["shape"])
        nbytes = self._files[name]["nbytes"]
        if nbytes > available_nbytes():
            raise ValueError(f"{name} of {nbytes} bytes does not fit the memory")
        array = np.empty(nbytes // dtype.itemsize, dtype).reshape(shape)
        self.read(name, iter([array]))
        return array


def _read_body(path: Path) -> Any:
    """Read the body of a manifest.

    Raises:
        ReplayError: it is of another version.
        ValueError: it is damaged; also errors of `DAMAGE`.
    """
    manifest = json.loads(path.read_bytes())
    if manifest["format"] != FORMAT:
        raise ReplayError(
            f"{path} has format {manifest['format']}, this version reads {FORMAT}; use the "
            "version of penstock that wrote it"
        )
    if zlib.crc32(manifest["body"].encode()) != manifest["crc32"]:
        raise ValueError("its checksum is wrong")
    return json.loads(manifest["body"])


def discard(folder: Path) -> None:
    """Remove the snapshot in ``folder``, if there is one, and the folder if it is empty then.

    A symbolic link and its target are left alone.
    """
    if folder.is_symlink():
        return

    # Without a manifest, the files are no snapshot any more.
    named = _named_folder(folder)
    with contextlib.suppress(OSError):
        if named is not None:
            (folder / MANIFEST).unlink()
        _remove_generations(folder, named)
        folder.rmdir()


def _named_folder(folder: Path) -> str | None:
    """The folder of files that a snapshot's manifest names; None without a valid manifest."""
    try:
        with _open(folder / MANIFEST) as stream:
            manifest = json.loads(stream.read())
        is_intact = zlib.crc32(manifest["body"].encode()) == manifest["crc32"]
        named = json.loads(manifest["body"])["folder"] if is_intact else None
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    return named if isinstance(named, str) and GENERATION.fullmatch(named) else None


def _remove_generations(folder: Path, named: str | None, but: str = "") -> None:
    """Remove all folders of files below ``folder`` except the one called ``but``.

    ``named`` is the one that a manifest names.
    """
    for name in os.listdir(folder):
        if GENERATION.fullmatch(name) and name != but:
            _remove_generation(folder / name, named=name == named)


def _remove_generation(path: Path, *, named: bool) -> None:
    """Remove the files of a snapshot, and their folder if it has no others.

    Nothing is removed of a folder that is not of this user, or not known as one of a snapshot:
    ``named`` says that a manifest names it, which suffices for snapshots of older versions; else
    the folder needs the marker file.
    """
    with contextlib.suppress(OSError):
        folder_fd = os.open(path, FOLDER)
        try:
            marked = _is_marked(folder_fd)
            if os.fstat(folder_fd).st_uid != os.getuid() or not (named or marked):
                return

            # The marker goes last, so that a removal that is cut short can be resumed.
            for name in os.listdir(folder_fd):
                status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
                if FILE.fullmatch(name) and stat.S_ISREG(status.st_mode):
                    os.unlink(name, dir_fd=folder_fd)
            if os.listdir(folder_fd) == [MARKER]:
                os.unlink(MARKER, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
        path.rmdir()


def _is_marked(folder_fd: int) -> bool:
    """Whether an open folder has the marker file."""
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as stream:
        return stream.read(len(MARK) + 1) == MARK


def _create(path: Path) -> IO[bytes]:
    """Open a new file that only this user can read; an existing file or link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE), "wb")


def _open(path: Path) -> BufferedReader:
    """Open a file for reading; a link is not followed, and a pipe not waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags), "rb")


def _sync(stream: IO[bytes]) -> None:
    """Wait until everything that was written to a file is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
