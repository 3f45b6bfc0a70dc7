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

PER_SLOT = ("length", "prev", "next", "generation")
COUNTS = ("inserted", "stored")

PIECE_NBYTES = 4 << 20
LEAST_SHARE_NBYTES = 1 << 18
SPARES = 2  # slots with memory ready for evicted ones
GROWING = ("frames", "unroll+1", "unroll")  # rows of blocks that only grow

MANIFEST = "replay.json"
TEMPORARY = f".{MANIFEST}.tmp"
FORMAT = 1
PREFIX = "replay-"
ARRAY = "$array"
MARKER = ".penstock-replay"
MARK = b"A snapshot of a replay of Penstock, which removes it once there is a newer one.\n"
GENERATION = re.compile(rf"{PREFIX}([0-9]{{1,15}})")
FILE = re.compile(r"[^/\0.][^/\0]*\.bin", re.DOTALL)
PRIVATE = 0o600
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Restored(NamedTuple):
    """What `restore` returns."""

    others: dict[str, Any]
    """The values that ``others`` of `save` returned."""
    origin: Rows | None
    """``[slots]``, the slot of the snapshot that each slot of the table holds, -1 for none. None
    where each slot has kept its place."""


def save(folder: Path, table: Table, lock: Lock, others: Callable[[], dict[str, Any]]) -> None:
    """Replace the snapshot in ``folder``.

    Args:
        folder: of the snapshot.
        table: to save.
        lock: of the table's buffer.
        others: called under ``lock`` at the same instant; returns JSON values and arrays to keep
            with the table, which must not be changed afterwards.

    Raises:
        ReplayError: it cannot be written. The previous snapshot stays complete.
    """
    try:
        writer = FolderWriter(folder)
    except OSError as error:
        raise _unwritten(folder, error) from error
    try:
        cut = Cut(table, lock)
        with lock:
            about = {"table": _state(table), "others": others()}
            cut.begin()
        try:
            for block in table.spec.blocks:
                writer.append(block.name, np.empty(0, block.dtype))  # where no slot is kept
            for name, piece in cut.pieces(about["table"]["order"]):
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


def restore(reader: FolderReader, table: Table) -> Restored:
    """Fill a new table from the snapshot of one with the same spec.

    Raises ReplayError where the snapshot is damaged or of another kind.
    """
    if table.inserted or table.store.lanes:
        raise ReplayError(
            f"{reader.folder} can only be restored into a replay that is new; use Replay.load"
        )
    with reader.refusing():
        state = reader.about["table"]
        spec = SlotSpec.from_dict(state["spec"])
        if difference := spec.difference(table.spec, "snapshot", "replay"):
            raise ReplayError(f"{reader.folder} is of another replay: {difference}; load its own")
        slots, order = _order(state)
        bits = np.unpackbits(state["valid"], count=slots * table.rows_per_slot)
        valid = bits.view(bool).reshape(slots, table.rows_per_slot)
        _check_links(state, slots, order)
        _check_counts(state, order, valid, table)

        # Which slot of the snapshot each slot of the table gets, and the reverse; NONE for none.
        origin = np.full(table.slots, NONE)
        if slots == table.slots:
            origin[:] = np.arange(slots)
        else:
            origin[: len(order)] = order[-table.slots :]
        used = origin != NONE
        place = np.full(slots, NONE)
        place[origin[used]] = np.flatnonzero(used)

        # The kept slots of the snapshot, the oldest first: NONE for those that are evicted.
        places = [int(place[slot]) for slot in order]
        for i, block in enumerate(spec.blocks):
            unused = np.empty(block.nbytes, np.uint8)
            into = (unused if at == NONE else table.store.slots[at].payload[i] for at in places)
            reader.read(block.name, into)
        headers = state["headers"].reshape(-1).view(HEADER)
        for at, header in zip(places, headers, strict=True):
            # A slot keeps its age: the clock may be that of another boot.
            header["published_s"] += time.monotonic() - state["now_s"]
            if at != NONE:
                table.store.slots[at].header[...] = header

        for name in PER_SLOT:
            values = state[name][origin]
            if name in ("prev", "next"):
                values = np.where(values == NONE, NONE, place[values])
            getattr(table, name)[used] = values[used]
        table.valid[...] = (valid[origin] & used[:, None]).reshape(-1)
        table.order = deque(at for at in places if at != NONE)
        table.closed = len(table.order)
        table.evicted = Counter({str(k): int(n) for k, n in state["evicted"].items()})
        for name in COUNTS:
            setattr(table, name, int(state[name]))
        free = [int(place[slot]) for slot in state["free"] if place[slot] != NONE]
        table.store.keep_all_but([*free, *np.flatnonzero(~used).tolist()])

        # Rows of slots for which there is no room leave, and those whose stacks began in them.
        if lost := int(np.count_nonzero(valid[place == NONE])):
            table.stored -= lost
            table.evicted["capacity"] += lost
        for slot, previous in zip(order, state["prev"][order], strict=True):
            if previous != NONE and place[previous] == NONE and place[slot] != NONE:
                table.cut_history(int(place[slot]))
        for slot in table.order:
            _check_rows(slot, table)
        return Restored(reader.about["others"], None if slots == table.slots else origin)


