"""Games of a user's, in modules of his own: sound ones and such as have a mistake."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from penstock.configs.sections import EnvConfig

USER_MODULE = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

class Shop(gymnasium.Env):
    '''Actions 10, 11, 12; the observation is the last one, the reward `price`.'''
    observation_space = Box(-100, 100, (2,), np.float64)
    action_space = Discrete(3, start=10)
    def __init__(self, price=2):
        self.price = price
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2), {}
    def step(self, action):
        return np.array([action, self.np_random.random()]), self.price, False, False, {}

class Doubled(gymnasium.RewardWrapper):
    def __init__(self, env, times=2):
        super().__init__(env)
        self.times = times
    def reward(self, reward):
        return reward * self.times

class Ids(Shop):
    observation_space = Box(0, 2**31 - 1, (1,), np.int64)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([2**24 + self.np_random.integers(2)]), {}
    def step(self, action):
        return np.array([2**24 + self.np_random.integers(2)]), 1.0, False, False, {}

def ids():
    return Ids()

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

def named(num_envs):
    vector = SyncVectorEnv([Shop] * num_envs)
    vector.metadata = {"autoreset_mode": "next_step"}
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
    knob.action_space = Tuple([Discrete(2), Discrete(2)])
    return knob

def text():
    shop = Shop()
    shop.observation_space = Dict(name=Text(3), price=Discrete(9))
    return shop

def mask():
    shop = Shop()
    shop.observation_space = Dict(action_mask=MultiBinary(2))
    return shop

def knob_mask():
    knob = box()
    knob.observation_space = Dict(action_mask=MultiBinary(2))
    return knob

class Crowded(Shop):
    '''There is room for three.'''
    alive = set()
    def reset(self, *, seed=None, options=None):
        self.alive.add(self)
        if len(self.alive) > 3:
            raise RuntimeError("no free port")
        return super().reset(seed=seed)
    def close(self):
        self.alive.discard(self)

ODD = {
    "nothing": Box(0, 1, (0,)),
    "no parts": Dict(),
    "many": Discrete(10**9),
    "many in one": Tuple([Discrete(2), Discrete(10**9)]),
    "dots": Dict({"a.b": Discrete(2), "a": Dict(b=Discrete(2))}),
    "none to choose": MultiDiscrete([]),
}

def odd(observations=None, actions=None):
    shop = Shop()
    shop.observation_space = ODD.get(observations, Shop.observation_space)
    shop.action_space = ODD.get(actions, Shop.action_space)
    return shop

class Unnamed(Shop):
    metadata = None

class Numbered(Shop):
    '''Its reward is its number.'''
    def __init__(self, index):
        self.price = index

def numbered(index, price=0):
    return Numbered(index + price)

def numbered_vector(num_envs, index):
    return SyncVectorEnv([lambda i=i: Numbered(index + i) for i in range(num_envs)])

nameless = lambda num_envs: shops(num_envs)

def too_few(num_envs):
    return SyncVectorEnv([Shop])

def vector_unasked():
    return SyncVectorEnv([Shop])

def broken():
    raise OSError("no display\\n  found")

def broken_vector(num_envs):
    raise OSError("no display found")

def no_vector(num_envs):
    return None

def wants(price):
    return Shop(price)

def broken_silently():
    raise KeyError

def needs_simulator():
    import simulator_of_weather.core

number = 3
gymnasium.register("Shop-v0", entry_point=Shop)
"""


def shopping(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes a user's module `shopping` importable to the end of the block."""
    (folder / "shopping.py").write_text(USER_MODULE)
    (folder / "needs_it.py").write_text("import shop_simulator.core")
    (folder / "halfway.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    with suppress(ImportError):
        importlib.import_module("ale_py")  # what it registers, once a process, is to stay
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    for name in ("shopping", "needs_it", "halfway"):
        sys.modules.pop(name, None)


def config(env_id: str, *wrappers: Any, **kwargs: Any) -> EnvConfig:
    """Returns the config of an environment by its id, with wrappers and options."""
    return EnvConfig(id=env_id, kwargs=kwargs, wrappers=list(wrappers))
