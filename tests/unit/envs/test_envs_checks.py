"""Every problem that `penstock check-env` finds, with a single environment that has it."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import broken_envs as envs
from broken_envs import Sound
from penstock.core.observations import MASK
from penstock.envs.checking.checks import (
    Checker,
    choose,
    growth_nbytes,
    memory_nbytes,
    refused_by_gymnasium,
)
from penstock.envs.space_misfit import misfit, misfits

STEPS = 60

BROKEN: dict[type[Sound], tuple[str, str]] = {
    envs.NoSpace: ("space", r"observation_space is \(2,\); set it to a gymnasium space"),
    envs.Samples: ("space", r"draws a sample with 10.0 at \[0\], above the upper bound 9.0"),
    envs.Text: ("space", r"observations of Text, which no network here reads"),
    envs.Unbounded: ("space", r"must have finite bounds"),
    envs.OldReset: ("reset", r"must return a tuple of an observation and a dict"),
    envs.NoSeed: (
        "reset",
        r"reset\(seed=0\) raised TypeError: .*unexpected keyword argument 'seed'",
    ),
    envs.OldStep: ("step", r"returned a tuple of 4; it must return a tuple of observation, reward"),
    envs.NoReward: ("reward", r"the reward None; return a finite number"),
    envs.NanReward: ("reward", r"the reward nan; return a finite number"),
    envs.LargeReward: (
        "reward",
        r"a reward of -2000000, and rewards must lie between .*; scale them",
    ),
    envs.IntFlags: ("flags", r"terminated as 0, a int; return a bool"),
    envs.NoInfo: ("info", r"info as None, a NoneType; return a dict"),
    envs.Nan: ("observation", r"step returned an observation with nan at \[1\]; correct"),
    envs.Doubles: ("observation", r"of dtype float64 where its space says float32"),
    envs.Lists: ("observation", r"that is a list and no numpy array"),
    envs.Ragged: ("observation", r"that is a list and no numpy array"),
    envs.Flags: ("flags", r"terminated as array\(\[False, False\]\), a ndarray; return a bool"),
    envs.Beyond: ("observation", r"with 10.0 at \[1\], above the upper bound 9.0 of its space"),
    envs.Longer: ("observation", r"of shape \[3\] where its space says \[2\]"),
    envs.Partless: ("observation", r"an observation, in far, with nothing there"),
    envs.GlobalChance: ("determinism", r"two environments .* differ in the observation of step 1"),
    envs.Keeps: (
        "determinism",
        r"reset with the same seed again differs in the observation of step 1",
    ),
    envs.SharesPlace: (
        "shared",
        r"two environments share SharesPlace.place, and differ in the observation of step",
    ),
    envs.SharesQuestion: ("shared", r"share SharesQuestion.question, and differ in the reward of"),
    envs.SharesTrail: ("shared", r"two environments share SharesTrail.trail, and differ"),
    envs.SharesChance: ("shared", r"share state of a class, a module or a library, and differ"),
    envs.Open: (
        "step",
        r"step raised ValueError: out of range \(broken_envs.py:\d+, in step\); correct it, or "
        r"action_space if it is right to refuse the action array\(\[-1., -1.\]",
    ),
    envs.Refuses: (
        "step",
        r"raised KeyError: 'no such button' \(broken_envs.py:\d+, in step\);",
    ),
    envs.Closed: ("mask", r"action_mask allows no action where one must be chosen"),
    envs.Holds: (
        "close",
        r"close\(\) raised OSError: the window is busy \(.*in close\); correct it",
    ),
    envs.Narrow: ("space", r"shows an action_mask of shape \[2\], and it must be \[3\]"),
    envs.ResetsItself: ("autoreset", r"resets itself .* \(info has terminal_observation\)"),
}


def checked(make: Callable[[], Any]) -> Checker:
    found = Checker()
    if found.check_spaces("it", make()):
        list(found.play(make(), STEPS, 0))
    if not found.problems:
        found.determinism(make, STEPS, 9)
    return found


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_each_broken_environment_has_its_one_problem(kind: type[Sound]) -> None:
    problems = checked(kind).problems
    assert [problem.kind for problem in problems] == [BROKEN[kind][0]], problems
    assert re.search(BROKEN[kind][1], problems[0].text), problems[0].text


def test_mask_of_none_is_reported_and_ends_the_check() -> None:
    told = [problem.text for problem in checked(envs.Maskless).problems]
    assert told[0].startswith("reset(seed=0) returned an observation, in action_mask, that is a No")


def test_a_sound_environment_has_no_problem() -> None:
    found = checked(Sound)
    assert found.problems == []
    assert not found.ends_where_it_begins
    assert len(found.times_s) >= STEPS
    for env_id in ("CartPole-v1", "Blackjack-v1", "Taxi-v4", "Pendulum-v1"):
        assert checked(partial(gymnasium.make, env_id)).problems == []


class Unseeded(Sound):
    """Sound for training: it draws nothing by chance, and so needs no seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        return self.show(), {}

    def show(self) -> Any:
        return np.full(2, self.age, np.float32)


