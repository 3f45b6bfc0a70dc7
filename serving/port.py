"""The games that are connected to a service: what they sent in one turn of the loop is one batch.

A connection (`frames.py` over TCP, `web_socket.py`) hands its bytes to a `Game`, and the port reads
them at the end of the turn, all games' together: STEPs of the same number of rows are one array, so
that a message costs little Python. Everything that arrives is taken for hostile. A game's bytes
raise nothing, and take no more memory than a message of its seats.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple, Protocol, cast

import numpy as np

from penstock.serving.messages import (
    HEAD,
    JSON_NBYTES,
    KIND,
    LENGTH,
    MESSAGE_NBYTES,
    STEP_HEAD,
    GameMessageKind,
    Hello,
    MessageError,
    act_records,
    fault_message,
    json_message,
    read_hello,
    step_dtype,
    step_nbytes,
)
from penstock.serving.seats import Indices, StepRows
from penstock.serving.service import MOST_FAULTS, DecidedRows, Service

# A game that has not sent HELLO by then is closed.
HELLO_S = 5
# The time in which a game that is closed may read what was sent before.
CLOSE_S = 5
# The most bytes that wait for a game; one that reads less is closed.
UNREAD_NBYTES = 4 << 20
# The most runs of messages of one game in one turn: what is beyond waits for the next turn, so that
# no game delays the others.
MOST_RUNS = 64
MOST_GAMES = 4096
# A plain number: the members of an enum are found and compared slowly.
STEP = int(GameMessageKind.STEP)


class Games(Protocol):
    """What a connection hands its bytes to: the games of a service."""

    def open(self, wire: Wire) -> Game | None:
        """Returns the game of a new connection; None if there is no room, after a FAULT."""

    def receive(self, game: Game, content: bytes) -> None:
        """Take bytes of a game: messages with their length in front, cut anywhere."""

    def lose(self, game: Game) -> None:
        """Forget a game whose connection has ended."""


class Wire(asyncio.Protocol):
    """The connection of a game; its subclasses are games over TCP and over WebSocket."""

    send: Callable[[bytes], None]
    """Sends a message that has its length in front."""

    def __init__(self, port: Games) -> None:
        self._port = port
        self._game: Game | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNREAD_NBYTES)

    def pause_writing(self) -> None:
        """Close a game that does not read what waits for it."""
        if self._game is not None:
            self._game.is_closed = True
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the port."""
        if self._game is not None:
            self._port.lose(self._game)
            self._game = None  # a cycle would keep its bytes until the next full collection

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection when all is sent, or cannot be."""
        self._transport.close()
        self._abort_later()

    def pause_reading(self) -> None:
        """Leave what arrives from now on to the kernel."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def _abort_later(self) -> None:
        """End the connection even if the peer does not read what was sent before."""
        asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)


class StepRun(NamedTuple):
    """STEPs of one game that follow each other, and have the same number of rows."""

    rows: int
    """Rows of each."""
    steps: int
    content: bytes
    """The messages, each with its length in front."""


