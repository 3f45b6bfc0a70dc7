"""Messages of games: where their parts lie, and what is no HELLO."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import game_client
from penstock.serving.messages import (
    Hello,
    MessageError,
    act_dtype,
    act_records,
    json_message,
    read_hello,
    step_dtype,
    step_nbytes,
)

SPACE_NBYTES = 1 << 20


def hello(**fields: Any) -> Hello:
    return read_hello(json.dumps({"protocol": 1} | fields).encode(), SPACE_NBYTES)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 255, 1000])
def test_parts_of_a_step_lie_where_a_client_by_the_page_puts_them(count: int) -> None:
    seats = [7 * seat for seat in range(count)]
    flags = [seat % 16 for seat in range(count)]
    rewards = [0.5 * seat for seat in range(count)]
    rows = np.random.default_rng(0).integers(0, 255, (count, 24), np.uint8)
    message = game_client.step(seats, rows.tobytes(), flags, rewards)

    content = struct.pack("<I", len(message)) + message
    assert len(content) == step_nbytes(count, 24)
    [record] = np.frombuffer(content, step_dtype(count, 24))
    assert (record["length"], record["kind"], record["count"]) == (len(message), 3, count)
    assert record["seat"].tolist() == seats
    assert record["flags"].tolist() == flags
    assert record["reward"].tolist() == rewards
    np.testing.assert_array_equal(record["rows"], rows)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_acts_of_as_many_rows_follow_each_other(count: int) -> None:
    seats = np.arange(2 * count, dtype=np.uint32)
    rows = np.arange(2 * count * 8, dtype=np.uint8).reshape(-1, 8)
    content = act_records(count, seats, rows).tobytes()
    nbytes = act_dtype(count, 8).itemsize
    assert len(content) == 2 * nbytes
    for i in range(2):
        length, kind, n = struct.unpack_from("<III", content, i * nbytes)
        assert (length, kind, n) == (nbytes - 4, 4, count)
        own = slice(i * count, (i + 1) * count)
        assert [*struct.unpack_from(f"<{count}I", content, i * nbytes + 12)] == seats[own].tolist()
        start = i * nbytes + 4 + (8 + 4 * count + 7) // 8 * 8
        assert content[start : start + 8 * count] == rows[own].tobytes()


def test_hello_needs_only_its_protocol() -> None:
    assert hello() == Hello()


def test_hello_says_the_side_of_each_seat_of_a_game() -> None:
    assert hello(seats=6, sides=[0, 1, 1]).sides == (0, 1, 1)
    assert hello(seats=2).sides is None


@pytest.mark.parametrize(
    ("sides", "field", "reason"),
    [
        ([], "sides", "give the side of each seat of one game"),
        ("01", "sides", "give the side of each seat of one game"),
        ([0, True], "sides", "give the side of each seat of one game"),
        ([0] * 257, "sides", "give the side of each seat of one game"),
        ([0, 2**62], "sides", "are not counted from 0"),
        ([-1, 0], "sides", "are not counted from 0"),
        ([0, 1, 2], "seats", "4 seats are no whole games of 3 seats"),
    ],
)
def test_sides_that_cannot_be_are_refused(sides: Any, field: str, reason: str) -> None:
    with pytest.raises(MessageError, match=reason) as error:
        hello(seats=4, sides=sides)
    assert error.value.field == field


def test_hello_says_seats_and_spaces() -> None:
    said = hello(
        seats=3, name="pole", action={"Discrete": [2, 0]}, observation={"Box": [-1, 1, [3], "<f4"]}
    )
    assert (said.seats, said.name) == (3, "pole")
    assert said.action == spaces.Discrete(2)
    assert said.observation == spaces.Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "hello"),
        (b"\xff\xfe", "hello"),
        (b"[" * 60_000, "hello"),
        (b"9" * 60_000, "hello"),
        (b"[]", "hello"),
        (b"{}", "protocol"),
        (b'{"protocol": true}', "protocol"),
        (b'{"protocol": 2}', "protocol"),
        (b'{"protocol": 1, "seats": 0}', "seats"),
        (b'{"protocol": 1, "seats": 1.5}', "seats"),
        (b'{"protocol": 1, "seats": true}', "seats"),
        (b'{"protocol": 1, "token": 5}', "token"),
        (b'{"protocol": 1, "name": "%s"}' % (b"x" * 201), "name"),
        (b'{"protocol": 1, "action": {"Discrete": [0, 0]}}', "action"),
        (b'{"protocol": 1, "action": {"Discrete": [99999999, 0]}}', "action"),
        (b'{"protocol": 1, "action": {"Discrete": "22"}}', "action"),
        (b'{"protocol": 1, "observation": {"Box": [0, 1, [99999, 99999], "<f4"]}}', "observation"),
        (b'{"protocol": 1, "observation": {"Box": [0, 1, [2], "O"]}}', "observation"),
        (b'{"protocol": 1, "observation": {"Sequence": []}}', "observation"),
        (b'{"protocol": 1, "observation": 5}', "observation"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[:60],
)
def test_what_is_no_hello_is_refused_by_its_field(body: bytes, field: str) -> None:
    with pytest.raises(MessageError) as refusal:
        read_hello(body, SPACE_NBYTES)
    assert refusal.value.field == field
    assert len(refusal.value.reason) < 200


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ([1, 2], "no space is written as [1, 2]"),
        ({"Discrete": 3}, 'no space is written as {"Discrete": 3}'),
        ({"Tuple": [{"Box": [0, 1, [2]]}]}, 'no space is written as {"Box": [0, 1, [2]]}'),
        ({"Discrete": [0, 0]}, 'no space is written as {"Discrete": [0, 0]}'),
        ({"Dict": [["a", {"Discrete": [2, 0]}]] * 2}, "a Dict has the key a twice"),
    ],
)
def test_a_space_of_another_form_is_named_and_not_what_python_says(space: Any, reason: str) -> None:
    with pytest.raises(MessageError) as refusal:
        hello(observation=space)
    described = "observation is no space as docs/games-protocol.md describes"
    assert refusal.value.reason == f"{described}: {reason}"


def test_an_infinite_number_cannot_be_written_into_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_message(game_client.WELCOME, {"low": float("inf")})  # type: ignore[arg-type]
