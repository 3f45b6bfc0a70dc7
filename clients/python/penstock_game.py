"""A game's end of `penstock serve` and `penstock serve-env`: one file that needs numpy alone.

    game = Game("127.0.0.1", 8900, seats=2)
    rows = game.rows([0, 1])               # a row of each seat, made once
    rows.flags[:] = FIRST                  # both begin an episode
    while True:
        rows.obs["obs"][:] = what_they_see # arrays into the message itself
        try:
            faults = game.step(rows)       # sends the rows, and waits for the actions
        except Lost:
            game.reconnect()
            rows.flags[:] = FIRST          # all seats begin anew
            continue
        rows.reward[:] = move(rows.action) # what the actions brought

The protocol is docs/games-protocol.md.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8
_ENDED = TERMINATED | TRUNCATED | LEAVES
_PROTOCOL = 1
_HELLO, _WELCOME, _STEP, _ACT, _FAULT, _END = range(1, 7)
_MOST_NBYTES = 16 << 20  # of a message
_CONNECT_S = 10.0  # the longest wait for a connection and for WELCOME
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between attempts to connect


class Lost(ConnectionError):
    """The service has ended or the connection broke: `Game.reconnect`, and begin all episodes."""


class Refused(Exception):
    """The service does not take this game: its spaces, its token or what it sends do not fit."""


class Fault(NamedTuple):
    """A row that was not taken. Its seat must begin a new episode; the others go on."""

    seat: int
    field: str
    error: str


class Rows:
    """The rows of some seats, to be sent again and again; made by `Game.rows`."""

    flags: npt.NDArray[np.uint8]
    """Of each row: FIRST, TERMINATED, TRUNCATED, LEAVES. They are 0 again after a step."""
    reward: npt.NDArray[np.float32]
    """What the last action brought. 0 again after a step."""
    obs: npt.NDArray[Any]
    """What each seat sees: a field for each column of `welcome`, "obs" if there is one alone."""
    action: npt.NDArray[Any]
    """The action that each seat got last, ``[rows, *shape]``."""
    is_answered: npt.NDArray[np.bool_]
    """Whether the last step brought an action: not to a row that ended, or with a fault."""

    def __init__(self, seats: Sequence[int], welcome: dict[str, Any]) -> None:
        strange = {seat for seat in seats if not 0 <= seat < welcome["seats"]}
        if strange or len({*seats}) < len(seats):
            raise ValueError(f"seats {seats} are not different ones of 0 to {welcome['seats'] - 1}")
        count = len(seats)
        flags = 12 + 4 * count  # counted from the length, which is in front of the kind
        reward = flags + -(-count // 4) * 4
        rows = 4 + -(-(reward + 4 * count - 4) // 8) * 8
        self.seats = np.array(seats, np.uint32)
        # Numbers lie at multiples of their size from the kind on, which is at the fourth byte.
        self.message = np.zeros(4 + rows + count * welcome["row_nbytes"], np.uint8)[4:]
        self.message[:12].view("<u4")[:] = len(self.message) - 4, _STEP, count
        self.message[12:flags].view("<u4")[:] = seats
        self.flags = self.message[flags : flags + count]
        self.reward = self.message[reward : reward + 4 * count].view("<f4")
        self.obs = self.message[rows:].view(_row_dtype(welcome["row"], welcome["row_nbytes"]))
        self._actions = np.zeros(count, _action_dtype(welcome))
        self.action = self._actions["action"]
        self.is_answered = np.zeros(count, np.bool_)


def _row_dtype(columns: list[list[Any]], nbytes: int) -> np.dtype[Any]:
    names, dtypes, shapes, offsets = zip(*columns, strict=True)
    formats = [(dtype, tuple(shape)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})


def _action_dtype(welcome: dict[str, Any]) -> np.dtype[Any]:
    return _row_dtype(welcome["action_row"], welcome["action_nbytes"])


class Game:
    """A connection, and the seats that play on it."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        seats: int = 1,
        token: str | None = None,
        observation: dict[str, Any] | None = None,
        action: dict[str, Any] | None = None,
        sides: Sequence[int] | None = None,
        name: str = "",
        tls: ssl.SSLContext | None = None,
        wait_s: float = 60.0,
    ) -> None:
        """Connect.

        Args:
            host: of the service.
            port: of the service.
            seats: how many episodes this connection plays at a time.
            token: of the service, if it has one.
            observation: the space of what a seat sees, as JSON of the protocol; None for any.
            action: the space of its actions, likewise.
            sides: the side of each seat of one game, such as (0, 1); None for games of one.
            name: of the game, for people.
            tls: for a service with a certificate, such as `ssl.create_default_context()`.
            wait_s: how long to try, here and in `reconnect`; `math.inf` for ever.

        Raises:
            Lost: nobody has served there in that time.
            Refused: the service does not take the game.
        """
        self.welcome: dict[str, Any] = {}
        """What the service says of its policy, its spaces and the layout of rows."""
        self._address = (host, port)
        self._tls = tls
        self._wait_s = wait_s
        spaces: dict[str, Any] = {"observation": observation, "action": action}
        if sides is not None:
            spaces["sides"] = [*sides]
        hello = {"protocol": _PROTOCOL, "seats": seats, "token": token, "name": name, **spaces}
        self._hello = _message(_HELLO, hello)
        self._socket: socket.socket | None = None
        # Of each seat: whether its row waits for an action, and whether it got one.
        self._is_waiting = np.zeros(seats, np.bool_)
        self._is_answered = np.zeros(seats, np.bool_)
        self._actions: npt.NDArray[Any]
        self.reconnect()

    def rows(self, seats: Sequence[int]) -> Rows:
        """Returns the rows of some seats, to be filled and sent step after step."""
        return Rows(seats, self.welcome)

    def step(self, *parts: Rows) -> list[Fault]:
        """Send rows, and wait until those that go on have their action.

        Args:
            parts: each is sent as a message of its own; together they have a seat at most once.

        Returns: the rows that were not taken. Their seats must begin new episodes.

        Raises:
            Lost: `reconnect`; all seats must begin new episodes.
            Refused: the service has closed the connection for what this game sent.
        """
        if self._socket is None:
            raise Lost("the connection is closed; call reconnect, and begin new episodes")
        content = b"".join([rows.message.tobytes() for rows in parts])
        for rows in parts:
            self._is_waiting[rows.seats] = rows.flags & _ENDED == 0
            self._is_answered[rows.seats] = False
            rows.is_answered[:] = False
            rows.flags[:] = 0
            rows.reward[:] = 0

        faults: list[Fault] = []
        try:
            self._socket.sendall(content)
            while self._is_waiting.any():
                kind, body = self._receive()
                if kind == _ACT:
                    self._take_actions(body)
                elif kind == _FAULT:
                    fault = _fault(body)
                    faults.append(fault)
                    self._is_waiting[fault.seat] = False
                else:
                    raise Lost(f"the service has left: {_reason(body)}")
        except (OSError, Refused) as error:
            self._drop()
            raise error if isinstance(error, (Lost, Refused)) else Lost(str(error)) from error

        for rows in parts:
            rows.is_answered[:] = self._is_answered[rows.seats]
            rows._actions[rows.is_answered] = self._actions[rows.seats[rows.is_answered]]
        return faults

    def reconnect(self) -> None:
        """Connect again, with growing pauses; all seats must begin new episodes.

        Rows that were made before remain valid.

        Raises:
            Lost: nobody has served there in `wait_s` seconds.
            Refused: the service does not take the game, or has other spaces than before.
        """
        deadline_s = time.monotonic() + self._wait_s
        pause_s = _FIRST_PAUSE_S
        while True:
            self._drop()
            try:
                self._connect()
                return
            except OSError as error:
                if time.monotonic() + pause_s > deadline_s:
                    self._drop()
                    host, port = self._address
                    text = f"nobody serves games at {host}:{port} ({error}); "
                    text += "start penstock serve or serve-env there"
                    raise Lost(text) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Leave; the service closes every seat."""
        if self._socket is not None:
            with suppress(OSError):  # the service may have gone already
                self._socket.sendall(_message(_END, {"reason": "the game is over"}))
        self._drop()

    def _connect(self) -> None:
        """Send HELLO, and read WELCOME. Raises OSError or Refused."""
        connection = socket.create_connection(self._address, timeout=_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_hostname=self._address[0])
        self._socket = connection
        self._reader = connection.makefile("rb")
        connection.sendall(self._hello)
        kind, body = self._receive()
        if kind == _FAULT:
            _fault(body)
        if kind != _WELCOME:
            raise Lost(_reason(body))
        # An answer may take as long as the service likes.
        connection.settimeout(None)
        welcome = json.loads(body[4:])
        layout = ("row", "row_nbytes", "action_row", "action_nbytes", "seats")
        if self.welcome and any(welcome[key] != self.welcome[key] for key in layout):
            raise Refused("the service has other spaces than before; start the game anew")
        self.welcome = welcome
        self._actions = np.zeros(welcome["seats"], _action_dtype(welcome))
        self._is_waiting[:] = False

    def _receive(self) -> tuple[int, bytes]:
        """Returns the kind of the next message, and all of it from the kind on."""
        head = self._reader.read(4)
        length = int.from_bytes(head, "little")
        if len(head) == 4 and not 4 <= length <= _MOST_NBYTES:
            raise Refused(f"a message of {length} bytes; is it penstock serve?")
        body = self._reader.read(length)
        if len(head) < 4 or len(body) < length:
            raise Lost("the connection was lost")
        return int.from_bytes(body[:4], "little"), body

    def _take_actions(self, body: bytes) -> None:
        """Keep the actions of an ACT by their seats."""
        (count,) = struct.unpack_from("<I", body, 4)
        seats = np.frombuffer(body, "<u4", count, 8)
        actions = np.frombuffer(body, self._actions.dtype, count, -(-(8 + 4 * count) // 8) * 8)
        self._actions[seats] = actions
        self._is_answered[seats] = self._is_waiting[seats]
        self._is_waiting[seats] = False

    def _drop(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._reader.close()
            self._socket.close()
            self._socket = None


def _message(kind: int, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    return struct.pack("<II", 4 + len(body), kind) + body


def _fault(body: bytes) -> Fault:
    """Returns the content of a FAULT of a seat; raises Refused or Lost for one without a seat."""
    fault = json.loads(body[4:])
    if fault["field"] == "connection":
        raise Lost(fault["error"])  # there may be room later
    if fault["seat"] is None:
        raise Refused(fault["error"])
    return Fault(**fault)


def _reason(body: bytes) -> str:
    """Returns the content of END."""
    return str(json.loads(body[4:])["reason"])
