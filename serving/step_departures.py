"""What is wrong with a STEP of the echo game, in one sentence.

`find_departure` compares a message with the rows that are expected (`echo_game.py`), and names the
first difference: what came, what is expected, where.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.serving.echo_game import SEATS, TURN_SEAT, EchoRow, ObservationRule
from penstock.serving.messages import FIRST, HEAD, LENGTH, STEP_HEAD, step_dtype, step_nbytes

FLAG_NAMES = {0: "goes on", 1: "first", 2: "terminated", 4: "truncated", 8: "leaves"}
# Rows of a seat before and after the expected one, which a client may have confused with it.
CONFUSED_ROWS = 20


def find_departure(
    message: bytes,
    expected: Sequence[EchoRow],
    round_rows: Sequence[EchoRow],
    rule: ObservationRule,
) -> str:
    """Returns a sentence on how a STEP departs from the one that is expected, or "".

    Args:
        message: a STEP of any content, with its length in front.
        expected: its rows, which may come in any order.
        round_rows: all rows of the round, with which they may be confused.
        rule: what seats see.
    """
    row_nbytes = rule.layout.nbytes
    count = 0
    if len(message) >= STEP_HEAD.size:
        (count,) = struct.unpack_from("<I", message, HEAD.size)
    if not 1 <= count <= SEATS:
        return (
            f"a STEP says it has {count} rows where {len(expected)} are expected; n is a u32 "
            "behind the kind"
        )
    if len(message) != step_nbytes(count, row_nbytes):
        return _explain_size(len(message) - LENGTH.size, count, row_nbytes)
    step = np.frombuffer(message, step_dtype(count, row_nbytes))[0]
    seats = step["seat"].tolist()
    rows = {row.seat: row for row in expected}
    if sorted(seats) != sorted(rows):
        return _explain_seats(seats, expected)

    for place, seat in enumerate(seats):
        row = rows[seat]
        flags = int(step["flags"][place])
        reward = step["reward"][place]
        content = step["rows"][place]
        if flags != row.flags:
            return _explain_flags(flags, row)
        if reward.tobytes() != row.reward.tobytes():
            return _explain_reward(reward, row, round_rows)
        if (content != rule.row(seat, row.number)).any():
            return _explain_row(content, row, round_rows, rule)

    # All that is read is right, so what differs is what lies between.
    unpadded = np.zeros((), step.dtype)
    for name in step.dtype.names:
        unpadded[name] = step[name]
    if unpadded.tobytes() != message:
        return "bytes between flags, rewards and observations are no zeros; write zeros"
    return ""


def _explain_size(nbytes: int, count: int, row_nbytes: int) -> str:
    """Returns what is wrong with the size of a STEP, without its length."""
    return (
        f"a STEP of {count} rows has {nbytes} bytes where "
        f"{step_nbytes(count, row_nbytes) - LENGTH.size} are "
        f"expected: kind and n, {4 * count} of seats, {count} of flags, zeros up to a multiple of "
        f"4, {4 * count} of rewards, zeros up to a multiple of 8, and {count} times row_nbytes, "
        f"which is {row_nbytes}; see WELCOME"
    )


def _explain_seats(seats: Sequence[int], expected: Sequence[EchoRow]) -> str:
    """Returns why a STEP of these seats is not the expected one."""
    text = f"a STEP has {listed(seats)} where {listed([row.seat for row in expected])} belong"
    missing = [row for row in expected if row.seat not in seats]
    if missing and missing[0].reason:
        row = missing[0]
        return f"{text}; seat {row.seat} begins its next episode by a first row, as {row.reason}"
    return (
        f"{text}; each seat has one row in a round, and seat {TURN_SEAT} a STEP of its own in each "
        "third round, until it has played its episodes"
    )


def _explain_flags(flags: int, row: EchoRow) -> str:
    """Returns what is wrong with the flags of a row."""
    came, expected = (
        f"{number} ({FLAG_NAMES.get(number, 'several')})" for number in (flags, row.flags)
    )
    text = f"the flags of seat {row.seat} are {came} where {expected} is expected"
    if row.reason:
        return f"{text}; {row.reason}, so it begins its next episode"
    if (flags | row.flags) & FIRST:
        return f"{text}; a first row begins each episode, and no other row is one"
    return (
        f"{text}; episode i of seat s has 3 + (s + 2 i) mod 5 actions, even ones are "
        "terminated, odd ones truncated"
    )


def _explain_reward(reward: Any, row: EchoRow, round_rows: Sequence[EchoRow]) -> str:
    """Returns what is wrong with the reward of a row."""
    text = f"the reward of seat {row.seat} is {reward} where {row.reward} is expected"
    if row.flags & FIRST:
        return f"{text}; a first row has the reward 0"
    for other in round_rows:
        if other.reward == reward:
            return f"{text}; it is that of seat {other.seat}: take each action by its seat in ACT"
    return (
        f"{text}; it is the checksum of the action_nbytes bytes of the seat's last action, "
        "divided by 1009"
    )


def _explain_row(
    content: Any, row: EchoRow, round_rows: Sequence[EchoRow], rule: ObservationRule
) -> str:
    """Returns what is wrong with the observation of a row."""
    place = f"seat {row.seat} in its row {row.number}"
    for other in round_rows:
        if (content == rule.row(other.seat, other.number)).all():
            return (
                f"{place} shows the observation of seat {other.seat}; rows of bytes lie in "
                "the order of seat[n]; if yours do, check the formula of v"
            )
    for number in range(max(row.number - CONFUSED_ROWS, 0), row.number + CONFUSED_ROWS):
        if (content == rule.row(row.seat, number)).all():
            return (
                f"{place} shows the observation of row {number}; rows count from 0 since the "
                "program began, those that end an episode too; if yours do, check the formula "
                "of v"
            )

    expected = rule.row(row.seat, row.number)
    byte = int(np.flatnonzero(content != expected)[0])
    for column in rule.layout.columns:
        element = (byte - column.offset) // np.dtype(column.dtype).itemsize
        if 0 <= element < math.prod(column.shape):
            value, expected_value = (
                cells.view(rule.layout.dtype)[0][column.name].reshape(-1)[element]
                for cells in (content, expected)
            )
            return (
                f"{place} shows {value} where {expected_value} is expected, at byte "
                f"{byte}: element {element} of column {column.name}, {column.dtype}, which begins "
                f"at offset {column.offset}"
            )
    return (
        f"byte {byte} of the observation of {place} belongs to no column and is {content[byte]}; "
        "columns begin at their offsets in WELCOME, and other bytes are zeros"
    )


def listed(seats: Sequence[int]) -> str:
    """Returns seats in words."""
    if len(seats) == 1:
        return f"seat {seats[0]}"
    return f"seats {', '.join(map(str, seats))}"