def _order(state: dict[str, Any]) -> tuple[int, list[int]]:
    """The number of slots in a snapshot, and those that hold rows, oldest first."""
    slots = state["slots"]
    if type(slots) is not int or slots < 1 or any(len(state[name]) != slots for name in PER_SLOT):
        raise ValueError(f"its number of slots {slots} is impossible")
    order = [int(slot) for slot in state["order"]]
    if len(set(order)) != len(order) or not set(order) <= set(range(slots)):
        raise ValueError(f"its order of slots {order} is impossible")
    return slots, order


def _check_links(state: dict[str, Any], slots: int, order: list[int]) -> None:
    """Raise ValueError for slots that occur twice, or with impossible neighbours."""
    free = [int(slot) for slot in state["free"]]
    if sorted([*order, *free]) != list(range(slots)):
        raise ValueError("some slots are missing, or there twice")
    prev, next_ = ([int(slot) for slot in state[name]] for name in ("prev", "next"))
    place = {slot: at for at, slot in enumerate(order)}
    for slot in range(slots):
        previous, following = prev[slot], next_[slot]
        if previous != NONE and not (
            previous in place and place[previous] < place.get(slot, -1) and next_[previous] == slot
        ):
            raise ValueError(f"slot {slot} cannot follow slot {previous}")
        if following != NONE and not (following in place and prev[following] == slot):
            raise ValueError(f"slot {following} cannot follow slot {slot}")


def _check_counts(state: dict[str, Any], order: list[int], valid: Valid, table: Table) -> None:
    """Raise ValueError for rows that cannot count; ``valid`` is [slots, rows of a slot]."""
    length, generation = state["length"], state["generation"]
    if length.min() < 0 or length.max() > table.spec.unroll:
        raise ValueError(f"slots of {length.min()} to {length.max()} steps")
    if generation.min() < 0 or generation.max() >= 1 << 31:
        raise ValueError(f"generations {generation.min()} to {generation.max()}")
    has_rows = np.zeros(len(valid), bool)
    has_rows[order] = True
    written = (np.arange(table.spec.unroll) < length[:, None]) & has_rows[:, None]
    if (valid.reshape(len(valid), table.spec.unroll, -1) & ~written[:, :, None]).any():
        raise ValueError("rows count that were never written")
    numbers = [state["inserted"], state["stored"], *state["evicted"].values()]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"counts {numbers}")
    if numbers[1] != np.count_nonzero(valid) or numbers[0] != sum(numbers[1:]):
        raise ValueError(f"counts {numbers} do not add up")


def _check_rows(slot: int, table: Table) -> None:
    """Raise ValueError for columns of a restored slot that refer to rows which do not exist."""
    if length := int(table.length[slot]):
        rows = table.records.reshape(-1, table.spec.unroll, table.spec.envs)[slot]
        if fault := table.checks.fault(rows[:length], marked=True):
            raise ValueError(fault)
        if table.lacks_history(slot):
            raise ValueError(f"rows of slot {slot} reach back to slots that are gone")


def _state(table: Table) -> dict[str, Any]:
    order, free = list(table.order), table.store.free
    at_rest = {*order, *free}
    lent = [slot for slot in range(table.slots) if slot not in at_rest]
    state: dict[str, Any] = {name: getattr(table, name).copy() for name in PER_SLOT}
    state |= {name: getattr(table, name) for name in COUNTS}
    headers = table.store.geometry.headers(table.store.arena)[order].copy()
    headers["published_s"][table.closed :] = time.monotonic()  # they end here
    return state | {
        "spec": table.spec.to_dict(),
        "slots": table.slots,
        "now_s": time.monotonic(),
        "order": order,
        "free": lent + free,  # in the order in which they will be lent
        "valid": np.packbits(table.valid),
        "headers": headers.view(np.uint8),
        "evicted": dict(table.evicted),
    }


