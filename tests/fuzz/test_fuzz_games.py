"""The port of games: hostile bytes over TCP, WebSocket and HTTP, beside an honest game."""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette")
pytest.importorskip("websockets")

from game_client import FIRST, HELLO, GameClient, row_dtype, step
from mutations import DEEP, FLOATS, bounded, changed, flipped, fuzzed, unsigned, values
from penstock.envs.space_json import to_json
from penstock.serving.service import Service
from served_games import PARTS, RECURRENT, random_policy, served

SEATS = 4
SPACE = to_json(PARTS)
GREETING = {"protocol": 1, "seats": SEATS, "token": "", "observation": SPACE, "name": "a"}
FIELDS = ("protocol", "seats", "token", "observation", "action", "name")
UPGRADE = (
    b"GET /play HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
READ_S = 0.02  # answers to hostile bytes are read for so long, and then the peer is gone
SETTLE_S = 20


class Field:
    """A served policy, a game beside the hostile ones, and what the server logs."""

    def __init__(self, port: int, service: Service) -> None:
        self.port = port
        self.service = service
        self.honest = GameClient(port, seats=2)
        self.observations = {
            "place": np.array([2, 3]),
            "ways": np.ones((2, 2), np.int64),
            "action_mask": np.ones((2, 3), np.int8),
        }
        self.expected = self.honest.act(self.observations, [FIRST, FIRST])
        self.dtype = row_dtype(self.honest.welcome["row"], self.honest.welcome["row_nbytes"])
        self.errors: list[str] = []

    def attack(self, *chunks: bytes, awaits_answer: bool = False) -> bytes:
        """Send chunks on a connection of its own; returns what came back."""
        received = b""
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=5)
        with closing(peer), suppress(OSError):
            for chunk in chunks:
                peer.sendall(chunk)
            peer.settimeout(SETTLE_S if awaits_answer else READ_S)
            while data := peer.recv(1 << 16):
                received += data
                peer.settimeout(READ_S)
        self.check()
        return received

    def check(self) -> None:
        """The honest game gets its actions, and nothing was raised."""
        assert self.honest.act(self.observations, [FIRST, FIRST]) == self.expected
        assert self.errors == []


