"""A disk that is full for a while costs checkpoints, not the run."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from penstock.learner import checkpoint
from train_command import SMALL, Penstock, assert_balanced, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def saved_steps(run_dir: Path) -> int:
    last = run_dir / "checkpoints" / "last"
    if not checkpoint.exists(last):
        return 0
    return int(checkpoint.load(last).meta["progress"]["learner_steps"])


def test_the_run_goes_on_and_saves_again_when_there_is_space(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock(
        *("train", "cartpole", *SMALL, "run.dir=run", "checkpoint.every_steps=20", "--json")
    )
    folder = tmp_path / "run"
    run.wait_until(lambda: saved_steps(folder))
    learner, (_, most) = run.pid_of("learner-0"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(learner, resource.RLIMIT_FSIZE, (1000, most))  # no file of it may be larger
    saved = saved_steps(folder)
    run.wait_until(lambda: updates(folder) > saved + 100)
    kept = saved_steps(folder)  # whole; a save may have been under way
    run.wait_until(lambda: updates(folder) > kept + 100)
    assert saved_steps(folder) == kept
    resource.prlimit(learner, resource.RLIMIT_FSIZE, (most, most))
    run.wait_until(lambda: saved_steps(folder) > kept)
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    assert_balanced(answer)
    assert saved_steps(folder) == answer["learner_steps"]
    assert "this checkpoint is missing, and the run goes on: checkpoint" in err
