"""Every problem that `penstock check-env` knows of a vector environment, with one that has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from broken_envs import GlobalChance, Holds, Refuses, Sound
from penstock.envs.checks import Checker
from penstock.envs.checks_vector import check_vector

STEPS = 60


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
