"""Runs that are evaluated against opponents, and commands that play matches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train_command import Penstock, assert_balanced, json_lines

pytestmark = [pytest.mark.system]

SMALL_GAMES = (
    *("actors.envs=64", "actors.inference=numpy", "model.hidden=[64]", "learner.micro_batch=512"),
    *("eval.share=null", "eval.every_steps=20000", "eval.video=false"),
)


def opponent_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in result["against"] if each["opponent"] == name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of connect four, `run`, that was evaluated against random play."""
    folder = tmp_path_factory.mktemp("matches")
    options = ("run.dir=run", "stop.env_steps=120000", "eval.against=[bot:random, initial]")
    command = ["-m", "penstock", "train", "connect_four", "--json", *SMALL_GAMES, *options]
    subprocess.run(
        [sys.executable, *command], cwd=folder, check=True, timeout=200, stdout=subprocess.DEVNULL
    )
    return folder


@pytest.fixture
def run_dir(folder: Path, tmp_path: Path) -> str:
    (tmp_path / "run").symlink_to(folder / "run")
    return "run"


def test_a_run_has_a_best_by_its_matches_and_their_win_rates_among_its_metrics(
    folder: Path,
) -> None:
    lines = json_lines(folder / "run" / "evaluations.jsonl")
    assert len(lines) >= 3
    for line in lines:
        assert [each["opponent"] for each in line["against"]] == ["bot:random", "initial"]
        assert [each["episodes"] for each in line["against"]] == [10, 10]
        assert all(len(each["seats"]) == 2 for each in line["against"])
    best = max(lines, key=lambda line: line["return"]["mean"])
    assert best["win_rate"] > 0.6

    assert (folder / "run/checkpoints/best").is_dir()
    summary = json.loads((folder / "run/summary.json").read_text())
    assert {*summary["eval_win_rates"]} == {"bot:random", "initial"}
    assert summary["eval_win_rate"] == lines[-1]["win_rate"]
    metrics = json_lines(folder / "run" / "metrics.jsonl")
    assert any("eval_win_rate" in line for line in metrics)


def test_a_trained_policy_beats_random_play_and_itself_in_half_of_the_games(
    penstock: Penstock, run_dir: str
) -> None:
    rivals = ("--against", "bot:random", "--against", "run", "--against", "initial")
    code, result, err = penstock("eval", run_dir, *rivals, "--episodes", "600", "--json").end()
    assert code == 0, err
    assert result["episodes"] == 600
    for name in ("bot:random", "initial"):
        assert opponent_of(result, name)["win_rate"]["lower"] > 0.5

    itself = opponent_of(result, "run")
    assert itself["episodes"] == 200
    # Twice the interval of 95 %, which a fair test leaves once in ten thousand runs.
    half = itself["win_rate"]["upper"] - itself["win_rate"]["lower"]
    assert abs(itself["win_rate"]["mean"] - 0.5) < half
    assert [seat["episodes"] for seat in itself["seats"]] == [100, 100]


def test_a_file_plays_a_run_and_a_match_is_recorded(
    penstock: Penstock, run_dir: str, tmp_path: Path
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    code, _, err = penstock("export", run_dir, "agent.safetensors", "--json").end()
    assert code == 0, err
    command = ("eval", "agent.safetensors", "--against", run_dir, "--episodes", "200", "--json")
    code, result, err = penstock(*command).end()
    assert code == 0, err
    [itself] = result["against"]
    assert abs(itself["win_rate"]["mean"] - 0.5) < 0.2

    options = ("--against", "bot:minimax4", "--episodes", "2", "--out", "match.mp4", "--json")
    code, result, err = penstock("record", run_dir, *options).end()
    assert code == 0, err
    assert (result["against"], result["seats"]) == ("bot:minimax4", [0, 1])
    assert (tmp_path / "match.mp4").stat().st_size > 1000
    decisions = json.loads((tmp_path / "match.mp4.json").read_text())
    assert len(decisions["action"]) == sum(result["lengths"])


def test_a_goal_against_opponents_is_reached_by_evaluations(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = ("eval.against=[bot:random]", "stop.return=0.2", "stop.minutes=2", "run.dir=goal")
    code, summary, err = penstock("train", "connect_four", "--json", *SMALL_GAMES, *options).end()
    assert code == 0, err
    assert summary["exit_reason"] == "return"
    assert "stop.return 0.2 is confirmed by evaluation" in err
    assert summary["closing_evaluation"]["estimate"]["episodes"] == 100
    assert_balanced(summary)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("eval", ("--against", "bot:minimx"), "choose from bot:random, bot:minimax2"),
        ("eval", ("--against", "nobody"), "there is no opponent nobody"),
        ("record", ("--against", "bot:minimx"), "choose from bot:random, bot:minimax2"),
        ("play", ("--seat", "2"), "has no seat 2; choose from 0 to 1"),
    ],
)
def test_an_opponent_or_seat_that_there_is_not_ends_a_command_in_one_sentence(
    penstock: Penstock,
    run_dir: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: tuple[str, ...],
    words: str,
) -> None:
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    code, _, err = penstock(command, run_dir, *options).end()
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
