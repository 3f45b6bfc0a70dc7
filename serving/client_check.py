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
from typing import Any, NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.core.web.listen import Listen
from penstock.serving.client_script import Answer, Answers, ScriptPart, draw_actions, parts
from penstock.serving.echo_game import SEATS, TURN_SEAT, EchoGame, EchoRow, ObservationRule
from penstock.serving.messages import (
    FIRST,
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
    padded,
    read_hello,
    step_dtype,
    step_nbytes,
)
from penstock.serving.rows import RowColumn, RowLayout, describe_layouts

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
FLAG_NAMES = {0: "goes on", 1: "first", 2: "terminated", 4: "truncated", 8: "leaves"}


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
                where = f"{HOST} {door.port}"
                tell(
                    f"part {number} of {len(script)}, {part.name}: start the echo game for {where}"
                )
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

    def accept(self, process: subprocess.Popen[bytes] | None, wait_s: float) -> Peer:
        """Returns the next connection. Raises Departure if none comes."""
        self._listener.settimeout(POLL_S)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                return Peer(connection)
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


class Peer:
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
        self._socket.settimeout(WAIT_S)
        try:
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
        self._peer: Peer

    def run(self) -> None:
        """Play. Raises Departure."""
        wait_s = math.inf if self._process is None else RECONNECT_S
        self._peer = self._door.accept(self._process, wait_s)
        try:
            self._greet(singly=True)
            while steps := self._game.next_round():
                for step in steps:
                    self._expect_step(step)
                rows = [row for step in steps for row in step if row.goes_on]
                if rows:
                    self._answer([row.seat for row in rows])
            self._expect_end()
        except Departure as departure:
            # The client is told why it is closed, and need not come again.
            with suppress(Departure):
                self._peer.send(fault_message(None, "message", str(departure)))
            raise
        finally:
            self._peer.close()
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
        self._peer.send(json_message(GameMessageKind.WELCOME, content), singly=singly)

    def _expect_hello(self) -> None:
        """Read HELLO. Raises Departure."""
        message = self._peer.read_message("HELLO", self._wait_s)
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

    def _expect_step(self, rows: Sequence[EchoRow]) -> None:
        """Read a STEP of these rows. Raises Departure."""
        seats = _listed([row.seat for row in rows])
        message = self._peer.read_message(f"a STEP of {seats}", self._wait_s)
        if message is None:
            raise Departure(
                f"the connection was closed where a STEP of {seats} is expected; the seats have "
                "episodes to play"
            )
        if sentence := find_departure(message, rows, self._rule):
            raise Departure(f"round {self._game.round}: {sentence}")
        self.rows += len(rows)

    def _answer(self, seats: Sequence[int]) -> None:
        """Answer the rows of these seats, as the script says."""
        number = self._game.round
        match self._answers.of_round(number):
            case Answer.TOGETHER:
                self._peer.send(self._act(seats))
            case Answer.REVERSED:
                self._peer.send(self._act(seats[::-1]))
            case Answer.SINGLE:
                self._peer.send(b"".join([self._act([seat]) for seat in seats]))
            case Answer.DRIBBLED:
                self._peer.send(self._act(seats), singly=True)
            case Answer.LATE:
                time.sleep(LATE_S)
                if self._peer.has_pending():
                    raise Departure(
                        f"round {number}: bytes came although {_listed(seats)} had no answer yet; "
                        "wait for the ACT of each row that goes on"
                    )
                self._peer.send(self._act(seats))
            case Answer.FAULT_FIRST:
                refused = seats[number % len(seats)]
                others = [seat for seat in seats if seat != refused]
                self._peer.send(self._fault(refused) + self._act(others))
            case Answer.FAULT_LAST:
                refused = seats[number % len(seats)]
                others = [seat for seat in seats if seat != refused]
                self._peer.send(self._act(others) + self._fault(refused))
            case Answer.FAULT_ALL:
                self._peer.send(b"".join([self._fault(seat) for seat in seats]))
            case Answer.END:
                self._end("the service ends")
                # A service that begins may tell games to come again, and then be gone for a while.
                self._peer = self._door.accept(self._process, RECONNECT_S)
                self._expect_hello()
                self._end("starting, connect again")
                self._door.shut(SHUT_S)
                self._reconnect()
            case Answer.CUT:
                act = self._act(seats)
                self._peer.send(act[: len(act) // 2])
                self._peer.close()
                self._reconnect()
            case Answer.RESET:
                self._peer.close(reset=True)
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
        self._peer.send(json_message(GameMessageKind.END, {"reason": reason}))
        self._peer.finish()
        while message := self._peer.read_message("the end of the connection", self._wait_s):
            _, kind = HEAD.unpack_from(message)
            if kind != GameMessageKind.END:
                raise Departure(
                    f"{GameMessageKind(kind).name} came on a connection that END has closed; "
                    "close it, and connect again"
                )
        self._peer.close()

    def _reconnect(self) -> None:
        """Take the client's next connection. Raises Departure."""
        self._game.lose_connection()
        self._peer = self._door.accept(self._process, RECONNECT_S)
        self._greet()

    def _expect_end(self) -> None:
        """Read END, and rows with flag 8 before it. Raises Departure."""
        while True:
            message = self._peer.read_message("END", self._wait_s)
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
        rows = _rows_of(message, self._rule.layout.nbytes)
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


def find_departure(message: bytes, expected: Sequence[EchoRow], rule: ObservationRule) -> str:
    """Returns a sentence on how a message departs from the STEP that is expected, or "".

    Args:
        message: with its length in front, of a kind that exists.
        expected: the rows of the STEP, which may come in any order.
        rule: what seats see.
    """
    _, kind = HEAD.unpack_from(message)
    seats = [row.seat for row in expected]
    if kind != GameMessageKind.STEP:
        return (
            f"{GameMessageKind(kind).name} came where a STEP of {_listed(seats)} is expected; "
            "the seats have episodes to play"
        )
    step = _rows_of(message, rule.layout.nbytes)
    if step is None:
        return _explain_size(message, len(expected), rule.layout.nbytes)
    if sorted(step["seat"].tolist()) != sorted(seats):
        return _explain_seats(step["seat"].tolist(), expected)

    by_seat = {row.seat: row for row in expected}
    sent = [by_seat[seat] for seat in step["seat"].tolist()]
    sentences = (
        _explain_flags(step, sent),
        _explain_padding(message, len(sent)),
        _explain_rewards(step, sent),
        _explain_rows(step, sent, rule),
    )
    return next(filter(None, sentences), "")


def _rows_of(message: bytes, row_nbytes: int) -> Any:
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
    text = f"a STEP has {_listed(seats)} where {_listed(expected_seats)} belong"
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


def _explain_rewards(step: Any, sent: Sequence[EchoRow]) -> str:
    """Returns a sentence on the first reward that is not the one expected, or ""."""
    for reward, row in zip(step["reward"], sent, strict=True):
        if reward.tobytes() == row.reward.tobytes():
            continue
        text = f"the reward of seat {row.seat} is {reward} where {row.reward} is expected"
        others = [other.seat for other in sent if other.reward == reward and other is not row]
        if row.flags & FIRST:
            return f"{text}; a first row has the reward 0"
        if others:
            return f"{text}; it is that of seat {others[0]}: take each action by its seat in ACT"
        return (
            f"{text}; it is the checksum of the action_nbytes bytes of the seat's last action, "
            "divided by 1009"
        )
    return ""


def _explain_rows(step: Any, sent: Sequence[EchoRow], rule: ObservationRule) -> str:
    """Returns a sentence on the first observation that is not the one expected, or ""."""
    for content, row in zip(step["rows"], sent, strict=True):
        expected = rule.row(row.seat, row.number)
        if (content == expected).all():
            continue
        place = f"seat {row.seat} in its row {row.number}"
        for other in sent:
            if (content == rule.row(other.seat, other.number)).all():
                return (
                    f"{place} shows the observation of seat {other.seat}; rows of bytes lie in "
                    "the order of seat[n]"
                )
        for number in range(max(row.number - 20, 0), row.number + 20):
            if (content == rule.row(row.seat, number)).all():
                return (
                    f"{place} shows the observation of row {number}; rows count from 0 since the "
                    "program began, those that end an episode too"
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
        "write zeros there"
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


def _listed(seats: Sequence[int]) -> str:
    """Returns seats in words."""
    if len(seats) == 1:
        return f"seat {seats[0]}"
    return f"seats {', '.join(map(str, seats))}"
