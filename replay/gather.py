"""Gathers transitions from the table: the content of a batch for given physical rows.

Every array is filled by one large take, which releases the interpreter lock, into memory that is
reused; small columns are read by one take of whole records.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.batch import Batch
from penstock.replay.columns import names_of, unflatten
from penstock.replay.layout import Layout, Observation
from penstock.replay.nstep import Returns, n_step, one_step
from penstock.replay.records import Array, RecordReader, Rows
from penstock.replay.stacks import FrameWindow, window
from penstock.replay.table import Table

TURN_NBYTES = 1 << 18  # bytes of a window taken at a time where another window has the same frames


class Gather:
    """Makes batches of rows; used under the buffer's lock."""

    def __init__(self, table: Table, layout: Layout, steps: int, discount: float) -> None:
        self.table = table
        self.layout = layout
        self.steps = steps
        self.discount = discount
        self.records = RecordReader(table.records)
        self.pool = Pool()
        self._big = table.columns
        direct = _direct_columns(layout) if steps == 1 else None
        self._direct = direct and [name for name in direct if name not in self._big]
        self._direct_big = [name for name in direct or () if name in self._big]
        self._factors = np.array([discount, 0], np.float32)
        self._ones: Array = np.ones(0, np.float32)

    def batch(self, rows: Rows, weights: Array | None, *, stacked: bool = True) -> Batch:
        """A `Batch` of rows ``[count]`` and their weights."""
        records = self.records.take(rows)
        if self._direct is not None:
            batch = Batch()
            self.records.copy(records, self._direct, batch)
            for name in self._direct_big:
                batch[name] = self._column(name, rows, records)
            batch["discount"] = self._factors.take(batch["terminated"])
            return self._finish(batch, rows, weights)
        if self.steps == 1:
            returns = one_step(rows, records, self._factors)
        else:
            steps, discount = self.steps, self.discount
            returns = n_step(self.table, self.records, rows, records, steps, discount)
        batch = Batch()
        self._observe(batch, rows, records, returns, stacked)
        for root, nest in self.layout.nests.items():
            if isinstance(nest, str):
                batch[root] = self._column(nest, rows, records)
            else:
                names = names_of(nest)
                flat = {name: self._column(name, rows, records) for name in names}
                batch[root] = unflatten(nest, flat)
        ends = returns.last_records
        batch["reward"] = returns.reward
        batch["discount"] = returns.discount
        batch["terminated"] = ends["terminated"].copy()
        batch["truncated"] = ends["truncated"].copy()
        return self._finish(batch, rows, weights)

    def _finish(self, batch: Batch, rows: Rows, weights: Array | None) -> Batch:
        batch["weights"] = self._equal_weights(len(rows)) if weights is None else weights
        batch["keys"] = self.table.keys(rows)
        return batch

    def _equal_weights(self, count: int) -> Array:
        if len(self._ones) != count:
            self._ones = np.ones(count, np.float32)
        return self._ones.copy()

    def observations(self, rows: Rows) -> dict[str, Array]:
        """Observations of ``rows`` by column name, without the next ones."""
        records = self.records.take(rows)
        windows = self._windows(rows, records)
        found = {o.name: self._column(o.name, rows, records) for o in self.layout.inline}
        for o in self.layout.framed:
            (found[o.name],) = self._frames(o, windows[o.depth].narrow(0, o.depth))
        return found

    def _observe(
        self, batch: Batch, rows: Rows, records: Array, returns: Returns, stacked: bool
    ) -> None:
        before: dict[str, Array] = {}
        after: dict[str, Array] = {}
        frames: dict[str, Array] = {}
        for o in self.layout.inline:
            before[o.name] = self._column(o.name, rows, records)
            after[o.name] = self._column(o.next_name, returns.last, returns.last_records)
        if self.layout.framed:
            self._frame_columns(before, after, frames, rows, records, returns, stacked)
        if before:
            batch["obs"] = unflatten(self.layout.obs, before)
            batch["next_obs"] = unflatten(self.layout.obs, after)
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _frame_columns(
        self,
        before: dict[str, Array],
        after: dict[str, Array],
        frames: dict[str, Array],
        rows: Rows,
        records: Array,
        returns: Returns,
        stacked: bool,
    ) -> None:
        """Put observations stored as frames into ``before`` and ``after``, or into ``frames``."""
        first = self._windows(rows, records)
        same = self.steps == 1
        last = first if same else self._windows(returns.last, returns.last_records)
        for o in self.layout.framed:
            seen, then = first[o.depth].narrow(0, o.depth), last[o.depth].narrow(1, o.depth + 1)
            if stacked or not o.stack:
                before[o.name], after[o.name] = self._frames(o, seen, then)
            else:
                (frames[o.name],) = self._frames(o, first[o.depth] if same else _beside(seen, then))

    def _windows(self, rows: Rows, records: Array) -> dict[int, FrameWindow]:
        depths = {o.depth for o in self.layout.framed}
        return {depth: window(self.table, rows, records, depth) for depth in depths}

    def _column(self, name: str, rows: Rows, records: Array) -> Array:
        big = self._big.get(name)
        if big is None:
            return self.records.column(records, name)
        out = self.pool.empty((len(rows), *big.shape[1:]), big.dtype)
        big.take(rows, axis=0, out=out, mode="clip")
        return out

    def _frames(self, o: Observation, *windows: FrameWindow) -> list[Array]:
        """For each window ``[count, width, *frame]``, or ``[count, *frame]`` of a leaf that is one
        frame a row.

        Windows of the same rows alternate, so that frames of both are still in the cache.
        """
        source, made = self.table.frames[o.name], list[Array]()
        for seen in windows:
            count, width = seen.frames.shape
            made.append(self.pool.empty((count * width, *source.shape[1:]), source.dtype))
        rows = max(1, TURN_NBYTES // (width * source[0].nbytes)) if len(windows) > 1 else count
        for first in range(0, count, rows):
            turn = slice(first * width, (first + rows) * width)
            for seen, flat in zip(windows, made, strict=True):
                source.take(seen.frames.reshape(-1)[turn], axis=0, out=flat[turn], mode="clip")
        for seen, flat in zip(windows, made, strict=True):
            if len(seen.zeros):
                flat[seen.zeros] = 0
            if len(seen.side_at):
                flat[seen.side_at] = self.table.sides[o.side_name][seen.side_rows]
        if not o.stack:
            return made
        return [flat.reshape(count, width, *source.shape[1:]) for flat in made]


def _direct_columns(layout: Layout) -> list[str] | None:
    """The columns that a batch of single steps returns as they are stored, under the same names.

    None where it has others too: stored as frames, or nested.
    """
    nests = layout.nests
    if layout.framed or layout.obs != "obs" or any(root != nest for root, nest in nests.items()):
        return None
    return ["obs", "next_obs", *nests, "reward", "terminated", "truncated"]


def _beside(left: FrameWindow, right: FrameWindow) -> FrameWindow:
    """The frames of ``left``, then those of ``right``, of each row."""
    width = left.frames.shape[1]
    both = 2 * width

    def placed(at: Rows, first: int) -> Rows:
        moved: Rows = at // width * both + at % width + first
        return moved

    def joined(part: Callable[[FrameWindow], Rows]) -> Rows:
        return np.concatenate([placed(part(left), 0), placed(part(right), width)])

    return FrameWindow(
        np.concatenate([left.frames, right.frames], axis=1),
        joined(lambda w: w.zeros),
        joined(lambda w: w.side_at),
        np.concatenate([left.side_rows, right.side_rows]),
    )


BIG_NBYTES = 1 << 16  # malloc reuses smaller ones itself
MOST_KEPT = 8  # of one shape and dtype: prefetching holds a few


def _references_of_unused() -> int:
    """The result of getrefcount in the loop below for an array that only the pool holds.

    It differs between versions of Python.
    """
    kept = [np.empty(0)]
    for array in kept:
        return sys.getrefcount(array)
    raise AssertionError


_UNUSED = _references_of_unused()


class Pool:
    """Large output arrays by shape and dtype, reused once nothing else refers to them.

    Fresh memory costs a page fault for every 4 KiB, more than copying the bytes. An array is reused
    when the pool holds its only reference: views and tensors made from it hold one too. Used under
    the buffer's lock.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], np.dtype[Any]], list[npt.NDArray[Any]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array with undefined content."""
        if math.prod(shape) * dtype.itemsize < BIG_NBYTES:
            return np.empty(shape, dtype)
        kept = self._kept.setdefault((shape, dtype), [])
        for array in kept:
            if sys.getrefcount(array) == _UNUSED:
                return array
        made = np.empty(shape, dtype)
        if len(kept) < MOST_KEPT:
            kept.append(made)
        return made
