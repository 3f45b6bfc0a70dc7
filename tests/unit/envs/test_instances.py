"""Environments that share instances or memory, or write to their arguments and results."""

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
from penstock.envs.instances import parts_of
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


def test_instances_within_a_tuple_attribute_are_found() -> None:
    inner, outer = Counts(), Counts()
    vars(outer)["rated"] = (inner, 0.5, None)
    assert [*parts_of(outer).values()] == [outer, inner]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["Counts", "CountsInADict"])
def test_environments_sharing_an_array_keep_separate_observations(name: str, threads: int) -> None:
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


class Seats(gymnasium.Env[Any, Any]):
    """Goes around an environment, and is no wrapper of gymnasium's."""

    def __init__(self, inner: gymnasium.Env[Any, Any]) -> None:
        self.inner = inner
        self.observation_space, self.action_space = inner.observation_space, inner.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed)

    def step(self, action: Any) -> Any:
        return self.inner.step(action)


ONE = Counts()
ONE_VECTOR = SyncVectorEnv([Counts] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)


def one() -> Any:
    return ONE


def one_wrapped() -> Any:
    return wrappers.TimeLimit(ONE, 9)


def one_within() -> Any:
    return Seats(ONE)


def vector_of_one(num_envs: int) -> Any:
    return SyncVectorEnv([one] * num_envs)


def one_vector(num_envs: int) -> Any:
    return ONE_VECTOR


@pytest.mark.parametrize("name", ["one", "one_wrapped", "one_within", "vector_of_one"])
def test_one_instance_for_all_environments_is_refused(name: str) -> None:
    for threads in (1, 2):
        with pytest.raises(UserError, match="returned the same instance for two environments"):
            make(config(f"{HERE}:{name}"), 3, threads)
    [problem] = check(f"{HERE}:{name}", [], 20, 3)["problems"]
    assert "returned the same instance for two environments" in problem["text"]


@pytest.mark.parametrize(("name", "count"), [("one", 1), ("one_vector", 3)])
def test_one_instance_is_refused_to_a_second_vector_while_the_first_is_open(
    name: str, count: int
) -> None:
    first = make(config(f"{HERE}:{name}"), count)
    with pytest.raises(UserError, match="returned the same instance"):
        make(config(f"{HERE}:{name}"), count)
    first.close()
    make(config(f"{HERE}:{name}"), count).close()


def normalized(observations: bool, fixed: bool = False) -> Any:
    if not observations:
        return wrappers.TimeLimit(wrappers.NormalizeReward(CountsOfBox()), 9)
    env = wrappers.NormalizeObservation(CountsOfBox())
    env.update_running_mean = not fixed
    return wrappers.TimeLimit(env, 9)


def normalized_vector(num_envs: int, observations: bool) -> Any:
    if observations:
        return vector_wrappers.NormalizeObservation(SyncVectorEnv([CountsOfBox] * num_envs))
    return SyncVectorEnv([lambda: Seats(normalized(False))] * num_envs)


@pytest.mark.parametrize("name", ["normalized", "normalized_vector"])
@pytest.mark.parametrize(
    ("observations", "option"),
    [(True, "model.normalize_observations=true"), (False, "algo.normalize_rewards=true")],
)
def test_running_statistics_of_gymnasium_are_refused_at_any_level(
    name: str, observations: bool, option: str
) -> None:
    with pytest.raises(UserError, match=option):
        make(config(f"{HERE}:{name}", observations=observations), 2)
    with pytest.raises(UserError, match=option):
        check(f"{HERE}:{name}", [f"env.kwargs.observations={observations}"], 20, 2)


def test_running_statistics_are_refused_of_a_wrapper_in_the_config() -> None:
    with pytest.raises(UserError, match=r"model\.normalize_observations=true"):
        make(config("Pendulum-v1", "gymnasium.wrappers:NormalizeObservation"), 2)


def test_fixed_statistics_are_allowed() -> None:
    make(config(f"{HERE}:normalized", observations=True, fixed=True), 2).close()


class Pops(Counts):
    """Takes its length from a nested option, and a factor from that of its wrapper."""

    def __init__(self, options: dict[str, int]) -> None:
        self.length = options.pop("length", 50)


class Multiplies(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], options: dict[str, int]) -> None:
        super().__init__(env)
        self.factor = options.pop("factor", 1)


def test_options_changed_by_an_environment_do_not_affect_others() -> None:
    multiplied = {f"{HERE}:Multiplies": {"options": {"factor": 3}}}
    target = config(f"{HERE}:Pops", multiplied, options={"length": 10})

    for _ in range(2):
        envs: Any = make(target, 2).vector
        assert [env.unwrapped.length for env in envs.envs] == [10, 10]
        assert [env.get_wrapper_attr("factor") for env in envs.envs] == [3, 3]
