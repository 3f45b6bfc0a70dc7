"""Action masks that an environment gives in `info`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from broken_envs import Sound
from penstock.cli.check_env import check
from penstock.configs.errors import UserError
from penstock.core.observations import MASK, views
from penstock.envs import BatchedEnv, make
from penstock.envs.checking.vector import draw_for
from user_shop import config

WRAPPER = "penstock.envs.masks:MaskFromInfo"


class TellsMask(Sound):
    """Refuses actions that the mask in its info forbids, which is missing at the end."""

    action_space: Any = spaces.MultiDiscrete([2, 3])

    def mask(self) -> Any:
        return {MASK: (np.array([1, self.age % 2]), [self.age % 2, 1, 0])}

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], self.mask()

    def step(self, action: Any) -> Any:
        if not all(part[choice] for part, choice in zip(self.mask()[MASK], action, strict=True)):
            raise ValueError("illegal move")
        observation, _, terminated, *rest, _ = super().step(0)
        return observation, 1.0, terminated, *rest, {} if terminated else self.mask()


class ForgetsMask(TellsMask):
    def mask(self) -> Any:
        return super().mask() if self.age < 2 else {"moves": 3}


class Boxed(TellsMask):
    action_space = spaces.Box(-1, 1, (2,))


def begin(env_id: str, *wrappers: str) -> tuple[BatchedEnv, Any]:
    game = make(config(env_id, *wrappers), 3)
    out = np.zeros((3, *game.info.observation_space.shape), game.info.observation_space.dtype)
    game.watch_precision()
    game.reset_into(1, out)
    return game, out


def test_mask_in_info_is_used_as_if_in_the_observation() -> None:
    game, out = begin(f"{__name__}:TellsMask", WRAPPER)
    rng = np.random.default_rng(0)
    assert views(game.info.parts, out)[MASK].tolist() == [[1, 0, 0, 1, 0]] * 3
    for _ in range(20):
        game.step_into(draw_for(game, out, rng), out)
    assert {part.name for part in game.info.parts} == {MASK, "observation"}
    assert check(f"{__name__}:TellsMask", [f"env.wrappers=[{WRAPPER}]"], 50, 2)["problems"] == []


def test_mask_of_taxi_equals_its_action_mask() -> None:
    game, out = begin("Taxi-v4", WRAPPER)
    own = [env.unwrapped.action_mask(env.unwrapped.s) for env in game.vector.envs]  # type: ignore[attr-defined]
    assert views(game.info.parts, out)[MASK].tolist() == np.array(own).tolist()


def test_mask_in_info_that_is_not_used_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    game, out = begin(f"{__name__}:TellsMask")
    assert "gives an action_mask in its info, which no network sees; set 'env.wr" in caplog.text
    with pytest.raises(ValueError, match="illegal move") as error:
        game.step_into(np.ones((3, 2), np.int32), out)
    assert WRAPPER in error.value.__notes__[0]
    [problem] = check(f"{__name__}:TellsMask", [], 50, 2)["problems"]
    assert WRAPPER in problem["text"]


def test_info_without_a_mask_is_refused_while_the_episode_lasts() -> None:
    game, out = begin(f"{__name__}:ForgetsMask", WRAPPER)
    game.step_into(draw_for(game, out, np.random.default_rng(0)), out)
    with pytest.raises(UserError, match=r"info has no action_mask, but \['moves'\]; give it in"):
        game.step_into(draw_for(game, out, np.random.default_rng(0)), out)


def test_mask_for_continuous_actions_is_refused() -> None:
    with pytest.raises(UserError, match="MaskFromInfo goes around actions to choose from, not Box"):
        make(config(f"{__name__}:Boxed", WRAPPER), 1)
