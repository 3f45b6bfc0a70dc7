"""Snapshots of a table, taken while writers continue.

Which rows count and how slots follow each other is copied at once under the buffer's lock; the
slots are then written one by one, oldest first, as they were at that instant: see
`penstock.replay.snapshot_cut`.

A loaded table has no writers. Slots that were being written end with the rows they had. Later adds
begin new streams, and writers in other processes attach again.

The number of slots follows from the capacity and from how many slots all writers hold together, so
a table may have another number of slots than the snapshot that it loads. Then the newest slots, as
many as the table has room for, move to its first places and keep their links; older ones are
evicted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import HEADER, SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.snapshot_cut import Cut, Lock
from penstock.replay.snapshot_files import FolderReader, FolderWriter
from penstock.replay.table import NONE, Table

PER_SLOT = ("length", "prev", "next", "generation")
COUNTS = ("inserted", "stored")
Slots = npt.NDArray[np.int64]
Valid = npt.NDArray[np.bool_]


class Restored(NamedTuple):
    """What `restore` returns."""

    others: dict[str, Any]
    """The values that ``others`` of `save` returned."""
    origin: Slots | None
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
        origin = np.full(table.slots, NONE)
        if slots == table.slots:
            origin[:] = np.arange(slots)
        else:
            origin[: len(order)] = order[-table.slots :]
        place = np.full(slots, NONE)  # of each slot of the snapshot
        place[origin[origin != NONE]] = np.flatnonzero(origin != NONE)
        places = [int(place[slot]) for slot in order]  # first NONE, for each that is evicted
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
        used = origin != NONE
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
        if gone := int(np.count_nonzero(valid[place == NONE])):
            table.stored -= gone
            table.evicted["capacity"] += gone
        for slot, before in zip(order, state["prev"][order], strict=True):
            if before != NONE and place[before] == NONE and place[slot] != NONE:
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
    before, after = ([int(slot) for slot in state[name]] for name in ("prev", "next"))
    place = {slot: at for at, slot in enumerate(order)}
    for slot in range(slots):
        last, following = before[slot], after[slot]
        if last != NONE and not (
            last in place and place[last] < place.get(slot, -1) and after[last] == slot
        ):
            raise ValueError(f"slot {slot} cannot follow slot {last}")
        if following != NONE and not (following in place and before[following] == slot):
            raise ValueError(f"slot {following} cannot follow slot {slot}")


def _check_counts(state: dict[str, Any], order: list[int], valid: Valid, table: Table) -> None:
    """Raise ValueError for rows that cannot count; ``valid`` is [slots, rows of a slot]."""
    length, generation = state["length"], state["generation"]
    if length.min() < 0 or length.max() > table.spec.unroll:
        raise ValueError(f"slots of {length.min()} to {length.max()} steps")
    if generation.min() < 0 or generation.max() >= 1 << 31:
        raise ValueError(f"generations {generation.min()} to {generation.max()}")
    kept = np.zeros(len(valid), bool)
    kept[order] = True
    written = (np.arange(table.spec.unroll) < length[:, None]) & kept[:, None]
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
        if fault := table.checks.fault(rows[:length], told=True):
            raise ValueError(fault)
        if table.lacks_history(slot):
            raise ValueError(f"rows of slot {slot} reach back to slots that are gone")


def _state(table: Table) -> dict[str, Any]:
    order, free = list(table.order), table.store.free
    known = {*order, *free}
    lent = [slot for slot in range(table.slots) if slot not in known]
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
