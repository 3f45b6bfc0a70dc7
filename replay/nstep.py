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


def one_step(rows: Rows, records: Array, discounts: npt.NDArray[np.float32]) -> Returns:
    """Returns the returns for n = 1, which are the rewards of the rows themselves.

    Args:
        rows: ``[B]``.
        records: ``[B]``, of these rows.
        discounts: gamma, and 0 for a row that terminated.
    """
    return Returns(
        reward=records["reward"].copy(),
        discount=discounts.take(records["terminated"]),
        last=rows,
        last_records=records,
    )


def n_step(
    table: Table,
    reader: RecordReader,
    rows: Rows,
    records: Array,
    *,
    steps: int,
    discount: float,
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
    reward_sum = records["reward"].astype(np.float64)
    factor = np.full(len(rows), discount)
    last = rows.copy()

    # Each step is computed for all rows, masked by `continuing`, because records are slow to index.
    continuing = ~ends_episode(records)
    for next_rows in follow(table, rows, steps)[1:]:
        continuing &= next_rows != NONE
        if not continuing.any():
            break

        next_records = reader.take(next_rows)
        continuing &= continues_episode(next_records)
        np.add(reward_sum, factor * next_records["reward"], out=reward_sum, where=continuing)
        np.multiply(factor, discount, out=factor, where=continuing)
        np.copyto(last, next_rows, where=continuing)
        continuing &= ~ends_episode(next_records)

    last_records = reader.take(last)
    next_discount = np.where(last_records["terminated"], 0, factor)
    return Returns(
        reward=reward_sum.astype(np.float32),
        discount=next_discount.astype(np.float32),
        last=last,
        last_records=last_records,
    )


def ends_episode(records: Array) -> npt.NDArray[np.bool_]:
    """Returns whether rows with these ``records`` are the last of their episodes."""
    are_last: npt.NDArray[np.bool_] = records["terminated"] | records["truncated"]
    return are_last


def continues_episode(records: Array) -> npt.NDArray[np.bool_]:
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
    columns = (rows[-1] >= stop).nonzero()[0]
    if not len(columns):
        return rows

    # These columns of `rows` go beyond the written rows of their slots, and on in the next slots of
    # their streams. `covered` counts the steps of each column up to the end of its present slot.
    steps = np.arange(count)[:, None]
    slot = slot[columns]
    env = starts[columns] % envs
    covered = (stop[columns] - starts[columns] + envs - 1) // envs
    while len(columns):
        slot = table.next.take(slot)
        exists = slot != NONE
        first_row = np.where(exists, slot * np.int64(table.rows_per_slot) + env, NONE)
        stride = np.where(exists, envs, 0)
        steps_into_slot = steps - covered
        rows[:, columns] = np.where(
            steps_into_slot >= 0, first_row + steps_into_slot * stride, rows[:, columns]
        )

        covered = covered + table.length.take(slot)
        unfinished = exists & (covered < count)
        columns = columns[unfinished]
        slot = slot[unfinished]
        covered = covered[unfinished]
        env = env[unfinished]
    return rows
