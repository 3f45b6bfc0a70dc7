"""Every problem that `penstock check-env` knows, with an environment that really has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from penstock.core.observations import MASK
from penstock.envs.checks import Checker, choose, growth_nbytes
from penstock.envs.checks_vector import check_vector
from penstock.envs.fits import misfit

STEPS = 60


class Sound(gymnasium.Env[Any, Any]):
    """Walks by chance for five steps; each of the broken ones changes one thing."""

    observation_space: Any = spaces.Box(-9, 9, (2,), np.float32)
    action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age = 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return self.show(), float(action), self.age == 5, False, {}

    def show(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


class NoSpace(Sound):
    observation_space = (2,)


class Samples(Sound):
    class _Box(spaces.Box):
        def sample(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
            return np.full(2, 10, np.float32)

    observation_space = _Box(-9, 9, (2,), np.float32)


class Text(Sound):
    observation_space = spaces.Text(3)


class Unbounded(Sound):
    action_space = spaces.Box(-np.inf, np.inf, (1,))


class OldReset(Sound):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoSeed(Sound):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class OldStep(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class NoReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class NanReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, np.nan, *rest


class IntFlags(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, int(terminated), 0, info


class NoInfo(Sound):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], None)


class Nan(Sound):
    def show(self) -> Any:
        return np.array([0, np.nan if self.age == 3 else 0], np.float32)


class Doubles(Sound):
    def show(self) -> Any:
        return super().show().astype(np.float64)


class Lists(Sound):
    def show(self) -> Any:
        return [0.0, 0.0]


class Beyond(Sound):
    def show(self) -> Any:
        return np.array([0, 9 + self.age], np.float32)


class Longer(Sound):
    def show(self) -> Any:
        return np.zeros(2 + (self.age > 3), np.float32)


class Partless(Sound):
    observation_space = spaces.Dict(near=spaces.Discrete(2), far=spaces.Discrete(2))

    def show(self) -> Any:
        return {"near": 1}


class GlobalChance(Sound):
    def show(self) -> Any:
        return np.random.default_rng().uniform(-1, 1, 2).astype(np.float32)


class Keeps(Sound):
    """Its generator is seeded once, and never again."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def show(self) -> Any:
        return self.rng.uniform(-1, 1, 2).astype(np.float32)


class Scales(Sound):
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        action *= 2
        return (*super().step(0)[:1], 0.0, *super().step(0)[2:])


