"""Curves and their intervals, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.monitor.intervals import interval, t_95
from penstock.monitor.plot import _draw, band, curve, load, plot, whole
from penstock.monitor.record import Lines


def test_the_interval_of_a_mean() -> None:
    # 1, 2, 3: deviation 1, error 1 / sqrt 3; Student's t for two degrees of freedom is 4.303.
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert interval([7.0]) == (7.0, None)


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (5, 2.776), (31, 2.042), (32, 1.96)])
def test_students_t(count: int, t: float) -> None:
    assert t_95(count) == t


def test_a_curve_rises_and_what_was_done_again_replaces_what_was_lost() -> None:
    steps = [0, 10, 20, 30, 15, 25]  # resumed from a checkpoint at 12
    lines: Lines = [{"x": step, "y": i} for i, step in enumerate(steps)]
    lines.insert(2, {"x": 12, "y": None})
    xs, ys = curve(lines, "x", "y")
    assert (xs.tolist(), ys.tolist()) == ([0, 10, 15, 25], [0, 1, 4, 5])


def test_a_curve_of_nothing_is_empty() -> None:
    assert [len(found) for found in curve([{"x": 1}], "x", "y")] == [0, 0]


def test_a_long_curve_is_thinned() -> None:
    xs, _ = curve([{"x": i, "y": i} for i in range(10_000)], "x", "y")
    assert xs.tolist() == list(range(0, 10_000, 5))


def test_the_band_goes_as_far_as_all_curves_go() -> None:
    first = np.array([0.0, 10.0]), np.array([0.0, 10.0])
    second = np.array([2.0, 6.0]), np.array([4.0, 8.0])  # two more than the first
    places, mean, half = band([first, second])
    assert (places[0], places[-1]) == (2.0, 6.0)
    assert mean == pytest.approx(places + 1)
    # Deviation of x and x + 2: sqrt 2; its error 1; Student's t for one degree of freedom.
    assert half == pytest.approx(12.706)
    apart = np.array([20.0, 30.0]), np.array([0.0, 1.0])
    assert [len(found) for found in band([first, apart])] == [0, 0, 0]


def test_intervals_that_were_cut_short_are_left_out() -> None:
    lines = [{"time_s": time_s} for time_s in (1.0, 2.0, 3.0, 3.01)]
    assert whole(lines) == lines[:3]
    thinned = [{"time_s": at_s, "interval_s": 1.0} for at_s in (1.0, 2.0, 300.0, 400.0)]
    assert whole([*thinned, {"time_s": 480.0, "interval_s": 0.01}]) == thinned


def write(folder: Path, rates: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {
            "env_steps": 100 * i,
            "time_s": float(i),
            "steps_per_s": rate,
            "episode_return_mean": rate / 10,
            "policy_lag_mean": 1.0,
            "learner_wait_fraction": 0.1,
        }
        for i, rate in enumerate(rates)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"env_steps": 4')  # being written


def test_runs_and_groups_become_one_picture(tmp_path: Path) -> None:
    write(tmp_path / "one", [100.0, 110.0, 120.0])
    for seed in (2, 10):
        write(tmp_path / "group" / f"seed-{seed}", [90.0 + seed, 95.0, 100.0])
    evaluation = {"trained_steps": 100, "time_s": 1.0, "return": {"mean": 9.0}}
    (tmp_path / "one" / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    group = load(tmp_path / "group")
    assert [run[0]["steps_per_s"] for run in group.runs] == [92.0, 100.0]  # in order of the seeds
    folders = [str(tmp_path / "one"), str(tmp_path / "group")]
    both = plot(folders, str(tmp_path / "out" / "both.png"), None).read_bytes()
    steps = plot(folders, str(tmp_path / "steps.png"), "steps").read_bytes()
    assert both[:8] == steps[:8] == b"\x89PNG\r\n\x1a\n"
    width, half = (int.from_bytes(data[16:20], "big") for data in (both, steps))
    assert width == 2 * half
    assert plot([folders[0]], None, None) == tmp_path / "one" / "plot.png"


def test_evaluations_that_were_lost_leave_no_dots(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    write(tmp_path / "run", [100.0, 110.0])
    means = {100: 1.0, 200: 2.0, 300: 3.0, 150: 4.0, 160: None, 250: 5.0}  # resumed after 100
    lines = [
        json.dumps({"trained_steps": at, "time_s": at / 10, "return": {"mean": mean}})
        for at, mean in means.items()
    ]
    lines.insert(2, '{"trained_steps": 2')  # the disk was full
    (tmp_path / "run" / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
    for x, scale in (("env_steps", 1), ("time_s", 10)):
        cell = figure.subplots()
        _draw(cell, [load(tmp_path / "run")], x, "episode_return_mean")
        dots = cell.lines[-1]
        assert (dots.get_xdata() * scale).tolist() == [100, 150, 250]
        assert dots.get_ydata().tolist() == [1, 4, 5]


def test_a_picture_has_the_name_that_was_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "run", [100.0, 110.0])
    out = tmp_path / "picture"
    with pytest.raises(UserError, match=f"--out {out} has no suffix, .*ends in .png"):
        plot([str(tmp_path / "run")], str(out), None)
    assert not list(tmp_path.glob("picture*"))


def test_a_folder_that_is_no_run_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics.jsonl, .* name a run"):
        plot([str(tmp_path)], None, None)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="contains no measurement yet"):
        plot([str(tmp_path)], None, None)


def test_without_matplotlib_the_user_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r'run `pip install "penstock\[plot\]"`'):
        plot([str(tmp_path)], None, None)
