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
from penstock.replay.frames import FrameWindow, window
from penstock.replay.layout import Layout, Observation
from penstock.replay.nstep import Returns, n_step, one_step
from penstock.replay.table import Array, RecordReader, Rows, Table

# Windows with the same frames alternate after so many bytes of each, which stay in the cache.
TURN_NBYTES = 1 << 18


class Gather:
    """Makes batches of transitions for given rows; used under the buffer's lock.

    Args:
        table: whose rows are gathered.
        layout: of the table's columns.
        steps: rows that one transition spans, n of the n-step return.
        discount: gamma.
    """

    def __init__(self, table: Table, layout: Layout, steps: int, discount: float) -> None:
        self.table = table
        self.layout = layout
        self.steps = steps
        self.discount = discount
        self.records = RecordReader(table.records)
        self.pool = Pool()
        # Columns that do not lie in the records, but in memory of their own.
        self._big = table.columns
        # The columns of a batch that needs no more than copies, in records and in memory of their
        # own; None if a batch needs more.
        direct = _direct_columns(layout) if steps == 1 else None
        self._direct = direct and [name for name in direct if name not in self._big]
        self._direct_big = [name for name in direct or () if name in self._big]
        self._factors = np.array([discount, 0], np.float32)
        # The weights of the last batch without importance weights.
        self._ones: Array = np.ones(0, np.float32)

    def batch(self, rows: Rows, weights: Array | None, *, stacked: bool = True) -> Batch:
        """Make a `Batch` of transitions.

        Args:
            rows: ``[count]``, where the transitions begin.
            weights: ``[count]`` float32 importance weights; None: all are 1.
            stacked: False returns frame stacks as the frames that they consist of.
        """
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

        # The action and further columns, nested like their spaces.
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
        """Returns ``batch`` with the weights and keys of its ``rows``."""
        batch["weights"] = self._equal_weights(len(rows)) if weights is None else weights
        batch["keys"] = self.table.keys(rows)
        return batch

    def _equal_weights(self, count: int) -> Array:
        """Returns a new array of ``count`` ones."""
        if len(self._ones) != count:
            self._ones = np.ones(count, np.float32)
        return self._ones.copy()

    def _observe(
        self, batch: Batch, rows: Rows, records: Array, returns: Returns, stacked: bool
    ) -> None:
        """Put the observations before and after the transitions into ``batch``.

        Frame stacks become ``frames`` unless ``stacked``.
        """
        obs: dict[str, Array] = {}
        next_obs: dict[str, Array] = {}
        frames: dict[str, Array] = {}

        # A small observation lies in the record of its row, with the one after it.
        for o in self.layout.inline:
            obs[o.name] = self._column(o.name, rows, records)
            next_obs[o.name] = self._column(o.next_name, returns.last, returns.last_records)

        # Big ones are frames of this row and of others; one window has those before and after.
        if self.layout.framed:
            self._frame_columns(obs, next_obs, frames, rows, records, returns, stacked)

        if obs:
            batch["obs"] = unflatten(self.layout.obs, obs)
            batch["next_obs"] = unflatten(self.layout.obs, next_obs)
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _frame_columns(
        self,
        obs: dict[str, Array],
        next_obs: dict[str, Array],
        frames: dict[str, Array],
        rows: Rows,
        records: Array,
        returns: Returns,
        stacked: bool,
    ) -> None:
        """Put observations stored as frames into ``obs`` and ``next_obs``, or into ``frames``."""
        first = self._windows(rows, records)
        same = self.steps == 1
        last = first if same else self._windows(returns.last, returns.last_records)
        for o in self.layout.framed:
            obs_window = first[o.depth].narrow(0, o.depth)
            next_window = last[o.depth].narrow(1, o.depth + 1)
            if stacked or not o.stack:
                obs[o.name], next_obs[o.name] = self._frames(o, obs_window, next_window)
            elif same:
                (frames[o.name],) = self._frames(o, first[o.depth])
            else:
                (frames[o.name],) = self._frames(o, _beside(obs_window, next_window))

    def _windows(self, rows: Rows, records: Array) -> dict[int, FrameWindow]:
        """Returns the windows of ``rows`` by the depths of the observations stored as frames."""
        depths = {o.depth for o in self.layout.framed}
        return {depth: window(self.table, rows, records, depth) for depth in depths}

    def _column(self, name: str, rows: Rows, records: Array) -> Array:
        """Returns a column of ``rows`` [n] with their ``records``, ``[n, *shape]``."""
        big = self._big.get(name)
        if big is None:
            return self.records.column(records, name)
        out = self.pool.empty((len(rows), *big.shape[1:]), big.dtype)
        big.take(rows, axis=0, out=out, mode="clip")
        return out

    def _frames(self, o: Observation, *windows: FrameWindow) -> list[Array]:
        """Returns the frames of each window.

        Args:
            observation: one that is stored as frames.
            windows: of the same number of rows, and equally wide.

        Returns:
            For each window ``[count, width, *frame]``, or ``[count, *frame]`` if the observation is
            one frame a row.
        """
        source = self.table.frames[o.name]
        outputs: list[Array] = []
        for each in windows:
            count, width = each.frames.shape
            outputs.append(self.pool.empty((count * width, *source.shape[1:]), source.dtype))
        rows = max(1, TURN_NBYTES // (width * source[0].nbytes)) if len(windows) > 1 else count
        for first in range(0, count, rows):
            turn = slice(first * width, (first + rows) * width)
            for each, flat in zip(windows, outputs, strict=True):
                source.take(each.frames.reshape(-1)[turn], axis=0, out=flat[turn], mode="clip")
        for each, flat in zip(windows, outputs, strict=True):
            if len(each.zeros):
                flat[each.zeros] = 0
            if len(each.side_at):
                flat[each.side_at] = self.table.sides[o.side_name][each.side_rows]
        if not o.stack:
            return outputs
        return [flat.reshape(count, width, *source.shape[1:]) for flat in outputs]


def _direct_columns(layout: Layout) -> list[str] | None:
    """Returns the columns that a batch of single steps has exactly as they are stored.

    None if the batch has other columns too: nested ones, or observations stored as frames.
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


# `Pool` holds only arrays of at least this size; malloc itself reuses smaller ones.
BIG_NBYTES = 1 << 16  # malloc reuses smaller ones itself
MOST_KEPT = 8  # of one shape and dtype: prefetching holds a few


def _references_of_unused() -> int:
    """Returns the number of references that the loop in `Pool.empty` sees for an unused array.

    It is that of an array which only the pool holds, and differs between versions of Python.
    """
    arrays = [np.empty(0)]
    for array in arrays:
        return sys.getrefcount(array)
    raise AssertionError


_UNUSED = _references_of_unused()


class Pool:
    """Holds large output arrays by shape and dtype, for reuse once nothing else refers to them.

    Fresh memory costs a page fault for every 4 KiB, more than copying the bytes. An array is reused
    when the pool holds its only reference: views and tensors made from it hold one too. Used under
    the buffer's lock.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], np.dtype[Any]], list[npt.NDArray[Any]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns an array with undefined content, which nothing else refers to."""
        if math.prod(shape) * dtype.itemsize < BIG_NBYTES:
            return np.empty(shape, dtype)

        arrays = self._arrays.setdefault((shape, dtype), [])
        for array in arrays:
            if sys.getrefcount(array) == _UNUSED:
                return array

        fresh = np.empty(shape, dtype)
        if len(arrays) < MOST_KEPT:
            arrays.append(fresh)
        return fresh
