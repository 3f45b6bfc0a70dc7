"""Games of which only the spaces are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.schema import Config
from penstock.configs.yaml_text import parse
from penstock.envs import make, probe
from penstock.envs.seats import ONE_SEAT, Seating
from penstock.envs.self_driven import kwargs_of
from penstock.envs.space_difference import difference

PARTS = spaces.Dict(
    {
        "b": spaces.Box(-np.inf, np.array([1.0, np.inf], np.float32)),
        "a": spaces.Box(0, 255, (4, 4), np.uint8),
        "action_mask": spaces.MultiBinary(3),
    }
)


def config_of(observation: spaces.Space[Any], action: spaces.Space[Any]) -> Config:
    env = resolve("games").env.model_copy(update={"kwargs": kwargs_of(observation, action)})
    return resolve("games").model_copy(update={"env": env})


def test_the_spaces_are_those_that_the_first_game_has_sent_also_after_a_file() -> None:
    config = config_of(PARTS, spaces.Discrete(3, start=1))
    values, _ = parse(dump(config), "config.yaml")
    for env in (config.env, Config.model_validate(values).env):
        info = probe(env)
        assert difference((PARTS, spaces.Discrete(3, start=1)), info.spaces) is None
        assert [part.name for part in info.parts] == ["a", "action_mask", "b"]


def test_there_is_no_environment_to_make() -> None:
    with pytest.raises(UserError, match="`penstock serve RUN`"):
        make(config_of(PARTS, spaces.Discrete(3)).env, 1)


@pytest.mark.parametrize(
    "kwargs", [{}, {"observation": {"Box": 3}, "action": {"Discrete": [2, 0]}}]
)
def test_games_without_spaces_are_a_sentence(kwargs: dict[str, Any]) -> None:
    env = resolve("games").env.model_copy(update={"kwargs": kwargs})
    with pytest.raises(UserError, match=r"env\.id games needs the spaces of the games"):
        probe(env)


def test_the_sides_of_a_games_seats_are_those_that_it_has_sent() -> None:
    kwargs = kwargs_of(PARTS, spaces.Discrete(3), sides=(0, 1, 1, 0))
    env = resolve("games").env.model_copy(update={"kwargs": kwargs})
    assert probe(env).seating == Seating(4, (0, 1, 1, 0))
    assert probe(config_of(PARTS, spaces.Discrete(3)).env).seating == ONE_SEAT
