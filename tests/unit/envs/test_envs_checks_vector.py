"""Every problem that `penstock check-env` finds, with a vector environment that has it."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from broken_envs import (
    GlobalChance,
    Holds,
    Masked,
    OldReset,
    Refuses,
    ResetsItself,
    SharesMemory,
    SharesPlace,
    SharesQuestion,
    Sound,
)
from penstock.envs.checking.checks import Checker
from penstock.envs.checking.vector import check_vector, draw

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


class LiesLate(LiesQuietly):
    """And only in episodes of 400 steps."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        for env in getattr(self.env, "envs"):  # noqa: B009
            env.last = 400


class Averages(gymnasium.vector.VectorWrapper):
    """Takes the mean of all observations so far from each, also of those before a reset."""

    def __init__(self, count: int) -> None:
        super().__init__(SyncVectorEnv([Sound] * count, autoreset_mode=AutoresetMode.NEXT_STEP))
        self.total: Any = np.zeros(2, np.float32)
        self.count = 0

    def reset(self, **options: Any) -> Any:
        observations, infos = super().reset(**options)
        return self.centred(observations), infos

    def step(self, actions: Any) -> Any:
        observations, *outcome = super().step(actions)
        return self.centred(observations), *outcome

    def centred(self, observations: Any) -> Any:
        self.total = self.total + observations.mean(0)
        self.count += 1
        return observations - self.total / self.count


class Shuts(Masked):
    """Of its second choice nothing is allowed in the third step."""

    def allowed(self) -> Any:
        return [1, 1, self.age != 2, 0, 0]


class Spaceless(VectorEnv):
    num_envs = 2
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


class Leaks(Sound):
    kept: list[mmap.mmap] = []  # noqa: RUF012

    def step(self, action: Any) -> Any:
        self.kept.append(memory := mmap.mmap(-1, 1 << 18))  # new memory, whatever lies free
        memory.write(bytes(1 << 18))
        return super().step(action)


class Loses(gymnasium.vector.VectorWrapper):
    """Loses the metadata, or has others."""

    def __init__(self, count: int, **metadata: Any) -> None:
        super().__init__(vectors()(count))
        self.metadata = metadata


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
    "too few": (lambda _: vectors()(1), "vector", r"num_envs=2 made 1 environments"),
    "same step": (
        vectors(autoreset_mode=AutoresetMode.SAME_STEP),
        "autoreset",
        r"says autoreset mode SAME_STEP; .*must not be lost",
    ),
    "no metadata": (Loses, "autoreset", r"has no autoreset_mode in its metadata"),
    "a string": (
        lambda count: Loses(count, autoreset_mode="next_step"),
        "autoreset",
        r"says autoreset mode 'next_step'; .*must not be lost",
    ),
    "lies": (Lies, "autoreset", r"it gave a reward or an end there"),
    "lies quietly": (LiesQuietly, "autoreset", r"what followed depended on the action"),
    "chance": (vectors(GlobalChance), "determinism", r"differ in their first observations"),
    "statistics": (Averages, "determinism", r"reset with the same seed again differs in their"),
    "rewards": (
        lambda count: Changes(count, 1, lambda reward: reward[:1]),
        "reward",
        r"return an array of 2 finite numbers",
    ),
    "no numbers": (
        lambda count: Changes(count, 1, lambda _: [None, "1"]),
        "reward",
        r"the rewards \[None, '1'\]; return an array of 2 finite numbers",
    ),
    "large rewards": (
        lambda count: Changes(count, 1, lambda reward: reward + 2e6),
        "reward",
        r"a reward of 200000\d, and rewards must lie between .*; scale them",
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
    "raises": (
        vectors(Refuses),
        "step",
        r"playing the vector raised KeyError: .*; correct it, or .* refuse the actions \[\d, \d\]",
    ),
    "lies late": (LiesLate, "autoreset", r"what followed depended on the action"),
    "resets itself": (vectors(ResetsItself), "autoreset", r"\(info has terminal_observation\)"),
    "shut": (vectors(Shuts), "mask", r"action_mask allows no action .* \(of each choice, where"),
    "one place": (vectors(SharesPlace), "shared", r"two environments share SharesPlace.place, and"),
    "one question": (vectors(SharesQuestion), "shared", r"share SharesQuestion.question, and"),
    "one memory": (vectors(SharesMemory), "shared", r"share the memory of their observations"),
    "no space": (lambda _: Spaceless(), "space", r"^single_observation_space is None; set it to a"),
    "old": (vectors(OldReset), "reset", r"reset\(seed=7\) raised \w+: .*; correct it"),
    # 2 * 2 ** 18 bytes in five steps of six, the last of which resets
    "leaks": (vectors(Leaks), "memory", r"memory grows by 4[0-4]\d,\d{3} bytes a step"),
}


@pytest.mark.parametrize("name", BROKEN_VECTORS)
def test_each_broken_vector_has_its_one_problem(name: str) -> None:
    make, kind, sentence = BROKEN_VECTORS[name]
    found = Checker()
    check_vector(found, make, 500 if name == "lies late" else STEPS)
    assert [problem.kind for problem in found.problems] == [kind], found.problems
    assert re.search(sentence, found.problems[0].text), found.problems[0].text


def test_a_sound_vector_has_no_problem() -> None:
    for make in (vectors(), vectors(Masked), lambda n: gymnasium.make_vec("CartPole-v1", n)):
        found = Checker()
        figures = check_vector(found, make, STEPS)
        assert found.problems == []
        assert (figures["games"], figures["steps"]) == (2, STEPS)
        assert figures["episodes"] > 2
        times_ms = figures["step_ms"]
        assert 0 < times_ms["p50"] <= times_ms["p99"] <= times_ms["max"]
        assert figures["resets_tested"]


def test_episodes_that_do_not_end_leave_resets_untested() -> None:
    figures = check_vector(Checker(), vectors(), 4)
    assert (figures["steps"], figures["episodes"], figures["resets_tested"]) == (4, 0, False)


def test_a_vector_is_played_for_a_limited_time() -> None:
    figures = check_vector(Checker(), vectors(), 10**9, 0.05)
    assert 0 < figures["steps"] < 10**6


def test_imitated_policies_act_within_bounds_and_masks() -> None:
    rng = np.random.default_rng(0)
    numbers = draw(Box(-3, 5, (2,)), 500, rng)
    assert (numbers.dtype.str, numbers.shape) == ("<f4", (500, 2))
    assert -1 <= numbers.min() < -0.9
    assert 0.9 < numbers.max() <= 1
    several = MultiDiscrete(np.array([[2, 3]]))
    allowed = np.array([[0, 1, 1, 0, 1]] * 100 + [[0] * 5] * 100)
    chosen = draw(several, 200, rng, allowed)
    assert (chosen.dtype.str, chosen.shape) == ("<i4", (200, 1, 2))
    assert {tuple(pair) for pair in chosen[:100, 0].tolist()} == {(1, 0), (1, 2)}
    assert all(several.contains(action.astype(np.int64)) for action in chosen)
