"""Gathers sequences from the table, and draws later rows of the same episodes.

Arrays of sequences are time-major, [length, B, *shape]. A sequence crosses the edges of slots,
never the end of its episode, so the observation after step t is the one at step t + 1: `obs` and
`next_obs` are two views of one array [length + 1, B, *shape].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.batch import Batch
from penstock.replay.columns import unflatten
from penstock.replay.gather import Gather
from penstock.replay.layout import Layout, Observation
from penstock.replay.nstep import continues, ended
from penstock.replay.records import Array, RecordReader, Rows
from penstock.replay.sequences import Sequences
from penstock.replay.stacks import FrameWindow, window
from penstock.replay.table import NONE, Table

Mask = npt.NDArray[np.bool_]
STATE = "state"


class SequenceGather(Gather):
    """Makes batches of sequences; under the buffer's lock.

    | key                   | shape and dtype                | meaning                             |
    | --------------------- | ------------------------------ | ----------------------------------- |
    | obs, next_obs         | [length, B, *shape], nested    | before, and one step later          |
    | action, other columns | [length, B, *shape], nested    | as added                            |
    | reward, discount      | [length, B] float32            | as added; gamma, 0 where terminated |
    | terminated, truncated | [length, B] bool               |                                     |
    | mask                  | [length, B] bool               | False after the episode's end,      |
    |                       |                                | where everything else is 0          |
    | state                 | [B, *shape], nested            | of the first step, where declared   |
    | weights, keys         | [B]                            | of the sequence                     |
    | burn_in               | int                            | steps that only warm up the state   |

    next_obs holds the observation after the last step too, also where the mask ends earlier. With
    ``stacked=False``, observations that are frame stacks come as ``frames`` [length + K, B, *frame]
    in place of obs and next_obs: the stack of K before step t is ``frames[t : t + K]``.
    """

    def __init__(self, table: Table, layout: Layout, discount: float, sequences: Sequences) -> None:
        super().__init__(table, layout, 1, discount)
        self.sequences = sequences

    def batch(self, rows: Rows, weights: Array | None, *, stacked: bool = True) -> Batch:
        """A batch of sequences that start at rows [B], as the class describes."""
        steps, records, mask = self._follow(rows)
        batch = Batch()
        self._observe_sequences(batch, steps, records, mask, stacked)
        for root, nest in self.layout.nests.items():
            names = [o.name for o in self.layout.others if o.name.split(".", 1)[0] == root]
            part = slice(1) if root == STATE else slice(None)
            flat = {n: self._steps(n, steps[part], records[part], mask[part]) for n in names}
            if root == STATE:
                flat = {name: array[0] for name, array in flat.items()}
            batch[root] = unflatten(nest, flat)
        reward = self._blank(records["reward"].astype(np.float32), mask)
        discounts = np.array([self.discount, 0], np.float32)
        batch["reward"] = reward
        batch["discount"] = self._blank(discounts.take(records["terminated"].view(np.uint8)), mask)
        batch["terminated"] = self._blank(records["terminated"].copy(), mask)
        batch["truncated"] = self._blank(records["truncated"].copy(), mask)
        batch["mask"] = mask
        batch["weights"] = np.ones(len(rows), np.float32) if weights is None else weights
        batch["keys"] = self.table.keys(rows)
        batch["burn_in"] = self.sequences.burn_in
        return batch

    def _follow(self, starts: Rows) -> tuple[Rows, Array, Mask]:
        """Rows and records [length, B] of the steps, and which of them belong to the sequence.

        Steps that do not belong to it repeat the first step.
        """
        length, count = self.sequences.length, len(starts)
        rows = follow(self.table, starts, length)
        records = self.records.take(rows.reshape(-1)).reshape(length, count)
        mask = np.ones((length, count), bool)
        if self.sequences.pad:
            goes_on = ~(records["terminated"] | records["truncated"])[:-1] & (rows[1:] != NONE)
            if "age" in (records.dtype.names or ()):
                goes_on &= records["age"][1:] != 0
            np.logical_and.accumulate(goes_on, axis=0, out=mask[1:])
            step, which = np.nonzero(~mask)
            rows[step, which], records[step, which] = starts[which], records[0, which]
        return rows, records, mask

    def _observe_sequences(
        self, batch: Batch, rows: Rows, records: Array, mask: Mask, stacked: bool
    ) -> None:
        counts = mask.sum(axis=0)
        last = counts - 1, np.arange(mask.shape[1])
        arrays: dict[str, Array] = {}
        frames: dict[str, Array] = {}
        for o in self.layout.inline:
            arrays[o.name] = self._inline(o, rows, records, last)
        for o in self.layout.framed:
            seen = window(self.table, rows.reshape(-1), records.reshape(-1), o.depth)
            then = window(self.table, rows[last], records[last], o.depth)
            if stacked or not o.stack:
                parts = [seen.narrow(0, o.depth), then.narrow(1, o.depth + 1)]
                arrays[o.name] = self._taken(o, parts, mask)
            else:
                start = window(self.table, rows[0], records[0], o.depth)
                older = [start.narrow(i, i + 1) for i in range(o.depth - 1)]
                newest = seen.narrow(o.depth - 1, o.depth)
                parts = [*older, newest, then.narrow(o.depth, o.depth + 1)]
                frames[o.name] = self._taken(o, parts, mask)[:, :, 0]
        for array in (*arrays.values(), *frames.values()):
            _place_last(array, counts, len(array) - 1 - len(mask))
        if arrays:
            batch["obs"] = unflatten(self.layout.obs, {k: a[:-1] for k, a in arrays.items()})
            batch["next_obs"] = unflatten(self.layout.obs, {k: a[1:] for k, a in arrays.items()})
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _inline(self, o: Observation, rows: Rows, records: Array, last: Any) -> Array:
        """Observations [length + 1, B, *shape]; the last follows each sequence's last step."""
        length, count = rows.shape
        out = self.pool.empty((length + 1, count, *o.leaf.shape), o.leaf.dtype)
        big = self.table.columns.get(o.name)
        if big is None:
            self.records.write(records, o.name, out[:-1])
        else:
            flat = out[:-1].reshape(-1, *o.leaf.shape)
            big.take(rows.reshape(-1), axis=0, out=flat, mode="clip")
        out[-1] = self._column(o.next_name, rows[last], records[last])
        return out

    def _taken(self, o: Observation, parts: list[FrameWindow], mask: Mask) -> Array:
        """Windows of B rows or a multiple, one after the other: [steps, B, width, *frame]."""
        (flat,) = self._frames(o, _joined(parts))
        return flat.reshape(-1, mask.shape[1], *flat.shape[1:])

    def _blank(self, array: Array, mask: Mask) -> Array:
        if self.sequences.pad:
            array[~mask] = 0
        return array

    def _steps(self, name: str, rows: Rows, records: Array, mask: Mask) -> Array:
        flat = self._column(name, rows.reshape(-1), records.reshape(-1))
        return self._blank(flat.reshape(*rows.shape, *flat.shape[1:]), mask)