def _unwritten(folder: Path, error: OSError) -> ReplayError:
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
        """Copy at most ``nbytes`` more; returns whether the copy is complete."""
        first = 0
        for out, data in zip(self.blocks, payload, strict=True):
            start = self.done - first
            if nbytes and 0 <= start < len(out):
                stop = min(len(out), start + nbytes)
                np.copyto(out[start:stop], data[start:stop])
                self.done += stop - start
                nbytes -= stop - start
            first += len(out)
        return self.done == first


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
        self._table, self._lock = table, lock
        self._blocks = table.spec.blocks
        rows = {column.name: column.rows for column in table.spec.columns}
        self._growing = {b.name for b in self._blocks if rows.get(b.name) in GROWING}
        self._waiting: set[int] = set()
        self._copies: dict[int, list[Bytes]] = {}
        self._begun: dict[int, _Copy] = {}
        self._nbytes = sum(block.nbytes for block in self._blocks)
        self._share = max(LEAST_SHARE_NBYTES, -(-self._nbytes // max(1, table.spec.unroll - 1)))
        self._ends: dict[int, _End] = {}
        # Memory is slow when it is first touched: that is done here, where no thread waits for it.
        self._staging = np.ones(PIECE_NBYTES, np.uint8)
        self._spares = [self._spare() for _ in range(SPARES)]

    def begin(self) -> None:
        """Start: from now on the kept slots wait to be read.

        ReplayError while another cut is read.
        """
        table = self._table
        if any(isinstance(listener, Cut) for listener in table.listeners):
            raise ReplayError("a snapshot of this replay is being written; wait for it to end")
        table.subscribe(self)
        self._waiting = set(table.order)
        for slot in list(table.order)[table.closed :]:
            self._ends[slot] = _End(table, slot, self._growing)

    def pieces(self, order: Sequence[int]) -> Iterator[tuple[str, Bytes]]:
        """Yield the bytes of the kept slots, one after the other: block name, and next bytes of it.

        Bytes are valid until the next piece. The lock is taken for each large slot, and once for as
        many small slots as make a piece, since a busy writer may hold it for long.
        """
        together = PIECE_NBYTES // self._nbytes
        if together < 2:
            for slot in order:
                yield from self._large(slot)
            return
        for first in range(0, len(order), together):
            slots = order[first : first + together]
            with self._lock:
                read = [[block.copy() for block in self._source(slot)] for slot in slots]
                for slot in slots:
                    self._forget(slot)
            for slot, blocks in zip(slots, read, strict=True):
                yield from self._small(slot, blocks)

    def _small(self, slot: int, blocks: list[Bytes]) -> Iterator[tuple[str, Bytes]]:
        end = self._ends.pop(slot, None)
        for block, data in zip(self._blocks, blocks, strict=True):
            if end is not None and block.name in end.blocks:
                yield block.name, end.blocks[block.name]
                continue
            if end is not None:
                end.restore_bytes(block.name, 0, data)
            yield block.name, data

    def _large(self, slot: int) -> Iterator[tuple[str, Bytes]]:
        end = self._ends.pop(slot, None)
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
            self._forget(slot)
            short = len(self._spares) < SPARES
        if short:
            self._spares.append(self._spare())

    def _source(self, slot: int) -> Sequence[Bytes]:
        """The blocks of a slot; needs the lock."""
        return self._copies.get(slot) or self._table.store.slots[slot].payload

    def end(self) -> None:
        self._table.unsubscribe(self)

    def _forget(self, slot: int) -> None:
        """Mark a slot as read; needs the lock."""
        self._waiting.discard(slot)
        copy, begun = self._copies.pop(slot, None), self._begun.pop(slot, None)
        if copy is not None:
            self._spares.append(copy)
        if begun is not None:
            self._spares.append(begun.blocks)

    def on_evict(self, slot: int) -> None:
        self._copy(slot, self._nbytes)

    def on_row(self) -> None:
        """Copy a share at each stored step, so that none has to wait for all of a slot."""
        if self._table.closed:
            self._copy(self._table.order[0], self._share)

    def _copy(self, slot: int, nbytes: int) -> None:
        """Copy ``nbytes`` more of a slot, if it is still to be read."""
        if slot not in self._waiting or slot in self._copies:
            return
        copy = self._begun.get(slot)
        if copy is None:
            blocks = self._spares.pop() if self._spares else self._empty()
            copy = self._begun[slot] = _Copy(blocks)
        if copy.extend(self._table.store.slots[slot].payload, nbytes):
            self._copies[slot] = self._begun.pop(slot).blocks

    def _empty(self) -> list[Bytes]:
        return [np.empty(block.nbytes, np.uint8) for block in self._blocks]

    def _spare(self) -> list[Bytes]:
        spare = self._empty()
        for block in spare:
            block.fill(1)
        return spare


class _End:
    """The part of a slot being written that may still change."""

    def __init__(self, table: Table, slot: int, growing: set[str]) -> None:
        store, envs = table.store.slots[slot], table.spec.envs
        self.blocks: dict[str, Bytes] = {}
        self._frames: dict[str, npt.NDArray[np.uint8]] = {}  # [envs, bytes of a frame]
        strides, length = table.frame_rows, int(table.length[slot])
        self._rows = length * strides.steps + np.arange(envs) * strides.envs  # in the slot
        for block, data in zip(table.spec.blocks, store.payload, strict=True):
            if block.name not in growing:
                self.blocks[block.name] = data.copy()
            elif block.name in table.frames:
                frames = data.reshape(strides.slots, -1)
                self._frames[block.name] = frames[self._rows]

    def restore_bytes(self, name: str, start: int, piece: Bytes) -> None:
        """Restore the bytes of a block, from ``start`` on, as of the instant."""
        for row, frame in zip(self._rows.tolist(), self._frames.get(name, ()), strict=False):
            at = row * len(frame) - start  # in the piece
            first, last = max(at, 0), min(at + len(frame), len(piece))
            if first < last:
                piece[first:last] = frame[first - at : last - at]


class _File:
    def __init__(self, path: Path) -> None:
        self.stream: IO[bytes] = _create(path)
        self.nbytes = self.crc32 = 0

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self.stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += data.nbytes


class FolderWriter:
    """Writes a new snapshot below ``folder``; readers do not see it before `finish`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        matches = [GENERATION.fullmatch(name) for name in os.listdir(folder)]
        numbers = [int(match[1]) for match in matches if match]
        self._inside = folder / f"{PREFIX}{max(numbers, default=0) + 1}"
        self._inside.mkdir(mode=0o700)
        self._files: dict[str, _File] = {}
        try:
            with _create(self._inside / MARKER) as marker:
                marker.write(MARK)
        except OSError:
            self.abandon()
            raise

    def append(self, name: str, array: Array) -> None:
        """Append the bytes of ``array`` to the file ``name``."""
        if name not in self._files:
            self._files[name] = _File(self._inside / f"{name}.bin")
        self._files[name].write(array)

    def finish(self, about: dict[str, Any]) -> None:
        """Make it the snapshot; ``about`` holds JSON values and arrays, which become files."""
        body = {
            "about": self._extract(about),
            "folder": self._inside.name,
            "files": {n: {"nbytes": f.nbytes, "crc32": f.crc32} for n, f in self._files.items()},
        }
        for file in self._files.values():
            _sync(file.stream)
            file.stream.close()
        sync_folder(self._inside)
        text = json.dumps(body)
        manifest = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), "body": text}
        previous = _named_in(self._folder)
        temporary = self._folder / TEMPORARY
        temporary.unlink(missing_ok=True)
        with _create(temporary) as stream:
            stream.write(json.dumps(manifest).encode())
            _sync(stream)
        temporary.replace(self._folder / MANIFEST)
        sync_folder(self._folder)
        _remove_generations(self._folder, previous, but=self._inside.name)

    def abandon(self) -> None:
        """Remove the files written so far."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # bytes not written yet do not fit either
                file.stream.close()
        _remove_generation(self._inside, named=True)
        with contextlib.suppress(OSError):
            (self._folder / TEMPORARY).unlink(missing_ok=True)

    def _extract(self, value: Any) -> Any:
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

    Raises ReplayError where there is none, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names_read: set[str] = set()
        path = folder / MANIFEST
        if not path.is_file():
            raise ReplayError(
                f"{folder} holds no {MANIFEST}; give the folder that Replay.save was given"
            )
        with self.refusing():
            manifest = json.loads(path.read_bytes())
            if manifest["format"] != FORMAT:
                raise ReplayError(
                    f"{path} has format {manifest['format']}, this version reads {FORMAT}; use the "
                    "version of penstock that wrote it"
                )
            if zlib.crc32(manifest["body"].encode()) != manifest["crc32"]:
                raise ValueError("its checksum is wrong")
            body = json.loads(manifest["body"])
            self._files: dict[str, dict[str, int]] = body["files"]
            if not GENERATION.fullmatch(body["folder"]):
                raise ValueError(f"its folder {body['folder']!r} is none of a snapshot")
            self._inside = folder / body["folder"]
            if self._inside.is_symlink():
                raise ValueError(f"{self._inside} is a symbolic link")
            self._check_sizes()
            self.about: dict[str, Any] = self._insert(body["about"])

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """An error inside the block becomes a ReplayError: the snapshot is damaged or is none."""
        try:
            yield
        except ReplayError:
            raise
        except DAMAGE as error:
            raise DamagedSnapshotError(
                f"{self.folder} is damaged or no snapshot of a replay ({error}); load another one"
            ) from error

    def read(self, name: str, parts: Iterator[Array]) -> None:
        """Fill ``parts``, one after the other, with all bytes of a file, which is read once."""
        # A short manifest could else ask for any amount of memory.
        if name in self._names_read:
            raise ValueError(f"{name} is named twice")
        self._names_read.add(name)

        about, crc32, nbytes = self._files[name], 0, 0
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
        for name, about in self._files.items():
            status = self._path(name).lstat()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name} is no file")
            if type(about["nbytes"]) is not int or status.st_size != about["nbytes"]:
                raise ValueError(f"{name} has {status.st_size} bytes, not {about['nbytes']}")

    def _path(self, name: str) -> Path:
        if not FILE.fullmatch(f"{name}.bin"):
            raise ValueError(f"no file of a snapshot is called {name!r}")
        path: Path = self._inside / f"{name}.bin"
        return path

    def _insert(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._insert(child) for child in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {key: self._insert(child) for key, child in value.items()}
        dtype, shape = plain_dtype(value["dtype"]), tuple(value["shape"])
        nbytes = self._files[value[ARRAY]]["nbytes"]
        if nbytes > available_nbytes():
            raise ValueError(f"{value[ARRAY]} of {nbytes} bytes does not fit the memory")
        array = np.empty(nbytes // dtype.itemsize, dtype).reshape(shape)
        self.read(value[ARRAY], iter([array]))
        return array


def discard(folder: Path) -> None:
    """Remove the snapshot in ``folder``, if there is one, and the folder if it is empty then.

    A symbolic link and its target are left alone.
    """
    if folder.is_symlink():
        return
    named = _named_in(folder)
    with contextlib.suppress(OSError):
        if named is not None:
            (folder / MANIFEST).unlink()
        _remove_generations(folder, named)
        folder.rmdir()


def _named_in(folder: Path) -> str | None:
    """The folder named in the snapshot's manifest; None without a valid manifest."""
    try:
        with _open(folder / MANIFEST) as stream:
            manifest = json.loads(stream.read())
        sound = zlib.crc32(manifest["body"].encode()) == manifest["crc32"]
        named = json.loads(manifest["body"])["folder"] if sound else None
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    return named if isinstance(named, str) and GENERATION.fullmatch(named) else None


def _remove_generations(folder: Path, named: str | None, but: str = "") -> None:
    for name in os.listdir(folder):
        if GENERATION.fullmatch(name) and name != but:
            _remove_generation(folder / name, named=name == named)


def _remove_generation(path: Path, *, named: bool) -> None:
    """Remove the files of a snapshot, and their folder if it has no others.

    ``named``: a manifest names it, which suffices for snapshots of older versions; else the folder
    needs the marker file.
    """
    with contextlib.suppress(OSError):
        folder = os.open(path, FOLDER)
        try:
            marked = _is_marked(folder)
            if os.fstat(folder).st_uid != os.getuid() or not (named or marked):
                return
            for name in os.listdir(folder):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if FILE.fullmatch(name) and stat.S_ISREG(status.st_mode):
                    os.unlink(name, dir_fd=folder)
            if os.listdir(folder) == [MARKER]:
                os.unlink(MARKER, dir_fd=folder)
        finally:
            os.close(folder)
        path.rmdir()


def _is_marked(folder: int) -> bool:
    try:
        fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as stream:
        return stream.read(len(MARK) + 1) == MARK


def _create(path: Path) -> IO[bytes]:
    """Open a new file that only this user can read; an existing file or link is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, PRIVATE), "wb")


def _open(path: Path) -> BufferedReader:
    return os.fdopen(
        os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
    )


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
