"""Environments that are saved and restored continue bit for bit, and others are refused."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.envs import BatchedEnv, make
from penstock.envs.checking.saving import why_not_savable
from penstock.envs.checking.vector import draw
from penstock.envs.saved_state import NotSavableError, _attributes, _class_name

STACKED = "env.wrappers=[{'gymnasium.wrappers:FrameStackObservation': {stack_size: 4}}]"
CASES = {
    "cartpole": ("cartpole",),
    "pendulum": ("pendulum_sac",),
    "memory": ("memory",),
    "bit flip": ("bit_flip",),
    "stacked": ("cartpole", STACKED),
    "threads": ("cartpole", STACKED, "actors.env_threads=2"),
    "frozen lake": ("cartpole", "env.id=FrozenLake-v1"),
    "breakout": ("minatar_breakout",),
    "seaquest": ("minatar_breakout", "env.kwargs.game=seaquest"),
    "halfcheetah": ("halfcheetah",),
    "ant": ("halfcheetah", "env.id=Ant-v5"),
}
NEEDS = {"breakout": "minatar", "seaquest": "minatar", "halfcheetah": "mujoco", "ant": "mujoco"}


def of_case(name: str) -> Callable[[], BatchedEnv]:
    target, *options = CASES[name]
    config = resolve(target, options)
    return partial(make, config.env, 3, config.actors.env_threads)


def played(env: BatchedEnv, steps: int, rng: np.random.Generator) -> list[bytes]:
    """The results of random actions, whatever the observations are."""
    space = env.info.observation_space
    out = np.zeros((env.count, *space.shape), space.dtype)
    found = []
    for _ in range(steps):
        results = env.step_into(draw(env.info.action_space, env.count, rng), out)
        found.append(b"".join(np.asarray(values).tobytes() for values in (out, *results)))
    return found


def begun(made: Callable[[], BatchedEnv], seed: int) -> BatchedEnv:
    env = made()
    space = env.info.observation_space
    env.reset_into(seed, np.zeros((env.count, *space.shape), space.dtype))
    return env


@pytest.mark.parametrize("name", CASES)
def test_a_restored_environment_continues_bit_for_bit(name: str) -> None:
    """Through ends of episodes, where new ones are drawn."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    made = of_case(name)
    env = begun(made, 1)
    played(env, 60, np.random.default_rng(0))
    state = to_bytes(env.state_dict())
    wanted = played(env, 250, np.random.default_rng(1))
    env.close()
    other = begun(made, 2)
    assert played(other, 5, np.random.default_rng(0)) != wanted[:5]
    other.load_state_dict(from_bytes(state))
    again = to_bytes(other.state_dict())
    assert played(other, 250, np.random.default_rng(1)) == wanted
    other.close()
    third = begun(made, 3)
    third.load_state_dict(from_bytes(again))
    assert played(third, 100, np.random.default_rng(1)) == wanted[:100], "saved a second time"
    third.close()
    assert why_not_savable(made) == ""


class Mode(Enum):
    SLOW = 1
    FAST = 2


class Part:
    __slots__ = ("speed", "whole")

    def __init__(self, whole: Any) -> None:
        self.whole, self.speed = whole, 1


