"""Settings compared at equal steps, against figures worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core.machine import VERSIONS
from penstock.monitor.compare import compare, describe
from run_folders import make_run

FIVE = "stop.return=5"


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Two seeds with 0, 4, 8 and 0, 6, 8, 9, each after 2 s; one run with 0, 1, 2, 3, 7."""
    make_run(tmp_path / "two" / "seed-0", [0, 4, 8], "run.seed=0", FIVE, seconds=2.0)
    make_run(
        tmp_path / "two" / "seed-1", [0, 6, 8, 9], "run.seed=1", FIVE, seconds=2.0,
        evaluated={100: 5.0, 200: 3.0},
    )  # fmt: skip
    make_run(tmp_path / "one", [0, 1, 2, 3, 7], FIVE, "learner.lr=1e-5", evaluated={100: 6.0})
    return [str(tmp_path / "two"), str(tmp_path / "one")]


def test_settings_are_compared_at_the_steps_of_the_shortest_run(folders: list[str]) -> None:
    found = compare(folders)
    assert (found["at_env_steps"], found["reach"]) == (200.0, 5.0)
    two, one = found["settings"]
    assert (two["value"], two["low"], two["high"]) == (8.0, 8.0, 8.0)
    assert (one["value"], one["low"], one["high"]) == (2.0, None, None)


def test_at_given_steps_values_lie_between_measurements(folders: list[str]) -> None:
    two, one = compare(folders, at=150)["settings"]
    assert (two["value"], two["low"], two["high"]) == (6.5, 6.0, 7.0)
    assert one["value"] == 1.5
    two, one = compare(folders, at=250)["settings"]
    assert two["value"] is None, "one of its runs ended at 200"
    assert one["value"] == 2.5


def test_steps_to_a_return_are_averaged_over_the_runs_that_reach_it(folders: list[str]) -> None:
    two, one = compare(folders)["settings"]
    # The seeds are at 5 or above after 200 and 100 steps, each 100 of them in 2 s.
    assert (two["reached"], two["reach_env_steps"], two["reach_s"]) == (2, 150.0, 3.0)
    assert (one["reached"], one["reach_env_steps"], one["reach_s"]) == (1, 400.0, 4.0)
    two, one = compare(folders, reach=8.5)["settings"]
    assert (two["reached"], two["reach_env_steps"]) == (1, 300.0)
    assert (one["reached"], one["reach_env_steps"], one["reach_s"]) == (0, None, None)


def test_run_confirmed_by_an_evaluation_has_reached_its_goal(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0, 2, 4], FIVE)  # no line has 5, which it was in between
    summary = json.loads((folder / "summary.json").read_text())
    moments = {"return_reached_at_s": 1.5, "solved_at_s": 1.75}
    (folder / "summary.json").write_text(json.dumps(summary | moments))
    [found] = compare([str(folder)])["settings"]
    assert (found["reached"], found["reach_env_steps"], found["reach_s"]) == (1, 150.0, 1.5)
    assert found["solved"] == 1
    assert "1 of 1  1 of 1" in describe(compare([str(folder)]))
    [other] = compare([str(folder)], reach=4.5)["settings"]
    assert (other["reached"], other["solved"]) == (0, None)


def test_steps_without_a_value_are_refused_with_the_valid_range(
    folders: list[str], tmp_path: Path
) -> None:
    rule = "where no line has episode_return_mean of all its runs; give steps from"
    with pytest.raises(UserError, match=f"--at is 1e\\+09, {rule} 0 to 200"):
        compare(folders, at=1e9)
    late = str(make_run(tmp_path / "late", [None, None, 5.0, 6.0]))
    with pytest.raises(UserError, match=f"--at is 10, {rule} 200 to 300"):
        compare([late], at=10)
    for seed, returns in ((0, [1.0, 2.0]), (1, [None, None, 5.0])):
        make_run(tmp_path / "apart" / f"seed-{seed}", returns, f"run.seed={seed}")
    with pytest.raises(UserError, match=r"at is 10, and the runs have .* at no common agent steps"):
        compare([str(tmp_path / "apart")], at=10)
    about = describe(compare([str(tmp_path / "apart")])).splitlines()[0]
    assert about.endswith(
        "at 100 agent steps; mean of the runs, with its bootstrap interval; the "
        "runs of a line have no value in common there"
    )
    one = str(make_run(tmp_path / "one-evaluation", [1.0, 2.0, 3.0], evaluated={100: 4.0}))
    with pytest.raises(UserError, match=r"--at is 10, .*; give steps from 100 to 100"):
        compare([one], "eval_return_mean", at=10)


def test_runs_without_the_metric_are_not_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "group" / "seed-0", [0, 4], "run.seed=0")
    make_run(tmp_path / "group" / "seed-1", [None, None], "run.seed=1")
    result = compare([str(tmp_path / "group")])
    [found] = result["settings"]
    assert (found["averaged"], found["value"], found["low"]) == (1, 4.0, None)
    assert describe(result).splitlines()[2].split()[1:5] == ["1", "of", "2", "4"]


def test_speed_and_evaluations_are_compared(folders: list[str]) -> None:
    two, one = compare(folders)["settings"]
    assert (two["steps_per_s"], one["steps_per_s"]) == (50.0, 100.0)
    assert (two["env_steps"], two["time_s"]) == (250.0, 5.0)
    assert two["evaluation_best"] is None, "one of its runs has none"
    assert one["evaluation_best"] == 7.0  # of returns 6 and 8


