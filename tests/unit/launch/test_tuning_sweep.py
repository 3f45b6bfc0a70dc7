"""What a sweep checks before its first trial, and how its results are read."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.launch.run_group import run_command
from penstock.launch.tuning import sweep, trial_run, trials, tune
from penstock.launch.tuning.sweep import Sweep, make_sweep
from penstock.launch.tuning.trial_run import OUTPUT, last_output
from penstock.launch.tuning.trials import (
    ProgressReader,
    TrialProgress,
    add_start,
    folder_of,
    results,
    show,
)
from penstock.learner.checkpoints.checkpoint_format import FILE

STEPS = "stop.env_steps=1e5"
LISTS = "learner.lr: [1e-3, 3e-3]\n"
RANGE = "learner.lr: {low: 1e-3, high: 3e-3}\n"
ENDS_WELL = """print('{"exit_reason": "env_steps", "error": null}')"""


def make(tmp_path: Path, *overrides: str, text: str = LISTS, **options: Any) -> Sweep:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    known: dict[str, Any] = {
        "number": 2,
        "scheduler": "none",
        "metric": "eval",
        "interval": None,
        "parallel": None,
        "folder": str(tmp_path / "sweep"),
    }
    target = options.pop("target", "cartpole_ppo")
    return make_sweep(target, list(overrides), str(path), **{**known, **options})


def test_evaluations_are_as_frequent_as_decisions(tmp_path: Path) -> None:
    found = make(tmp_path, STEPS, scheduler="asha")
    assert (found.interval, found.most_steps) == (10_000, 100_000)
    assert found.overrides == ("eval.share=null", "eval.every_steps=10000", STEPS)
    own = make(tmp_path, STEPS, "eval.share=0.1", "eval.every_steps=500", scheduler="asha")
    assert resolve("cartpole_ppo", own.overrides).eval.share == 0.1
    often = make(tmp_path, STEPS, "eval.every_steps=500", interval=1000)
    assert often.overrides == (STEPS, "eval.every_steps=500")
    assert make(tmp_path, STEPS).overrides == ("eval.every_steps=10000", STEPS)
    assert make(tmp_path, STEPS, metric="return").overrides == (STEPS,)


def test_a_trial_has_the_cores_of_its_largest_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "usable_cores", lambda: 8.0)
    found = make(tmp_path, STEPS, text="actors.count: [1, 3]\n")
    assert (found.cores, found.at_once) == (4, 2)  # 3 actors and a learner
    assert make(tmp_path, STEPS, parallel=5).at_once == 5
    monkeypatch.setattr(sweep, "usable_cores", lambda: 1.0)
    assert make(tmp_path, STEPS).at_once == 1


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {}, "a trial would run without an end; add stop.env_steps=1e6"),
        (["stop.minutes=1"], {"scheduler": "pbt"}, "--pbt needs the number of agent steps of a"),
        (["stop.minutes=1"], {"interval": 10}, "--interval needs the number of agent steps of a"),
        ([STEPS], {"interval": 200_000}, "--interval 200000 is more than stop.env_steps=100000"),
        ([STEPS, "eval.every_steps=null"], {}, "trials are compared by their evaluations, and"),
        ([STEPS, "actors.envs=auto"], {}, "actors.envs auto is found at the start of one run on"),
        ([STEPS], {"text": "actors.envs: [auto, 64]"}, "actors.envs auto is found at the start of"),
        (
            [STEPS],
            {"text": "transport.connectors: [1, auto]"},
            "transport.connectors auto is found",
        ),
        ([STEPS, "run.dir=a"], {}, "run.dir is of one run; name the folder of all trials with"),
        ([STEPS], {"number": None, "scheduler": "pbt"}, "--pbt needs the size of the population"),
        ([STEPS], {"number": 1, "scheduler": "asha"}, "--trials is 1; --asha needs at least 2"),
        ([STEPS], {"number": 10**6}, "--trials is 1000000; a sweep has at most 1000"),
        ([STEPS], {"number": None, "text": RANGE}, "the space has ranges, so it has no grid; add"),
        ([STEPS], {"target": "cartpol"}, "'cartpol' is not a target; the nearest preset is"),
        ([STEPS], {"folder": "."}, "--dir . is not empty; name a folder that does not exist"),
        (
            [STEPS],
            {"scheduler": "pbt", "text": "model.hidden: [[8], [9]]"},
            "--pbt copies weights between trials, and model.hidden changes what they fit",
        ),
    ],
)
def test_invalid_sweeps_are_refused_before_a_trial_starts(
    tmp_path: Path, overrides: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        make(tmp_path, *overrides, **options)
    assert str(error.value).startswith(message)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("folder", ["file/sweep", "long" * 100])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--dir .* cannot be made: .*; name a folder elsewhere"):
        tune.run_sweep(make(tmp_path, STEPS, folder=str(tmp_path / folder)), False, as_json=False)


@pytest.mark.parametrize(
    ("missing", "with_ray", "message"),
    [
        (True, True, "--pbt needs Ray Tune, which is not installed; run: pip install 'penstock[t"),
        (False, False, "--pbt needs Ray Tune; leave out --no-ray"),
    ],
)
def test_schedulers_need_ray_tune(
    monkeypatch: pytest.MonkeyPatch, missing: bool, with_ray: bool, message: str
) -> None:
    monkeypatch.setattr(tune, "find_spec", lambda name: None if missing else name)
    with pytest.raises(UserError) as error:
        tune.uses_tune("pbt", with_ray)
    assert str(error.value).startswith(message)


def test_trial_with_contradictory_options_fails_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A space is checked option by option, and its first combination is refused."""
    text = "actors.envs: [4, 64]\nlearner.updates_per_batch: [8, 4]\n"

    def some_command(target: str, overrides: list[str], *about: Any) -> list[str]:
        refused = {"actors.envs=4", "learner.updates_per_batch=8"} <= set(overrides)
        return (
            run_command(target, overrides, *about) if refused else [sys.executable, "-c", ENDS_WELL]
        )

    monkeypatch.setattr(tune, "run_command", some_command)
    found = make(tmp_path, STEPS, text=text, number=None, parallel=1)
    assert tune.run_sweep(found, with_ray=False, as_json=True) == 1
    answer = json.loads(capsys.readouterr().out)
    errors = {row["trial"]: row["error"] for row in answer["trials"]}
    assert "actors.envs 4 is not divisible" in errors.pop(0)
    assert errors == {1: None, 2: None, 3: None}


