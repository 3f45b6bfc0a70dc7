"""`penstock check-client`: plays the service by a script, and compares what a client sends.

The client plays the echo game (`echo_game.py`), so each of its bytes is known; `client_script.py`
says with which spaces, and how it is answered. A part of the check is one run of the game, and ends
at the first departure, which is told in one sentence.
"""

from __future__ import annotations

import math
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.core.web.listen import Listen
from penstock.serving.client_script import Answer, Answers, ScriptPart, draw_actions, parts
from penstock.serving.echo_game import SEATS, EchoGame, EchoRow, ObservationRule
from penstock.serving.messages import (
    HEAD,
    JSON_NBYTES,
    KIND,
    LENGTH,
    MESSAGE_NBYTES,
    PROTOCOL,
    GameMessageKind,
    MessageError,
    act_records,
    fault_message,
    json_message,
    read_hello,
)
from penstock.serving.rows import RowLayout, describe_layouts
from penstock.serving.step_departures import find_departure, listed, rows_of

HOST = "127.0.0.1"
FIRST_PORT = 8900
# The longest wait for the next message, and for a client that has lost its connection: it may pause
# before it tries again.
WAIT_S = 10.0
RECONNECT_S = 30.0
POLL_S = 0.05
LATE_S = 0.02
BYTE_PAUSE_S = 0.0002
# There is a pause after each of the first bytes of a message, and after every so many others.
PAUSED_NBYTES = 12
SHUT_S = 0.3  # during which nobody listens
# JSON escapes some of it, and WELCOME has a key that no client knows.
RUN_NAME = 'a "run" of \\check-client, für alle'
RST = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Departure(Exception):
    """What a client did otherwise than the protocol and the echo game say, in one sentence."""


class PartResult(NamedTuple):
    """What came of one part."""

    part: str
    rows: int
    """Rows that were as they must be."""
    took_s: float
    departure: str
    """A sentence; "" if all was kept."""


def check_client(
    command: Sequence[str],
    port: int | None,
    tell: Callable[[str], object],
    *,
    wait_s: float = WAIT_S,
    chosen: Sequence[ScriptPart] | None = None,
) -> list[PartResult]:
    """Check the client that a command starts, or one that somebody starts.

    Args:
        command: starts an echo game; HOST and PORT are appended. Empty to wait for one.
        port: that the client connects to; None for any, or without a command for the first free one
            from `FIRST_PORT` on.
        tell: gets a sentence when a part waits for a client.
        wait_s: the longest wait for a message.
        chosen: the parts; all by default.

    Returns: a result for each part.

    Raises:
        UserError: the command cannot be started, or the port is taken.
    """
    if port is None and command:
        port = 0
    results: list[PartResult] = []
    script = parts() if chosen is None else chosen
    with closing(Door(port)) as door:
        for number, part in enumerate(script, 1):
            if not command:
                place = f"part {number} of {len(script)}, {part.name}"
                tell(f"{place}: start the echo game for {HOST} {door.port}")
            door.turn_away()
            with _started(command, door.port) as process:
                check = PartCheck(part, door, process, seed=number, wait_s=wait_s)
                began_s = time.monotonic()
                departure = ""
                try:
                    check.run()
                except Departure as error:
                    departure = str(error) + _exit_clause(process)
                took_s = time.monotonic() - began_s
                results.append(PartResult(part.name, check.rows, took_s, departure))
    return results


