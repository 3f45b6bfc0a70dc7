"""Which stored frames make up the observations of rows, before and after.

The frame of row t is stored at step t of its slot; its stack is that and the frames before it, back
to the start of the episode. What would lie before the start is the padding of the environment: the
first frame again (pad 0), zeros (1), or frames kept in side rows (2 + index of the oldest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.table import Table

Rows = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Window:
    """Frames of each row, oldest first, the last being that of its next observation.

    ``frames`` [n, depth + 1] are rows of `Table.frames`. What is not there is patched in: zeros at
    flat positions ``zeros``, side rows ``side_rows`` at flat positions ``side_at``.
    """

    frames: Rows
    zeros: Rows
    side_at: Rows
    side_rows: Rows

    def narrow(self, first: int, stop: int) -> Window:
        """Its columns ``first`` to ``stop``."""
        width = self.frames.shape[1]
        if (first, stop) == (0, width):
            return self
        frames = np.ascontiguousarray(self.frames[:, first:stop])
        zeros, _ = _moved(self.zeros, width, first, stop)
        side_at, kept = _moved(self.side_at, width, first, stop)
        return Window(frames, zeros, side_at, self.side_rows[kept])


def _moved(at: Rows, width: int, first: int, stop: int) -> tuple[Rows, npt.NDArray[np.bool_]]:
    row, column = np.divmod(at, width)
    kept = (column >= first) & (column < stop)
    return (row * (stop - first) + column - first)[kept], kept


def window(table: Table, rows: Rows, records: Array, depth: int) -> Window:
    """Frames of ``rows`` [n], whose records are ``records`` [n]; ``depth``: frames of a stack."""
    spec, lie = table.spec, table.frame_rows
    slot, rest = np.divmod(rows, table.rows_per_slot)
    t, env = np.divmod(rest, spec.envs)
    own = slot * lie.slots + t * lie.steps + env * lie.envs
    frames = np.empty((len(rows), depth + 1), np.int64)
    frames[:, depth - 1] = own
    frames[:, depth] = own + lie.steps
    zeros = side_at = side_rows = np.empty(0, np.int64)
    if depth > 1:
        back = np.arange(depth - 1, 0, -1)
        age = records["age"].astype(np.int64)
        reach = np.minimum(back, age[:, None])  # not further back than the start
        np.subtract(own[:, None], reach * lie.steps, out=frames[:, : depth - 1])
        _cross_edges(table, frames, slot, t, env, reach)
        zeros, side_at, side_rows = _padding(table, records, slot, t, age, depth)
    if "side" in (records.dtype.names or ()):
        final = np.flatnonzero(records["side"] >= 0)
        if len(final):
            side_at = np.concatenate([side_at, final * (depth + 1) + depth])
            own_side = slot[final] * spec.side + records["side"][final]
            side_rows = np.concatenate([side_rows, own_side])
    return Window(frames, zeros, side_at, side_rows)


def _cross_edges(table: Table, frames: Rows, slot: Rows, t: Rows, env: Rows, reach: Rows) -> None:
    """Point at the slots before where a stack reaches back beyond its own slot's first row."""
    row, column = np.nonzero(reach > t[:, None])
    if not len(row):
        return
    back_slot, back_t = walk_back(table, slot[row], t[row] - reach[row, column])
    lie = table.frame_rows
    frames[row, column] = back_slot * lie.slots + back_t * lie.steps + env[row] * lie.envs


def walk_back(table: Table, slot: Rows, t: Rows) -> tuple[Rows, Rows]:
    """Slot and step of steps ``t``, counted from the first of ``slot`` and mostly negative."""
    while (before := t < 0).any():
        previous = table.prev.take(slot[before])
        if (previous < 0).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        slot, t = slot.copy(), t.copy()
        slot[before] = previous
        t[before] += table.length.take(previous)
    return slot, t


def _padding(
    table: Table, records: Array, slot: Rows, t: Rows, age: Rows, depth: int
) -> tuple[Rows, Rows, Rows]:
    """Flat positions of zeros, and of side rows with these, in stacks that begin before a start."""
    pad = records["pad"]
    young = np.flatnonzero((age < depth - 1) & (pad > 0))
    if not len(young):
        none = np.empty(0, np.int64)
        return none, none, none
    missing = np.arange(depth - 1) < (depth - 1 - age[young])[:, None]  # the oldest ones
    at = young[:, None] * (depth + 1) + np.arange(depth - 1)
    zero = pad[young] == 1
    zeros = at[zero][missing[zero]]
    odd = young[~zero]
    start, _ = walk_back(table, slot[odd], t[odd] - age[odd])
    # The stack at the start was side rows and its own frame; `age` steps later it has moved on.
    first = start * table.spec.side + pad[odd] - 2 + age[odd]
    side_rows = (first[:, None] + np.arange(depth - 1))[missing[~zero]]
    return zeros, at[~zero][missing[~zero]], side_rows
