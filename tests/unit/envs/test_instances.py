"""Environments that share instances or memory, and that write to what they are given or return."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as vector_wrappers

from penstock.cli.check_env import check
from penstock.configs.errors import UserError
from penstock.envs import BatchedEnv, make
from user_shop import config

HERE = __name__


class Counts(gymnasium.Env[Any, Any]):
    """Shows its seed and its age in memory of all environments; writes to its actions."""

    observation_space: Any = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space: Any = spaces.MultiDiscrete([3, 3])
    shown: Any = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = self.np_random_seed
        self.age = 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        reward = float(np.ravel(action)[0])
        action[...] = 0
        return self.show(), reward, False, False, {}

    def show(self) -> Any:
        self.shown[:] = self.seed, self.age
        return self.shown


class CountsInADict(Counts):
    observation_space = spaces.Dict(near=Counts.observation_space, far=Counts.observation_space)

    def show(self) -> Any:
        return {"near": super().show(), "far": self.shown}


class CountsOfBox(Counts):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


class WritesActions(VectorWrapper):
    """A vector of the user's that writes to its actions."""

    def step(self, actions: Any) -> Any:
        results = super().step(actions.copy())
        actions[...] = 0
        return results


def vector_of(num_envs: int) -> VectorEnv:
    return WritesActions(SyncVectorEnv([Counts] * num_envs))


def played(name: str, *options: Any, threads: int = 1) -> tuple[BatchedEnv, Any]:
    """Three environments after a reset, and memory for their observations."""
    game = make(config(f"{HERE}:{name}", *options), 3, threads)
    space = game.info.observation_space
    out = np.zeros((3, *space.shape), space.dtype)
    game.reset_into(5, out)
    return game, out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["Counts", "CountsOfBox", "vector_of"])
def test_environment_that_edits_its_action_leaves_that_of_the_policy(
    name: str, threads: int
) -> None:
    game, out = played(name, threads=threads)
    kind = np.float32 if name == "CountsOfBox" else np.int64
    actions = np.array([[1, 1], [0, 1], [1, 0]], kind)
    reward, _, _ = game.step_into(actions, out)
    assert reward.tolist() == [1, 0, 1]
    assert actions.tolist() == [[1, 1], [0, 1], [1, 0]]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["Counts", "CountsInADict"])
def test_environments_that_share_one_array_each_show_their_own(name: str, threads: int) -> None:
    game, out = played(name, threads=threads)
    for age in range(3):
        shown = out.view(np.float32).reshape(3, -1, 2)
        for each in shown.swapaxes(0, 1):
            assert each.tolist() == [[5, age], [6, age], [7, age]]
        game.step_into(np.ones((3, 2), np.int32), out)


def test_wrapper_that_keeps_observations_keeps_those_of_each_step() -> None:
    game, out = played("Counts", {"gymnasium.wrappers:FrameStackObservation": {"stack_size": 3}})
    for _ in range(2):
        game.step_into(np.ones((3, 2), np.int32), out)
    assert out[:, :, 1].tolist() == [[0, 1, 2]] * 3
