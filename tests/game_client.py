"""A client of `penstock serve` by plain sockets, written from docs/games-protocol.md alone."""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

HELLO, WELCOME, STEP, ACT, FAULT, END = range(1, 7)
FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8
WAIT_S = 20


class Acts(NamedTuple):
    """The content of an ACT."""

    seats: list[int]
    actions: npt.NDArray[np.void]
    """One record for each, with the columns of WELCOME."""


def padded(data: bytes, align: int) -> bytes:
    """The data with zeros up to a multiple of ``align``."""
    return data + bytes(-len(data) % align)


def row_dtype(columns: Sequence[Sequence[Any]], nbytes: int) -> np.dtype[Any]:
    """The record of a row, by the columns of WELCOME."""
    names, dtypes, shapes, offsets = zip(*columns, strict=True)
    formats = [(dtype, tuple(shape)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})


def step(
    seats: Sequence[int], rows: bytes, flags: Sequence[int], rewards: Sequence[float] = ()
) -> bytes:
    """A STEP without its length; rewards are zeros by default."""
    n = len(seats)
    message = struct.pack(f"<II{n}I{n}B", STEP, n, *seats, *flags)
    rewards = rewards or [0.0] * n
    return padded(padded(message, 4) + struct.pack(f"<{n}f", *rewards), 8) + rows


class GameClient:
    """One connection."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, **hello: Any) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.file = self.socket.makefile("rb")
        self.send(struct.pack("<I", HELLO) + json.dumps({"protocol": 1} | hello).encode())
        kind, body = self.receive()
        if kind != WELCOME:
            self.close()
            raise AssertionError((kind, body))
        self.welcome = json.loads(body)
        self.row = row_dtype(self.welcome["row"], self.welcome["row_nbytes"])
        self.action = row_dtype(self.welcome["action_row"], self.welcome["action_nbytes"])

    def send(self, *messages: bytes) -> None:
        self.socket.sendall(b"".join(struct.pack("<I", len(m)) + m for m in messages))

    def receive(self) -> tuple[int, bytes]:
        """The kind and the body of the next message; kind 0 if the connection is closed."""
        head = self.file.read(8)
        if len(head) < 8:
            return 0, b""
        length, kind = struct.unpack("<II", head)
        return kind, self.file.read(length - 4)

    def rows(self, observations: Any) -> bytes:
        """The rows of observations: one array [n, ...], or one by the name of each column."""
        arrays = observations if isinstance(observations, dict) else {"obs": observations}
        records = np.zeros(len(next(iter(arrays.values()))), self.row)
        for name, array in arrays.items():
            records[name] = array
        return records.tobytes()

    def read_acts(self) -> Acts:
        """The next ACT. Raises AssertionError with the content of a FAULT."""
        kind, body = self.receive()
        assert kind == ACT, (kind, body)
        (n,) = struct.unpack_from("<I", body)
        seats = struct.unpack_from(f"<{n}I", body, 4)
        start = len(padded(bytes(8 + 4 * n), 8)) - 4
        return Acts([*seats], np.frombuffer(body, self.action, n, start))

    def act(
        self,
        observations: Any,
        flags: Sequence[int],
        seats: Sequence[int] = (),
        rewards: Sequence[float] = (),
    ) -> Any:
        """Send one STEP, and return the actions of its seats that go on, by seat."""
        seats = seats or range(len(flags))
        self.send(step(seats, self.rows(observations), flags, rewards))
        waiting = {seat for seat, flag in zip(seats, flags, strict=True) if flag < TERMINATED}
        actions: dict[int, Any] = {}
        while waiting - actions.keys():
            acts = self.read_acts()
            actions |= zip(acts.seats, acts.actions["action"], strict=True)
        return actions

    def read_fault(self) -> Any:
        """The content of the next FAULT."""
        kind, body = self.receive()
        assert kind == FAULT, (kind, body)
        return json.loads(body)

    def close(self) -> None:
        self.file.close()
        self.socket.close()
