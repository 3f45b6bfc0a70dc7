"""Snapshots of a table, taken while writers go on.

Which rows count and how slots follow each other is copied in one go under the buffer's lock; the
slots are then written one by one, oldest first, as they were at that instant: see
`penstock.replay.snapshot_cut`.

What is loaded has no writers. Slots that were being written end with the rows they had, and whoever
adds begins new streams; foreign writers attach anew.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.specs import HEADER, SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.snapshot_cut import Cut, Lock
from penstock.replay.snapshot_files import FolderReader, FolderWriter
from penstock.replay.table import Table

PER_SLOT = ("length", "prev", "next", "generation")
COUNTS = ("inserted", "stored")


def save(folder: Path, table: Table, lock: Lock, others: Callable[[], dict[str, Any]]) -> None:
    """Replace the snapshot in ``folder``.

    ``others`` is called under ``lock`` at the same instant and gives what else to keep: JSON values
    and arrays that nobody changes any more. Raises ReplayError where it cannot be written, and then
    the snapshot before is whole.
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
    """Fill a new table with a snapshot of one that was like it; what ``others`` gave comes back.

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
        for i, block in enumerate(spec.blocks):
            reader.read(block.name, (table.store.slots[slot].payload[i] for slot in order))
        for name in PER_SLOT:
            getattr(table, name)[...] = state[name]
        table.valid[...] = np.unpackbits(state["valid"], count=table.rows).view(bool)
        headers = state["headers"].reshape(-1).view(HEADER)
        for slot, header in zip(order, headers, strict=True):
            # A slot is as old as it was: the clock may be that of another boot.
            header["published_s"] += time.monotonic() - state["now_s"]
            table.store.slots[slot].header[...] = header
        table.order, table.closed = deque(order), len(order)
        table.evicted = Counter({str(k): int(n) for k, n in state["evicted"].items()})
        for name in COUNTS:
            setattr(table, name, int(state[name]))
        table.store.keep_all_but([int(slot) for slot in state["free"]])
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
