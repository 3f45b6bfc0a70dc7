"""Which stored frames make up the observations of rows, before and after the step.

The frame of row t is stored at step t of its slot; its stack is that frame and those before it,
back to the start of the episode. Before the start lies the padding of the environment: the first
frame again (pad 0), zeros (1), or frames kept in side rows (2 + index of the oldest).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.replay.table import Table

Rows = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FrameWindow:
    """Frames of each row, oldest first; the last is that of its next observation.

    ``frames`` [n, depth + 1] are rows of `Table.frames`. Missing frames are patched in: zeros at
    flat positions ``zeros``, side rows ``side_rows`` at flat positions ``side_at``.
    """

    frames: Rows
    zeros: Rows
    side_at: Rows
    side_rows: Rows

    def narrow(self, first: int, stop: int) -> FrameWindow:
        """Its columns ``first`` to ``stop``."""
        width = self.frames.shape[1]
        if (first, stop) == (0, width):
            return self
        frames = np.ascontiguousarray(self.frames[:, first:stop])
        zeros, side_at, side_rows = self.zeros, self.side_at, self.side_rows
        if len(zeros):
            zeros, _ = _moved(zeros, width, first, stop)
        if len(side_at):
            side_at, kept = _moved(side_at, width, first, stop)
            side_rows = side_rows[kept]
        return FrameWindow(frames, zeros, side_at, side_rows)


def _moved(at: Rows, width: int, first: int, stop: int) -> tuple[Rows, npt.NDArray[np.bool_]]:
    row, column = np.divmod(at, width)
    kept = (column >= first) & (column < stop)
    return (row * (stop - first) + column - first)[kept], kept


def window(table: Table, rows: Rows, records: Array, depth: int) -> FrameWindow:
    """Frames of ``rows`` [n] with records ``records`` [n]; ``depth``: frames of a stack."""
    spec, lie = table.spec, table.frame_rows
    slot = rows // table.rows_per_slot  # divmod is several times slower
    rest = rows - slot * table.rows_per_slot
    t = rest // spec.envs
    own = slot * lie.slots + t * lie.steps + (rest - t * spec.envs) * lie.envs
    frames = own[:, None] + np.arange(1 - depth, 2) * lie.steps
    zeros = side_at = side_rows = np.empty(0, np.int64)
    if depth > 1:
        age = records["age"]
        odd = np.flatnonzero((age < depth - 1) | (t < depth - 1))
        if len(odd):
            few = _Few(odd, slot[odd], t[odd], age[odd].astype(np.int64))
            _reach_back(table, frames, few, depth)
            zeros, side_at, side_rows = _padding(table, records["pad"], few, depth)
    if "side" in (records.dtype.names or ()):
        final = np.flatnonzero(records["side"] >= 0)
        if len(final):
            side_at = np.concatenate([side_at, final * (depth + 1) + depth])
            own_side = slot[final] * spec.side + records["side"][final]
            side_rows = np.concatenate([side_rows, own_side])
    return FrameWindow(frames, zeros, side_at, side_rows)


class _Few(NamedTuple):
    """Rows whose stacks begin before their slot, or with their episode.

    Their positions in the batch, slots, steps and ages.
    """

    at: Rows
    slot: Rows
    t: Rows
    age: Rows


def _reach_back(table: Table, frames: Rows, few: _Few, depth: int) -> None:
    """Clip stacks at the start of the episode, and continue them in the slots before."""
    lie = table.frame_rows
    back = np.arange(depth - 1, 0, -1)
    reach = np.minimum(back, few.age[:, None])  # not further back than the start
    older = frames[few.at, : depth - 1] + (back - reach) * lie.steps
    slot, behind = few.slot, few.t  # steps stored from `slot` on, before the row's own
    while (beyond := reach > behind[:, None]).any():
        previous = table.prev.take(slot).astype(np.int64)
        if (beyond[:, 0] & (previous < 0)).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        steps = table.length.take(previous)
        older += beyond * ((previous - slot) * lie.slots + steps * lie.steps)[:, None]
        slot, behind = previous, behind + steps
    frames[few.at, : depth - 1] = older


def walk_back(table: Table, slot: Rows, t: Rows) -> tuple[Rows, Rows]:
    """Slot and step of steps ``t``, counted from the first of ``slot`` and mostly negative."""
    slot, t = slot.copy(), t.copy()
    before = np.flatnonzero(t < 0)
    while len(before):
        previous = table.prev.take(slot[before])
        if (previous < 0).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        slot[before] = previous
        t[before] += table.length.take(previous)
        before = before[t[before] < 0]
    return slot, t


def _padding(table: Table, pads: Array, few: _Few, depth: int) -> tuple[Rows, Rows, Rows]:
    """Flat positions of zeros, and of side rows with these rows, in stacks that begin before a
    start.
    """
    pad = pads[few.at]
    young = np.flatnonzero((few.age < depth - 1) & (pad > 0))
    if not len(young):
        none = np.empty(0, np.int64)
        return none, none, none
    pad, age = pad[young], few.age[young]
    missing = np.arange(depth - 1) < (depth - 1 - age)[:, None]  # the oldest ones
    at = few.at[young, None] * (depth + 1) + np.arange(depth - 1)
    zero = pad == 1
    zeros = at[zero][missing[zero]]
    odd = ~zero
    start, _ = walk_back(table, few.slot[young[odd]], few.t[young[odd]] - age[odd])
    # The stack at the start was side rows and its own frame; `age` steps later it has moved on.
    first = start * table.spec.side + pad[odd] - 2 + age[odd]
    side_rows = (first[:, None] + np.arange(depth - 1))[missing[odd]]
    return zeros, at[odd][missing[odd]], side_rows
