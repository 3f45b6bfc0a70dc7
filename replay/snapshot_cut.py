"""The slots of a table as they are at one instant, read piece by piece while writers continue.

A published slot does not change until it is evicted. One that is about to be evicted before it was
read is copied first, a share of it at every step that is stored meanwhile. In a slot that is still
being written, existing rows do not change either, except for what the next row may move to side
rows: the records, the side rows, and the frames that the newest row led to. Those are copied at the
instant itself. No thread waits for longer than the copy of a piece or a share takes, or, where a
slot must be evicted at once, of the rest of that slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import Bytes
from penstock.replay.errors import ReplayError
from penstock.replay.table import Table

PIECE_NBYTES = 4 << 20
LEAST_SHARE_NBYTES = 1 << 18
SPARES = 2  # slots with memory ready for evicted ones
GROWING = ("frames", "unroll+1", "unroll")  # rows of blocks that only grow
Lock = AbstractContextManager[Any]


@dataclass
class _Copy:
    """A copy of a slot that is evicted before it was read: ``done`` bytes so far."""

    blocks: list[Bytes]
    done: int = 0

    def go_on(self, payload: Sequence[Bytes], nbytes: int) -> bool:
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


class Cut:
    """One instant of ``table``, from `begin` to `end`; both are called under ``lock``."""

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
        if table.leaving is not None:
            raise ReplayError("a snapshot of this replay is being written; wait for it to end")
        table.leaving, table.stepped = self._before_it_leaves, self._copy_ahead
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
            if end is not None and block.name in end.whole:
                yield block.name, end.whole[block.name]
                continue
            if end is not None:
                end.mend(block.name, 0, data)
            yield block.name, data

    def _large(self, slot: int) -> Iterator[tuple[str, Bytes]]:
        end = self._ends.pop(slot, None)
        for i, block in enumerate(self._blocks):
            if end is not None and block.name in end.whole:
                yield block.name, end.whole[block.name]
                continue
            for start in range(0, block.nbytes, PIECE_NBYTES):
                piece = self._staging[: min(PIECE_NBYTES, block.nbytes - start)]
                with self._lock:
                    np.copyto(piece, self._source(slot)[i][start : start + len(piece)])
                if end is not None:
                    end.mend(block.name, start, piece)
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
        if self._table.leaving == self._before_it_leaves:
            self._table.leaving = self._table.stepped = None

    def _forget(self, slot: int) -> None:
        """Mark a slot as read; needs the lock."""
        self._waiting.discard(slot)
        copy, begun = self._copies.pop(slot, None), self._begun.pop(slot, None)
        if copy is not None:
            self._spares.append(copy)
        if begun is not None:
            self._spares.append(begun.blocks)

    def _before_it_leaves(self, slot: int) -> None:
        self._copy(slot, self._nbytes)

    def _copy_ahead(self) -> None:
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
        if copy.go_on(self._table.store.slots[slot].payload, nbytes):
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
        self.whole: dict[str, Bytes] = {}
        self._frames: dict[str, npt.NDArray[np.uint8]] = {}  # [envs, bytes of a frame]
        lie, length = table.frame_rows, int(table.length[slot])
        self._rows = length * lie.steps + np.arange(envs) * lie.envs  # in the slot
        for block, data in zip(table.spec.blocks, store.payload, strict=True):
            if block.name not in growing:
                self.whole[block.name] = data.copy()
            elif block.name in table.frames:
                frames = data.reshape(lie.slots, -1)
                self._frames[block.name] = frames[self._rows]

    def mend(self, name: str, start: int, piece: Bytes) -> None:
        """Restore the bytes of a block, from ``start`` on, as of the instant."""
        for row, frame in zip(self._rows.tolist(), self._frames.get(name, ()), strict=False):
            at = row * len(frame) - start  # in the piece
            first, last = max(at, 0), min(at + len(frame), len(piece))
            if first < last:
                piece[first:last] = frame[first - at : last - at]
