"""Snapshots of a table, taken while writers continue.

Which rows count and how slots follow each other is copied at once under the buffer's lock; the
slots are then written one by one, oldest first, as they were at that instant: see
`penstock.replay.snapshot_cut`.

A loaded table has no writers. Slots that were being written end with the rows they had. Later adds
begin new streams, and writers in other processes attach again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import HEADER, SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.snapshot_cut import Cut, Lock
from penstock.replay.snapshot_files import FolderReader, FolderWriter
from penstock.replay.table import NONE, Table

PER_SLOT = ("length", "prev", "next", "generation")
COUNTS = ("inserted", "stored")


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


def restore(reader: FolderReader, table: Table) -> dict[str, Any]:
    """Fill a new table from the snapshot of one with the same spec; returns the values of
    ``others``.

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
        order = _order(reader.folder, state, table)
        valid = np.unpackbits(state["valid"], count=table.rows).view(bool)
        _check_links(state, order, table)
        _check_counts(state, order, valid, table)
        for i, block in enumerate(spec.blocks):
            reader.read(block.name, (table.store.slots[slot].payload[i] for slot in order))
        for name in PER_SLOT:
            getattr(table, name)[...] = state[name]
        table.valid[...] = valid
        headers = state["headers"].reshape(-1).view(HEADER)
        for slot, header in zip(order, headers, strict=True):
            # A slot keeps its age: the clock may be that of another boot.
            header["published_s"] += time.monotonic() - state["now_s"]
            table.store.slots[slot].header[...] = header
        table.order, table.closed = deque(order), len(order)
        table.evicted = Counter({str(k): int(n) for k, n in state["evicted"].items()})
        for name in COUNTS:
            setattr(table, name, int(state[name]))
        table.store.keep_all_but([int(slot) for slot in state["free"]])
        for slot in order:
            _check_rows(slot, table)
        others: dict[str, Any] = reader.about["others"]
        return others


def _order(folder: Path, state: dict[str, Any], table: Table) -> list[int]:
    """The kept slots of a snapshot that ``table`` can take."""
    if state["slots"] != table.slots:
        raise ReplayError(
            f"{folder} has {state['slots']} slots and the replay {table.slots}; give the same "
            "capacity, and as many writers or slots in hand"
        )
    order = [int(slot) for slot in state["order"]]
    if len(set(order)) != len(order) or not set(order) <= set(range(table.slots)):
        raise ValueError(f"its order of slots {order} is impossible")
    return order


def _check_links(state: dict[str, Any], order: list[int], table: Table) -> None:
    """Raise ValueError for slots that occur twice, or with impossible neighbours."""
    free, slots = [int(slot) for slot in state["free"]], range(table.slots)
    if sorted([*order, *free]) != list(slots):
        raise ValueError("some slots are missing, or there twice")
    before, after = ([int(slot) for slot in state[name]] for name in ("prev", "next"))
    if len(before) != table.slots or len(after) != table.slots:
        raise ValueError("it has the neighbours of another number of slots")
    place = {slot: at for at, slot in enumerate(order)}
    for slot in slots:
        last, following = before[slot], after[slot]
        if last != NONE and not (
            last in place and place[last] < place.get(slot, -1) and after[last] == slot
        ):
            raise ValueError(f"slot {slot} cannot follow slot {last}")
        if following != NONE and not (following in place and before[following] == slot):
            raise ValueError(f"slot {following} cannot follow slot {slot}")


def _check_counts(
    state: dict[str, Any], order: list[int], valid: npt.NDArray[np.bool_], table: Table
) -> None:
    """Raise ValueError for rows that cannot count."""
    length, generation = state["length"], state["generation"]
    if length.min() < 0 or length.max() > table.spec.unroll:
        raise ValueError(f"slots of {length.min()} to {length.max()} steps")
    if generation.min() < 0 or generation.max() >= 1 << 31:
        raise ValueError(f"generations {generation.min()} to {generation.max()}")
    kept = np.zeros(table.slots, bool)
    kept[order] = True
    written = (np.arange(table.spec.unroll) < length[:, None]) & kept[:, None]
    if (valid.reshape(table.slots, table.spec.unroll, -1) & ~written[:, :, None]).any():
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