def write(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_progress_counts_only_the_current_start(tmp_path: Path) -> None:
    metrics, evaluations = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    write(metrics, {"trained_steps": 90, "episode_return_mean": 9.0})
    write(evaluations, {"trained_steps": 80, "return": {"mean": 8.0}})
    reader = ProgressReader(tmp_path, "eval")
    assert reader.read().score is None, "these weights are given up"
    write(metrics, {"trained_steps": 30, "env_steps": 33, "episode_return_mean": 3.0})
    found = reader.read()
    assert (found.score, found.scored_steps) == (None, 0)
    assert (found.trained_steps, found.env_steps, found.return_mean) == (30, 33, 3.0)
    write(evaluations, {"trained_steps": 20, "return": {"mean": 2.0}})
    found = reader.read()
    assert (found.score, found.scored_steps) == (2.0, 20)
    by_return = ProgressReader(tmp_path, "return")
    write(metrics, {"trained_steps": 40, "episode_return_mean": math.nan})
    assert by_return.read().score is None
    write(metrics, {"trained_steps": 50, "episode_return_mean": 5.0})
    assert (by_return.read().score, by_return.read().scored_steps) == (5.0, 50)


def test_results_are_ordered_by_the_best_evaluation(tmp_path: Path) -> None:
    for n, means in enumerate([[5.0, 1.0], [7.0], []]):
        path = folder_of(tmp_path, n)
        add_start(path, {"learner.lr": 0.001 * (n + 1)}, 0, None)
        write(path / "evaluations.jsonl", *({"return": {"mean": mean}} for mean in means))
        summary = {"exit_reason": "terminated" if n else "env_steps", "env_steps": 100, "time_s": 2}
        if n < 2:
            (path / "summary.json").write_text(json.dumps(summary))
    add_start(folder_of(tmp_path, 0), {"learner.lr": 0.5}, 50, 1)
    found = results(tmp_path, "eval", False, {2: "no such game"})
    assert [row["trial"] for row in found] == [1, 0, 2]
    assert [row["score"] for row in found] == [7.0, 5.0, None]
    assert [row["ended_by"] for row in found] == [trials.STOPPED, "env_steps", "user_error"]
    assert found[1]["options"] == {"learner.lr": 0.5}
    assert found[1]["taken_over_from"] == [1]
    assert found[2]["error"] == "no such game"
    stopped = results(tmp_path, "eval", True, {})
    assert stopped[0]["ended_by"] == "terminated"
    assert stopped[2]["ended_by"] == trials.NOT_STARTED
    text = io.StringIO()
    show(found, "eval", tmp_path, text)
    lines = text.getvalue().splitlines()
    assert lines[0].split()[:3] == ["trial", "learner.lr", "return"]
    assert "trial 2 failed: no such game" in lines


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("starts\npenstock: the sentence\n", "penstock: the sentence"),
        ('note\n{"error": "the sentence"}\n', "the sentence"),
        ("", "its process has printed nothing"),
    ],
)
def test_error_of_a_trial_is_its_last_output_line(tmp_path: Path, printed: str, error: str) -> None:
    (tmp_path / OUTPUT).write_text(printed)
    assert last_output(tmp_path) == error