class Game:
    """One connected game: its seats, and the bytes that it sent and nobody has read yet."""

    def __init__(self, wire: Wire, number: int, row_nbytes: int) -> None:
        """Create a game; ``row_nbytes`` are those of an observation."""
        self.wire = wire
        self.number = number
        self.places: range | None = None
        """Its seats; None before HELLO."""
        self.most_rows = 0
        """Rows of its largest STEP, one for each seat; 0 before HELLO."""
        self.most_nbytes = JSON_NBYTES + LENGTH.size
        """The most bytes of one message of this game, with its length."""
        self.is_closed = False
        self.turn_faults = 0
        """Its rows at fault in this turn."""
        self.arrived_s = 0.0
        """When the first byte arrived that is not read yet."""
        self.is_paused = False
        self._row_nbytes = row_nbytes
        self._unread: bytes | bytearray = b""
        self._position = 0
        """Bytes of `_unread` that are read already."""

    def receive(self, content: bytes) -> None:
        """Add bytes that have arrived."""
        if not self._unread:
            self._unread = content
            return
        if isinstance(self._unread, bytes):
            self._unread = bytearray(self._unread)
        self._unread += content

    def next_run(self) -> StepRun | None:
        """Returns the next complete STEPs, or None if there are none that are well formed."""
        unread = self._unread
        position = self._position
        available = len(unread) - position
        if available < STEP_HEAD.size:
            return None
        length, kind, rows = STEP_HEAD.unpack_from(unread, position)
        nbytes = LENGTH.size + length
        is_step = kind == STEP and rows and rows <= self.most_rows and nbytes <= available
        if not is_step or nbytes != step_nbytes(rows, self._row_nbytes):
            return None

        steps = available // nbytes
        if steps > 1:
            # The messages behind it that have the same head belong to the run.
            dtype = step_dtype(rows, self._row_nbytes)
            records = np.frombuffer(unread, dtype, steps, position)
            is_same = (
                (records["length"] == length)
                & (records["kind"] == kind)
                & (records["count"] == rows)
            )
            steps = steps if is_same.all() else int(np.argmin(is_same))
            del records, is_same  # while they live, the bytes cannot be added to
        self._position = position + steps * nbytes
        return StepRun(rows, steps, bytes(unread[position : self._position]))

    def next_message(self) -> bytes | None:
        """Returns the next complete message, from its kind on, or None if there is none.

        Raises:
            MessageError: it is too long or too short, or a STEP that is not well formed.
        """
        nbytes = self._next_nbytes()
        if not nbytes:
            return None
        position = self._position + LENGTH.size
        self._position += nbytes
        message = bytes(self._unread[position : self._position])
        if KIND.unpack_from(message) == (STEP,):
            raise self._step_error(message)
        return message

    def _step_error(self, message: bytes) -> MessageError:
        """Returns what is wrong with a STEP."""
        if not self.most_rows:
            return MessageError("hello", "a STEP before HELLO; send HELLO first")
        if len(message) < STEP_HEAD.size - LENGTH.size:
            return MessageError("message", f"a STEP of {len(message)} bytes says no rows")
        _, rows = HEAD.unpack_from(message)
        if not 1 <= rows <= self.most_rows:
            return MessageError(
                "message", f"a STEP has {rows} rows, and this game has {self.most_rows} seats"
            )
        expected = step_nbytes(rows, self._row_nbytes) - LENGTH.size
        return MessageError(
            "message",
            f"a STEP of {rows} rows has {len(message)} bytes where {expected} belong; see "
            "row_nbytes in WELCOME",
        )

    @property
    def is_read(self) -> bool:
        """Whether nothing is left to read."""
        return self._position == len(self._unread)

    def forget_read(self) -> bool:
        """Free the memory of what was read; returns whether a complete message is left."""
        if self.is_read:
            self._unread = b""
            self._position = 0
            return False
        if self._position:
            self._unread = self._unread[self._position :]
            self._position = 0
        with suppress(MessageError):
            return self._next_nbytes() > 0
        return True

    def forget_all(self) -> None:
        """Free the memory of all that has arrived."""
        self._unread = b""
        self._position = 0

    def _next_nbytes(self) -> int:
        """Returns the bytes of the next message with its length; 0 if it is not complete.

        Raises:
            MessageError: it is longer than any message of this game, or without a kind.
        """
        available = len(self._unread) - self._position
        if available < LENGTH.size:
            return 0
        (length,) = LENGTH.unpack_from(self._unread, self._position)
        nbytes: int = LENGTH.size + length
        if nbytes > self.most_nbytes or nbytes < HEAD.size:
            raise MessageError(
                "message",
                f"a message says it has {length} bytes, and here it has {HEAD.size - LENGTH.size} "
                f"to {self.most_nbytes - LENGTH.size}",
            )
        return nbytes if available >= nbytes else 0


