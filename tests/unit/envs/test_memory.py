"""The corridor that needs memory: its observations, rewards and lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import make

ENVS, STEPS = 50, 400
Choose = Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[Any]]


def play(choose: Choose, wrappers: list[Any], **kwargs: Any) -> tuple[list[float], list[int]]:
    """Returns and lengths of all episodes; ``choose`` gets the observation and the last sign."""
    count = 5 if wrappers else ENVS
    game = make(EnvConfig(id="penstock/Memory-v0", kwargs=kwargs, wrappers=wrappers), count)
    obs = np.zeros((count, 3), np.float32)
    game.reset_into(3, obs)
    signs, begins = np.zeros(count), np.ones(count, bool)
    played, returns, lengths = np.zeros(count, int), [], []
    for _ in range(STEPS):
        np.testing.assert_array_equal(obs[:, 0] != 0, begins)
        np.testing.assert_array_equal(obs[:, 2], 1)
        signs = np.where(begins, obs[:, 0], signs)
        reset = ~begins & (played < 0)
        reward, terminated, truncated = game.step_into(choose(obs, signs), obs)
        assert not truncated.any()
        assert not reward[~terminated].any()
        played += 1
        returns += reward[terminated].tolist()
        lengths += played[terminated].tolist()
        begins = reset
        played[reset] = 0
        played[terminated] = -1
    game.close()
    return returns, lengths


def remembers(obs: npt.NDArray[Any], signs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (signs > 0).astype(np.int32)


def forgets(obs: npt.NDArray[Any], signs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return (obs[:, 0] >= 0).astype(np.int32)


@pytest.mark.parametrize("wrappers", [[], ["gymnasium.wrappers:OrderEnforcing"]])
def test_policy_with_memory_always_wins(wrappers: list[Any]) -> None:
    returns, lengths = play(remembers, wrappers, lengths=[2, 5])
    assert set(returns) == {1.0}
    assert set(lengths) == {3, 4, 5, 6}  # so many steps to the end, and the one there


def test_policy_without_memory_wins_half_the_time() -> None:
    returns, _ = play(forgets, [], lengths=[2, 5])
    assert set(returns) == {1.0, -1.0}
    assert abs(np.mean(returns)) < 4 / np.sqrt(len(returns))


def test_invalid_corridor_lengths_are_refused() -> None:
    with pytest.raises(UserError, match=r"lengths \[5, 2\] must be two numbers from 1"):
        make(EnvConfig(id="penstock/Memory-v0", kwargs={"lengths": [5, 2]}), 2)