def test_damaged_files_of_a_trial_affect_only_its_row(tmp_path: Path) -> None:
    for number, text in enumerate(["[1]", "5", '{"return": 5, "options": 5, "env_steps": "x"}']):
        path = tmp_path / f"trial-{number}"
        path.mkdir()
        for name in ("starts.jsonl", "metrics.jsonl", "evaluations.jsonl", "summary.json"):
            (path / name).write_text(text + "\n")
    found = results(tmp_path, "eval", False, {})
    assert [row["score"] for row in found] == [None] * 3
    show(found, "eval", tmp_path, io.StringIO())
    reader = ProgressReader(tmp_path / "trial-2", "eval")
    with (tmp_path / "trial-2" / "evaluations.jsonl").open("a") as file:
        file.write('{"return": 5, "trained_steps": "x"}\n')
    with (tmp_path / "trial-2" / "metrics.jsonl").open("a") as file:
        file.write('{"trained_steps": [1], "env_steps": 1e400}\n')
    assert reader.read() == TrialProgress()


def test_a_trial_that_takes_over_weights_removes_its_checkpoints_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "trial-0" / "checkpoints"
    for name in ("last", "step-5", "best", "step-5-of-mine"):
        (own / name).mkdir(parents=True)
        (own / name / FILE).write_bytes(b"x")
    (own / "step-5" / "notes.txt").write_text("of the user")
    given = tmp_path / "given"
    given.mkdir()
    (given / FILE).write_bytes(b"y")
    (given / "trial.json").write_text('{"trial": 1, "trained_steps": 7}')
    ended = SimpleNamespace(poll=lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: ended)
    settings = trial_run.TrialSettings("cartpole", [], tmp_path, tmp_path, "eval", None, 0.0)
    trial = trial_run.TrialRun(settings, 0, {})
    trial.load(given)
    trial.step()
    left = {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
    mine = {"step-5/notes.txt", f"step-5-of-mine/{FILE}"}
    assert left == {f"best/{FILE}", f"received/{FILE}", *mine}
