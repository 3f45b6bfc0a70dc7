"""The rule of the echo game against numbers that were computed by hand from its page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.serving.echo_game import (
    EPISODES,
    EchoGame,
    EchoRow,
    ObservationRule,
    checksum_reward,
)
from penstock.serving.messages import FIRST, GameMessageKind, step_dtype
from penstock.serving.step_departures import find_departure

NUMBERS = spaces.Box(-1, 1, (4,), np.float32)


def step_of(rows: list[EchoRow], rule: ObservationRule) -> Any:
    """The STEP of these rows, as a record."""
    step = np.zeros((), step_dtype(len(rows), rule.layout.nbytes))
    step["length"] = step.itemsize - 4
    step["kind"] = GameMessageKind.STEP
    step["count"] = len(rows)
    step["seat"] = [row.seat for row in rows]
    step["flags"] = [row.flags for row in rows]
    step["reward"] = [row.reward for row in rows]
    step["rows"] = [rule.row(row.seat, row.number) for row in rows]
    return step


def test_numbers_are_counted_in_97ths() -> None:
    # 31 * 2 + 7 * 1 + 3 * e
    expected = np.array([69, 72, 75, 78], np.float32) / np.float32(97)
    assert ObservationRule(NUMBERS).row(seat=1, number=2).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        # Seat 2 in its row 3: (93 + 14 + 3 e) mod 97 = 10, 13, 16 ...
        pytest.param(spaces.Discrete(7, start=-2), [-2 + 3], id="choice"),
        pytest.param(spaces.MultiDiscrete([3, 5], start=[1, -1]), [1 + 1, -1 + 3], id="choices"),
        pytest.param(spaces.MultiBinary(3), [0, 1, 0], id="switches"),
        pytest.param(spaces.Box(0, 255, (3,), np.uint8), [10, 13, 16], id="pixels"),
        pytest.param(spaces.Box(-3, 3, (2,), np.int32), [-3 + 3, -3 + 6], id="whole"),
    ],
)
def test_whole_numbers_are_counted_from_the_lowest(
    space: spaces.Space[Any], expected: list[int]
) -> None:
    rule = ObservationRule(space)
    row = rule.row(seat=2, number=3)
    dtype = np.dtype(space.dtype)
    used = row[: len(expected) * dtype.itemsize]
    assert used.view(dtype).tolist() == expected
    assert not row[len(used) :].any()


def test_elements_are_counted_over_all_columns_and_a_mask_allows_all() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": spaces.Box(0, 1, (1,))})
    row = ObservationRule(space).row(seat=0, number=0)
    assert row[:3].tolist() == [1, 1, 1]
    assert row[4:8].view(np.float32) == np.float32(9) / np.float32(97)


def test_a_reward_is_the_checksum_of_all_bytes() -> None:
    assert checksum_reward(b"\x01\x02") == np.float32(35) / np.float32(1009)
    assert checksum_reward(b"\xff\x10") == np.float32(359) / np.float32(1009)
    assert checksum_reward(b"\x01\0\0\0\0\0\0\0") == np.float32(pow(33, 7, 1009)) / np.float32(1009)


def test_episodes_have_their_lengths_and_ends_alternate() -> None:
    game = EchoGame()
    rows: list[list[EchoRow]] = [[], [], []]
    while steps := game.next_round():
        for row in (row for step in steps for row in step):
            rows[row.seat].append(row)
            if row.goes_on:
                game.seats[row.seat].take(bytes(8))
    for seat, rows_of_seat in enumerate(rows):
        ends = [row for row in rows_of_seat if not row.goes_on]
        begins = [row.number for row in rows_of_seat if row.flags == FIRST]
        assert [row.flags for row in ends] == [2, 4] * (EPISODES // 2)
        lengths = [end.number - begin for end, begin in zip(ends, begins, strict=True)]
        assert lengths == [3 + (seat + 2 * episode) % 5 for episode in range(EPISODES)]


def test_a_seat_between_episodes_loses_none_with_the_connection() -> None:
    game = EchoGame()
    game.next_round()
    game.lose_connection()
    game.lose_connection()
    (rows,) = game.next_round()
    assert [(row.flags, row.number) for row in rows] == [(FIRST, 1)] * 3
    for seat in game.seats:
        for _ in range(5):
            seat.take(bytes(8))
    # Episode 1 has 3 + (seat + 2) mod 5 actions: 5 of seat 0.
    ends = [row for step in game.next_round() for row in step if not row.goes_on]
    assert [(row.seat, row.flags) for row in ends] == [(0, 4)]


def test_a_step_is_kept_in_any_order_of_seats() -> None:
    rule = ObservationRule(NUMBERS)
    (rows,) = EchoGame().next_round()
    assert find_departure(step_of(rows, rule).tobytes(), rows, rows, rule) == ""
    assert find_departure(step_of(rows[::-1], rule).tobytes(), rows, rows, rule) == ""


def test_every_byte_of_a_step_is_compared() -> None:
    rule = ObservationRule(spaces.MultiBinary(5))
    (rows,) = EchoGame().next_round()
    message = step_of(rows, rule).tobytes()
    # A length or a kind that cannot be is found when the message is read.
    for byte in range(8, len(message)):
        changed = bytearray(message)
        changed[byte] ^= 1
        assert find_departure(bytes(changed), rows, rows, rule), byte