class Walk(gymnasium.Env[Any, Any]):
    """A walk with state in many forms."""

    observation_space = spaces.Box(-1e9, 1e9, (4,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.part = Part(self)
        self.parts = {"one": self.part, 2: [Part(self)]}
        self.block = np.zeros((3, 4), order="F")
        self.row = self.block[1]  # a view
        self.column = self.block.T[2]
        self.last: deque[Any] = deque(maxlen=3)
        self.same = self.seen = [0]
        self.lock = threading.Lock()
        self.mode = Mode.SLOW

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.rng = self.np_random
        self.age, self.met = 0, {3, 1}
        self.last.append((self.age, np.float32(0.5)))
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        self.row += self.rng.random(4)
        self.block[0] += self.row * self.part.speed
        self.part.whole.parts[2][0].speed += int(action)
        self.seen.append(self.parts[2][0].speed)  # type: ignore[index]
        self.mode = Mode.FAST if self.mode is Mode.SLOW and action else Mode.SLOW
        self.last.append((self.age, np.float32(len(self.same))))
        self.met.add(self.age)
        return self.show(), float(self.column.sum()), self.np_random.random() < 0.05, False, {}

    def show(self) -> Any:
        seen = self.same[-1] + len(self.met) + self.mode.value
        return np.array([self.row.sum(), self.column.sum(), self.last[0][0], seen], np.float64)


class Counted(Walk):
    """Holds an object in C."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count()


class SavesItself(Counted):
    def step(self, action: Any) -> Any:
        shown, *rest = super().step(action)
        return shown + next(self.counter), *rest

    def state_dict(self) -> dict[str, Any]:
        keys = ("age", "seen", "met", "last", "mode", "block")
        kept = {name: getattr(self, name) for name in keys}
        speeds = [self.part.speed, self.parts[2][0].speed]  # type: ignore[index]
        self.counter, copy = itertools.tee(self.counter)  # type: ignore[assignment]
        return kept | {"next": next(copy), "speeds": speeds, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.age, self.met, self.last, self.mode = (
            state[k] for k in ("age", "met", "last", "mode")
        )
        self.same = self.seen = state["seen"]
        self.block[...] = state["block"]
        self.counter = itertools.count(state["next"])
        self.part.speed, self.parts[2][0].speed = state["speeds"]  # type: ignore[index]
        self.rng.bit_generator.state = state["rng"]


class Hidden(Walk):
    """Counts where no attribute shows it."""

    def __init__(self) -> None:
        super().__init__()
        hidden = 0

        def count() -> int:
            nonlocal hidden
            hidden += 1
            return hidden

        self.count = count

    def step(self, action: Any) -> Any:
        shown, *rest = super().step(action)
        return shown + self.count(), *rest


class Grows(Walk):
    """Holds more objects than a new one does."""

    def step(self, action: Any) -> Any:
        self.parts[self.age + 10] = Part(self)
        return super().step(action)


class Forbids(Walk):
    def step(self, action: Any) -> Any:
        raise RuntimeError("not today")


class Keeps(Walk):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.request = [f"key={key}"]

    def show(self) -> Any:
        return super().show() * len(self.key)


def of_class(made: Callable[..., Any], **kwargs: Any) -> Callable[[], BatchedEnv]:
    config = resolve("cartpole", [f"env.id=test_saved_state:{made.__name__}"])
    config.env.kwargs.update(kwargs)
    return partial(make, config.env, 2)


@pytest.mark.parametrize("made", [Walk, SavesItself])
def test_environment_state_of_every_form_is_saved(made: type[Walk]) -> None:
    assert why_not_savable(of_class(made)) == ""


def test_shared_objects_are_shared_again_after_restoring() -> None:
    env, other = begun(of_class(Walk), 1), begun(of_class(Walk), 2)
    played(env, 30, np.random.default_rng(0))
    other.load_state_dict(from_bytes(to_bytes(env.state_dict())))
    walk = other._vector.envs[1]  # type: ignore[attr-defined]
    assert walk.same is walk.seen
    assert walk.rng is walk.np_random
    assert walk.part.whole is walk
    assert walk.parts["one"] is walk.part
    assert np.shares_memory(walk.block, walk.row)
    walk.block[...] = 7
    assert walk.row.tolist() == [7.0] * 4
    assert walk.column.tolist() == [7.0] * 3
    for each in (env, other):
        each.close()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Counted, "counter is of class itertools.count"),
        (Hidden, "step 1 after it was restored returned something else"),
        (Grows, "has no object in a new environment"),
        (Forbids, "it raised RuntimeError when this was tested"),
    ],
)
def test_unsavable_state_is_detected(made: type[Walk], why: str) -> None:
    assert why in why_not_savable(of_class(made))


@pytest.mark.parametrize(
    ("target", "option", "needs", "why"),
    [
        ("pong", "actors.envs=4", "ale_py", "AtariVectorEnv.ale is of class"),
        ("cartpole", "env.id=LunarLander-v3", "Box2D", ".this is of class .SwigPyObject"),
    ],
)
def test_environments_in_native_code_are_not_savable(
    target: str, option: str, needs: str, why: str
) -> None:
    pytest.importorskip(needs)
    config = resolve(target, [option])
    assert why in why_not_savable(partial(make, config.env, 2))


def test_secret_is_not_saved_and_kept_on_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_KEY", "a-long-secret-value")
    made = of_class(Keeps, key="${env:PENSTOCK_TEST_KEY}")
    assert why_not_savable(made) == ""
    env, other = begun(made, 1), begun(made, 2)
    state = to_bytes(env.state_dict())
    assert b"a-long-secret" not in state.tobytes()
    other.load_state_dict(from_bytes(state))
    for walk in other._vector.envs:  # type: ignore[attr-defined]
        assert walk.key == "a-long-secret-value"
        assert walk.request == ["key=a-long-secret-value"]
    for each in (env, other):
        each.close()


@pytest.mark.parametrize(
    "state",
    [
        ["object", "os.system", {}],
        ["object", "gymnasium.vector.sync_vector_env.SyncVectorEnv", {"envs": ["ref", 99]}],
        ["object", "gymnasium.vector.sync_vector_env.SyncVectorEnv", {"envs": ["call", "os"]}],
        [
            "object",
            "gymnasium.vector.sync_vector_env.SyncVectorEnv",
            {"x": ["enum", "os.sep", "a"]},
        ],
        ["object", "gymnasium.vector.sync_vector_env.SyncVectorEnv", {"x": ["object", "a.B", {}]}],
        ["array", np.zeros(8, np.uint8), "<f8", [4], [8], 0],
        ["array", np.zeros(8, np.uint8), "<f8", [1], [8], 64],
        ["array", 0, "<f8", [1], [8], 0],
        ["list"],
        {},
    ],
)
def test_foreign_state_is_refused(state: Any) -> None:
    env = begun(of_class(Walk), 1)
    with pytest.raises(NotSavableError):
        env.load_state_dict(state)
    env.close()


KEEP = ["keep"]
ATTACK = {
    "entry_point": "subprocess:Popen",
    "kwargs": ["dict", [["args", "touch run"], ["shell", True]]],
}


def object_node(value: Any, **changes: Any) -> Any:
    """A node for any object that keeps all attributes but ``changes``."""
    return ["object", _class_name(value), dict.fromkeys(_attributes(value), KEEP) | changes]


def partial_node(first: Any, count: int) -> Any:
    """A node for a partial whose first of ``count`` arguments becomes that of ``first``."""
    arguments = ["tuple", [first, *[KEEP] * (count - 1)]]
    attributes = {"args": arguments, "func": KEEP, "keywords": KEEP, "__vectorcalloffset__": KEEP}
    return ["object", "functools.partial", attributes]


def through_partials() -> dict[str, Any]:
    """To the registry through the functions that make the environments."""
    spec = object_node(gymnasium.registry["FrozenLake-v1"], **ATTACK)
    return {"env_fns": ["list", [partial_node(partial_node(spec, 2), 3)]]}


def through_spec() -> dict[str, Any]:
    return {"spec": object_node(gymnasium.registry["CartPole-v1"], **ATTACK)}


def through_enum() -> dict[str, Any]:
    """To the registry through the globals of a method of an enumeration, and `sys.modules`."""
    registration = gymnasium.envs.registration
    spec = object_node(gymnasium.registry["CartPole-v1"], **ATTACK)
    module = object_node(registration, registry=["dict", [["CartPole-v1", spec]]])
    modules = object_node(sys, modules=["dict", [["gymnasium.envs.registration", module]]])
    method = AutoresetMode.__dict__["__new__"]
    function = object_node(method, __globals__=["dict", [["sys", modules]]])
    enumeration = object_node(AutoresetMode, __new__=function)
    member = object_node(AutoresetMode.NEXT_STEP, __objclass__=enumeration)
    return {"metadata": ["dict", [["autoreset_mode", member]]]}


@pytest.mark.parametrize(
    ("name", "attack"),
    [("frozen lake", through_partials), ("cartpole", through_spec), ("frozen lake", through_enum)],
)
def test_state_naming_program_internals_is_refused_without_changes(
    name: str, attack: Callable[[], dict[str, Any]]
) -> None:
    env = begun(of_case(name), 1)
    kind, class_name, attributes = env.state_dict()
    specs = copy.deepcopy(gymnasium.registry)

    with pytest.raises(UserError, match="a part of the program"):
        env.load_state_dict([kind, class_name, attributes | attack()])

    assert gymnasium.registry == specs
    env.close()


@pytest.mark.parametrize("number", [0, -1, True])
def test_a_reference_puts_no_object_in_the_place_of_a_function(number: int) -> None:
    env = begun(of_class(Walk), 1)
    kind, class_name, attributes = env.state_dict()
    functions = ["list", [["ref", number], KEEP]]
    with pytest.raises(NotSavableError, match="env_fns"):
        env.load_state_dict([kind, class_name, attributes | {"env_fns": functions}])
    env.close()


class Logs(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.log = logging.getLogger("penstock.test")
        self.handler = logging.StreamHandler()


def test_loggers_are_not_saved_and_kept_on_restore() -> None:
    assert why_not_savable(of_class(Logs)) == ""


def test_generic_state_is_refused_by_an_environment_with_its_own_state_methods() -> None:
    env = begun(of_class(SavesItself), 1)
    kind, class_name, attributes = env.state_dict()
    single = ["object", "test_saved_state.SavesItself", {"age": 1}]
    with pytest.raises(NotSavableError, match="was saved as object and would be as own"):
        env.load_state_dict([kind, class_name, attributes | {"envs": ["list", [single]]}])
    env.close()
