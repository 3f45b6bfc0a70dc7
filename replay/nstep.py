"""The rows that follow a row in its stream, and n-step returns over them.

n-step returns (Sutton and Barto, Reinforcement Learning, 2018, section 7.1) are computed when a
batch is sampled:

    R = sum over j < m of gamma^j r_{t+j},   discount = gamma^m, or 0 where row t+m-1 terminated

m is n, or less where an episode ends or the stream has no further row yet: the return then
bootstraps from the observation after the last stored row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.replay.table import NONE, Array, RecordReader, Rows, Table


class Returns(NamedTuple):
    """The n-step returns of B rows, each array ``[B]``.

    Args:
        reward: the discounted sum of rewards.
        discount: of the observation after the last row that was summed; 0 where it terminated.
        last: the last row that was summed.
        last_records: the records of these rows.
    """

    reward: npt.NDArray[np.float32]
    discount: npt.NDArray[np.float32]
    last: Rows
    last_records: Array


def one_step(rows: Rows, records: Array, factors: npt.NDArray[np.float32]) -> Returns:
    """Returns the returns for n = 1, which are the rewards of the rows themselves.

    Args:
        rows: ``[B]``.
        records: ``[B]``, of these rows.
        discounts: gamma, and 0 for a row that terminated.
    """
    return Returns(records["reward"].copy(), factors.take(records["terminated"]), rows, records)


def n_step(
    table: Table, reader: RecordReader, rows: Rows, records: Array, steps: int, discount: float
) -> Returns:
    """Sum the rewards of up to ``steps`` rows that follow each other.

    Args:
        table: of the rows.
        reader: of the table's records.
        rows: ``[B]``, the first row of each sum.
        records: ``[B]``, of these rows.
        steps: n, from 2.
        discount: gamma.
    """
    total = records["reward"].astype(np.float64)
    factor = np.full(len(rows), discount)
    last = rows.copy()

    # Each step is computed for all rows, masked by `continuing`, because records are slow to index.
    continuing = ~ended(records)
    for following in follow(table, rows, steps)[1:]:
        continuing &= following != NONE
        if not continuing.any():
            break

        next_records = reader.take(following)
        continuing &= continues(next_records)
        np.add(total, factor * next_records["reward"], out=total, where=continuing)
        np.multiply(factor, discount, out=factor, where=continuing)
        np.copyto(last, following, where=continuing)
        continuing &= ~ended(next_records)

    last_records = reader.take(last)
    discounts = np.where(last_records["terminated"], 0, factor)
    return Returns(total.astype(np.float32), discounts.astype(np.float32), last, last_records)


def ended(records: Array) -> npt.NDArray[np.bool_]:
    """Returns whether rows with these ``records`` are the last of their episodes."""
    are_last: npt.NDArray[np.bool_] = records["terminated"] | records["truncated"]
    return are_last


def continues(records: Array) -> npt.NDArray[np.bool_]:
    """Returns whether rows with these ``records`` [B] continue the episode of the row before.

    A row that only resets, or is the first of an episode, does not.
    """
    names = records.dtype.names or ()
    continuing = np.ones(len(records), bool)
    if "alive" in names:
        continuing &= records["alive"] != 0
    if "age" in names:
        continuing &= records["age"] != 0
    return continuing


def follow(table: Table, starts: Rows, count: int) -> Rows:
    """Returns the rows that follow each other in their streams from given rows on.

    Args:
        table: of the rows.
        starts: ``[B]``, the first rows.
        count: number of rows to follow, the first included.

    Returns:
        Rows ``[count, B]``; NONE where a stream has no further row yet.
    """
    # Within a slot, the next row of an environment lies `envs` rows ahead.
    envs = table.spec.envs
    rows: Rows = np.arange(0, count * envs, envs)[:, None] + starts
    slot = starts // table.rows_per_slot
    stop = slot * table.rows_per_slot + table.length.take(slot) * envs
    which = (rows[-1] >= stop).nonzero()[0]
    if not len(which):
        return rows

    # These columns of `rows` go beyond the written rows of their slots, and on in the next slots of
    # their streams. `covered` counts the steps of each column up to the end of its present slot.
    steps = np.arange(count)[:, None]
    slot, env = slot[which], starts[which] % envs
    left = (stop[which] - starts[which] + envs - 1) // envs  # steps until the slot ends
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
