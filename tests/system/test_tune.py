"""`penstock tune`: small sweeps of CartPole, without Ray and by Ray Tune."""

from __future__ import annotations

import json
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from train_command import Command, json_lines, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
needs_tune = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("ray", "pyarrow", "pandas")),
    reason="needs the extra [tune]",
)

# Trials last seconds also on a fast machine, so that they are evaluated and schedulers decide.
SMALL = ("stop.return=null", "eval.episodes=4", "run.interval_s=0.2")
WAIT_S = 240.0


def start(folder: Path, space: str, *arguments: str) -> Command:
    (folder / "space.yaml").write_text(space)
    common = ("--space", "space.yaml", "--dir", "sweep", "--json", *SMALL)
    return Command(folder, "tune", "cartpole_ppo", *common, *arguments)


def end(command: Command) -> tuple[int, dict[str, Any], str]:
    try:
        out, err = command.process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        command.process.send_signal(signal.SIGINT)
        raise
    lines = out.splitlines()
    return command.process.returncode, json.loads(lines[-1]) if lines else {}, err


def starts(folder: Path, number: int) -> list[dict[str, Any]]:
    return json_lines(folder / "sweep" / f"trial-{number}" / "starts.jsonl")


def check(answer: dict[str, Any], folder: Path, rates: list[float]) -> None:
    """Each trial is a run with its options, and the best is the first."""
    assert sorted(trial["options"]["learner.lr"] for trial in answer["trials"]) == rates
    scores = [trial["score"] for trial in answer["trials"]]
    assert scores == sorted(scores, reverse=True)
    for trial in answer["trials"]:
        assert trial["ended_by"] == "env_steps"
        run_dir = folder / trial["run_dir"]
        config = (run_dir / "config.yaml").read_text()
        assert f"lr: {trial['options']['learner.lr']}\n" in config
        lines = (run_dir / "evaluations.jsonl").read_text().splitlines()
        assert trial["score"] == max(json.loads(line)["return"]["mean"] for line in lines)
        assert trial["env_steps"] == json.loads((run_dir / "summary.json").read_text())["env_steps"]
        assert (run_dir / "checkpoints" / "last").is_dir()
        assert trial["seconds"] > 0
    assert json.loads((folder / "sweep" / "results.json").read_text()) == answer


def test_grid_sweep_runs_without_ray(tmp_path: Path) -> None:
    space = "learner.lr: [0.001, 0.004]\n"
    command = start(tmp_path, space, "--no-ray", "stop.env_steps=400000", "--parallel", "2")
    code, answer, err = end(command)
    assert code == 0, err
    check(answer, tmp_path, [0.001, 0.004])
    assert "2 trials, 2 at a time" in err


@needs_tune
def test_grid_sweep_runs_by_ray_tune_with_asha(tmp_path: Path) -> None:
    """The rung is at the end, so that no trial is stopped early."""
    space = "learner.lr: [0.001, 0.004]\n"
    limits = ("stop.env_steps=200000", "--interval", "200000")
    code, answer, err = end(start(tmp_path, space, "--asha", *limits))
    assert code == 0, err
    check(answer, tmp_path, [0.001, 0.004])
    reports = [*(tmp_path / "sweep" / "tune").glob("*/result.json")]
    assert len(reports) == 2
    for path in reports:
        last = json.loads(path.read_text().splitlines()[-1])
        assert last["trained_steps"] >= 200_000
        assert last["score"] == last["eval_return"]
        assert {"return", "env_steps", "seconds"} <= last.keys()


@needs_tune
def test_asha_stops_a_trial_that_does_not_learn(tmp_path: Path) -> None:
    """One at a time, so that the good trial has passed both rungs before the other begins."""
    space = "learner.lr: [0.003, 1.0e-9]\n"
    limits = ("stop.env_steps=600000", "--interval", "100000", "--parallel", "1")
    by_return = ("--metric", "return", "eval.every_steps=null")
    code, answer, err = end(start(tmp_path, space, "--asha", *limits, *by_return))
    assert code == 0, err
    good, bad = answer["trials"]
    assert (good["options"], good["ended_by"]) == ({"learner.lr": 0.003}, "env_steps")
    assert (bad["options"], bad["ended_by"]) == ({"learner.lr": 1e-9}, "scheduler")
    assert bad["env_steps"] >= 100_000
    assert (tmp_path / bad["run_dir"] / "checkpoints" / "last").is_dir()


@needs_tune
def test_pbt_copies_weights_between_trials_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    """One trial does not learn, and takes over the weights of the other."""
    space = "learner.lr: [1e-9, 3e-3]\n"
    command = start(
        tmp_path, space, "--pbt", "--trials", "2", "--parallel", "2", "--metric", "return",
        "--interval", "20000", "stop.env_steps=1e8", "eval.every_steps=null", "run.seed=1",
    )  # fmt: skip

    def taken_over() -> list[int]:
        return [n for n in (0, 1) if any(s["from_trial"] is not None for s in starts(tmp_path, n))]

    command.wait_until(taken_over, WAIT_S)
    [loser] = taken_over()
    path = tmp_path / "sweep" / f"trial-{loser}"
    start_of = next(s for s in starts(tmp_path, loser) if s["from_trial"] is not None)
    before = len(metrics(path))
    command.wait_until(lambda: len(metrics(path)) > before, WAIT_S)
    command.process.send_signal(signal.SIGINT)
    code, answer, err = end(command)
    assert code == 130, err
    first = starts(tmp_path, loser)[0]
    assert first["options"] == {"learner.lr": 1e-9}, "the one that did not learn"
    winner = start_of["from_trial"]
    assert winner == 1 - loser
    assert starts(tmp_path, winner)[0]["options"] == {"learner.lr": 3e-3}
    since = metrics(path)[before:]
    assert since[0]["trained_steps"] >= start_of["trained_steps"] > 0
    returns = [m["episode_return_mean"] for m in metrics(path)[:before]]
    assert since[-1]["episode_return_mean"] > max(r for r in returns if r is not None)
    assert "checkpoints/received, after" in (path / "output.log").read_text()
    assert [trial["ended_by"] for trial in answer["trials"]] == ["terminated"] * 2
    assert [winner] in [trial["taken_over_from"][:1] for trial in answer["trials"]]


def test_invalid_space_starts_no_trial(tmp_path: Path) -> None:
    command = start(tmp_path, "learner.lrr: [1]\n", "stop.env_steps=1000")
    code, answer, err = end(command)
    assert code == 2
    assert "space.yaml:1: there is no option learner.lrr; the nearest" in answer["error"], err
    assert [path.name for path in tmp_path.iterdir()] == ["space.yaml"]
