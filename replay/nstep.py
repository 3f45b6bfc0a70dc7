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
    """Sum rewards from ``rows`` [count], with ``records``, over up to ``steps`` rows."""
    total = records["reward"].astype(np.float64)
    factor = np.full(len(rows), discount)
    last, last_records = rows.copy(), records.copy()
    going = np.arange(len(rows))  # positions whose return may continue
    for _ in range(steps - 1):
        going = going[~ended(last_records[going])]
        following = _following(table, last[going])
        exists = following != NONE
        going, following = going[exists], following[exists]
        if not len(going):
            break
        reached = reader.take(following)
        goes_on = continues(reached)
        going, following, reached = going[goes_on], following[goes_on], reached[goes_on]
        total[going] += factor[going] * reached["reward"]
        factor[going] *= discount
        last[going] = following
        last_records[going] = reached
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


def _following(table: Table, rows: Rows) -> Rows:
    """The row one step later in the stream, NONE where there is none yet."""
    envs = table.spec.envs
    slot, rest = np.divmod(rows, table.rows_per_slot)
    t, env = np.divmod(rest, envs)
    inside = t + 1 < table.length.take(slot)
    after = table.next.take(slot)
    begun = (after != NONE) & (table.length.take(after, mode="clip") > 0)
    crossed = np.where(begun, after * np.int64(table.rows_per_slot) + env, NONE)
    return np.where(inside, rows + envs, crossed)
