"""Which runs form one line, and the points of a line, against figures by hand."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.monitor.curves import (
    RETURN,
    band,
    check_ranges,
    common_span,
    load,
    observed_ranges,
    parse_ranges,
    ranges_of,
    run_curve,
    smoothed,
    strata,
)
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS
from run_folders import make_run


def test_smoothing_averages_a_point_with_preceding_points() -> None:
    values = np.array([1.0, 3.0, 8.0, 4.0])
    assert smoothed(values, 1).tolist() == [1, 3, 8, 4]
    assert smoothed(values, 2).tolist() == [1, 2, 5.5, 6]
    assert smoothed(values, 4).tolist() == [1, 2, 4, 4]
    assert smoothed(values, 9).tolist() == [1, 2, 4, 4]
    assert smoothed(np.array([]), 2).tolist() == []


def test_spike_affects_only_means_that_contain_it() -> None:
    values = np.array([1.0, 1e17, 1.0, 2.0, 4.0])
    assert smoothed(values, 2).tolist() == [1, 5e16, 5e16, 1.5, 3]


def test_a_figure_of_an_evaluation_is_at_the_evaluated_weights(tmp_path: Path) -> None:
    # The result of the weights at 100 steps arrives with the measurement at 300.
    folder = make_run(tmp_path / "run", [1.0, 2.0, 3.0, 4.0], evaluated={100: 5.0})
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    lines[-1]["eval_return_mean"] = 6.0
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / EVALUATIONS).open("a") as file:
        file.write('{"trained_steps": 200, "time_s": 2, "return": 1}\n{"trained_steps": 300}\n')
    [[run]] = [setting.runs for setting in load([str(folder)])]
    for x, place in (("env_steps", 100.0), ("time_s", 1.0)):
        xs, ys = run_curve(run, x, "eval_return_mean")
        assert (xs.tolist(), ys.tolist()) == ([place], [6.0]), "the mean of returns 5 and 7"
    assert run_curve(run, "env_steps", "eval_trained_steps")[1].tolist() == [100.0]


def test_runs_that_differ_only_in_their_seed_are_one_setting(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", [1.0, 2.0], "run.seed=0"),
        make_run(tmp_path / "b", [1.0, 2.0], "run.seed=0", "learner.lr=1e-5"),
        make_run(tmp_path / "c", [1.0, 2.0], "run.seed=1", "run.interval_s=0.5"),
        make_run(tmp_path / "again", [1.0, 2.0], "run.seed=0"),
    ]
    found = load([str(folder) for folder in folders])
    assert [[run.files.folder.name for run in setting.runs] for setting in found] == [
        ["a", "c"], ["b"], ["again"],
    ]  # fmt: skip
    assert [setting.label(len(setting.runs)) for setting in found] == [
        f"{tmp_path / 'a'}, … (2 seeds)", str(folders[1]), str(folders[3]),
    ]  # fmt: skip


def test_runs_of_a_group_are_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    for seed in (10, 2):
        make_run(tmp_path / "group" / f"seed-{seed}", [float(seed)], f"run.seed={seed}")
    [group] = load([str(tmp_path / "group")])
    assert [run.files.last[RETURN] for run in group.runs] == [2.0, 10.0]
    assert group.label(2) == f"{tmp_path / 'group'} (2 seeds)"
    assert group.label(1) == f"{tmp_path / 'group'} (1 of 2 seeds)"


def suite(folder: Path) -> Path:
    """Two seeds of CartPole, which reach 10 and 20, and a run of Acrobot from -500 to -100."""
    for seed, last in ((0, 10.0), (1, 20.0)):
        make_run(folder / "cartpole" / f"seed-{seed}", [0.0, last], f"run.seed={seed}")
    make_run(folder / "acrobot", [-500.0, -100.0], "env.id=Acrobot-v1")
    return folder


def test_runs_in_several_environments_are_one_setting_of_several_tasks(tmp_path: Path) -> None:
    [setting] = load([str(suite(tmp_path / "impala"))])
    assert {task: len(runs) for task, runs in setting.tasks.items()} == {
        "Acrobot-v1": 1, "CartPole-v1": 2,
    }  # fmt: skip
    assert setting.label(3).endswith("(3 runs, 2 environments)")
    assert observed_ranges([setting], RETURN) == {
        "Acrobot-v1": (-500.0, -100.0), "CartPole-v1": (0.0, 20.0),
    }  # fmt: skip
    scales = ranges_of([setting], RETURN, {"CartPole-v1": (0.0, 40.0)})
    places = np.array([0.0, 50.0, 100.0])
    values = strata(setting, places, "env_steps", RETURN, ranges=scales)
    assert [found.tolist() for found in values] == [
        [[0.0, 0.5, 1.0]], [[0.0, 0.125, 0.25], [0.0, 0.25, 0.5]],
    ]  # fmt: skip
    assert ranges_of([setting], "steps_per_s", {}) is None, "speeds need no scale"


def test_variants_of_one_environment_are_separate_tasks(tmp_path: Path) -> None:
    for level, algorithm in ((1, "impala"), (2, "impala"), (1, "ppo")):
        options = (f"env.kwargs={{max_episode_steps: 9, level: {level}}}", f"algo.name={algorithm}")
        make_run(tmp_path / algorithm / f"level-{level}", [1.0], *options)
    both, one = load([str(tmp_path / "impala"), str(tmp_path / "ppo")])
    assert [*both.tasks] == ["CartPole-v1 level=1", "CartPole-v1 level=2"]
    assert [*one.tasks] == ["CartPole-v1 level=1"], "the same name in every setting"
    assert [*load([str(tmp_path / "ppo")])[0].tasks] == ["CartPole-v1"]


def test_a_range_without_an_effect_is_refused(tmp_path: Path) -> None:
    settings = load([str(suite(tmp_path / "impala"))])
    check_ranges(settings, ["grad_norm", RETURN], {"Acrobot-v1": (0.0, 1.0)})
    check_ranges(settings, ["grad_norm"], {})
    with pytest.raises(UserError, match=r"Pong is not .*; give one of: Acrobot-v1, CartPole-v1"):
        check_ranges(settings, [RETURN], {"Pong": (0.0, 1.0)})
    with pytest.raises(UserError, match=r"Acrobot-v1 has no effect: only returns .*; leave it out"):
        check_ranges(settings, ["grad_norm"], {"Acrobot-v1": (0.0, 1.0)})
    alone = load([str(tmp_path / "impala" / "cartpole")])
    with pytest.raises(UserError, match=r"CartPole-v1 has no effect"):
        check_ranges(alone, [RETURN], {"CartPole-v1": (0.0, 1.0)})


def test_a_folder_of_different_settings_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "lr" / "a", [1.0])
    make_run(tmp_path / "lr" / "b", [1.0], "learner.lr=1e-5")
    with pytest.raises(UserError, match=r"CartPole-v1 with different options \(learner.lr\)"):
        load([str(tmp_path / "lr")])
    make_run(tmp_path / "algo" / "a", [1.0])
    make_run(tmp_path / "algo" / "b", [1.0], target="cartpole_ppo")
    with pytest.raises(UserError, match="contains runs of impala and ppo; give the runs of each"):
        load([str(tmp_path / "algo")])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics.jsonl, .* name a run"):
        load([str(tmp_path)])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="contains no measurement, and it is not in progress; see"):
        load([str(tmp_path)])
    about = {"host": socket.gethostname(), "socket": f"{tmp_path}/s"}
    (tmp_path / "supervisor.json").write_text(json.dumps(about))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(about["socket"])
        listener.listen()
        with pytest.raises(UserError, match="contains no measurement yet; try again in a moment"):
            load([str(tmp_path)])
    with pytest.raises(UserError, match="it is not in progress"):  # it died
        load([str(tmp_path)])


def test_a_run_whose_config_cannot_be_read_is_still_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [1.0, 2.0])
    (folder / "config.yaml").write_text("env: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 4')  # being written
    [setting] = load([str(folder)])
    assert list(setting.runs[0].files.columns.column(RETURN)) == [1.0, 2.0]


def test_band_ends_where_the_shortest_run_ends(tmp_path: Path) -> None:
    make_run(tmp_path / "seed-0", [0.0, 1.0, 2.0, 3.0], "run.seed=0")
    make_run(tmp_path / "seed-1", [None, 5.0, 6.0], "run.seed=1")  # four more than the first
    [group] = load([str(tmp_path)])
    assert common_span(group.runs, "env_steps", RETURN) == (100.0, 200.0)
    places = np.array([100.0, 150.0, 200.0])
    found = band(strata(group, places, "env_steps", RETURN))
    assert found.middle.tolist() == [3.0, 3.5, 4.0]
    assert (found.low.tolist(), found.high.tolist()) == ([1.0, 1.5, 2.0], [5.0, 5.5, 6.0])
    [beyond] = strata(group, np.array([300.0]), "env_steps", RETURN)
    assert np.isnan(beyond).tolist() == [[False], [True]]
    [before] = strata(group, np.array([50.0]), "env_steps", RETURN)
    assert np.isnan(before).tolist() == [[False], [True]], "its first episode ended by 100"


def test_runs_without_a_common_part_have_no_span(tmp_path: Path) -> None:
    make_run(tmp_path / "seed-0", [0.0, 1.0], "run.seed=0")
    make_run(tmp_path / "seed-1", [None, None, 1.0, 2.0], "run.seed=1")
    [group] = load([str(tmp_path)])
    assert common_span(group.runs, "env_steps", RETURN) is None
    assert common_span(group.runs, "env_steps", "nothing") is None


def test_over_several_tasks_the_line_is_the_interquartile_mean() -> None:
    values = [np.array([[1.0], [2.0]]), np.array([[3.0], [100.0]])]
    assert band(values).middle.tolist() == [2.5]
    assert band(values, "mean").middle.tolist() == [26.5]
    assert band([np.concatenate(values)]).middle.tolist() == [26.5]


def test_ranges_apply_to_their_environment() -> None:
    found = parse_ranges(["ALE/Pong-v5=-20.7,14.6", "a:b=c=0,1e3"])
    assert found == {"ALE/Pong-v5": (-20.7, 14.6), "a:b=c": (0.0, 1000.0)}


@pytest.mark.parametrize("text", ["Pong", "Pong=1", "Pong=2,1", "=0,1", "Pong=0,inf", "Pong=a,b"])
def test_malformed_range_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--range {text} is not ENV=LOW,HIGH"):
        parse_ranges([text])
