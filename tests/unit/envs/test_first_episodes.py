"""First episodes of different lengths, in the environments of training actors only."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, make
from penstock.envs.first_episodes import ShortFirstEpisode, shares

PENDULUM = EnvConfig(id="Pendulum-v1")  # always 200 steps


def ends(game: BatchedEnv, steps: int) -> list[tuple[int, int, bool]]:
    """(step, environment, whether it was a shortened one) of each end of an episode."""
    found = []
    for step in range(1, steps + 1):
        truncated = advance(game)
        for env in np.flatnonzero(truncated).tolist():
            found.append((step, env, game.shortened is not None and bool(game.shortened[env])))
    return found


def advance(game: BatchedEnv) -> Any:
    out = np.zeros((game.count, 3), np.float32)
    _, terminated, truncated = game.step_into(np.zeros((game.count, 1), np.float32), out)
    assert not terminated.any()
    return truncated


def begin(game: BatchedEnv, seed: int = 5) -> BatchedEnv:
    game.reset_into(seed, np.zeros((game.count, 3), np.float32))
    return game


def test_shares_are_multiples_of_the_golden_ratio_and_spread_evenly() -> None:
    assert shares(0, 4) == pytest.approx([0.618034, 0.236068, 0.854102, 0.472136], abs=1e-6)
    assert shares(2, 2) == shares(0, 4)[2:]  # of a second actor with two environments
    for count in range(2, 200):
        gaps = np.diff(np.sort([0.0, *shares(0, count - 1), 1.0]))
        assert len({round(gap, 9) for gap in gaps}) <= 3  # the three-gap theorem (Sos 1958)
        assert gaps.max() < 2 / count


@pytest.mark.parametrize("threads", [1, 2])
def test_only_the_first_episodes_are_shortened(threads: int) -> None:
    game = begin(make(PENDULUM, 3, threads, first=0, stagger=True))
    first = [124, 48, 171]  # 200 times the shares, rounded up
    expected = [(step, env, True) for env, step in enumerate(first)]
    later = [(step + 201, env, False) for env, step in enumerate(first)]  # a step only resets
    assert ends(game, 375) == sorted(expected + later)
    begin(game)  # a new seed begins anew
    assert ends(game, 200) == sorted(expected)
    game.close()


def test_first_episodes_of_evaluations_keep_their_lengths() -> None:
    game = begin(make(PENDULUM, 3))
    assert ends(game, 200) == [(200, env, False) for env in range(3)]
    game.close()


def test_a_saved_state_holds_the_place_in_the_first_episode() -> None:
    game, other = (begin(make(PENDULUM, 2, first=0, stagger=True), seed) for seed in (5, 6))
    ends(game, 60)
    other.load_state_dict(game.state_dict())
    assert ends(game, 80) == ends(other, 80) == [(124 - 60, 0, True)]
    game.close()
    other.close()


class Corridor(gymnasium.Env[Any, Any]):
    """Ends by itself after four steps."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.full(1, self.at, np.float32), 1.0, self.at == 4, False, {}


@pytest.mark.parametrize(("cut", "flags"), [(3, (False, True)), (4, (True, False))])
def test_natural_end_of_a_first_episode_is_not_marked(cut: int, flags: tuple[bool, bool]) -> None:
    env = ShortFirstEpisode(Corridor(), cut)
    env.reset(seed=1)
    for _ in range(cut - 1):
        _, _, *over, _ = env.step(0)
        assert over == [False, False]
    _, _, *over, info = env.step(0)
    assert tuple(over) == flags
    assert bool(info) == flags[1]
    env.reset()
    lengths = [env.step(0)[2] for _ in range(4)]
    assert lengths == [False, False, False, True]


def test_an_environment_without_a_time_limit_is_left_alone() -> None:
    game = make(EnvConfig(id=f"{__name__}:Corridor"), 2, first=0, stagger=True)
    assert isinstance(game.vector, SyncVectorEnv)
    assert not any(isinstance(env, ShortFirstEpisode) for env in game.vector.envs)
    game.close()


class RefusesReset(Corridor):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is None and self.at % 4:
            raise RuntimeError("the episode has not ended")
        return super().reset(seed=seed)


def test_environment_that_refuses_an_early_reset_plays_its_first_episode_on() -> None:
    env = ShortFirstEpisode(RefusesReset(), 3)
    env.reset(seed=1)
    for _ in range(3):
        shown, _, *over, info = env.step(0)
    assert (over, bool(info)) == ([False, True], True)
    assert env.reset()[0].tolist() == shown.tolist() == [3]

    _, _, *over, info = env.step(0)
    assert (over, bool(info)) == ([True, False], True)  # the rest is no result
    env.reset()
    for _ in range(4):
        _, _, *over, info = env.step(0)
    assert (over, bool(info)) == ([True, False], False)