class _Noting(logging.Handler):
    """Notes what is logged."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(self.format(record))


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    service = Service(random_policy(tmp_path_factory.mktemp("run"), "parts", *RECURRENT))
    with served(service) as port:
        made = Field(port, service)
        handler = _Noting(made.errors)
        for name in ("asyncio", "uvicorn.error", "websockets.server"):
            logging.getLogger(name).addHandler(handler)
        yield made
        made.honest.close()
        ends_s = time.monotonic() + SETTLE_S
        while service.seats.taken and time.monotonic() < ends_s:
            time.sleep(0.05)
        assert service.seats.taken == 0  # every seat of a hostile game is free again
        for name in ("asyncio", "uvicorn.error", "websockets.server"):
            logging.getLogger(name).removeHandler(handler)


def framed(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def hello(content: Any = None) -> bytes:
    said = {"protocol": 1, "seats": SEATS} if content is None else content
    return struct.pack("<I", HELLO) + as_json(said)


def as_json(value: Any) -> bytes:
    """JSON in which bytes are lists in lists."""
    return json.dumps(value, default=lambda _: json.loads("[" * 400 + "]" * 400)).encode()


@st.composite
def pieces(draw: st.DrawFn, content: bytes) -> list[bytes]:
    """Bytes cut anywhere."""
    ends = sorted(draw(st.lists(st.integers(0, len(content)), max_size=3)))
    return [content[start:end] for start, end in zip([0, *ends], [*ends, None], strict=True)]


@st.composite
def steps(draw: st.DrawFn, dtype: np.dtype[Any]) -> bytes:
    """STEPs with some things wrong: seats, flags, rewards, bytes of rows, and of the message."""
    stream = b""
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, SEATS))
        seats = draw(st.permutations(range(SEATS)))[:count]
        if draw(st.booleans()):
            seats = draw(st.lists(unsigned(32), min_size=count, max_size=count))
        flags = draw(
            st.lists(st.sampled_from([0, 1, 2, 4, 8]) | unsigned(8), min_size=count, max_size=count)
        )
        rewards = draw(
            st.lists(
                st.sampled_from([f for f in FLOATS if abs(f) < 1e38 or f != f or abs(f) > 1e400]),
                min_size=count,
                max_size=count,
            )
        )
        rows = np.zeros(count, dtype)
        rows["place"] = 2
        rows["ways"] = 1
        rows["action_mask"] = 1
        content = rows.tobytes()
        if draw(st.booleans()):
            content = flipped(content, draw)
        message = step(seats, content, flags, rewards)
        if draw(st.integers(0, 7)) == 0:
            message = flipped(message, draw)
        stream += framed(message)
    return stream


@fuzzed()
@example(b"\xff" * 64)
@example(bytes(4096))
@example(b"POST /act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999999999999\r\n\r\n")
@example(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n")
@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_end_their_connection(field: Field, content: bytes) -> None:
    with bounded():
        field.attack(content)
        field.attack(framed(hello()) + content)


@fuzzed()
@given(st.data())
def test_any_hello_is_welcomed_or_refused(field: Field, data: st.DataObject) -> None:
    content = data.draw(changed(GREETING) | values(FIELDS) | st.sampled_from(DEEP))
    body = bytes(content) if isinstance(content, bytes) else hello(content)[4:]
    with bounded():
        message = framed(struct.pack("<I", HELLO) + body)
        received = field.attack(message, awaits_answer=True)
    assert received[4:8] in (b"\x02\0\0\0", b"\x05\0\0\0")


@fuzzed(cost=0.5)
@given(st.data())
def test_any_steps_are_answered_by_actions_and_faults(field: Field, data: st.DataObject) -> None:
    stream = framed(hello()) + data.draw(steps(field.dtype))
    with bounded():
        received = field.attack(*data.draw(pieces(stream)))

    # What comes back is whole messages of known kinds, with seats and actions that exist.
    position = 0
    while position + 8 <= len(received):
        length, kind = struct.unpack_from("<II", received, position)
        body = received[position + 8 : position + 4 + length]
        if len(body) < length - 4:
            break  # the rest came later
        assert kind in (2, 4, 5)
        if kind == 4:
            (n,) = struct.unpack_from("<I", body)
            assert all(seat < SEATS for seat in struct.unpack_from(f"<{n}I", body, 4))
            actions = np.frombuffer(body, "<i8", n, len(body) - 8 * n)
            assert set(actions.tolist()) <= {5, 6, 7}
        else:
            json.loads(body)
        position += 4 + length


@fuzzed()
@example(b"\x88\x80aaaa", False)  # CLOSE
@example(b"\x08\x80aaaa", True)  # CLOSE in fragments
@example(b"\x00\x80aaaa" * 2000, False)  # fragments of nothing
@example(b"\x02\x80aaaa" + b"\x00\x80aaaa" * 20_000, False)
@example(b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff", True)  # 2^63 - 1 bytes
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_over_web_socket_end_it_or_are_ignored(
    field: Field, content: bytes, together: bool
) -> None:
    with bounded():
        field.attack(*([UPGRADE + content] if together else [UPGRADE, content]))


@fuzzed()
@given(st.data())
def test_any_body_of_act_is_answered_or_refused(field: Field, data: st.DataObject) -> None:
    observation = {
        "place": 2,
        "inner": {"speed": [0, 0, 0]},
        "flags": [0] * 5,
        "lamps": [0] * 3,
        "ways": [1, 1],
        "action_mask": [1] * 3,
    }
    content = data.draw(
        changed({"observation": observation, "state": [0.0] * 32})
        | values(("observation", "state"))
    )
    body = as_json(content)
    head = (
        "POST /act HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with bounded():
        received = field.attack(head.encode() + body)
    assert received[9:12] in (b"200", b"400", b"")
