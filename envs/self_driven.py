"""Games that drive their own loop, of which only the spaces are known (`env.id` games).

`penstock serve-env` writes the spaces that the first game has sent into `env.kwargs`, as
`observation` and `action` in the form of `space_json`; and the sides of a game's seats, if it has
several, as `sides`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gymnasium.spaces import Space

from penstock.configs.errors import UserError
from penstock.configs.games import GAMES_ID
from penstock.core.files import DAMAGE
from penstock.envs.seats import SEATS, SIDES, seating_of
from penstock.envs.space_json import from_json, to_json
from penstock.envs.vector_env import EnvInfo

if TYPE_CHECKING:
    from penstock.configs.sections import EnvConfig

KEYS = ("observation", "action")
HOW = "games play, at the port of penstock serve-env"


def kwargs_of(
    observation_space: Space[Any],
    action_space: Space[Any],
    sides: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns `env.kwargs` for games with these spaces, and ``sides`` of the seats of each."""
    kwargs = dict(zip(KEYS, map(to_json, (observation_space, action_space)), strict=True))
    return kwargs if sides is None else {**kwargs, SIDES: [*sides]}


def games_info(env: EnvConfig) -> EnvInfo:
    """Returns the properties of games, by the spaces in `env.kwargs`.

    Raises:
        UserError: if they are missing or are no spaces, or if Penstock cannot play them.
    """
    try:
        encoded: list[Any] = [env.kwargs[key] for key in KEYS]
        observation_space, action_space = (from_json(space, sys.maxsize) for space in encoded)
    except (*DAMAGE, AssertionError) as error:
        raise UserError(
            f"env.id {GAMES_ID} needs the spaces of the games, env.kwargs.observation and "
            f"env.kwargs.action, and these are none ({str(error)[:80]}); start penstock serve-env "
            "without a target, so that it takes them from the first game"
        ) from error
    own_spaces = observation_space, action_space
    info = EnvInfo.of_spaces(GAMES_ID, own_spaces, 1, HOW, env.embed_above)
    sides = env.kwargs.get(SIDES, [0])
    if not isinstance(sides, list):
        raise UserError(
            f"env.kwargs.{SIDES} is {sides!r:.80}; give the side of each seat, as in [0, 1]"
        )
    return replace(info, seating=seating_of(GAMES_ID, {SEATS: len(sides), SIDES: sides}))


def refuse_to_make() -> UserError:
    """Returns the error for a command that would make an environment."""
    return UserError(
        "the games of this run are programs of their own, and there is no environment to make "
        "here; have them play its policy by `penstock serve RUN`, or name an environment as env.id"
    )