def test_steps_to_an_evaluated_return_are_those_of_the_weights(folders: list[str]) -> None:
    [one] = compare(folders[1:], "eval_return_mean", reach=7.0)["settings"]
    assert (one["reached"], one["reach_env_steps"], one["reach_s"]) == (1, 100.0, 1.0)


def test_the_best_evaluation_is_in_the_environment_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0, 1], "env.kwargs={level: 2}")
    # An earlier level, lost evaluations at 300 and 400, and what the resume from 200 has made.
    found = [(100, 1, 90.0), (200, 2, 3.0), (300, 2, 50.0), (400, 2, 60.0), (300, 2, 7.0)]
    (folder / "evaluations.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "trained_steps": steps,
                    "return": {"mean": mean},
                    "env": {"id": "CartPole-v1", "kwargs": {"level": level}, "wrappers": []},
                }
            )
            + "\n"
            for steps, level, mean in found
        )
    )
    [setting] = compare([str(folder)])["settings"]
    assert setting["evaluation_best"] == 7.0
    with (folder / "evaluations.jsonl").open("a") as file:  # of a version that did not record it
        file.write('{"trained_steps": 500, "return": {"mean": 8}}\n{"env": 1, "return": 2}\n')
        lucky = '{"trained_steps": 600, "play": "greedy", "greedy": {"lower": 6}, '
        file.write(lucky + '"return": {"mean": 9}}\n')
    assert compare([str(folder)])["settings"][0]["evaluation_best"] == 8.0


def test_options_and_versions_that_differ_are_listed(folders: list[str]) -> None:
    found = compare(folders)
    assert found["options"] == {"learner.lr": [0.001, 1e-05]}
    path = Path(folders[1]) / VERSIONS
    starts = json.loads(path.read_text())
    starts["starts"][-1] |= {"commit": "abc"}
    starts["starts"][-1]["packages"] |= {"torch": "1.0"}
    path.write_text(json.dumps(starts))
    assert {*compare(folders)["options"]} == {"learner.lr", "versions.commit", "versions.torch"}


def test_the_text_has_a_line_for_each_setting(folders: list[str]) -> None:
    lines = describe(compare(folders)).splitlines()
    assert lines[0] == (
        "episode_return_mean at 200 agent steps; mean of the runs, with its bootstrap interval"
    )
    assert lines[1].split("  ")[0] == "run"
    cells = lines[2].split()
    assert cells[:6] == [folders[0], "2", "8", "8", "to", "8"]
    reached, solved = ["2", "of", "2"], ["0", "of", "2"]
    assert cells[6:] == ["150", "3.0", "s", *reached, *solved, "50", "-", "250", "5.0", "s"]
    assert lines[3].split()[:4] == [folders[1], "1", "2", "-"]
    assert lines[5].split() == ["option", *folders]
    assert lines[6].split() == ["learner.lr", "0.001", "1e-05"]


def test_runs_with_equal_options_list_no_difference(folders: list[str]) -> None:
    result = compare([folders[1], folders[1]], "grad_norm")
    assert [found["value"] for found in result["settings"]] == [5.0, 5.0]
    assert result["reach"] is None
    assert describe(result).endswith("\n\nno option differs")


def test_returns_of_several_environments_are_scaled(tmp_path: Path) -> None:
    make_run(tmp_path / "suite" / "a", [0, 50], FIVE, evaluated={100: 9.0})
    make_run(tmp_path / "suite" / "b", [-500, -100], "env.id=Acrobot-v1", FIVE, evaluated={100: 9})
    found = compare([str(tmp_path / "suite")], ranges=["CartPole-v1=0,100"])
    assert found["scaled"]
    [setting] = found["settings"]
    assert setting["value"] == 0.75
    assert (setting["low"], setting["high"]) == (None, None), "one run of each environment"
    assert "interquartile mean" in describe(found)
    assert found["reach"] is None, "stop.return is not scaled"
    assert setting["evaluation_best"] is None, "a mean of different games"


def test_steps_to_a_scaled_return_are_measured_on_scaled_returns(tmp_path: Path) -> None:
    # Scaled 0, 0.1, 0.4, 1 and 0, 0.25, 0.75, 1; every raw return of a is above 0.5 but the first.
    make_run(tmp_path / "suite" / "a", [0, 10, 40, 100], seconds=2.0)
    make_run(tmp_path / "suite" / "b", [-500, -400, -200, -100], "env.id=Acrobot-v1")
    [setting] = compare([str(tmp_path / "suite")], reach=0.5)["settings"]
    assert (setting["reached"], setting["reach_env_steps"], setting["reach_s"]) == (2, 250.0, 4.0)
    with pytest.raises(UserError, match="--range Pong is not an environment of these runs"):
        compare([str(tmp_path / "suite")], ranges=["Pong=0,1"])


def test_invalid_steps_and_returns_are_refused(folders: list[str]) -> None:
    with pytest.raises(UserError, match="--at is 0; it must be a number of agent steps above 0"):
        compare(folders, at=0)
    with pytest.raises(UserError, match="--at is inf; it must be a number of agent steps above 0"):
        compare(folders, at=math.inf)
    for reach in (math.nan, -math.inf):
        with pytest.raises(UserError, match=f"--reach is {reach}; it must be a finite value of"):
            compare(folders, reach=reach)
    with pytest.raises(UserError, match="--metric nothing is in none of the runs"):
        compare(folders, "nothing")
