"""`penstock check-client`: plays the service by a script, and compares what a client sends.

The client plays the echo game (`echo_game.py`), so each of its bytes is known; `client_script.py`
says with which spaces, and how it is answered. A part of the check is one run of the game, and ends
at the first departure, which is told in one sentence.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.core.processes import die_with
from penstock.core.web.listen import Listen
from penstock.serving.client_script import Answer, ScriptPart, answer_of_round, parts
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
from penstock.serving.step_departures import find_departure, listed

HOST = "127.0.0.1"
FIRST_PORT = 8900
# The longest wait for the next message, and for a client that has lost its connection: it may pause
# before it tries again.
WAIT_S = 10.0
RECONNECT_S = 30.0
POLL_S = 0.05
LATE_S = 0.005
# There is a pause after each of the first bytes of a message, and after every so many others.
BYTE_PAUSE_S = 0.0002
PAUSED_NBYTES = 12
SHUT_S = 0.2  # during which nobody listens
EXIT_S = 0.5  # for a client that fails at its departure
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
    for number, part in enumerate(script, 1):
        with closing(CheckedClient(command, port, wait_s)) as client:
            port = client.port
            if not command:
                place = f"part {number} of {len(script)}, {part.name}"
                tell(f"{place}: start the echo game for {HOST} {port}")
            check = PartCheck(part, client, seed=number)
            began_s = time.monotonic()
            departure = check.run()
            took_s = time.monotonic() - began_s
            results.append(PartResult(part.name, check.rows, took_s, departure))
    return results


class CheckedClient:
    """The client during one part: its process, the port that it connects to, its connection."""

    def __init__(self, command: Sequence[str], port: int | None, wait_s: float) -> None:
        """Listen, and start the command with its output on standard error, if there is one.

        Raises UserError if the port is taken or the command cannot be started.
        """
        self._wait_s = wait_s
        self._listener = Listen(host=HOST, port=port, first_port=FIRST_PORT).bind()
        self.port: int = self._listener.getsockname()[1]
        self._connection = socket.socket()  # not connected yet
        self._process: subprocess.Popen[bytes] | None = None
        # A person who starts the game takes as long as they like.
        self._connect_s = RECONNECT_S if command else math.inf
        if not command:
            return
        words = [*command, HOST, str(self.port)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                # The game ends with the check, whatever ends that.
                preexec_fn=partial(die_with, os.getpid(), signal.SIGKILL),
            )
        except OSError as error:
            raise UserError(
                f"{command[0]} cannot be started ({error.strerror}); give the command of an echo "
                "game"
            ) from error

    def close(self) -> None:
        """Kill the process, and listen no more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection.close()
        self._listener.close()

    def accept(self) -> None:
        """Take the next connection. Raises Departure if none comes."""
        self._connection.close()
        self._listener.settimeout(POLL_S)
        deadline_s = time.monotonic() + self._connect_s
        while time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                self._connection, _ = self._listener.accept()
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connect_s = RECONNECT_S
                return
            if self._process is not None and self._process.poll() is not None:
                raise Departure(
                    "the client ended where it must connect; connect to the HOST and PORT that "
                    "are its last arguments, and connect again when the service has gone"
                )
        raise Departure(
            f"no connection came within {self._connect_s:g} s; connect again, with pauses, until "
            "the service is back"
        )

    def shut(self) -> None:
        """Listen no more, and listen again after a while."""
        self._listener.close()
        time.sleep(SHUT_S)
        self._listener = Listen(host=HOST, port=self.port).bind()

    def read_message(self, expected: str) -> bytes:
        """Returns the next message with its length in front; b"" at the end of the connection.

        Raises:
            Departure: it does not come in time, is cut, or has a length that cannot be.
        """
        self._connection.settimeout(self._wait_s)
        message = b""
        while len(message) < (nbytes := _nbytes_of_message(message, expected)):
            try:
                received = self._connection.recv(nbytes - len(message))
            except TimeoutError:
                part = f"{len(message)} of {nbytes} bytes of a message" if message else "nothing"
                raise Departure(
                    f"{part} came within {self._wait_s:g} s where {expected} is expected; send it "
                    "as soon as all answers are there; its length counts the bytes behind it, and "
                    "no more"
                ) from None
            except OSError:
                received = b""
            if message and not received:
                raise Departure(
                    f"the connection was closed after {len(message)} bytes of a message where "
                    f"{expected} is expected; send whole messages"
                )
            if not received:
                break
            message += received
        return message

    def expect(self, kind: GameMessageKind, expected: str, reason: str) -> bytes:
        """Returns the next message, which must be of a kind. Raises Departure, with the reason."""
        message = self.read_message(expected)
        if not message:
            raise Departure(f"the connection was closed where {expected} is expected; {reason}")
        if _kind_of(message) != kind:
            raise Departure(f"{_kind_of(message).name} came where {expected} is expected; {reason}")
        return message

    def sends_within(self, wait_s: float) -> bool:
        """Whether bytes come in a while."""
        self._connection.settimeout(wait_s)
        with suppress(OSError):
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        return False

    def send(self, content: bytes, *, singly: bool = False) -> None:
        """Send bytes, or each byte by itself. Raises Departure if the client has gone."""
        try:
            self._connection.settimeout(WAIT_S)
            if not singly:
                self._connection.sendall(content)
                return
            for number, byte in enumerate(content):
                self._connection.sendall(bytes([byte]))
                if number < PAUSED_NBYTES or number % PAUSED_NBYTES == 0:
                    time.sleep(BYTE_PAUSE_S)
        except OSError as error:
            raise Departure(
                "the connection was closed where an answer is awaited; read until it is there, "
                "also if it comes in pieces"
            ) from error

    def end(self, reason: str) -> None:
        """Send END, and wait until the client has closed. Raises Departure."""
        self.send(json_message(GameMessageKind.END, {"reason": reason}))
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        while message := self.read_message("the end of the connection"):
            if _kind_of(message) != GameMessageKind.END:
                raise Departure(
                    f"{_kind_of(message).name} came on a connection that END has closed; close it, "
                    "and connect again"
                )
        self.hang_up()

    def hang_up(self, *, reset: bool = False) -> None:
        """Close the connection, with a reset if asked."""
        if reset:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self._connection.close()

    def expect_exit(self) -> None:
        """Wait for the end of the process. Raises Departure."""
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

    def describe_failure(self) -> str:
        """Returns a clause for a process that fails when its connection is closed, or ""."""
        if self._process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            if code := self._process.wait(EXIT_S):
                return f" (the client ended with exit code {code})"
        return ""


