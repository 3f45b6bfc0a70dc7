"""`penstock plot`: pictures of runs and their texts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.monitor.curves import RETURN, load
from penstock.monitor.plot import COLOURS, MOST_POINTS, draw, label_x, plot, text, units
from run_folders import make_run


def test_runs_and_groups_are_drawn_into_one_picture(tmp_path: Path) -> None:
    make_run(tmp_path / "one", [10.0, 11.0, 12.0], "learner.lr=1e-5", evaluated={100: 9.0})
    for seed in (2, 10):
        make_run(tmp_path / "group" / f"seed-{seed}", [9.0, 9.5, 10.0], f"run.seed={seed}")
    folders = [str(tmp_path / "one"), str(tmp_path / "group")]
    both = plot(folders, str(tmp_path / "out" / "both.png")).read_bytes()
    steps = plot(folders, str(tmp_path / "steps.png"), "steps").read_bytes()
    assert both[:8] == steps[:8] == b"\x89PNG\r\n\x1a\n"
    width, half = (int.from_bytes(data[16:20], "big") for data in (both, steps))
    assert width == 2 * half
    assert plot([folders[0]]) == tmp_path / "one" / "plot.png"


def test_picture_of_chosen_metrics_has_their_names(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a$x_<b>", [1.0, 2.0, 3.0])
    metrics = ("policy_loss", "ledger/compute", "episode_length_mean")
    path = plot([str(folder)], str(tmp_path / "p.svg"), "time", metrics, smooth=2)
    import xml.etree.ElementTree as ElementTree

    comments = path.read_text(encoding="utf-8")
    ElementTree.parse(path)
    for label in ("policy loss", "ledger/compute", "episode length, steps", "seconds of training"):
        assert f"<!-- {label} -->" in comments
    assert "a$x_&lt;b&gt;" in comments or "a$x_<b>" in comments
    assert "smoothed over 2 measurements" in comments


def test_a_metric_that_no_run_has_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    with pytest.raises(UserError, match=r"--metric grad_nrm is in none .* name is grad_norm"):
        plot([str(folder)], None, None, ["grad_nrm"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"eval_return_mean": 1.0}
    (folder / "metrics.jsonl").write_text("".join(f"{x}\n" for x in [*lines, json.dumps(last)]))
    with pytest.raises(UserError, match=r"eval_return_mean is in none .* is episode_return_mean"):
        plot([str(folder)], None, None, ["eval_return_mean"])


def test_a_group_is_a_line_with_a_band_over_its_runs(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for seed, last in ((0, 10.0), (1, 20.0)):
        make_run(tmp_path / "group" / f"seed-{seed}", [0.0, last], f"run.seed={seed}")
    make_run(tmp_path / "one", [1.0, 2.0], "learner.lr=1e-5")
    cell = figure.subplots()
    draw(cell, load([str(tmp_path / "group"), str(tmp_path / "one")]), "env_steps", RETURN)
    lines = {line.get_label(): line for line in cell.lines}
    middle, alone = lines[f"{tmp_path / 'group'} (2 seeds)"], lines[str(tmp_path / "one")]
    assert (middle.get_xdata()[-1], middle.get_ydata()[-1]) == (100.0, 15.0)
    assert [middle.get_color(), alone.get_color()] == [*COLOURS[:2]]
    [band] = cell.collections
    ends = band.get_paths()[0].vertices
    assert {10.0, 20.0} <= {float(y) for x, y in ends if x == 100.0}


def test_a_label_has_the_number_of_runs_that_are_drawn(tmp_path: Path) -> None:
    for seed, returns in ((0, [None, None]), (1, [1.0, 2.0])):
        make_run(tmp_path / "group" / f"seed-{seed}", returns, f"run.seed={seed}")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    cell = figure.subplots()
    draw(cell, load([str(tmp_path / "group")]), "env_steps", RETURN, smooth=2)
    single, means, *_ = cell.lines
    assert means.get_label() == f"{tmp_path / 'group'} (1 of 2 seeds)"
    assert (single.get_ydata().tolist(), means.get_ydata().tolist()) == ([1, 2], [1, 1.5])
    names = ["grad_norm", RETURN]
    path = plot([str(tmp_path / "group")], str(tmp_path / "p.svg"), None, names)
    shown = path.read_text(encoding="utf-8")
    assert "(2 seeds)" in shown
    assert "(1 of 2 seeds)" in shown, "in the second panel"


def test_settings_beyond_the_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    folders = [
        str(make_run(tmp_path / f"{i}", [1.0, 2.0], f"learner.lr={i + 1}e-5"))
        for i in range(len(COLOURS) + 1)
    ]
    cell = figure.subplots()
    draw(cell, load(folders), "env_steps", RETURN)
    drawn = [line for line in cell.lines if str(line.get_label()).startswith(str(tmp_path))]
    styles = {(line.get_color(), line.get_linestyle()) for line in drawn}
    assert len(styles) == len(folders)


def test_lost_evaluations_leave_no_dots(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    means = {100: 1.0, 200: 2.0, 300: 3.0, 150: 4.0, 250: 5.0}  # resumed after 100
    folder = make_run(tmp_path / "run", [1.0, 2.0, 3.0])
    text_of = [
        f'{{"trained_steps": {at}, "time_s": {at / 10}, "return": {{"mean": {mean}}}}}\n'
        for at, mean in means.items()
    ]
    text_of.insert(2, '{"trained_steps": 2\n')  # the disk was full
    text_of.insert(5, '{"trained_steps": 160, "time_s": 16, "return": {"mean": null}}\n')
    (folder / "evaluations.jsonl").write_text("".join(text_of))
    for x, scale in (("env_steps", 1), ("time_s", 10)):
        cell = figure.subplots()
        draw(cell, load([str(folder)]), x, RETURN)
        dots = cell.lines[-1]
        assert (dots.get_xdata() * scale).tolist() == [100, 150, 250]
        assert dots.get_ydata().tolist() == [1, 4, 5]


def test_long_line_is_smoothed_before_it_is_thinned(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    folder = make_run(tmp_path / "run", [0.0])
    lines = [{"env_steps": i, "time_s": i, RETURN: float(i % 2)} for i in range(5_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cell = figure.subplots()
    draw(cell, load([str(folder)]), "env_steps", RETURN, smooth=2)
    single, means, _ = cell.lines
    assert len(single.get_xdata()) == len(means.get_xdata()) == MOST_POINTS
    assert (means.get_xdata()[0], means.get_xdata()[-1]) == (0, 4_999)
    assert {*means.get_ydata()[1:]} == {0.5}, "each is the mean of a 0 and a 1"


def test_return_over_all_environments_is_a_faint_line(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    folder = make_run(tmp_path / "run", [0.0])
    lines = [
        {"env_steps": i, "time_s": i, RETURN: 9.0, "episode_return_all_mean": 3.0} for i in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cell = figure.subplots()
    draw(cell, load([str(folder)]), "env_steps", RETURN)
    faint = next(line for line in cell.lines if line.get_alpha() is not None)
    assert faint.get_ydata().tolist() == [3.0, 3.0]


def test_single_evaluations_of_several_seeds_are_dots(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for seed, at in ((0, 100), (1, 200)):
        folder = tmp_path / "group" / f"seed-{seed}"
        make_run(folder, [1.0, 2.0, 3.0], f"run.seed={seed}", evaluated={at: 5.0})
    cell = figure.subplots()
    draw(cell, load([str(tmp_path / "group")]), "env_steps", "eval_return_mean")
    dots = [line for line in cell.lines if len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in dots] == [[100.0], [200.0]]
    assert [line.get_ydata().tolist() for line in dots] == [[6.0], [6.0]], "of returns 5 and 7"
    assert {(line.get_marker(), line.get_alpha()) for line in dots} == {("o", 1.0)}


def test_scaled_runs_without_a_common_range_are_drawn_separately(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    make_run(tmp_path / "suite" / "a", [1.0], evaluated={100: 4.0})  # of returns 4 and 6
    make_run(tmp_path / "suite" / "b", [1.0], "env.id=Acrobot-v1", evaluated={200: 7.0})
    cell = figure.subplots()
    scales = {"CartPole-v1": (0.0, 10.0), "Acrobot-v1": (0.0, 16.0)}
    settings = load([str(tmp_path / "suite")])
    draw(cell, settings, "env_steps", "eval_return_mean", scales=scales)
    assert [line.get_ydata().tolist() for line in cell.lines[:2]] == [[0.5], [0.5]]


def test_tasks_are_scaled_before_they_are_combined(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for name, options, returns in (
        ("a", (), [0.0, 500.0]), ("b", ("env.id=Acrobot-v1",), [-500.0, -100.0]),
    ):  # fmt: skip
        make_run(tmp_path / "suite" / name, returns, *options)
    cell = figure.subplots()
    scales = {"CartPole-v1": (0.0, 1000.0), "Acrobot-v1": (-500.0, -100.0)}
    draw(cell, load([str(tmp_path / "suite")]), "env_steps", RETURN, scales=scales)
    [line] = cell.lines
    assert [line.get_ydata()[0], line.get_ydata()[-1]] == [0.0, 0.75]
    with (tmp_path / "suite" / "a" / "evaluations.jsonl").open("a") as file:
        file.write('{"trained_steps": 50, "time_s": 1, "return": {"mean": 1}}\n')
    path = plot([str(tmp_path / "suite")], str(tmp_path / "p.svg"), None, [RETURN])
    assert "dots: evaluations" not in path.read_text(encoding="utf-8")
    assert "scaled by environment" in path.read_text(encoding="utf-8")
    assert "interquartile mean" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (950.0, "950"),
        (1500.0, "1.5k"),
        (2e6, "2M"),
        (1.0005, "1.0005"),
        (-25e3, "-25k"),
        (3e9, "3G"),
    ],
)
def test_axis_numbers_are_formatted(value: float, shown: str) -> None:
    assert units(value) == shown


@pytest.mark.parametrize(
    ("seconds", "label", "last"),
    [(90.0, "seconds of training", 90), (900.0, "minutes of training", 15),
     (9000.0, "hours of training", 2.5)],
)  # fmt: skip
def test_an_axis_of_time_has_a_unit_by_its_length(seconds: float, label: str, last: float) -> None:
    cell = pytest.importorskip("matplotlib.figure").Figure().subplots()
    cell.set_xlim(0, seconds)
    label_x(cell, "time_s")
    assert cell.get_xlabel() == label
    shown = [float(tick.get_text()) for tick in cell.get_xticklabels()]
    assert max(tick for tick in shown if tick <= last) >= 0.8 * last
    assert cell.get_xlim() == (0, seconds)


def test_names_in_the_legend_are_not_parsed_as_mathematics() -> None:
    assert text("runs/a$b$") == r"runs/a\$b\$"
    assert text("_mine") == " _mine"


def test_html_page_embeds_the_picture_and_escapes_texts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a_<script>", [1.0, 2.0, 3.0])
    page = plot([str(folder)], str(tmp_path / "p.html"), metrics=[RETURN]).read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "<?xml" not in page
    assert "<script" not in re.sub("<!--.*?-->", "", page, flags=re.DOTALL)
    assert "return, mean of the last episodes" in page


def test_unusable_output_names_of_a_picture_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    out = tmp_path / "picture"
    with pytest.raises(UserError, match=f"--out {out} has no suffix, .*ends in .png"):
        plot([str(folder)], str(out))
    with pytest.raises(UserError, match=r"p.xyz cannot be written .*; give another --out"):
        plot([str(folder)], str(tmp_path / "p.xyz"))
    assert not list(tmp_path.glob("p*"))


def test_missing_matplotlib_is_named_with_its_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r'run `pip install "penstock\[plot\]"`'):
        plot([str(tmp_path)])