def follow(table: Table, starts: Rows, count: int) -> Rows:
    """Rows ``[count, B]`` from ``starts`` [B] on in their streams.

    NONE where there is no row yet.
    """
    envs = table.spec.envs
    steps = np.arange(count)[:, None]
    rows: Rows = starts + steps * envs
    slot, rest = np.divmod(starts, table.rows_per_slot)
    left = table.length.take(slot) - rest // envs  # steps until the slot ends
    which = np.flatnonzero(left < count)
    slot, left, env = slot[which], left[which], rest[which] % envs
    while len(which):
        slot = table.next.take(slot)
        first = np.where(slot == NONE, NONE, slot * np.int64(table.rows_per_slot) + env)
        further = steps - left
        stride = np.where(slot == NONE, 0, envs)
        rows[:, which] = np.where(further >= 0, first + further * stride, rows[:, which])
        left = left + table.length.take(slot)
        going = (slot != NONE) & (left < count)
        which, slot, left, env = which[going], slot[going], left[going], env[going]
    return rows


def _joined(parts: list[FrameWindow]) -> FrameWindow:
    """One window over the rows of all windows, which are equally wide."""
    sizes = [part.frames.size for part in parts]
    firsts = np.cumsum([0, *sizes[:-1]])
    return FrameWindow(
        np.concatenate([part.frames for part in parts]),
        np.concatenate([part.zeros + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.side_at + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.side_rows for part in parts]),
    )


def _place_last(array: Array, counts: Rows, older: int) -> None:
    """Move the observation after a sequence's last step there from the end.

    Blank those after it.
    """
    for which in np.flatnonzero(counts + older < len(array) - 1):
        after = int(counts[which]) + older
        array[after, which] = array[-1, which]
        array[after + 1 :, which] = 0


def draw_future(table: Table, rows: Rows, horizon: int, rng: np.random.Generator) -> Rows:
    """For each of ``rows`` [B], draw a row at or after it in its episode.

    The "future" strategy of Andrychowicz et al. 2017, arXiv 1707.01495, section 4.5. The draw is
    even among the row itself and those that follow it, as far as they are stored, ``horizon`` in
    all at most.
    """
    ahead = follow(table, rows, horizon)
    flat = RecordReader(table.records).take(ahead.reshape(-1))
    goes_on = ~ended(flat).reshape(ahead.shape)[:-1]
    goes_on &= (continues(flat).reshape(ahead.shape) & (ahead != NONE))[1:]
    np.logical_and.accumulate(goes_on, axis=0, out=goes_on)
    counts = 1 + goes_on.sum(axis=0)
    chosen = (rng.random(len(rows)) * counts).astype(np.int64)
    found: Rows = ahead[chosen, np.arange(len(rows))]
    return found
