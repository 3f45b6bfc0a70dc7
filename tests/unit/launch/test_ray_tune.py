"""Search spaces and reports in the form that Ray Tune needs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.load import resolve
from penstock.launch.tuning.space import ChoiceList, NumberRange, Space
from penstock.launch.tuning.sweep import Sweep
from penstock.launch.tuning.trials import TrialProgress

pytest.importorskip("pyarrow", reason="needs the extra [tune]")
pytest.importorskip("ray", reason="needs the extra [tune]")

SPACE = Space(
    {
        "learner.lr": NumberRange(1e-4, 1e-2, log=True),
        "algo.epochs": NumberRange(1, 4, whole=True),
        "actors.envs": ChoiceList((8, 16, 32)),
    },
    [],
)


def sweep(scheduler: Any) -> Sweep:
    metric: Any = "eval"
    return Sweep(
        "cartpole_ppo", (), SPACE, 4, scheduler, metric, 1000, 16_000, 2, 1, 0, Path("sweep")
    )


def test_perturbed_numbers_stay_in_their_range() -> None:
    """PBT of Ray multiplies by 0.8 or 1.2, or draws anew."""
    from ray.tune.schedulers.pbt import _explore

    from penstock.launch.tuning.ray_tune import make_scheduler

    pbt: Any = make_scheduler(sweep("pbt"))
    start = {"learner.lr": 0.0099, "algo.epochs": 4, "actors.envs": 8}
    factors: Any = (1.2, 0.8)
    seen: dict[str, set[Any]] = {name: set() for name in start}
    for _ in range(300):
        perturbed, _ = _explore(
            start, pbt._hyperparam_mutations, 0.25, factors, pbt._custom_explore_fn
        )
        for name, value in perturbed.items():
            seen[name].add(value)
    assert max(seen["learner.lr"]) == 1e-2
    assert min(seen["learner.lr"]) >= 1e-4
    assert seen["algo.epochs"] <= {1, 2, 3, 4}
    assert {type(value) for value in seen["algo.epochs"]} == {int}
    assert seen["actors.envs"] == {8, 16, 32}


def test_perturbed_options_that_contradict_each_other_are_drawn_anew() -> None:
    """Such a trial would fail at its start, with the weights that it has just received."""
    from penstock.launch.tuning.ray_tune import make_scheduler

    space = Space(
        {
            "learner.accumulate": NumberRange(1, 2, whole=True),
            "algo.epochs": NumberRange(1, 4, whole=True),
        },
        [],
    )
    options = ("learner.updates_per_batch=1",)
    made = replace(sweep("pbt"), overrides=options, space=space)
    pbt: Any = make_scheduler(made)
    found = pbt._custom_explore_fn({"learner.accumulate": 2, "algo.epochs": 3})
    given = [f"{name}={value}" for name, value in found.items()]
    resolve(made.target, [*options, *given])


def test_asha_decides_at_the_interval_and_by_scored_steps() -> None:
    from penstock.launch.tuning.ray_tune import make_scheduler

    asha: Any = make_scheduler(sweep("asha"))
    assert asha._time_attr == "scored_steps"
    [bracket] = asha._brackets
    assert sorted(milestone for milestone, _ in bracket._rungs) == [1000, 4000, 16000]
    assert make_scheduler(sweep("none")) is None


def test_unknown_score_is_reported_as_a_number_at_0_steps() -> None:
    """Tune refuses reports without the metric."""
    from penstock.launch.tuning.ray_tune import tune_report

    report = tune_report(TrialProgress(trained_steps=500, return_mean=3.0))
    assert math.isnan(report["score"])
    assert (report["scored_steps"], report["trained_steps"], report["return"]) == (0, 500, 3.0)
    assert "eval_return" not in report
    report = tune_report(TrialProgress(7.0, 400, 500, 512, 3.0, 7.0, 1.5, 1e-3))
    assert (report["score"], report["scored_steps"], report["eval_return"]) == (7.0, 400, 7.0)
    assert (report["seconds"], report["learning_rate"]) == (1.5, 1e-3)


def test_the_number_of_a_trial_is_the_end_of_its_id() -> None:
    from penstock.launch.tuning.ray_tune import number_of

    assert number_of("3f2a1_00017") == 17