@contextmanager
def _started(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start the client, with its output on standard error; it is killed at the end."""
    if not command:
        yield None
        return
    try:
        process = subprocess.Popen(
            [*command, HOST, str(port)], stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
        )
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started ({error.strerror}); give the command of an echo game"
        ) from error
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _exit_clause(process: subprocess.Popen[bytes] | None) -> str:
    """Returns a clause for a client that has failed by now."""
    if process is None:
        return ""
    with suppress(subprocess.TimeoutExpired):
        if code := process.wait(0.5):
            return f" (the client ended with exit code {code})"
    return ""


class Door:
    """The listening socket, which may be shut for a while."""

    def __init__(self, port: int | None) -> None:
        """Listen. Raises UserError if the port is taken."""
        listen = Listen(host=HOST, port=port, first_port=FIRST_PORT)
        self._listener: socket.socket = listen.bind()
        self.port: int = self._listener.getsockname()[1]

    def accept(self, process: subprocess.Popen[bytes] | None, wait_s: float) -> ClientConnection:
        """Returns the next connection. Raises Departure if none comes."""
        self._listener.settimeout(POLL_S)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                return ClientConnection(connection)
            if process is not None and process.poll() is not None:
                raise Departure(
                    "the client ended where it must connect; connect to the HOST and PORT that "
                    "are its last arguments, and connect again when the service has gone"
                )
        raise Departure(
            f"no connection came within {wait_s:g} s; connect again, with pauses, until the "
            "service is back"
        )

    def turn_away(self) -> None:
        """Close the connections of clients that have ended, which nobody has accepted."""
        self._listener.settimeout(0)
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.close()

    def shut(self, duration_s: float) -> None:
        """Listen no more, and listen again after a while."""
        self.close()
        time.sleep(duration_s)
        self._listener = Listen(host=HOST, port=self.port).bind()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


class ClientConnection:
    """One connection of the client."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._unread = b""

    def read_message(self, expected: str, wait_s: float) -> bytes | None:
        """Returns the next message with its length in front; None at the end of the connection.

        Raises:
            Departure: it does not come in time, is cut, or has a length that cannot be.
        """
        self._socket.settimeout(wait_s)
        while len(self._unread) < (wanted := self._wanted_nbytes(expected)):
            try:
                received = self._socket.recv(1 << 16)
            except TimeoutError:
                raise Departure(self._describe_wait(expected, wait_s)) from None
            except OSError:
                received = b""
            if not received:
                if not self._unread:
                    return None
                raise Departure(
                    f"the connection was closed after {len(self._unread)} bytes of a message "
                    f"where {expected} is expected; send whole messages"
                )
            self._unread += received

        message, self._unread = self._unread[:wanted], self._unread[wanted:]
        return message

    def _describe_wait(self, expected: str, wait_s: float) -> str:
        """Returns what has come in that time instead of a whole message."""
        if not self._unread:
            return (
                f"nothing came within {wait_s:g} s where {expected} is expected; send it as soon "
                "as all answers are there"
            )
        wanted = self._wanted_nbytes(expected)
        return (
            f"{len(self._unread)} of {wanted} bytes of a message came within {wait_s:g} s where "
            f"{expected} is expected; its length counts the bytes behind it, and no more"
        )

    def _wanted_nbytes(self, expected: str) -> int:
        """Returns the bytes of the next message with its length, or of its head as long as that is
        not there. Raises Departure.
        """
        if len(self._unread) < HEAD.size:
            return HEAD.size
        length, kind = HEAD.unpack_from(self._unread)
        if kind in {*GameMessageKind} and KIND.size <= length <= MESSAGE_NBYTES:
            return LENGTH.size + int(length)
        raise Departure(
            f"a message of {length} bytes and kind {kind} begins where {expected} is expected; "
            "a message is u32 length, u32 kind and its body, where length counts kind and body, "
            "and the next one follows its last byte"
        )

    def has_pending(self) -> bool:
        """Whether bytes have come that nobody has read."""
        if self._unread:
            return True
        self._socket.settimeout(0)
        with suppress(OSError):
            self._unread = self._socket.recv(1 << 16)
        return bool(self._unread)

    def send(self, content: bytes, *, singly: bool = False) -> None:
        """Send bytes, or each byte by itself. Raises Departure if the client has gone."""
        try:
            self._socket.settimeout(WAIT_S)
            if not singly:
                self._socket.sendall(content)
                return
            for number, byte in enumerate(content):
                self._socket.sendall(bytes([byte]))
                if number < PAUSED_NBYTES or number % PAUSED_NBYTES == 0:
                    time.sleep(BYTE_PAUSE_S)
        except OSError as error:
            raise Departure(
                "the connection was closed where an answer is awaited; read until it is there, "
                "also if it comes in pieces"
            ) from error

    def finish(self) -> None:
        """Send no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, with a reset if asked."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self._socket.close()


class PartCheck:
    """Plays the service for one run of the echo game."""

    def __init__(
        self,
        part: ScriptPart,
        door: Door,
        process: subprocess.Popen[bytes] | None,
        *,
        seed: int,
        wait_s: float,
    ) -> None:
        """Create a check; ``seed`` is that of the actions."""
        self.rows = 0
        self._part = part
        self._door = door
        self._process = process
        self._wait_s = wait_s
        self._rule = ObservationRule(part.observation)
        self._action_layout = RowLayout(part.action, "action")
        self._actions = draw_actions(part.action, seed)
        self._game = EchoGame()
        self._answers = Answers()
        self._connection: ClientConnection

    def run(self) -> None:
        """Play. Raises Departure."""
        wait_s = math.inf if self._process is None else RECONNECT_S
        self._connection = self._door.accept(self._process, wait_s)
        try:
            self._greet(singly=True)
            while steps := self._game.next_round():
                rows = [row for step in steps for row in step]
                for step in steps:
                    self._expect_step(step, rows)
                if seats := [row.seat for row in rows if row.goes_on]:
                    self._answer(seats)
            self._expect_end()
        except Departure as departure:
            # The client is told why it is closed, and need not come again.
            with suppress(Departure):
                self._connection.send(fault_message(None, "message", str(departure)))
            raise
        finally:
            self._connection.close()
        self._expect_exit()

    def _greet(self, *, singly: bool = False) -> None:
        """Read HELLO, and send WELCOME, byte by byte if asked."""
        self._expect_hello()
        content = {
            "protocol": PROTOCOL,
            **describe_layouts(self._rule.layout, self._action_layout),
            "policy": {"run": RUN_NAME, "env": self._part.name, "play": "sampled"},
            "seats": SEATS,
            "learns": True,
            "later": [{"row": 7}, None, -1.5e3],
        }
        self._connection.send(json_message(GameMessageKind.WELCOME, content), singly=singly)

    def _expect_hello(self) -> None:
        """Read HELLO. Raises Departure."""
        message = self._connection.read_message("HELLO", self._wait_s)
        if message is None:
            raise Departure("the connection was closed before HELLO; send it at once")
        _, kind = HEAD.unpack_from(message)
        if kind != GameMessageKind.HELLO:
            raise Departure(
                f"{GameMessageKind(kind).name} comes first; begin each connection by HELLO"
            )
        try:
            hello = read_hello(message[HEAD.size :], JSON_NBYTES)
        except MessageError as error:
            raise Departure(f"HELLO is refused: {error.reason}") from error
        if hello.seats != SEATS:
            raise Departure(f"HELLO says {hello.seats} seats; the echo game has {SEATS}")
        if hello.observation is not None or hello.action is not None:
            raise Departure(
                "HELLO has spaces, and the echo game plays any; leave observation and action out"
            )

    def _expect_step(self, rows: Sequence[EchoRow], round_rows: Sequence[EchoRow]) -> None:
        """Read a STEP of these rows, of all those of a round. Raises Departure."""
        seats = listed([row.seat for row in rows])
        message = self._connection.read_message(f"a STEP of {seats}", self._wait_s)
        if message is None:
            raise Departure(
                f"the connection was closed where a STEP of {seats} is expected; the seats have "
                "episodes to play"
            )
        if sentence := find_departure(message, rows, round_rows, self._rule):
            raise Departure(f"round {self._game.round}: {sentence}")
        self.rows += len(rows)

    def _answer(self, seats: Sequence[int]) -> None:
        """Answer the rows of these seats, as the script says."""
        number = self._game.round
        match self._answers.of_round(number):
            case Answer.TOGETHER:
                self._connection.send(self._act(seats))
            case Answer.REVERSED:
                self._connection.send(self._act(seats[::-1]))
            case Answer.SINGLE:
                self._connection.send(b"".join([self._act([seat]) for seat in seats]))
            case Answer.DRIBBLED:
                self._connection.send(self._act(seats), singly=True)
            case Answer.LATE:
                time.sleep(LATE_S)
                if self._connection.has_pending():
                    raise Departure(
                        f"round {number}: bytes came although {listed(seats)} had no answer yet; "
                        "wait for the ACT of each row that goes on"
                    )
                self._connection.send(self._act(seats))
            case Answer.FAULT_FIRST:
                refused = seats[number % len(seats)]
                others = [seat for seat in seats if seat != refused]
                self._connection.send(self._fault(refused) + self._act(others))
            case Answer.FAULT_LAST:
                refused = seats[number % len(seats)]
                others = [seat for seat in seats if seat != refused]
                self._connection.send(self._act(others) + self._fault(refused))
            case Answer.FAULT_ALL:
                self._connection.send(b"".join([self._fault(seat) for seat in seats]))
            case Answer.END:
                self._end("the service ends")
                # A service that begins may tell games to come again, and then be gone for a while.
                self._connection = self._door.accept(self._process, RECONNECT_S)
                self._expect_hello()
                self._end("starting, connect again")
                self._door.shut(SHUT_S)
                self._reconnect()
            case Answer.CUT:
                act = self._act(seats)
                self._connection.send(act[: len(act) // 2])
                self._connection.close()
                self._reconnect()
            case Answer.RESET:
                self._connection.close(reset=True)
                self._reconnect()

    def _act(self, seats: Sequence[int]) -> bytes:
        """Returns an ACT, whose actions the game takes; "" for no seats."""
        if not seats:
            return b""
        rows = np.zeros((len(seats), self._action_layout.nbytes), np.uint8)
        actions = np.stack([np.asarray(next(self._actions)) for _ in seats])
        self._action_layout.write(actions, rows)
        for seat, row in zip(seats, rows, strict=True):
            self._game.seats[seat].take(row.tobytes())
        records: bytes = act_records(len(seats), np.array(seats, np.uint32), rows).tobytes()
        return records

    def _fault(self, seat: int) -> bytes:
        """Returns a FAULT of a seat, whose episode the game gives up."""
        self._game.seats[seat].give_up("its row was answered by a FAULT")
        return fault_message(seat, "observation", "the observation has nan at [0]")

    def _end(self, reason: str) -> None:
        """Send END, and wait until the client has closed. Raises Departure."""
        self._connection.send(json_message(GameMessageKind.END, {"reason": reason}))
        self._connection.finish()
        while message := self._connection.read_message("the end of the connection", self._wait_s):
            _, kind = HEAD.unpack_from(message)
            if kind != GameMessageKind.END:
                raise Departure(
                    f"{GameMessageKind(kind).name} came on a connection that END has closed; "
                    "close it, and connect again"
                )
        self._connection.close()

    def _reconnect(self) -> None:
        """Take the client's next connection. Raises Departure."""
        self._game.lose_connection()
        self._connection = self._door.accept(self._process, RECONNECT_S)
        self._greet()

    def _expect_end(self) -> None:
        """Read END, and rows with flag 8 before it. Raises Departure."""
        while True:
            message = self._connection.read_message("END", self._wait_s)
            if message is None:
                raise Departure(
                    "the connection was closed without END; send it, as all episodes are played"
                )
            _, kind = HEAD.unpack_from(message)
            if kind == GameMessageKind.END:
                return
            if not self._is_leaving(message):
                raise Departure(
                    f"{GameMessageKind(kind).name} came where END is expected, as all episodes are "
                    "played; END has the reason as JSON"
                )

    def _is_leaving(self, message: bytes) -> bool:
        """Whether a message is a STEP in which all seats leave."""
        rows = rows_of(message, self._rule.layout.nbytes)
        if rows is None:
            return False
        return bool((rows["flags"] == 8).all())

    def _expect_exit(self) -> None:
        """Wait for the client's process. Raises Departure."""
        if self._process is None:
            return
        try:
            code = self._process.wait(self._wait_s)
        except subprocess.TimeoutExpired:
            raise Departure(
                f"the client still ran {self._wait_s:g} s after END; end it with exit code 0"
            ) from None
        if code:
            raise Departure(f"the client ended with exit code {code}; end it with 0")
