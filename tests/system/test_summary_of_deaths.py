"""Summary, events and files of a run whose learner dies without a final report."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest

from train_command import SMALL, Command, Penstock, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

SECRET = "swordfish-1234"
GAME = f"""
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Locked(gymnasium.Env):
    # No episode ends, so that the run ends where it fails again.
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, key, price="none"):
        assert key == {SECRET!r}.replace("#", "")
        self.key, self.steps = key, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        self.steps += 1
        if self.steps == 300:
            raise RuntimeError(f"the server did not take the key {{self.key}}")
        return np.zeros(2, np.float32), 1.0, False, False, {{}}
"""


def events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "logs" / "events.jsonl").read_text().splitlines()]


def started(penstock: Penstock, folder: Path) -> Command:
    run = penstock("train", "cartpole", *SMALL, "run.dir=run", "--json")
    run.wait_until(lambda: updates(folder) > 20)
    return run


def test_killed_learner_leaves_its_figures_in_the_summary(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = started(penstock, tmp_path / "run")
    os.kill(run.pid_of("learner-0"), signal.SIGKILL)
    code, answer, err = run.end()
    assert code == 1, err
    accounting = answer["accounting"]
    assert not answer["accounting_complete"]
    assert accounting["in_flight"] is None
    assert accounting["trained"] >= answer["trained_steps"] > 0
    assert accounting["produced"] >= accounting["trained"]
    assert re.search(r"samples +produced [\d,]+ = trained [\d,]+ .* in flight unknown", err)
    assert "the terms differ" not in err
    exits = {e["role"]: e["data"] for e in events(tmp_path / "run") if e["kind"] == "exit"}
    assert exits["learner-0"] == {"exit_code": None, "signal": "SIGKILL", "expected": False}
    assert exits["actor-0"] == {"exit_code": 0, "signal": None, "expected": True}
    [stop] = [e for e in events(tmp_path / "run") if e["kind"] == "stop"]
    assert "learner-0: was killed by SIGKILL" in str(stop["text"])
    assert events(tmp_path / "run")[-1]["kind"] == "end"


def test_sigterm_to_all_processes_leaves_figures_in_the_summary(
    penstock: Penstock, tmp_path: Path
) -> None:
    """As a container's runtime or a batch system sends it."""
    run = started(penstock, tmp_path / "run")
    pids = [run.pid_of(name) for name in ("actor-0", "actor-1", "learner-0")]
    for pid in (*pids, run.process.pid):
        os.kill(pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    accounting = answer["accounting"]
    assert accounting["trained"] >= answer["trained_steps"] > 0
    assert accounting["produced"] >= accounting["trained"]


def test_no_file_of_the_run_folder_contains_a_secret(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked.py").write_text(GAME.replace(SECRET, "sword#fish-1234"))
    monkeypatch.setenv("PENSTOCK_KEY", SECRET)
    run = penstock(
        *("train", "locked:Locked", *SMALL, "run.dir=run", "run.max_restarts=1", "--json"),
        *("env.kwargs.key=${env:PENSTOCK_KEY}", "actors.count=1", "checkpoint.every_steps=5"),
    )
    code, answer, err = run.end()
    assert code == 1, err
    assert "did not take the key ${env:PENSTOCK_KEY}" in answer["error"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "summary.json", "actor-0.log", "checkpoint.safetensors"} <= {
        path.name for path in files
    }
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in err + json.dumps(answer)
    open_to_others = [
        path
        for path in (tmp_path / "run", *(tmp_path / "run").rglob("*.*"))
        if path.suffix != ".log" and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    assert open_to_others == []


def test_unset_environment_variable_is_a_user_error(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("train", "CartPole-v1", "run.dir=run", "env.kwargs.key=${env:PENSTOCK_NONE}")
    code, _, err = run.end()
    assert code == 2
    assert "which is not set on this host; export PENSTOCK_NONE" in err
    assert not (tmp_path / "run").exists()
