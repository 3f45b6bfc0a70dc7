"""Each command reports an error of a user's environment with its place in the user's code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train_command import SMALL, Penstock, assert_balanced

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

GAME = """
import os, subprocess, sys, time
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

FAULT = os.environ.get("FAULT", "")
DATA = iter(range(300))
if FAULT == "import":
    raise LookupError("no board")

class Game(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = Box(-1, 1, (4,), np.float32)
    action_space = Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        if FAULT == "constructor":
            self.speed = {}["speed"]
        if FAULT == "child":
            subprocess.Popen(["sh", "-c", "while :; do echo noise; sleep 0.05; done"])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if FAULT == "slow":
            time.sleep(0.5)
        if FAULT == "reset":
            raise ValueError("no level")
        return self.show(), {}

    def step(self, action):
        self.t += 1
        if FAULT == "step" and self.t == 9:
            raise RuntimeError("no ground")
        if FAULT == "exit" and self.t == 9:
            sys.exit("licence expired")
        if FAULT == "stop":
            next(DATA)
        return self.show(), 1.0, self.t == 20, False, {}

    def show(self):
        shown = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        if FAULT == "nan" and self.np_random.random() < 0.01:
            shown[0] = np.nan
        return shown

    def render(self):
        if FAULT == "render":
            raise OSError("no window")
        return np.zeros((64, 64, 3), np.uint8)
"""
TELLS = {  # by fault: the error, and the place
    "import": r"LookupError: no board \(game\.py:9, in <module>\)",
    "constructor": r"KeyError: 'speed' \(game\.py:19, in __init__\)",
    "reset": r"ValueError: no level \(game\.py:29, in reset\)",
    "step": r"RuntimeError: no ground \(game\.py:35, in step\)",
    "exit": r"sys\.exit\('licence expired'\) at game\.py:37, in step",
    "stop": r"StopIteration \(game\.py:39, in step\)",
    "render": r"OSError: no window \(game\.py:50, in render\)",
}
OF_OTHERS = re.compile(r'File "[^"]*/(penstock|gymnasium|typer|click)/')
AGENT = ("algo.name=ppo", *SMALL, "actors.count=2", "run.max_restarts=1")


@pytest.fixture(autouse=True)
def game(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)


def assert_told(fault: str, error: str, err: str) -> None:
    assert re.search(TELLS[fault], error), error
    assert "Traceback (most recent call last):" in err
    assert '/game.py", line' in err
    assert not OF_OTHERS.search(err), err


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [("constructor", 2), ("reset", 1), ("exit", 2), ("stop", 1)],
)
def test_training_ends_with_the_error_and_its_place(
    fault: str, exit_code: int, penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", fault)
    code, summary, err = penstock("train", "game:Game", *AGENT, "--json").end()
    assert code == exit_code, err
    assert_told(fault, summary["error"], err)


def test_check_env_reports_the_error_and_its_place(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fault in ("import", "constructor", "reset", "step", "exit", "stop"):
        monkeypatch.setenv("FAULT", fault)
        command = penstock("check-env", "game:Game", "--steps", "400", "--envs", "2")
        out, err = command.process.communicate(timeout=60)
        assert command.process.returncode == 2, (out, err)
        assert_told(fault, out + err, out + err)


def test_eval_and_record_report_the_error_and_its_place(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*AGENT, "stop.learner_steps=2", "run.dir=run")
    assert penstock("train", "game:Game", *options, "--json").end()[0] == 0
    faults = [("eval", each) for each in ("constructor", "step", "exit", "stop")]
    for command, fault in (*faults, ("record", "render")):
        monkeypatch.setenv("FAULT", fault)
        code, result, err = penstock(command, "run", "--json").end()
        assert code == 2, err
        assert_told(fault, result["error"], err)


def test_commands_end_the_programs_of_an_environment(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nothing_left_behind` looks for them."""
    monkeypatch.setenv("FAULT", "child")
    options = ("--steps", "100", "--envs", "2", "--json")
    code, report, err = penstock("check-env", "game:Game", *options).end()
    assert (code, report["problems"]) == (0, []), err
    limits = ("stop.learner_steps=2", "run.dir=run", "actors.envs=auto")
    code, _, err = penstock("train", "game:Game", *AGENT, *limits, "--json").end()
    assert code == 0, err
    assert penstock("eval", "run", "--json").end()[0] == 0


def test_dropped_episodes_are_counted_and_the_run_goes_on(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "nan")
    options = (*AGENT, "env.on_error=drop_episode", "stop.env_steps=2000")
    code, summary, err = penstock("train", "game:Game", *options, "run.dir=run", "--json").end()
    assert code == 0, err
    assert_balanced(summary)
    assert summary["accounting"]["dropped"]["env_error"] > 5
    assert "an episode was dropped, as it failed with ValueError: it returned an obs" in err
    code, result, err = penstock("eval", "run", "--json").end()
    assert code == 0, err
    assert result["length"]["min"] == 20


def test_slow_resets_are_not_taken_for_a_hang(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "slow")
    limits = ("actors.count=1", "run.hang_timeout_s=3", "stop.learner_steps=1")
    code, _, err = penstock("train", "game:Game", *AGENT, *limits, "--json").end()
    assert code == 0, err
    assert "no sign of life" not in err
