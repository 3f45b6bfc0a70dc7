"""The bits of `penstock/BitFlip-v0`, followed one by one."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

import penstock.envs  # noqa: F401


def test_an_episode_ends_with_success_at_the_goal_and_without_it_after_as_many_steps_as_bits() -> (
    None
):
    env = gymnasium.make_vec("penstock/BitFlip-v0", num_envs=4, bits=6)
    obs, _ = env.reset(seed=1)
    rng = np.random.default_rng(0)
    steps, over = np.zeros(4, int), np.zeros(4, bool)
    successes, failures = 0, 0
    for _ in range(400):
        assert np.array_equal(obs["observation"], obs["achieved_goal"])
        wrong = obs["observation"] != obs["desired_goal"]
        # Two rows flip what differs, the others any bit.
        action = np.where(np.arange(4) < 2, wrong.argmax(1), rng.integers(6, size=4))
        next_obs, reward, terminated, truncated, info = env.step(action)
        for i in range(4):
            if over[i]:
                assert (reward[i], terminated[i], truncated[i]) == (0, False, False)
                assert (next_obs["observation"][i] != next_obs["desired_goal"][i]).any()
                steps[i] = 0
                continue
            expected = obs["observation"][i].copy()
            expected[action[i]] = 1 - expected[action[i]]
            assert np.array_equal(next_obs["observation"][i], expected)
            steps[i] += 1
            reached = np.array_equal(expected, next_obs["desired_goal"][i])
            assert (reward[i], terminated[i]) == (0 if reached else -1, reached)
            assert info["is_success"][i] == reached
            assert truncated[i] == (steps[i] == 6 and not reached)
            successes += reached
            failures += truncated[i]
            if i < 2:
                assert not truncated[i]
        over, obs = terminated | truncated, next_obs
    assert successes > 100
    assert failures > 50
    env.close()


def test_no_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="bits 0 must be at least 1"):
        gymnasium.make_vec("penstock/BitFlip-v0", num_envs=1, bits=0)
