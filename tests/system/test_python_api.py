"""`penstock.train` and the functions for a trained run, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import penstock
from penstock import Callbacks, Summary, UserError
from penstock.launch.callbacks import Evaluated, Run, Saved
from train_command import assert_balanced, trained

pytestmark = pytest.mark.system

SMALL: dict[str, Any] = {
    "actors.envs": 8,
    "actors.unroll": 8,
    "run.interval_s": 0.1,
    "stop.return": None,
}


def test_trained_policy_acts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = {"stop.return": 200, "stop.minutes": 0.5, "run.interval_s": 0.1}
    summary = penstock.train("cartpole", overrides, run_dir=tmp_path / "run")
    assert summary.reason == "return"
    assert summary.run_dir == tmp_path / "run"
    assert summary.return_mean is not None
    assert summary.metrics["closing_evaluation"]["estimate"]["mean"] >= 200
    assert summary.solved_at_s is not None
    assert summary.solved_at_s <= summary.seconds
    assert summary.rate == pytest.approx(summary.env_steps / summary.seconds)
    assert summary.utilization is not None
    assert 0.1 < summary.utilization <= 1
    assert summary.accounting.balanced
    assert_balanced(dict(summary.metrics))
    assert summary.history() == penstock.history(tmp_path / "run")
    counts = [metrics["env_steps"] for metrics in summary.history()]
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= summary.env_steps
    shown, complaints = capfd.readouterr()
    assert shown.splitlines()[-1].startswith("time 0:")
    assert complaints == ""

    policy = penstock.load_policy(tmp_path / "run")
    env, total = gymnasium.make("CartPole-v1"), 0.0
    obs, _ = env.reset(seed=1)
    ended = False
    while not ended:
        action, _ = policy(obs)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    evaluation = penstock.evaluate(tmp_path / "run", episodes=8)
    assert len(evaluation.returns) == 8
    assert evaluation.return_mean == pytest.approx(np.mean(evaluation.returns))
    # Random play pays about 22; the mean return of the training policy was above 200.
    assert evaluation.return_mean > 100
    assert total > 50


@pytest.mark.slow
def test_run_resumes_and_is_not_overwritten(tmp_path: Path) -> None:
    overrides = SMALL | {"stop.learner_steps": 20, "run.dir": tmp_path}
    first = penstock.train("cartpole", overrides, progress=False)
    assert (first.reason, first.learner_steps) == ("learner_steps", 20)
    with pytest.raises(UserError, match="already holds a run"):
        penstock.train("cartpole", overrides)
    second = penstock.train("cartpole", overrides | {"stop.learner_steps": 40}, resume="must")
    assert second.learner_steps == 40
    assert second.env_steps > first.env_steps


GOAL = """
import gymnasium
import numpy as np

class Goal(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.age += 1
        over = self.age == 4
        info = {"age": self.age} | ({"won": True} if over else {})
        return np.full(4, self.age, np.float32), 1.0, over, False, info
"""


class Heard(Callbacks):
    """Writes down what it hears of; the first evaluation ends the run."""

    every_steps = 64

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[int] = []
        self.metrics: Mapping[str, Any] = {}
        self.summary: Summary | None = None

    def on_steps(self, run: Run, metrics: Mapping[str, Any]) -> None:
        self.steps.append(metrics["env_steps"])
        self.metrics = metrics

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
        self.calls.append(f"{evaluated.episodes} episodes")
        return True

    def on_checkpoint(self, run: Run, saved: Saved) -> None:
        self.calls.append("checkpoint")

    def on_end(self, run: Run, summary: Summary) -> None:
        self.calls.append(f"end by {summary.reason} of {run.folder.name}")
        self.summary = summary


def test_callbacks_are_called_in_the_caller_with_recorded_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "goal.py").write_text(GOAL)
    monkeypatch.chdir(tmp_path)
    heard = Heard()
    options = SMALL | {"run.dir": tmp_path / "run", "checkpoint.every_s": 0.2, "eval.every_s": 0.2}
    options |= {"eval.episodes": 3, "stop.minutes": 2}
    options |= {"env.id": "goal:Goal", "env.record": ["age", "won"]}
    summary = penstock.train("cartpole", options, progress=False, callbacks=[heard])
    assert summary.reason == "callback"
    assert heard.calls[0] == "checkpoint"
    assert "3 episodes" in heard.calls
    assert heard.calls[-1] == "end by callback of run"
    assert heard.summary == summary
    assert heard.steps == sorted({*heard.steps})
    assert heard.steps[0] >= 64
    for metrics in (heard.metrics, summary.metrics):
        assert 2 < metrics["env_age_mean"] < 3
        assert metrics["env_age_final_mean"] == 4
        assert metrics["env_won_mean"] == metrics["env_won_final_mean"] == 1


def test_run_trains_in_a_thread_other_than_the_main_one(tmp_path: Path) -> None:
    found: list[Summary] = []

    def train() -> None:
        options = SMALL | {"stop.learner_steps": 20, "run.dir": tmp_path}
        found.append(penstock.train("cartpole", options, progress=False))

    handlers = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(50)
    assert [summary.reason for summary in found] == ["learner_steps"]
    assert signal.getsignal(signal.SIGINT) is handlers


def test_unknown_environment_raises_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^environment CartPole-v9 is not registered"):
        penstock.train("CartPole-v9", {"run.dir": tmp_path})


SCRIPT = """
import penstock, sys
summary = penstock.train("cartpole", {"stop.return": None, "run.interval_s": 0.1}, run_dir="run",
                         progress=False)
print(summary.reason, summary.accounting.balanced, (summary.run_dir / "checkpoints/last").exists())
"""


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [
        (signal.SIGINT, 0, "interrupted True True\n"),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, "", marks=pytest.mark.slow),
    ],
)
def test_a_script_without_a_main_guard_is_interrupted_cleanly(
    tmp_path: Path, signum: int, code: int, said: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    ends_s = time.monotonic() + 40
    while not trained(tmp_path / "run") and time.monotonic() < ends_s:
        time.sleep(0.05)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=40)
    assert (process.returncode, out) == (code, said)
    assert (tmp_path / "run" / "summary.json").exists()
