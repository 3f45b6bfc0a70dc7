"""Gathers transitions from the table: the content of a batch for given physical rows.

Every array is filled by one large take, which releases the interpreter lock, into memory that is
reused; small columns are read by one take of whole records.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.batch import Batch
from penstock.replay.columns import names_of, unflatten
from penstock.replay.frames import FrameWindow, find_window
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
        self._big_columns = table.columns
        # The columns of a batch that needs no more than copies: those in the records, and those in
        # memory of their own. None if a batch needs more.
        direct = _direct_columns(layout) if steps == 1 else None
        self._direct: list[str] | None = None
        self._direct_big: list[str] = []
        if direct is not None:
            self._direct = [name for name in direct if name not in self._big_columns]
            self._direct_big = [name for name in direct if name in self._big_columns]

        # The discount of the next observation, by whether the row terminated.
        self._discounts = np.array([discount, 0], np.float32)
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
        batch = Batch()

        # Single steps of plain columns are copied as they are stored.
        if self._direct is not None:
            self.records.copy(records, self._direct, batch)
            for name in self._direct_big:
                batch[name] = self._column(name, rows, records)
            batch["discount"] = self._discounts.take(batch["terminated"])
            return self._finish(batch, rows, weights)

        if self.steps == 1:
            returns = one_step(rows, records, self._discounts)
        else:
            returns = n_step(
                self.table, self.records, rows, records, steps=self.steps, discount=self.discount
            )
        self._observe(batch, rows, records, returns, stacked=stacked)

        # The action and further columns, nested like their spaces.
        for root, nest in self.layout.other_nests.items():
            if isinstance(nest, str):
                batch[root] = self._column(nest, rows, records)
            else:
                arrays = {name: self._column(name, rows, records) for name in names_of(nest)}
                batch[root] = unflatten(nest, arrays)

        batch["reward"] = returns.reward
        batch["discount"] = returns.discount
        batch["terminated"] = returns.last_records["terminated"].copy()
        batch["truncated"] = returns.last_records["truncated"].copy()
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
        self, batch: Batch, rows: Rows, records: Array, returns: Returns, *, stacked: bool
    ) -> None:
        """Put the observations before and after the transitions into ``batch``.

        Frame stacks become ``frames`` unless ``stacked``.
        """
        obs: dict[str, Array] = {}
        next_obs: dict[str, Array] = {}
        frames: dict[str, Array] = {}

        # A small observation lies in the record of its row, with the one after it.
        for observation in self.layout.inline:
            name = observation.name
            obs[name] = self._column(name, rows, records)
            next_obs[name] = self._column(observation.next_name, returns.last, returns.last_records)

        # A big one consists of frames of this row and of others. A window has the frames of a row's
        # observation and of the next one, which begin one frame later.
        if self.layout.framed:
            is_one_step = self.steps == 1
            windows = self._windows(rows, records)
            last_windows = windows
            if not is_one_step:
                last_windows = self._windows(returns.last, returns.last_records)
            for observation in self.layout.framed:
                name = observation.name
                depth = observation.depth
                obs_window = windows[depth].narrow(0, depth)
                next_window = last_windows[depth].narrow(1, depth + 1)
                if stacked or not observation.stack:
                    obs[name], next_obs[name] = self._frames(observation, obs_window, next_window)
                elif is_one_step:
                    # The two stacks overlap, and each frame is returned once.
                    (frames[name],) = self._frames(observation, windows[depth])
                else:
                    both_windows = _side_by_side(obs_window, next_window)
                    (frames[name],) = self._frames(observation, both_windows)

        if obs:
            batch["obs"] = unflatten(self.layout.obs, obs)
            batch["next_obs"] = unflatten(self.layout.obs, next_obs)
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _windows(self, rows: Rows, records: Array) -> dict[int, FrameWindow]:
        """Returns the windows of ``rows`` by the depths of the observations stored as frames."""
        depths = {observation.depth for observation in self.layout.framed}
        return {depth: find_window(self.table, rows, records, depth) for depth in depths}

    def _column(self, name: str, rows: Rows, records: Array) -> Array:
        """Returns a column of ``rows`` [n] with their ``records``, ``[n, *shape]``."""
        big_column = self._big_columns.get(name)
        if big_column is None:
            return self.records.column(records, name)

        array = self.pool.empty((len(rows), *big_column.shape[1:]), big_column.dtype)
        big_column.take(rows, axis=0, out=array, mode="clip")
        return array

    def _frames(self, observation: Observation, *windows: FrameWindow) -> list[Array]:
        """Returns the frames of each window.

        Args:
            observation: one that is stored as frames.
            windows: of the same number of rows, and equally wide.

        Returns:
            For each window ``[count, width, *frame]``, or ``[count, *frame]`` if the observation is
            one frame a row.
        """
        source = self.table.frames[observation.name]
        count, width = windows[0].frames.shape
        outputs = [
            self.pool.empty((count * width, *source.shape[1:]), source.dtype) for _ in windows
        ]

        # Windows of the same rows alternate, so that frames of both are still in the cache.
        rows = count
        if len(windows) > 1:
            rows = max(1, TURN_NBYTES // (width * source[0].nbytes))
        for first in range(0, count, rows):
            turn = slice(first * width, (first + rows) * width)
            for part, flat in zip(windows, outputs, strict=True):
                source.take(part.frames.reshape(-1)[turn], axis=0, out=flat[turn], mode="clip")

        # Frames that the rows do not have are zeros, or lie in side rows.
        for part, flat in zip(windows, outputs, strict=True):
            if len(part.zeros):
                flat[part.zeros] = 0
            if len(part.side_positions):
                flat[part.side_positions] = self.table.sides[observation.side_name][part.side_rows]

        if not observation.stack:
            return outputs
        return [flat.reshape(count, width, *source.shape[1:]) for flat in outputs]


def _direct_columns(layout: Layout) -> list[str] | None:
    """Returns the columns that a batch of single steps has exactly as they are stored.

    None if the batch has other columns too: nested ones, or observations stored as frames.
    """
    has_nested = any(root != nest for root, nest in layout.other_nests.items())
    if layout.framed or layout.obs != "obs" or has_nested:
        return None
    return ["obs", "next_obs", *layout.other_nests, "reward", "terminated", "truncated"]


def _side_by_side(left: FrameWindow, right: FrameWindow) -> FrameWindow:
    """Returns one window with the frames of ``left`` and then those of ``right`` in each row.

    The two have the same rows, and are equally wide.
    """
    width = left.frames.shape[1]

    def join_positions(of_left: Rows, of_right: Rows) -> Rows:
        """Returns flat positions in the two windows as flat positions in the joined one."""
        left_row, left_column = of_left // width, of_left % width
        right_row, right_column = of_right // width, of_right % width
        return np.concatenate(
            [
                left_row * (2 * width) + left_column,
                right_row * (2 * width) + width + right_column,
            ]
        )

    return FrameWindow(
        frames=np.concatenate([left.frames, right.frames], axis=1),
        zeros=join_positions(left.zeros, right.zeros),
        side_positions=join_positions(left.side_positions, right.side_positions),
        side_rows=np.concatenate([left.side_rows, right.side_rows]),
    )


# `Pool` holds only arrays of at least this size; malloc itself reuses smaller ones.
POOLED_NBYTES = 1 << 16
# `Pool` holds at most so many arrays of one shape and dtype; prefetching uses a few at a time.
MOST_POOLED = 8


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
        if math.prod(shape) * dtype.itemsize < POOLED_NBYTES:
            return np.empty(shape, dtype)

        arrays = self._arrays.setdefault((shape, dtype), [])
        for array in arrays:
            if sys.getrefcount(array) == _UNUSED:
                return array

        new_array = np.empty(shape, dtype)
        if len(arrays) < MOST_POOLED:
            arrays.append(new_array)
        return new_array
