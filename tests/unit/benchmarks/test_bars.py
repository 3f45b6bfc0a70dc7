"""Which checkpoints count for a learning bar, and when one is met (benchmarks/bars.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bar_table import BARS, Claim, LearningBar
from bars import (
    BarFolder,
    at_multiples,
    chosen_seeds,
    first_reaching,
    locked,
    result_of,
    rise_steps,
    training_course,
    verdict,
)
from penstock.configs.errors import UserError
from penstock.configs.load import resolve

BAR = LearningBar("cartpole", steps=100, seeds=(1, 2))


def seed(mean: float, steps_to_goal: int | None = None) -> dict[str, Any]:
    return {"return": mean, "steps_to_goal": steps_to_goal}


def result(*seeds: dict[str, Any]) -> dict[str, Any]:
    return {"seeds": {str(number): seed for number, seed in enumerate(seeds)}, "unfinished": {}}


@pytest.mark.parametrize("name", BARS)
def test_every_bar_is_a_run_that_can_be_started(name: str) -> None:
    resolve(BARS[name].target, BARS[name].options)
    others = [BARS[name].must.not_below, BARS[name].aim.not_below]
    assert all(other in BARS for other in others if other)


def test_the_first_checkpoint_after_each_multiple_counts_and_the_last() -> None:
    assert at_multiples([7, 12, 19, 21, 44, 45], 10) == [12, 21, 44, 45]
    assert at_multiples([7], 10) == [7]
    assert at_multiples([8, 30], 10) == [30]


@pytest.mark.parametrize("first", [100, 300, 900])
def test_steps_to_a_goal_are_those_of_the_first_checkpoint_at_it(first: int) -> None:
    steps = [*range(100, 1000, 100)]
    asked: list[int] = []

    def reaches(each: int) -> bool:
        asked.append(each)
        return each >= first

    assert first_reaching(steps, reaches) == first
    assert len(asked) <= 5
    assert first == 100 or first - 100 in asked  # the one before was evaluated, and is below


def test_a_goal_that_the_last_checkpoint_does_not_reach_is_not_reached() -> None:
    assert first_reaching([100, 200], lambda steps: steps == 100) is None


def test_a_seed_without_the_goal_is_the_slowest() -> None:
    results = {"pong": result(seed(19.0, steps_to_goal=500_000), seed(3.0))}
    assert verdict(Claim(slowest_steps=1e6), BAR, "pong", results) == "(not met)"
    assert verdict(Claim(median_steps=1e6), BAR, "pong", results) == "(not met)"
    assert verdict(Claim(at_least=11), BAR, "pong", results) == "(met)"


def test_a_bar_beside_another_is_met_at_its_mean_return() -> None:
    results = {
        "ours": result(seed(4.0), seed(6.0)),
        "other": result(seed(5.0)),
        "none": result(),
    }
    assert verdict(Claim(not_below="other"), BAR, "ours", results) == "(met)"
    assert verdict(Claim(not_below="none"), BAR, "ours", results) == ""


def test_a_bar_whose_seeds_are_missing_is_not_judged() -> None:
    assert verdict(Claim(at_least=1), BAR, "a", {"a": result(seed(5.0))}) == ""


def test_a_run_begun_with_other_options_is_refused(tmp_path: Path) -> None:
    BarFolder(tmp_path, "bar", 1).begin({"options": ["learner.lr=1"]})
    with pytest.raises(UserError, match=r"was begun with .*lr=1"):
        BarFolder(tmp_path, "bar", 1).begin({"options": []})


def test_two_calls_cannot_train_in_one_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(UserError, match="one run trains at a time"),
        locked(tmp_path),
    ):
        pass


def test_seeds_that_a_bar_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match="give --seed one of them"):
        chosen_seeds("pong_ppo", [1])


def test_course_has_means_of_each_stretch_of_steps() -> None:
    intervals: list[dict[str, Any]] = [
        {"trained_steps": 10, "time_s": 1.0, "entropy": 1.0},
        {"trained_steps": 90, "time_s": 9.0, "entropy": 0.5},
        {"trained_steps": 110, "time_s": 11.0, "entropy": None},
    ]
    assert training_course(intervals, 100) == [
        {"steps": 90, "seconds": 9.0, "entropy": 0.75},
        {"steps": 110, "seconds": 11.0},
    ]


def test_the_return_rises_at_a_twentieth_of_what_it_gains() -> None:
    returns = [-21.0, -20.9, -20.0, -18.9, 10.0, 19.0]
    course = [
        {"steps": 100 * (i + 1), "episode_return_mean": mean} for i, mean in enumerate(returns)
    ]
    assert rise_steps([{"steps": 50}, *course]) == 400  # above -21 + 40 / 20
    assert rise_steps(course[:1]) is None


def test_earlier_seeds_are_kept_only_of_the_same_settings(tmp_path: Path) -> None:
    earlier = {"target": "cartpole", "options": [], "steps": 100, "seeds": {"1": seed(5.0)}}
    assert result_of(tmp_path, "a", BAR, earlier)["seeds"] == {"1": seed(5.0)}
    longer = BAR._replace(steps=200)
    assert result_of(tmp_path, "a", longer, earlier)["seeds"] == {}
