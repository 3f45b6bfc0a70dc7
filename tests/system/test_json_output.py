"""The output of a run with `run.log=json`, as a log collector reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train_command import SMALL, WAIT_S, Penstock

pytestmark = pytest.mark.system
BROKEN = """
import gymnasium as gym

class Broken(gym.Wrapper):
    def step(self, action):
        raise ValueError("of two\\nlines")

def make():
    return Broken(gym.make("CartPole-v1"))
"""


def test_every_output_line_of_a_run_is_a_json_object(penstock: Penstock) -> None:
    run = penstock("train", "cartpole", *SMALL, "run.log=json", "stop.learner_steps=20")
    out, err = run.process.communicate(timeout=WAIT_S)
    lines = [json.loads(line) for line in out.splitlines()]
    kinds = [line["kind"] for line in lines]
    assert (run.process.returncode, err) == (0, "")
    assert {"start", "ready", "metrics", "stop", "checkpoint", "exit"} <= {*kinds}
    assert (kinds[-1], lines[-1]["text"]) == ("end", "ended by learner_steps")
    assert [line["role"] for line in lines if line["kind"] == "start"] == [
        "learner-0", "actor-0", "actor-1"
    ]  # fmt: skip


def test_failure_of_a_run_is_a_json_object(tmp_path: Path, penstock: Penstock) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    options = ("run.log=json", "run.max_restarts=0", "actors.count=1", "stop.minutes=1")
    run = penstock("train", "broken:make", "--json", *SMALL, *options)
    out, err = run.process.communicate(timeout=WAIT_S)
    lines = [json.loads(line) for line in err.splitlines()]
    assert run.process.returncode == 1
    assert json.loads(out)["exit_reason"] == "fault"
    assert (lines[-1]["level"], lines[-1]["kind"]) == ("error", "failure")
    assert lines[-1]["text"] == "actor-0: ValueError: of two\nlines (broken.py:6, in step)"
    assert lines[-1]["data"]["traceback"][-1] == "lines"