def test_requirements_of_gymnasiums_checker_are_reported() -> None:
    assert refused_by_gymnasium(Sound) is None
    assert refused_by_gymnasium(envs.Masked) is None  # it knows no masks
    refused = refused_by_gymnasium(Unseeded)
    assert refused is not None
    assert "super().reset(seed=seed)" in refused


def test_episode_end_that_shows_the_next_first_observation_is_detected() -> None:
    for kind, noticed in ((envs.ShowsTheNextBegin, True), (envs.Lists, False), (Sound, False)):
        found = Checker()
        list(found.play(kind(), STEPS, 0))
        assert found.ends_where_it_begins is noticed


def test_unpicklable_constructor_is_a_problem() -> None:
    found = Checker()
    found.pickling(Sound)
    assert found.problems == []
    found.pickling(lambda: Sound())
    assert "define it at the top level of its module" in found.problems[0].text


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_memory_is_counted_and_pages_of_files_are_not(flags: int, tmp_path: Path) -> None:
    size = 1 << 24
    (tmp_path / "file").write_bytes(bytes(size))
    with (tmp_path / "file").open("rb") as file:
        before = memory_nbytes()
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[:: mmap.PAGESIZE]) == 0  # reads every page
            assert memory_nbytes() - before < size // 4
    before = memory_nbytes()
    with mmap.mmap(-1, size, flags | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"1" * size)
        assert memory_nbytes() - before > size * 3 // 4


def test_steady_memory_growth_is_distinguished_from_a_cache() -> None:
    assert growth_nbytes([100] * 31, 300) == 0
    assert growth_nbytes([min(i, 12) * 4096 for i in range(31)], 300) == 0
    assert growth_nbytes([i * 4096 for i in range(31)], 300) == pytest.approx(409.6)
    assert growth_nbytes([i // 2 * 4096 for i in range(31)], 300) == 0  # now and then
    assert growth_nbytes([1, 2], 10) == 0


def test_random_actions_respect_the_mask() -> None:
    rng = np.random.default_rng(0)
    several = spaces.MultiDiscrete([3, 2], start=[5, 0])
    mask = np.array([0, 1, 0, 1, 0], np.int8)
    assert choose(several, {MASK: mask}, rng).tolist() == [6, 0]
    assert choose(several, {MASK: mask * 0}, rng) is None
    switches = spaces.MultiBinary((1, 2))
    chosen = choose(switches, {MASK: np.array([0, 1, 1, 0], np.int8)}, rng)
    assert switches.contains(chosen)
    assert chosen.tolist() == [[1, 0]]
    assert choose(switches, {MASK: np.array([1, 1, 0, 0], np.int8)}, rng) is None
    one = spaces.Discrete(5, start=-1)
    drawn = {int(choose(one, {MASK: mask}, rng)) for _ in range(50)}
    assert drawn == {0, 2}


def test_misfits_name_the_part_of_the_observation() -> None:
    space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]))
    good = {"a": (2, np.zeros(2, np.float32))}
    assert misfit(space, good) == ""
    assert misfit(space, {"a": (3, good["a"][1])}).startswith(", in a.0, of 3, which is not in")
    assert misfit(space, {"a": (2, good["a"][1] - 1)}) == (
        ", in a.1, with -1.0 at [0], below the lower bound 0.0 of its space"
    )


class NanAndBeyond(Sound):
    """Values beyond the bounds at first, and NaN later."""

    def show(self) -> Any:
        self.shown = getattr(self, "shown", 0) + 1
        return super().show() * 0 + (np.nan if self.shown > 3 else 100.0)


def test_two_faults_of_its_observations_are_two_problems() -> None:
    texts = [problem.text for problem in checked(NanAndBeyond).problems]
    assert len(texts) == 2
    assert "above the upper bound" in texts[0]
    assert "with nan" in texts[1]


def test_two_faults_of_one_observation_are_both_reported() -> None:
    space = spaces.Box(0, 1, (3,))
    value = np.array([np.nan, 5, 0], np.float32)
    assert misfits(space, value) == {
        "finite": " with nan at [0]",
        "bounds": " with 5.0 at [1], above the upper bound 1.0 of its space",
    }