def _nbytes_of_message(begin: bytes, expected: str) -> int:
    """Returns the bytes of a message with its length, or of its head as long as that is not there.

    Raises Departure for a head that cannot be.
    """
    if len(begin) < HEAD.size:
        return HEAD.size
    length, kind = HEAD.unpack_from(begin)
    if kind in {*GameMessageKind} and KIND.size <= length <= MESSAGE_NBYTES:
        return LENGTH.size + int(length)
    raise Departure(
        f"a message of {length} bytes and kind {kind} begins where {expected} is expected; "
        "a message is u32 length, u32 kind and its body, where length counts kind and body, "
        "and the next one follows its last byte"
    )


def _kind_of(message: bytes) -> GameMessageKind:
    """Returns the kind of a whole message."""
    _, kind = HEAD.unpack_from(message)
    return GameMessageKind(kind)


class PartCheck:
    """Plays the service for one run of the echo game."""

    def __init__(self, part: ScriptPart, client: CheckedClient, seed: int) -> None:
        """Create a check; ``seed`` is that of the actions."""
        self.rows = 0
        """Rows that were as they must be."""
        self._part = part
        self._client = client
        self._rule = ObservationRule(part.observation)
        self._action_layout = RowLayout(part.action, "action")
        self._game = EchoGame()
        part.action.seed(seed)

    def run(self) -> str:
        """Play. Returns a sentence on the first departure, "" if there is none."""
        try:
            self._play()
        except Departure as departure:
            # The client is told why it is closed, and need not come again.
            with suppress(Departure):
                self._client.send(fault_message(None, "message", str(departure)))
            self._client.hang_up()
            return str(departure) + self._client.describe_failure()
        return ""

    def _play(self) -> None:
        """Play all episodes. Raises Departure."""
        self._client.accept()
        self._greet(singly=True)
        while steps := self._game.next_round():
            rows = [row for step in steps for row in step]
            for step in steps:
                self._expect_step(step, rows)
            if seats := [row.seat for row in rows if row.goes_on]:
                self._answer(seats)

        self._client.expect(GameMessageKind.END, "END", "send it when all episodes are played")
        self._client.hang_up()
        self._client.expect_exit()

    def _greet(self, *, singly: bool = False) -> None:
        """Read HELLO, and send WELCOME, byte by byte if asked. Raises Departure."""
        self._expect_hello()
        content = {
            "protocol": PROTOCOL,
            **describe_layouts(self._rule.layout, self._action_layout),
            "policy": {"run": RUN_NAME, "env": self._part.name, "play": "sampled"},
            "seats": SEATS,
            "learns": True,
            "later": [{"row": 7}, None, -1.5e3],
        }
        self._client.send(json_message(GameMessageKind.WELCOME, content), singly=singly)

    def _expect_hello(self) -> None:
        """Read HELLO. Raises Departure."""
        message = self._client.expect(
            GameMessageKind.HELLO, "HELLO", "begin each connection by it, at once"
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
        message = self._client.expect(
            GameMessageKind.STEP, f"a STEP of {seats}", "the seats have episodes to play"
        )
        if sentence := find_departure(message, rows, round_rows, self._rule):
            raise Departure(f"round {self._game.round}: {sentence}")
        self.rows += len(rows)

    def _answer(self, seats: Sequence[int]) -> None:
        """Answer the rows of these seats, as the script says. Raises Departure."""
        number = self._game.round
        answer = answer_of_round(number)
        refused = seats[number % len(seats)]
        others = [seat for seat in seats if seat != refused]
        match answer:
            case Answer.TOGETHER:
                self._client.send(self._act(seats))
            case Answer.REVERSED:
                self._client.send(self._act(seats[::-1]))
            case Answer.SINGLE:
                self._client.send(b"".join([self._act([seat]) for seat in seats]))
            case Answer.DRIBBLED:
                self._client.send(self._act(seats), singly=True)
            case Answer.LATE:
                if self._client.sends_within(LATE_S):
                    raise Departure(
                        f"round {number}: bytes came although {listed(seats)} had no answer yet; "
                        "wait for the ACT of each row that goes on"
                    )
                self._client.send(self._act(seats))
            case Answer.FAULT_FIRST:
                self._client.send(self._fault(refused) + self._act(others))
            case Answer.FAULT_LAST:
                self._client.send(self._act(others) + self._fault(refused))
            case Answer.FAULT_ALL:
                self._client.send(b"".join([self._fault(seat) for seat in seats]))
            case Answer.END:
                self._client.end("the service ends")
                # A service that begins may tell games to come again, and then be gone for a while.
                self._client.accept()
                self._expect_hello()
                self._client.end("starting, connect again")
                self._client.shut()
                self._reconnect()
            case Answer.CUT:
                act = self._act(seats)
                self._client.send(act[: len(act) // 2])
                self._client.hang_up()
                self._reconnect()
            case Answer.RESET:
                self._client.hang_up(reset=True)
                self._reconnect()

    def _act(self, seats: Sequence[int]) -> bytes:
        """Returns an ACT, whose actions the game takes; b"" for no seats."""
        if not seats:
            return b""
        actions = np.stack([np.asarray(self._part.action.sample()) for _ in seats])
        rows = np.zeros((len(seats), self._action_layout.nbytes), np.uint8)
        self._action_layout.write(actions, rows)
        for seat, row in zip(seats, rows, strict=True):
            self._game.seats[seat].take(row.tobytes())
        records: bytes = act_records(len(seats), np.array(seats, np.uint32), rows).tobytes()
        return records

    def _fault(self, seat: int) -> bytes:
        """Returns a FAULT of a seat, whose episode the game gives up."""
        self._game.seats[seat].give_up("its row was answered by a FAULT")
        return fault_message(seat, "observation", "the observation has nan at [0]")

    def _reconnect(self) -> None:
        """Take the client's next connection. Raises Departure."""
        self._game.lose_connection()
        self._client.accept()
        self._greet()
