"""What is wrong with a STEP of the echo game, in one sentence.

`find_departure` compares a message with the rows that are expected (`echo_game.py`), field by field
in the order of the message, and names the first that differs: what came, what is expected, where.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.serving.echo_game import SEATS, TURN_SEAT, EchoRow, ObservationRule
from penstock.serving.messages import (
    FIRST,
    HEAD,
    LENGTH,
    GameMessageKind,
    padded,
    step_dtype,
    step_nbytes,
)
from penstock.serving.rows import RowColumn

FLAG_NAMES = {0: "goes on", 1: "first", 2: "terminated", 4: "truncated", 8: "leaves"}
# Rows of a seat before and after the expected one, which a client may have confused with it.
CONFUSED_ROWS = 20


def find_departure(
    message: bytes,
    expected: Sequence[EchoRow],
    round_rows: Sequence[EchoRow],
    rule: ObservationRule,
) -> str:
    """Returns a sentence on how a message departs from the STEP that is expected, or "".

    Args:
        message: with its length in front, of a kind that exists.
        expected: the rows of the STEP, which may come in any order.
        round_rows: all rows of the round, with which they may be confused.
        rule: what seats see.
    """
    _, kind = HEAD.unpack_from(message)
    seats = [row.seat for row in expected]
    if kind != GameMessageKind.STEP:
        return (
            f"{GameMessageKind(kind).name} came where a STEP of {listed(seats)} is expected; "
            "the seats have episodes to play"
        )
    step = rows_of(message, rule.layout.nbytes)
    if step is None:
        return _explain_size(message, len(expected), rule.layout.nbytes)
    if sorted(step["seat"].tolist()) != sorted(seats):
        return _explain_seats(step["seat"].tolist(), expected)

    by_seat = {row.seat: row for row in expected}
    sent = [by_seat[seat] for seat in step["seat"].tolist()]
    sentences = (
        _explain_flags(step, sent),
        _explain_padding(message, len(sent)),
        _explain_rewards(step, sent, round_rows),
        _explain_rows(step, sent, round_rows, rule),
    )
    return next(filter(None, sentences), "")


def rows_of(message: bytes, row_nbytes: int) -> Any:
    """Returns a STEP as a record of `step_dtype`; None if its size is not that of its rows."""
    if len(message) < HEAD.size + 4:
        return None
    _, kind = HEAD.unpack_from(message)
    (count,) = struct.unpack_from("<I", message, HEAD.size)
    if kind != GameMessageKind.STEP or not 1 <= count <= SEATS:
        return None
    if len(message) != step_nbytes(count, row_nbytes):
        return None
    return np.frombuffer(message, step_dtype(count, row_nbytes))[0]


def _explain_size(message: bytes, expected_count: int, row_nbytes: int) -> str:
    """Returns what is wrong with the size of a STEP."""
    (count,) = struct.unpack_from("<I", message, HEAD.size) if len(message) >= 12 else (0,)
    if not 1 <= count <= SEATS:
        return (
            f"a STEP says it has {count} rows where {expected_count} are expected; n is a u32 "
            "behind the kind"
        )
    nbytes = step_nbytes(count, row_nbytes) - LENGTH.size
    return (
        f"a STEP of {count} rows has {len(message) - LENGTH.size} bytes where {nbytes} are "
        f"expected: kind and n, {4 * count} of seats, {count} of flags, zeros up to a multiple of "
        f"4, {4 * count} of rewards, zeros up to a multiple of 8, and {count} times row_nbytes, "
        f"which is {row_nbytes}; see WELCOME"
    )


def _explain_seats(seats: Sequence[int], expected: Sequence[EchoRow]) -> str:
    """Returns why a STEP of these seats is not the expected one."""
    expected_seats = [row.seat for row in expected]
    text = f"a STEP has {listed(seats)} where {listed(expected_seats)} belong"
    missing = [row for row in expected if row.seat not in seats]
    if missing and missing[0].reason:
        row = missing[0]
        return f"{text}; seat {row.seat} begins its next episode by a first row, as {row.reason}"
    return (
        f"{text}; each seat has one row in a round, and seat {TURN_SEAT} a STEP of its own in each "
        "third round, until it has played its episodes"
    )


def _explain_flags(step: Any, sent: Sequence[EchoRow]) -> str:
    """Returns a sentence on the first row whose flags are not those expected, or ""."""
    for flags, row in zip(step["flags"].tolist(), sent, strict=True):
        if flags == row.flags:
            continue
        text = (
            f"the flags of seat {row.seat} are {_flags_text(flags)} where {_flags_text(row.flags)} "
            "is expected"
        )
        if row.reason:
            return f"{text}; {row.reason}, so it begins its next episode"
        if flags & FIRST or row.flags & FIRST:
            return f"{text}; a first row begins each episode, and no other row is one"
        return (
            f"{text}; episode i of seat s has 3 + (s + 2 i) mod 5 actions, even ones are "
            "terminated, odd ones truncated"
        )
    return ""


def _explain_padding(message: bytes, count: int) -> str:
    """Returns a sentence on bytes in front of the rewards or the rows that are no zeros, or ""."""
    flags_end = LENGTH.size + 8 + 5 * count
    reward = LENGTH.size + padded(8 + 5 * count, 4)
    reward_end = reward + 4 * count
    rows = LENGTH.size + padded(reward_end - LENGTH.size, 8)
    if any(message[flags_end:reward]):
        return "the bytes between flags and rewards are no zeros; write zeros"
    if any(message[reward_end:rows]):
        return "the bytes between rewards and observations are no zeros; write zeros"
    return ""


def _explain_rewards(step: Any, sent: Sequence[EchoRow], round_rows: Sequence[EchoRow]) -> str:
    """Returns a sentence on the first reward that is not the one expected, or ""."""
    for reward, row in zip(step["reward"], sent, strict=True):
        if reward.tobytes() == row.reward.tobytes():
            continue
        text = f"the reward of seat {row.seat} is {reward} where {row.reward} is expected"
        others = [other.seat for other in round_rows if other.reward == reward]
        if row.flags & FIRST:
            return f"{text}; a first row has the reward 0"
        if others:
            return f"{text}; it is that of seat {others[0]}: take each action by its seat in ACT"
        return (
            f"{text}; it is the checksum of the action_nbytes bytes of the seat's last action, "
            "divided by 1009"
        )
    return ""


def _explain_rows(
    step: Any,
    sent: Sequence[EchoRow],
    round_rows: Sequence[EchoRow],
    rule: ObservationRule,
) -> str:
    """Returns a sentence on the first observation that is not the one expected, or ""."""
    for content, row in zip(step["rows"], sent, strict=True):
        expected = rule.row(row.seat, row.number)
        if (content == expected).all():
            continue
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
        return _explain_bytes(place, content, expected, rule)
    return ""


def _explain_bytes(place: str, content: Any, expected: Any, rule: ObservationRule) -> str:
    """Returns a sentence on the first byte of a row that is not the one expected."""
    byte = int(np.flatnonzero(content != expected)[0])
    for column in rule.layout.columns:
        itemsize = np.dtype(column.dtype).itemsize
        element = (byte - column.offset) // itemsize
        if 0 <= element < math.prod(column.shape):
            value = _element_at(content, column, element)
            expected_value = _element_at(expected, column, element)
            return (
                f"{place} shows {value} where {expected_value} is expected, at byte "
                f"{byte}: element {element} of column {column.name}, {column.dtype}, which begins "
                f"at offset {column.offset}"
            )
    return (
        f"byte {byte} of the observation of {place} belongs to no column and is {content[byte]}; "
        "columns begin at their offsets in WELCOME, and other bytes are zeros"
    )


def _element_at(row: Any, column: RowColumn, element: int) -> Any:
    """Returns one element of a column in a row of bytes."""
    itemsize = np.dtype(column.dtype).itemsize
    begin = column.offset + element * itemsize
    dtype = "|u1" if column.dtype == "|b1" else column.dtype
    return np.frombuffer(row[begin : begin + itemsize].tobytes(), dtype)[0]


def _flags_text(flags: int) -> str:
    """Returns flags as a number and in words."""
    return f"{flags} ({FLAG_NAMES.get(flags, 'several')})"


def listed(seats: Sequence[int]) -> str:
    """Returns seats in words."""
    if len(seats) == 1:
        return f"seat {seats[0]}"
    return f"seats {', '.join(map(str, seats))}"
