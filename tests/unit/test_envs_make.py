"""Which form of an environment is taken, and what is said where it cannot be had."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from penstock.configs.errors import UserError
from penstock.configs.schema import EnvConfig
from penstock.envs import find_bad_observation, make, probe

USER_MODULE = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

class Shop(gymnasium.Env):
    '''Actions 10, 11, 12; the observation is the last one, the reward `price`.'''
    observation_space = Box(-100, 100, (2,), np.float64)
    action_space = Discrete(3, start=10)
    def __init__(self, price=2):
        self.price = price
    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}
    def step(self, action):
        return np.array([action, self.np_random.random()]), self.price, False, False, {}

class Doubled(gymnasium.RewardWrapper):
    def __init__(self, env, times=2):
        super().__init__(env)
        self.times = times
    def reward(self, reward):
        return reward * self.times

def shop(price=2):
    return Shop(price)

def shops(num_envs, price=2):
    return SyncVectorEnv([lambda: Shop(price)] * num_envs)

def shops_of_any_mode(num_envs, autoreset_mode):
    return SyncVectorEnv([Shop] * num_envs, autoreset_mode=autoreset_mode)

def same_step(num_envs):
    return SyncVectorEnv([Shop] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

def silent(num_envs):
    vector = SyncVectorEnv([Shop] * num_envs)
    vector.metadata = {}
    return vector

def misfit(num_envs, shape, dtype):
    vector = SyncVectorEnv([Shop] * num_envs)
    vector.single_observation_space = Box(0, 1, shape, dtype)
    return vector

class Knob(Shop):
    '''Shows the action that it was given, and insists on its bounds.'''
    observation_space = Box(-100, 100, (2,), np.float64)
    def step(self, action):
        assert action.dtype == self.action_space.dtype, action.dtype
        assert self.action_space.contains(action), action
        return np.array(action, np.float64), 0.0, False, False, {}

def box(low=-1.0, high=4.0, dtype="float32"):
    knob = Knob()
    knob.action_space = Box(np.array([low, 0], dtype), np.array([high, 1], dtype), dtype=dtype)
    return knob

def pair():
    knob = Knob()
    knob.action_space = MultiDiscrete([2, 2])
    return knob

def too_few(num_envs):
    return SyncVectorEnv([Shop])

def vector_unasked():
    return SyncVectorEnv([Shop])

def broken():
    raise OSError("no display\\n  found")

def broken_silently():
    raise KeyError

def needs_simulator():
    import simulator_of_weather.core

number = 3
gymnasium.register("Shop-v0", entry_point=Shop)
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `shopping` of a user's, importable."""
    (tmp_path / "shopping.py").write_text(USER_MODULE)
    (tmp_path / "needs_it.py").write_text("import shop_simulator.core")
    (tmp_path / "halfway.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    for name in ("shopping", "needs_it", "halfway"):
        sys.modules.pop(name, None)


def config(env_id: str, *wrappers: Any, **kwargs: Any) -> EnvConfig:
    return EnvConfig(id=env_id, kwargs=kwargs, wrappers=list(wrappers))


def one_step(env: EnvConfig, action: int) -> tuple[list[float], list[float]]:
    """First values of the observations, and rewards, of two environments after one step."""
    game = make(env, 2)
    space = game.info.observation_space
    out = np.zeros((2, *space.shape), space.dtype)
    game.reset_into(0, out)
    reward, _, _ = game.step_into(np.full(2, action, np.int32), out)
    game.close()
    return out.reshape(2, -1)[:, 0].tolist(), reward.tolist()


def test_the_fastest_form_is_taken_and_said() -> None:
    assert probe(config("CartPole-v1")).how == "CartPole-v1 is stepped by its own vector form"
    assert probe(config("ALE/Pong-v5")).how == "ALE/Pong-v5 is stepped by ale_py.AtariVectorEnv"
    assert probe(config("Acrobot-v1")).how == (
        "Acrobot-v1 is stepped one by one, by gymnasium's SyncVectorEnv"
    )
    assert "own vector form" in probe(config("penstock/Synthetic-v0")).how


@pytest.mark.parametrize(
    ("env_id", "form"),
    [("CartPole-v1", "its own vector form"), ("ALE/Pong-v5", "ale_py.AtariVectorEnv")],
)
def test_wrappers_turn_the_own_form_off_and_that_is_said(env_id: str, form: str) -> None:
    wrapped = make(config(env_id, {"gymnasium.wrappers:ClipReward": {"max_reward": 0.5}}), 2)
    assert wrapped.info.how == (
        f"{env_id} is stepped one by one, by gymnasium's SyncVectorEnv: env.wrappers turn {form} "
        "off, which is faster"
    )
    assert isinstance(wrapped._vector, SyncVectorEnv)
    wrapped.close()


def test_ids_of_old_atari_environments_are_known() -> None:
    info = probe(config("PongNoFrameskip-v4"))
    assert info.observation_space.shape == (210, 160, 3)
    assert "one by one" in info.how


def test_what_a_policy_needs_to_know_is_in_the_info() -> None:
    info = probe(config("ALE/Pong-v5", frameskip=3))
    assert info.observation_space.shape == (4, 84, 84)
    assert info.observation_space.dtype == np.uint8
    assert isinstance(info.action_space, gymnasium.spaces.Discrete)
    assert info.action_space.n == 6
    assert info.frames_per_step == 3
    assert probe(config("CartPole-v1")).frames_per_step == 1


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("env_id", ["shopping:Shop-v0", "shopping:shop", "shopping:Shop"])
def test_a_users_game_by_id_and_by_function(env_id: str) -> None:
    assert one_step(config(env_id, price=3), action=1) == ([11, 11], [3, 3])
    assert "SyncVectorEnv" in probe(config(env_id)).how
    space = probe(config(env_id)).action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    assert space.start == 10


@pytest.mark.usefixtures("shop")
def test_a_users_function_that_takes_num_envs_is_its_own_vector_form() -> None:
    assert one_step(config("shopping:shops", price=3), action=2) == ([12, 12], [3, 3])
    assert probe(config("shopping:shops")).how == "shopping:shops is stepped by its own vector form"


@pytest.mark.usefixtures("shop")
def test_the_canonical_autoreset_is_chosen_where_there_is_a_choice() -> None:
    assert one_step(config("shopping:shops_of_any_mode"), action=0) == ([10, 10], [2, 2])


@pytest.mark.usefixtures("shop")
def test_wrappers_go_on_from_the_inside_out_with_their_options() -> None:
    wrapped = config(
        "shopping:shop",
        {"shopping:Doubled": {"times": 5}},
        {"gymnasium.wrappers:ClipReward": {"max_reward": 7}},
        "shopping:Doubled",
        price=3,
    )
    assert one_step(wrapped, action=0)[1] == [14, 14]


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_actions_of_a_box_run_from_minus_1_to_1(dtype: str) -> None:
    game = make(config("shopping:box", dtype=dtype), 3)
    out = np.zeros((3, 2))
    game.reset_into(0, out)
    actions = np.array([[-1, -1], [1, 1], [0.2, 1.0000001]], np.float32)
    before = actions.copy()
    game.step_into(actions, out)
    np.testing.assert_allclose(out, np.array([[-1, 0], [4, 1], [-1 + 1.2 * 2.5, 1]]), rtol=1e-6)
    np.testing.assert_array_equal(actions, before)
    assert out[1].tolist() == [4, 1]  # the bounds themselves are exact
    game.close()


def test_the_pendulum_swings_as_by_hand() -> None:
    game, single = make(config("Pendulum-v1"), 1), gymnasium.make("Pendulum-v1")
    out = np.zeros((1, 3), np.float32)
    game.reset_into(5, out)
    np.testing.assert_array_equal(out[0], single.reset(seed=5)[0])
    for value in (0.5, -1.0, 0.3):
        reward, _, _ = game.step_into(np.full((1, 1), value, np.float32), out)
        obs, expected, *_ = single.step(np.array([2 * value], np.float32))
        np.testing.assert_allclose(out[0], obs, rtol=1e-6)
        assert reward[0] == pytest.approx(expected, rel=1e-6)
    game.close()


def test_a_wrapper_makes_other_observations_fit() -> None:
    lake = config("FrozenLake-v1", "gymnasium.wrappers:FlattenObservation")
    assert probe(lake).observation_space.shape == (16,)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "penstock/Synthetic-v0"])