class Port:
    """All games of a service."""

    def __init__(self, service: Service, token: str | None, most_games: int = MOST_GAMES) -> None:
        """Create a port without games.

        Args:
            service: decides.
            token: what HELLO must show; None if nothing.
            most_games: games at the same time.
        """
        self.service = service
        self.games: dict[int, Game] = {}
        """By their number."""
        self._token = token
        self._most_games = most_games
        self._next_number = 0
        self._arrived: list[Game] = []
        """Games with bytes that the next turn reads."""
        self.pause_s = 0.0
        """The time for which what has arrived waits for more, so that a turn decides more at once.

        A turn costs as much as some dozens of rows."""
        self._has_turn = False
        """Whether a turn is about to come."""
        self._row_nbytes = service.observations.layout.nbytes

    def open(self, wire: Wire) -> Game | None:
        """Returns the game of a new connection; None if there is no room, after a FAULT."""
        if len(self.games) >= self._most_games:
            # The oldest connection without HELLO makes room.
            without_hello = (
                game for game in self.games.values() if game.places is None and not game.is_closed
            )
            oldest = next(without_hello, None)
            if oldest is None:
                self.service.figures.faults["connection"] += 1
                reason = f"{self._most_games} games are connected, the most; try again later"
                wire.send(fault_message(None, "connection", reason))
                wire.close()
                return None
            self._fail(oldest, MessageError("connection", "more games connect; send HELLO"))

        game = Game(wire, self._next_number, self._row_nbytes)
        self._next_number += 1
        self.games[game.number] = game
        asyncio.get_running_loop().call_later(HELLO_S, self._check_hello, game)
        return game

    def receive(self, game: Game, content: bytes) -> None:
        """Take bytes of a game: messages with their length in front, cut anywhere."""
        if game.is_closed:
            return
        game.receive(content)
        if not game.arrived_s:
            game.arrived_s = perf_counter()
            self._schedule(game)

    def lose(self, game: Game) -> None:
        """Forget a game whose connection has ended."""
        game.is_closed = True
        game.forget_all()
        self.games.pop(game.number, None)
        if game.places is not None:
            self.service.leave(game.places)
            game.places = None

    def end(self, reason: str) -> None:
        """Tell all games that the service ends, and close them."""
        for game in [*self.games.values()]:
            if not game.is_closed:
                game.wire.send(json_message(GameMessageKind.END, {"reason": reason}))
                self._close(game)

    def turn_soon(self) -> None:
        """Have a turn, also if nothing arrives: rows that wait may be decided now."""
        if self._has_turn:
            return
        self._has_turn = True
        loop = asyncio.get_running_loop()
        if self.pause_s:
            loop.call_later(self.pause_s, self._turn)
        else:
            loop.call_soon(self._turn)

    def _schedule(self, game: Game) -> None:
        """Have the next turn read what a game has sent.

        It comes after the callbacks of this turn of the loop, so it sees all that arrived in it.
        """
        self._arrived.append(game)
        self.turn_soon()

    def _turn(self) -> None:
        """Read what has arrived, decide, and answer."""
        self._has_turn = False
        games, self._arrived = self._arrived, []
        active = [game for game in games if not game.is_closed]
        for _ in range(MOST_RUNS):
            runs: dict[int, list[tuple[Game, StepRun]]] = {}  # by the rows of a STEP
            for game in active:
                run = game.next_run() or self._next_run(game)
                if run is not None:
                    runs.setdefault(run.rows, []).append((game, run))
            if not runs:
                break
            for rows, runs_of_size in runs.items():
                self._take(rows, runs_of_size)
            active = [game for game in active if not game.is_read and not game.is_closed]

        decisions = self._decide()
        if decisions is not None:
            self._answer(decisions)
        for game in games:
            self._finish_turn(game)

    def _decide(self) -> DecidedRows | None:
        """Decide for all rows that wait, and end the turn of the service."""
        return self.service.decide()

    def _next_run(self, game: Game) -> StepRun | None:
        """Handle other messages than STEPs; returns the next STEPs, or None if there are none."""
        try:
            while not game.is_closed:
                message = game.next_message()
                if message is None:
                    return None
                self._handle(game, message)
                run = game.next_run()
                if run is not None:
                    return run
        except MessageError as error:
            self._fail(game, error)
        return None

    def _handle(self, game: Game, message: bytes) -> None:
        """Handle a message that is no STEP. Raises MessageError."""
        (kind,) = KIND.unpack_from(message)
        if kind == GameMessageKind.END:
            self._close(game)
            return
        if kind != GameMessageKind.HELLO:
            raise MessageError("message", f"a message of kind {kind}; games send HELLO, STEP, END")
        if game.places is not None:
            raise MessageError("hello", "a second HELLO; open another connection")

        hello = read_hello(message[KIND.size :], self.service.most_space_nbytes)
        check_token(hello, self._token)
        game.places = self.service.join(hello, game.number)
        game.most_rows = hello.seats
        largest_step = min(step_nbytes(hello.seats, self._row_nbytes), MESSAGE_NBYTES)
        game.most_nbytes = max(largest_step, game.most_nbytes)
        game.wire.send(json_message(GameMessageKind.WELCOME, self.service.welcome(hello.seats)))

    def _take(self, rows: int, runs: Sequence[tuple[Game, StepRun]]) -> None:
        """Give the STEPs of several games, of ``rows`` rows each, to the service."""
        contents = [run.content for _, run in runs]
        content = contents[0] if len(contents) == 1 else b"".join(contents)
        records = np.frombuffer(content, step_dtype(rows, self._row_nbytes))

        # The number of a seat in its game becomes its place in the table.
        bounds = np.array([_bounds(game) for game, _ in runs], np.int64)
        if len(records) > len(runs):
            bounds = bounds.repeat([run.steps for _, run in runs], axis=0)
        seat = records["seat"].astype(np.int64)
        seat += bounds[:, :1]
        is_inside = seat < bounds[:, 1:]

        taken = StepRows(
            seat.reshape(-1),
            flags=records["flags"].reshape(-1),
            reward=records["reward"].reshape(-1),
            message=np.arange(len(records)).repeat(rows),
        )
        observations = np.array(records["rows"]).reshape(-1, self._row_nbytes)
        if not is_inside.all():
            inside = is_inside.reshape(-1)
            self._refuse_seats(records["seat"].reshape(-1)[~inside], taken.message[~inside], runs)
            if not inside.any():
                return
            taken = taken.select(inside)
            observations = observations[inside]

        faults = self.service.take(taken, observations)
        for fault in faults:
            place = int(taken.seat[fault.row])
            game = self.games.get(int(self.service.seats.game[place]))
            if game is not None and not game.is_closed:
                assert game.places is not None
                seat_number = place - game.places.start
                self._send_fault(game, seat_number, fault.field, fault.reason, fault.is_told)

    def _refuse_seats(
        self,
        seats: np.typing.NDArray[np.uint32],
        messages: Indices,
        runs: Sequence[tuple[Game, StepRun]],
    ) -> None:
        """Tell games of seats that they do not have; ``messages`` counts the STEPs of the runs."""
        game_of = np.repeat(np.arange(len(runs)), [run.steps for _, run in runs])
        for seat, message in zip(seats, messages, strict=True):
            game, _ = runs[game_of[message]]
            if game.is_closed:
                continue
            assert game.places is not None
            last = len(game.places) - 1
            self._send_fault(
                game, int(seat), "seat", f"there is no seat {seat}; this game has 0 to {last}"
            )

    def _send_fault(
        self, game: Game, seat: int, field: str, reason: str, is_told: bool = True
    ) -> None:
        """Send a FAULT of a seat if it is told now, and close a game with too many in one turn."""
        if game.wire.is_closing():  # the peer has gone in the middle of the turn
            game.is_closed = True
            return
        self.service.figures.faults[field] += 1
        game.turn_faults += 1
        if game.turn_faults > MOST_FAULTS:
            self._fail(
                game, MessageError(field, f"more than {MOST_FAULTS} rows at fault; {reason}")
            )
        elif is_told:
            game.wire.send(fault_message(seat, field, reason))

    def _answer(self, decisions: DecidedRows) -> None:
        """Send each game the actions of its seats, as one ACT."""
        seat, actions = decisions
        numbers = self.service.seats.game[seat]
        starts = _run_starts(numbers)
        answered = numbers[starts].tolist()
        if len(set(answered)) < len(answered):
            # The rows of a game do not lie together, as it sent STEPs of several sizes.
            order = np.argsort(numbers, kind="stable")
            seat = seat[order]
            actions = actions[order]
            numbers = numbers[order]
            starts = _run_starts(numbers)
            answered = numbers[starts].tolist()

        counts = np.diff(np.append(starts, len(seat)))
        games = [self.games[number] for number in answered]
        bases = np.array([_bounds(game)[0] for game in games], np.int64)
        own_seats = (seat - bases.repeat(counts)).astype(np.uint32)
        same_count = int(counts[0])
        if (counts == same_count).all():
            self._send_acts(games, same_count, own_seats, actions)
        else:
            for count in np.unique(counts):
                chosen = np.flatnonzero(counts == count)
                rows = (starts[chosen, None] + np.arange(count)).reshape(-1)
                games_of_count = [games[index] for index in chosen]
                self._send_acts(games_of_count, int(count), own_seats[rows], actions[rows])

        # Rows of an earlier turn have waited for the learner, and not for this service.
        now_s = perf_counter()
        arrived_s = [game.arrived_s or now_s for game in games]
        self.service.figures.count_answers(arrived_s, counts, now_s)

    def _send_acts(
        self,
        games: Sequence[Game],
        count: int,
        seats: np.typing.NDArray[np.uint32],
        actions: np.typing.NDArray[np.uint8],
    ) -> None:
        """Send each of the games an ACT of ``count`` rows, which follow each other."""
        records = act_records(count, seats, actions)
        content = records.tobytes()
        nbytes = records.itemsize
        for i, game in enumerate(games):
            if not game.is_closed:
                game.wire.send(content[i * nbytes : (i + 1) * nbytes])

    def _finish_turn(self, game: Game) -> None:
        """Keep what is left of a game's bytes; read on in the next turn if that is much."""
        game.arrived_s = 0.0
        game.turn_faults = 0
        if game.is_closed:
            return
        has_more = game.forget_read()
        if has_more:
            game.arrived_s = perf_counter()
            self._schedule(game)
        if has_more == game.is_paused:
            return
        game.is_paused = has_more
        if has_more:
            game.wire.pause_reading()
        else:
            game.wire.resume_reading()

    def _check_hello(self, game: Game) -> None:
        """Close a game that has not sent HELLO."""
        if game.places is None and not game.is_closed:
            self._fail(game, MessageError("hello", f"no HELLO came within {HELLO_S} s"))

    def _fail(self, game: Game, error: MessageError) -> None:
        """Send the reason why a game is closed, and close it."""
        self.service.figures.faults[error.field] += 1
        game.wire.send(fault_message(None, error.field, error.reason))
        self._close(game)

    def _close(self, game: Game) -> None:
        """Close a game; `lose` follows when its connection has ended."""
        game.is_closed = True
        game.wire.close()


def check_token(hello: Hello, token: str | None) -> None:
    """Raise MessageError unless a game has shown the ``token``, if there is one."""
    if token is not None and not hmac.compare_digest(
        hello.token.encode(errors="replace"), token.encode()
    ):
        raise MessageError("token", "the token is missing or wrong; put it into HELLO")


def _run_starts(values: Indices) -> Indices:
    """Returns where each run of equal values begins, int64 [runs]; there is at least one value."""
    is_start = np.empty(len(values), np.bool_)
    is_start[0] = True
    np.not_equal(values[1:], values[:-1], out=is_start[1:])
    return np.flatnonzero(is_start)


def _bounds(game: Game) -> tuple[int, int]:
    """Returns the first place of a game's seats, and the one behind the last."""
    assert game.places is not None
    return game.places.start, game.places.stop
