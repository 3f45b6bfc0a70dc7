"""Results of a step on real games, against single environments stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from ale_py import AtariVectorEnv
from gymnasium import Env

from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, make
from penstock.envs.games.synthetic import make_single
from penstock.envs.single import SingleEnv

Array = npt.NDArray[Any]
PASS_THROUGH = "gymnasium.wrappers:OrderEnforcing"
PONG: dict[str, Any] = {
    "repeat_action_probability": 0.25,
    "noop_max": 30,
    "max_num_frames_per_episode": 80,
    "reward_clipping": False,
    "use_fire_reset": False,
}


def first_observations(game: BatchedEnv, seed: int) -> Array:
    space = game.info.observation_space
    out = np.zeros((game.count, *space.shape), space.dtype)
    game.reset_into(seed, out)
    return out


def played(game: BatchedEnv, seed: int, actions: Array) -> tuple[Array, Array, Array, Array]:
    """Observations [T+1, E, ...], rewards, terminated and truncated [T, E]."""
    first = first_observations(game, seed)
    observations = np.zeros((len(actions) + 1, *first.shape), first.dtype)
    observations[0] = first
    results = [game.step_into(row, observations[t + 1]) for t, row in enumerate(actions)]
    rewards, terminated, truncated = (np.array(column) for column in zip(*results, strict=True))
    return observations, rewards, terminated, truncated


def played_by_hand(
    env: Env[Any, Any], seed: int, actions: Array
) -> tuple[Array, Array, Array, Array]:
    """The same from one single environment, whose every reset is a row of its own."""
    observations = [np.array(env.reset(seed=seed)[0])]
    results: list[tuple[float, bool, bool]] = []
    over = False
    for action in actions:
        if over:
            observation, result = env.reset()[0], (0.0, False, False)
        else:
            observation, reward, terminated, truncated, _ = env.step(action)
            result = (float(reward), terminated, truncated and not terminated)
        over = result[1] or result[2]
        observations.append(np.array(observation))
        results.append(result)
    rewards, ends, cuts = (np.array(column) for column in zip(*results, strict=True))
    return np.array(observations), rewards, ends, cuts


def cartpole() -> Env[Any, Any]:
    return gymnasium.make("CartPole-v1", max_episode_steps=20)


def pong() -> Env[Any, Any]:
    return SingleEnv(AtariVectorEnv("pong", 1, num_threads=1, **PONG))


GAMES = {
    "cartpole, one by one": (
        EnvConfig(id="CartPole-v1", kwargs={"max_episode_steps": 20}, wrappers=[PASS_THROUGH]),
        3,
        cartpole,
    ),
    "pong, ale-py's vector": (EnvConfig(id="ALE/Pong-v5", kwargs=PONG), 3, pong),
    "pong, one by one": (
        EnvConfig(id="ALE/Pong-v5", kwargs=PONG, wrappers=[PASS_THROUGH]),
        3,
        pong,
    ),
    "synthetic": (
        EnvConfig(id="penstock/Synthetic-v0", kwargs={"episode_steps": 7, "truncate": True}),
        1,
        lambda: make_single(episode_steps=7, truncate=True),
    ),
}


@pytest.mark.parametrize(
    ("config", "count", "single"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.slow] if name == "pong, one by one" else [],
            id=name,
        )
        for name, case in GAMES.items()
    ],
)
def test_vector_equals_single_environments_stepped_by_hand(
    config: EnvConfig, count: int, single: Callable[[], Env[Any, Any]]
) -> None:
    game = make(config, count)
    assert isinstance(game.info.action_space, gymnasium.spaces.Discrete)
    actions = np.random.default_rng(1).integers(game.info.action_space.n, size=(100, count))
    observations, *results = played(game, 5, actions)
    assert (results[1] | results[2]).sum() >= 3 * count
    for i in range(count):
        by_hand = played_by_hand(single(), 5 + i, actions[:, i])
        np.testing.assert_array_equal(observations[:, i], by_hand[0])
        for result, expected in zip(results, by_hand[1:], strict=True):
            np.testing.assert_array_equal(result[:, i], expected)


def test_cartpoles_own_vector_form_plays_gymnasiums_single_cartpole() -> None:
    game = make(EnvConfig(id="CartPole-v1", kwargs={"max_episode_steps": 14}), 16)
    actions = np.random.default_rng(0).integers(2, size=(200, 16), dtype=np.int32)
    observations, rewards, terminated, truncated = played(game, 3, actions)
    single: Any = gymnasium.make("CartPole-v1").unwrapped
    for i in range(16):
        age, over = 0, False
        single.reset()
        single.state = observations[0, i]
        for t, action in enumerate(actions[:, i]):
            found = rewards[t, i], terminated[t, i], truncated[t, i]
            if over:
                age, over = 0, False
                assert found == (0, False, False)
                assert (np.abs(observations[t + 1, i]) <= 0.05).all()
                single.reset()
                single.state = observations[t + 1, i]
                continue
            observation, reward, falls, _, _ = single.step(action)
            age += 1
            assert found == (reward, falls, age == 14 and not falls)
            np.testing.assert_allclose(observations[t + 1, i], observation, atol=1e-5)
            over = falls or age == 14
    assert terminated.any()
    assert truncated.any()


def test_terminated_overrides_truncated() -> None:
    theirs = gymnasium.make_vec("CartPole-v1", 64, max_episode_steps=10)
    game = make(EnvConfig(id="CartPole-v1", kwargs={"max_episode_steps": 10}), 64)
    theirs.reset(seed=0)
    out = first_observations(game, 0)
    push = np.ones(64, np.int64)
    both = 0
    for _ in range(40):
        _, _, their_terminated, their_truncated, _ = theirs.step(push)
        _, terminated, truncated = game.step_into(push, out)
        both += int((their_terminated & their_truncated).sum())
        np.testing.assert_array_equal(terminated, their_terminated)
        np.testing.assert_array_equal(truncated, their_truncated & ~their_terminated)
    assert both > 0


def test_truncated_step_returns_the_last_observation_of_its_episode() -> None:
    cut = make(EnvConfig(id="ALE/Pong-v5", kwargs=PONG), 1)
    uncut = make(EnvConfig(id="ALE/Pong-v5", kwargs={**PONG, "max_num_frames_per_episode": 999}), 1)
    actions = np.random.default_rng(0).integers(6, size=(25, 1))
    observations, _, _, truncated = played(cut, 4, actions)
    longer, _, _, never = played(uncut, 4, actions)
    end = int(truncated[:, 0].argmax())
    assert truncated[end, 0]
    assert not never.any()
    np.testing.assert_array_equal(observations[: end + 1], longer[: end + 1])
    older = np.s_[end + 1, 0, :-1]  # ale-py leaves the newest frame of a final stack out of date
    np.testing.assert_array_equal(observations[older], longer[older])
    assert (observations[end + 1] != longer[end + 1]).mean() < 0.01
    assert not observations[end + 2, 0, :-1].any()  # the next episode's stack begins with zeros


def test_atari_ends_when_the_last_life_is_lost_and_then_resets_in_a_step_of_its_own() -> None:
    game = make(EnvConfig(id="ALE/Breakout-v5", kwargs={"repeat_action_probability": 0.0}), 1)
    out = first_observations(game, 3)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        _, terminated, truncated = game.step_into(rng.integers(4, size=1), out)
        if terminated[0]:
            break
    assert terminated[0]
    assert not truncated[0]
    final = out.copy()
    reward, terminated, truncated = game.step_into(np.array([1]), out)
    assert (reward[0], terminated[0], truncated[0]) == (0, False, False)
    assert not out[:, :-1].any()
    assert final[:, :-1].any()


def test_results_of_a_step_are_not_overwritten_by_later_steps() -> None:
    for config, count, _ in GAMES.values():
        game = make(config, count)
        out = first_observations(game, 0)
        kept = []
        for _ in range(30):
            result = game.step_into(np.zeros(count, np.int64), out)
            kept.append((result, tuple(array.copy() for array in result)))
        for result, copies in kept:
            for array, copy in zip(result, copies, strict=True):
                np.testing.assert_array_equal(array, copy)
        game.close()