def test_seeds_give_the_same_and_other_episodes(env_id: str) -> None:
    def firsts(seed: int) -> list[float]:
        game = make(config(env_id, **kwargs), 8)
        out = np.zeros((8, *game.info.observation_space.shape), np.float32)
        game.reset_into(seed, out)
        return [float(value) for value in out.ravel()]

    kwargs = {"n_actions": 4} if "Synthetic" in env_id else {}
    assert firsts(3) == firsts(3)
    assert firsts(3) != firsts(3 + 8)
    assert firsts(2**63) == firsts(2**63)


ERRORS = [
    (
        config("Cartpol-v1"),
        r"environment Cartpol-v1 is not registered; the nearest is CartPole-v\d",
    ),
    (config("Pong-v5"), r"environment Pong-v5 is not registered; the nearest is .*ALE/Pong-v5"),
    (config("ALE/Ponk-v5"), r"the nearest is ALE/Pong-v5"),
    (config("CartPole"), r"environment CartPole is not registered; the nearest is .*CartPole-v1"),
    (config("qqqqqq"), r"environment qqqqqq is not registered; correct its name"),
    (config("CartPole-v1", max_episode_step=5), r"no option max_episode_step; .*max_episode_steps"),
    (config("Acrobot-v1", max_episode_step=5), r"no option max_episode_step; .*max_episode_steps"),
    (config("CartPole-v1", num_envs=5), r"num_envs is not set here; set actors.envs$"),
    (config("shopping:box", high=np.inf), r"actions of Box.*must have finite bounds.*env.wrappers"),
    (config("shopping:box", high=-1.0), r"actions of Box.*the lower below the upper"),
    (config("shopping:box", dtype="int32"), r"only Discrete and a Box of floats are supported"),
    (config("shopping:pair"), r"actions of MultiDiscrete.*only Discrete and a Box of floats"),
    (config("FrozenLake-v1"), r"observations of Discrete.*gymnasium.wrappers:FlattenObservation"),
    (config("CartPole-v1", "gymnasium.wrappers:ClipRewards"), r"the nearest is .*ClipReward"),
    (
        config("CartPole-v1", "gymnasium.wrappers:ClipReward"),
        r"^wrapper gymnasium.wrappers:ClipReward failed with InvalidBound: .*; correct env.wrapper",
    ),
    (
        config("CartPole-v1", {"gymnasium.wrappers:ClipReward": {"max_rewards": 1}}),
        r"wrapper gymnasium.wrappers:ClipReward: there is no option max_rewards; .*max_reward",
    ),
    (config("shoping:shop"), r"there is no module shoping in /.* or installed; correct its name"),
    (config("shopping:Shop-v1"), r"registers no environment Shop-v1; .*Shop-v0"),
    (config("shopping:number"), r"module shopping has no function number and registers no"),
    (config("shopping:shopp"), r"module shopping has no function shopp .*; the nearest is shop"),
    (config("shopping:shop", prize=2), r"there is no option prize; the nearest is price"),
    (config("shopping:broken"), r"failed with OSError: no display found; correct env.kwargs"),
    (config("shopping:broken_silently"), r"failed with KeyError; correct env.kwargs"),
    (config("shopping:vector_unasked"), r"not SyncVectorEnv; .* let its function take num_envs"),
    (config("shopping:too_few"), r"must return a VectorEnv of num_envs=3"),
    (
        config("shopping:same_step"),
        r"autoreset mode is SAME_STEP, and it must be NEXT_STEP.*single",
    ),
    (config("shopping:silent"), r"metadata has no autoreset_mode, and it must be NEXT_STEP"),
    (config("shopping:shops", "shopping:Doubled"), r"comes as a vector environment only"),
    (
        config("shopping:needs_simulator"),
        r"simulator_of_weather is not installed; run `pip install \"simulator_of_weather\"`",
    ),
    (config("needs_it:Shop-v0"), r"shop_simulator is not installed"),
    (config("halfway:f"), r"failed with SyntaxError: .*; correct .*the code that raised it"),
]


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(("env", "sentence"), ERRORS, ids=[str(env.id) for env, _ in ERRORS])
def test_a_mistake_is_answered_with_one_sentence(env: EnvConfig, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        make(env, 3)
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("env_id", "module", "command"),
    [
        ("ALE/Pong-v5", "ale_py", 'pip install "penstock[atari]"'),
        ("LunarLander-v3", "Box2D", 'pip install "gymnasium[box2d]"'),
        ("Ant-v5", "mujoco", 'pip install "gymnasium[mujoco]"'),
        ("phys2d/CartPole-v1", "jax", 'pip install "gymnasium[jax]"'),
    ],
)
def test_a_missing_extra_is_answered_with_its_install_command(
    env_id: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=re.escape(command)) as error:
        make(config(env_id), 2)
    assert str(error.value).endswith("then try again")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(("shape", "dtype"), [((4,), "float64"), ((2,), "uint8")])
def test_observations_that_do_not_fit_their_space_are_refused(
    shape: tuple[int, ...], dtype: str
) -> None:
    game = make(config("shopping:misfit", shape=list(shape), dtype=dtype), 3)
    sentence = f"returned observations float64[3, 2] where its observation space says {dtype}"
    with pytest.raises(UserError, match=re.escape(sentence)):
        game.reset_into(0, np.zeros((3, *shape), dtype))


def test_a_bad_observation_is_found_where_it_is() -> None:
    observations = np.zeros((5, 4, 2, 3), np.float32)
    assert find_bad_observation(observations) is None
    assert find_bad_observation(np.full((2, 3), 255, np.uint8)) is None
    observations[3, 2, 1, 0] = np.nan
    observations[4] = np.inf
    assert find_bad_observation(observations) == (
        "nan at [1, 0] of environment 2's observation in row 3"
    )
    observations[3] = -np.inf
    assert find_bad_observation(observations) == (
        "-inf at [0, 0] of environment 0's observation in row 3"
    )


def test_importing_the_room_imports_no_torch() -> None:
    code = "import sys, penstock.envs; sys.exit('torch' in sys.modules or 'ale_py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
