"""Agents that must reach a known return, through the real processes and both transports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]


def train(folder: Path, target: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock", "train", target, "run.dir=run", "--json"]
    done = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    accounting = summary["accounting"]
    went = accounting["trained"] + accounting["in_flight"]
    went += sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    assert accounting["produced"] == went
    return summary


@pytest.mark.parametrize("kind", ["shm", "zmq", "inproc"])
def test_cartpole_is_solved(tmp_path: Path, nothing_left_behind: None, kind: str) -> None:
    summary = train(tmp_path, "cartpole", f"transport.kind={kind}", "stop.minutes=2")
    assert summary["exit_reason"] == "return"
    assert summary["episode_return_mean"] >= 475


def test_an_evaluation_finds_what_was_learnt(tmp_path: Path, nothing_left_behind: None) -> None:
    """In lockstep, which gives the same run each time: elsewhere the last update varies."""
    train(tmp_path, "cartpole", "transport.kind=inproc", "stop.minutes=2")
    command = [sys.executable, "-m", "penstock", "eval", "run", "--episodes", "20", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["returns"]) == 20
    assert result["return"]["mean"] >= 475


def test_the_best_play_of_the_synthetic_game_is_found(
    tmp_path: Path, nothing_left_behind: None
) -> None:
    summary = train(tmp_path, "synthetic", "stop.minutes=2")
    assert summary["exit_reason"] == "return"
    assert 95 <= summary["episode_return_mean"] <= 100
