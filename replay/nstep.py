"""n-step returns at sampling: Sutton and Barto, Reinforcement Learning (2018), section 7.1.

    R = sum over j < m of gamma^j r_{t+j},   discount = gamma^m, or 0 where row t+m-1 terminated

m is n, or less where an episode ends or the stream has no further row yet: the return then
bootstraps from the observation after the last stored row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.replay.records import Array, RecordReader, Rows
from penstock.replay.table import NONE, Table


class Returns(NamedTuple):
    """For each row: its return, the discount of the next observation, and the last row summed."""

    reward: npt.NDArray[np.float32]
    discount: npt.NDArray[np.float32]
    last: Rows
    last_records: Array


def one_step(rows: Rows, records: Array, factors: npt.NDArray[np.float32]) -> Returns:
    """n = 1: the rows themselves. ``factors``: the discount of the next observation, and 0."""
    return Returns(records["reward"].copy(), factors.take(records["terminated"]), rows, records)


def n_step(
    table: Table, reader: RecordReader, rows: Rows, records: Array, steps: int, discount: float
) -> Returns:
    """Sum rewards from ``rows`` [count], with ``records``, over up to ``steps`` rows.

    Each step is computed for all rows, masked by ``going``: records are slow to index.
    """
    total = records["reward"].astype(np.float64)
    factor = np.full(len(rows), discount)
    last, going = rows.copy(), ~ended(records)  # the rows summed last; which returns may continue
    walk = _Walk(table, rows)
    for _ in range(steps - 1):
        following = walk.step()
        going &= following != NONE
        if not going.any():
            break
        reached = reader.take(following)
        going &= continues(reached)
        np.add(total, factor * reached["reward"], out=total, where=going)
        np.multiply(factor, discount, out=factor, where=going)
        np.copyto(last, following, where=going)
        going &= ~ended(reached)
    last_records = reader.take(last)
    after = np.where(last_records["terminated"], 0, factor)
    return Returns(total.astype(np.float32), after.astype(np.float32), last, last_records)


def ended(records: Array) -> npt.NDArray[np.bool_]:
    """Whether rows are the last of their episodes."""
    last: npt.NDArray[np.bool_] = records["terminated"] | records["truncated"]
    return last


def continues(records: Array) -> npt.NDArray[np.bool_]:
    """Whether rows continue the row before: neither a reset nor the start of an episode."""
    names = records.dtype.names or ()
    goes_on = np.ones(len(records), bool)
    if "alive" in names:
        goes_on &= records["alive"] != 0
    if "age" in names:
        goes_on &= records["age"] != 0
    return goes_on


class _Walk:
    """Rows that move on along their streams."""

    def __init__(self, table: Table, rows: Rows) -> None:
        self._table = table
        self._rows, self._slot = rows, rows // table.rows_per_slot
        self._find_last()

    def step(self) -> Rows:
        """The rows one step later; NONE where there is none yet. After NONE the value is
        meaningless; callers mask it."""
        table, envs = self._table, self._table.spec.envs
        rows = self._rows + envs
        crosses = (self._rows >= self._last).nonzero()[0]
        if len(crosses):
            env = self._rows[crosses] % envs
            after = table.next.take(self._slot[crosses])
            begun = (after != NONE) & (table.length.take(after, mode="clip") > 0)
            rows[crosses] = np.where(begun, after * np.int64(table.rows_per_slot) + env, NONE)
            self._slot[crosses] = after
        self._rows = rows
        if len(crosses):
            self._find_last()
        return rows

    def _find_last(self) -> None:
        """The rows of the last stored step of each slot begin here."""
        table = self._table
        steps = table.length.take(self._slot, mode="clip") - np.int64(1)
        self._last = self._slot * table.rows_per_slot + steps * table.spec.envs