class Open(Sound):
    """Takes its bounds for values that are never reached."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        if (np.abs(action) >= 1).any():
            raise ValueError("out of range")
        return super().step(0)


class Refuses(Sound):
    def step(self, action: Any) -> Any:
        if action == 2:
            raise KeyError("no such button")
        return super().step(action)


class Closed(Sound):
    observation_space = spaces.Dict(
        place=Sound.observation_space, action_mask=spaces.MultiBinary(3)
    )

    def show(self) -> Any:
        return {"place": super().show(), MASK: np.full(3, self.age < 2, np.int8)}


class ResetsItself(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            info = {"terminal_observation": observation}
            observation, _ = self.reset()
        return observation, reward, terminated, truncated, info


class Holds(Sound):
    def close(self) -> None:
        raise OSError("the window is busy")


class ShowsTheNextBegin(Sound):
    def show(self) -> Any:
        return np.full(2, self.age % 5, np.float32)


BROKEN: dict[type[Sound], tuple[str, str]] = {
    NoSpace: ("space", r"observation_space is \(2,\); set it to a gymnasium space"),
    Samples: ("space", r"draws a sample with 10.0 at \[0\], above the upper bound 9.0"),
    Text: ("space", r"observations of Text, which no network here reads"),
    Unbounded: ("space", r"must have finite bounds"),
    OldReset: ("reset", r"must return a tuple of an observation and a dict"),
    NoSeed: ("reset", r"reset\(seed=0\) raised TypeError: .*unexpected keyword argument 'seed'"),
    OldStep: ("step", r"returned a tuple of 4; it must return a tuple of observation, reward"),
    NoReward: ("reward", r"the reward None; return a finite number"),
    NanReward: ("reward", r"the reward nan; return a finite number"),
    IntFlags: ("flags", r"terminated as 0, a int; return a bool"),
    NoInfo: ("info", r"info as None, a NoneType; return a dict"),
    Nan: ("observation", r"step returned an observation with nan at \[1\]; correct"),
    Doubles: ("observation", r"of dtype float64 where its space says float32"),
    Lists: ("observation", r"that is a list and no numpy array"),
    Beyond: ("observation", r"with 10.0 at \[1\], above the upper bound 9.0 of its space"),
    Longer: ("observation", r"of shape \[3\] where its space says \[2\]"),
    Partless: ("observation", r"an observation, in far, with nothing there"),
    GlobalChance: ("determinism", r"two environments .* differ in the observation of step 1"),
    Keeps: ("determinism", r"reset with the same seed again differs in the observation of step 1"),
    Scales: ("action", r"step changed the action that it was given"),
    Open: ("step", r"step\(array\(\[-1., -1.\].* raised ValueError: out of range; that action is"),
    Refuses: ("step", r"raised KeyError: 'no such button'; that action is in its action_space"),
    Closed: ("mask", r"action_mask allows no action where one must be chosen"),
    Holds: ("close", r"close\(\) raised OSError: the window is busy; correct it"),
    ResetsItself: ("autoreset", r"resets itself .* \(info has terminal_observation\)"),
}


def checked(make: Callable[[], Any]) -> Checker:
    found = Checker()
    if found.check_spaces("it", make()):
        list(found.play(make(), STEPS, 0))
    if not found.problems:
        found.determinism(make, STEPS, 9)
    return found


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_environment_is_told_what_is_wrong(kind: type[Sound]) -> None:
    problems = checked(kind).problems
    assert [problem.kind for problem in problems] == [BROKEN[kind][0]], problems
    assert re.search(BROKEN[kind][1], problems[0].text), problems[0].text


def test_a_sound_environment_has_no_problem() -> None:
    found = checked(Sound)
    assert found.problems == []
    assert set(found.lengths) == {5}
    assert not found.ends_where_it_begins
    assert len(found.times_s) >= STEPS
    for env_id in ("CartPole-v1", "Blackjack-v1", "Taxi-v4", "Pendulum-v1"):
        assert checked(partial(gymnasium.make, env_id)).problems == []


def test_a_last_observation_that_is_a_first_one_is_noticed() -> None:
    for kind, noticed in ((ShowsTheNextBegin, True), (Lists, False), (Sound, False)):
        found = Checker()
        list(found.play(kind(), STEPS, 0))
        assert found.ends_where_it_begins is noticed


def test_what_cannot_be_pickled_is_a_problem() -> None:
    found = Checker()
    found.pickling(Sound)
    assert found.problems == []
    found.pickling(lambda: Sound())
    assert "define it at the top level of its module" in found.problems[0].text


def test_memory_that_grows_all_the_time_is_told_from_a_cache() -> None:
    assert growth_nbytes([100] * 31, 300) == 0
    assert growth_nbytes([min(i, 12) * 4096 for i in range(31)], 300) == 0
    assert growth_nbytes([i * 4096 for i in range(31)], 300) == pytest.approx(409.6)
    assert growth_nbytes([i // 2 * 4096 for i in range(31)], 300) == 0  # now and then
    assert growth_nbytes([1, 2], 10) == 0


def test_actions_by_chance_heed_the_mask() -> None:
    rng = np.random.default_rng(0)
    several = spaces.MultiDiscrete([3, 2], start=[5, 0])
    mask = np.array([0, 1, 0, 1, 0], np.int8)
    assert choose(several, {MASK: mask}, rng).tolist() == [6, 0]
    assert choose(several, {MASK: mask * 0}, rng) is None
    one = spaces.Discrete(5, start=-1)
    drawn = {int(choose(one, {MASK: mask}, rng)) for _ in range(50)}
    assert drawn == {0, 2}


def test_misfits_name_the_part() -> None:
    space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]))
    good = {"a": (2, np.zeros(2, np.float32))}
    assert misfit(space, good) == ""
    assert misfit(space, {"a": (3, good["a"][1])}).startswith(", in a.0, of 3, which is not in")
    assert misfit(space, {"a": (2, good["a"][1] - 1)}) == (
        ", in a.1, with -1.0 at [0], below the lower bound 0.0 of its space"
    )


def vectors(kind: Any = Sound, **options: Any) -> Callable[[int], VectorEnv]:
    options = {"autoreset_mode": AutoresetMode.NEXT_STEP, **options}
    return lambda count: SyncVectorEnv([kind] * count, **options)


class Lies(gymnasium.vector.VectorWrapper):
    """Says NEXT_STEP and resets in the same step."""

    def __init__(self, count: int) -> None:
        super().__init__(SyncVectorEnv([Sound] * count, autoreset_mode=AutoresetMode.SAME_STEP))
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class LiesQuietly(Lies):
    """And shows it by no reward, only by what its actions do."""

    def step(self, actions: Any) -> Any:
        observations, _, terminated, *rest = super().step(actions)
        observations[:, 0] = actions / 9
        return observations, np.zeros(len(actions)), terminated, *rest


class Loses(gymnasium.vector.VectorWrapper):
    """Loses the metadata."""

    def __init__(self, count: int) -> None:
        super().__init__(vectors()(count))
        self.metadata = {}


class Changes(gymnasium.vector.VectorWrapper):
    """Returns something else in one place of what `step` returns."""

    def __init__(self, count: int, place: int, change: Callable[[Any], Any]) -> None:
        super().__init__(vectors()(count))
        self.place, self.change = place, change

    def step(self, actions: Any) -> Any:
        results = list(super().step(actions))
        results[self.place] = self.change(results[self.place])
        return tuple(results)


BROKEN_VECTORS: dict[str, tuple[Any, str, str]] = {
    "no vector": (lambda _: Sound(), "vector", r"returned a Sound; return a gymnasium.vector"),
    "too few": (lambda _: vectors()(1), "vector", r"num_envs=2 made 1 games"),
    "same step": (
        vectors(autoreset_mode=AutoresetMode.SAME_STEP),
        "autoreset",
        r"says autoreset mode SAME_STEP; .*must not be lost",
    ),
    "no metadata": (Loses, "autoreset", r"has no autoreset_mode in its metadata"),
    "lies": (Lies, "autoreset", r"it gave a reward or an end there"),
    "lies quietly": (LiesQuietly, "autoreset", r"what followed depended on the action"),
    "chance": (vectors(GlobalChance), "determinism", r"differ in their first observations"),
    "rewards": (
        lambda count: Changes(count, 1, lambda reward: reward[:1]),
        "reward",
        r"return an array of 2 finite numbers",
    ),
    "flags": (
        lambda count: Changes(count, 2, lambda flags: flags.astype(int)),
        "flags",
        r"return an array of 2 bools",
    ),
    "dtype": (
        lambda count: Changes(count, 0, lambda shown: shown.astype(np.float64)),
        "observation",
        r"returned observations of dtype float64 where its space says float32",
    ),
    "holds": (vectors(Holds), "close", r"close\(\) raised OSError: the window is busy"),
    "raises": (vectors(Refuses), "step", r"playing the vector raised KeyError"),
}


@pytest.mark.parametrize("name", BROKEN_VECTORS)
def test_a_broken_vector_is_told_what_is_wrong(name: str) -> None:
    make, kind, sentence = BROKEN_VECTORS[name]
    found = Checker()
    check_vector(found, make, STEPS)
    assert [problem.kind for problem in found.problems] == [kind], found.problems
    assert re.search(sentence, found.problems[0].text), found.problems[0].text


def test_a_sound_vector_has_no_problem() -> None:
    for make in (vectors(), lambda n: gymnasium.make_vec("CartPole-v1", n)):
        found = Checker()
        check_vector(found, make, STEPS)
        assert found.problems == []
