"""A run whose checkpoints hold its replay, through real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train_command import assert_balanced

pytestmark = pytest.mark.system

SMALL = (
    *("actors.envs=8", "actors.unroll=8", "replay.capacity=4000", "replay.min_size=1500"),
    *("replay.batch_size=32", "replay.samples_per_insert=4", "stop.return=null"),
    *("checkpoint.every_s=0.1", "run.interval_s=0.1"),
)


def train(folder: Path, steps: int, *options: str) -> tuple[dict[str, Any], str]:
    """The summary, and what was said."""
    command = [sys.executable, "-m", "penstock", "train", "cartpole_dqn", "run.dir=run", "--json"]
    done = subprocess.run(
        [*command, *SMALL, f"stop.learner_steps={steps}", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert_balanced(summary)
    return summary, done.stdout + done.stderr


def test_a_resumed_run_goes_on_with_the_stored_steps(tmp_path: Path) -> None:
    """100 steps with 32 samples each are worth 800 inserts, and an empty replay needs 1500 first;
    meanwhile checkpoints are written beside the training, as often as can be."""
    first, said = train(tmp_path, 100)
    assert "checkpoints keep the replay, with up to " in said
    manifest = tmp_path / "run/checkpoints/last/replay/0/replay.json"
    assert manifest.is_file()
    second, said = train(tmp_path, 200, "--resume=must")
    assert "the replay continues with " in said
    assert second["learner_steps"] >= 200
    assert second["replay_size"] >= first["replay_size"]
    assert second["env_steps"] - first["env_steps"] < 1500


@pytest.mark.slow
def test_without_stored_steps_the_replay_begins_empty(tmp_path: Path) -> None:
    second, _ = train(tmp_path, 100, "replay.checkpoint=true")
    manifest = tmp_path / "run/checkpoints/last/replay/0/replay.json"
    assert manifest.is_file()
    third, said = train(tmp_path, 200, "replay.checkpoint=false", "--resume=must")
    assert "the replay begins empty, as replay.checkpoint is false" in said
    assert third["env_steps"] - second["env_steps"] > 1500
    assert not manifest.exists()


@pytest.mark.slow
def test_a_run_resumed_in_another_game_begins_with_an_empty_replay(tmp_path: Path) -> None:
    first, _ = train(tmp_path, 100, "replay.checkpoint=true")
    other_game = ("replay.checkpoint=true", "env.kwargs.sutton_barto_reward=true")
    second, said = train(tmp_path, 200, *other_game, "--resume=must")
    assert "the replay continues with " not in said
    assert second["env_steps"] - first["env_steps"] > 1500
