"""Waits for the first game of a run, which says what its games see and do.

The port is that of the run to come: the game is told to connect again, and finds the learner there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import uvicorn
from gymnasium import spaces
from starlette.responses import PlainTextResponse

from penstock.configs.errors import UserError
from penstock.configs.games import GAMES_ID
from penstock.core.observations import MASK
from penstock.core.web.guard import GuardedApp
from penstock.core.web.listen import Listen
from penstock.envs import EnvInfo
from penstock.envs.packing import MOST_CHOICES, leaves_of
from penstock.envs.space_difference import brief
from penstock.envs.vector_env import checked_actions
from penstock.serving.messages import (
    KIND,
    GameMessageKind,
    Hello,
    MessageError,
    fault_message,
    json_message,
    read_hello,
)
from penstock.serving.port import HELLO_S, Game, Wire, check_token
from penstock.serving.server import open_listener, server_config

# The most memory that a space of a game may take: 32 MiB hold the bounds of two million numbers.
SPACE_NBYTES = 32 << 20
STARTS = "the run starts with the spaces of this game; connect again"
WAITS = "penstock: the run starts when the first game connects\n"


class GameSpaces(NamedTuple):
    """What a game sees and does."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    sides: tuple[int, ...] | None
    """The side of each seat of one game, if there are several."""


def wait_for_spaces(listen: Listen, ready: Callable[[int], object]) -> GameSpaces | None:
    """Returns the spaces of the first game that connects; None after Ctrl-C or SIGTERM.

    Args:
        listen: where games connect, and which.
        ready: gets the port as soon as they can.

    Raises UserError if the port is taken.
    """
    guard = replace(listen.guard(), cookie_name="penstock_serve")
    app = GuardedApp(PlainTextResponse(WAITS, 503), guard)
    first_game = FirstGame(listen.token)
    with closing(open_listener(listen)) as listener:
        server = uvicorn.Server(server_config(first_game, app, guard, listen))
        first_game.on_spaces = lambda: setattr(server, "should_exit", True)
        ready(listener.getsockname()[1])
        with suppress(KeyboardInterrupt):
            server.run([listener])
    return first_game.spaces


class FirstGame:
    """The games that connect before there is a run; see `port.Games` for its methods."""

    def __init__(self, token: str | None) -> None:
        """Create it without games; ``token`` is what HELLO must show, or None."""
        self.spaces: GameSpaces | None = None
        """The spaces of the first game that has sent them."""
        self.on_spaces: Callable[[], object] = lambda: None
        """Called when they have come."""
        self._token = token
        self._games: set[Game] = set()

    def open(self, wire: Wire) -> Game:
        """Returns the game of a new connection, which has a while for its HELLO."""
        game = Game(wire, number=0, row_nbytes=0)
        self._games.add(game)
        asyncio.get_running_loop().call_later(HELLO_S, self._close, game)
        return game

    def receive(self, game: Game, content: bytes) -> None:
        """Take bytes of a game, and handle its HELLO as soon as it is complete."""
        if game.is_closed:
            return
        game.receive(content)
        try:
            message = game.next_message()
            if message is not None:
                self._handle(game, message)
        except MessageError as error:
            game.wire.send(fault_message(None, error.field, error.reason))
            self._close(game)

    def lose(self, game: Game) -> None:
        """Forget a game whose connection has ended."""
        game.is_closed = True
        game.forget_all()
        self._games.discard(game)

    def _handle(self, game: Game, message: bytes) -> None:
        """Handle the first message of a game. Raises MessageError."""
        (kind,) = KIND.unpack_from(message)
        if kind != GameMessageKind.HELLO:
            raise MessageError("message", f"a message of kind {kind}; send HELLO first")
        hello = read_hello(message[KIND.size :], SPACE_NBYTES)
        check_token(hello, self._token)
        if self.spaces is None:
            self.spaces = _checked_spaces(hello)
            self.on_spaces()
        for other in [*self._games]:
            other.wire.send(json_message(GameMessageKind.END, {"reason": STARTS}))
            self._close(other)

    def _close(self, game: Game) -> None:
        """Close the connection of a game, if it is open."""
        if not game.is_closed:
            game.is_closed = True
            game.wire.close()


def _checked_spaces(hello: Hello) -> GameSpaces:
    """Returns the spaces of a game. Raises MessageError if no policy can be trained on them."""
    if hello.observation is None or hello.action is None:
        field = "observation" if hello.observation is None else "action"
        raise MessageError(
            field,
            f"HELLO has no {field}, and this run takes its spaces from its first game; send both "
            "spaces, or start penstock serve-env with a target that has them",
        )

    parts = [keys for keys, _ in leaves_of(hello.observation)]
    if any("$" in str(key) for keys in parts for key in keys):
        raise MessageError("observation", "a part of the observation has $ in its name")
    if parts == [(MASK,)]:
        raise MessageError(
            "observation", f"the observation has {MASK} alone; add what the seat sees"
        )

    try:
        checked_actions(GAMES_ID, hello.action)
    except UserError as error:
        raise MessageError(
            "action",
            f"no network chooses actions of {brief(hello.action)}; send Discrete, MultiDiscrete or "
            f"MultiBinary of 1 to {MOST_CHOICES:,} choices, or a Box of floats with finite bounds, "
            "the lower below the upper",
        ) from error
    try:
        EnvInfo.of_spaces(GAMES_ID, (hello.observation, hello.action), 1, "")
    except UserError as error:
        raise MessageError("observation", str(error)) from error
    return GameSpaces(hello.observation, hello.action, hello.sides)
