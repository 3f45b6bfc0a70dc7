"""The benchmark of the paces: its options, its figures, and the learner that it stalls."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from linked import ALLOWED
from paces import (
    EXAMPLES,
    NAME,
    PACES,
    STALLED,
    TASKS,
    goal_s,
    mean_over_time,
    overrides,
    row,
    stalls,
)
from penstock.configs.code_references import check
from penstock.configs.load import resolve

CURVE: list[dict[str, Any]] = [
    {"seconds": 2.0, "return": 10.0},
    {"seconds": 3.0, "return": 40.0},
    {"seconds": 5.0, "return": 20.0},
]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pace", PACES)
def test_each_pace_can_train_each_task(task: str, pace: str) -> None:
    target = TASKS[task].target
    target = str(EXAMPLES / target) if target.endswith(".yaml") else target
    bind = ("learner.count=4", "transport.bind=tcp://127.0.0.1:7700")
    config = resolve(target, [*bind, *overrides(task, pace, 3)])
    check(config, ALLOWED, trusted=False, source="the learner")  # as actors do
    assert config.learner.pace == pace
    assert (config.run.seed, config.stop.env_steps, config.has_evaluator) == (3, None, False)


def test_figures_are_computed_from_a_curve() -> None:
    assert [goal_s(CURVE, goal) for goal in (10.0, 11.0, 41.0)] == [2.0, 3.0, None]
    assert mean_over_time(CURVE) == pytest.approx((2 * 10 + 1 * 40 + 2 * 20) / 5)


def test_a_row_has_medians_over_seeds_and_counts_those_that_reached_the_goal() -> None:
    keys = ("goal_s", "mean_return", "last_return", "updates", "steps", "cores")
    runs = [dict.fromkeys(keys, value) | {"lag_mean": None} for value in (1.0, 3.0, 5.0)]
    assert row(runs) == ["3 of 3, 3.0", 3.0, 1.0, 5.0, 3.0, 3.0, 3.0, None, 3.0]
    runs[1]["goal_s"] = None
    assert row(runs)[0] == "2 of 3, 3.0"
    assert row([run | {"goal_s": None} for run in runs])[0] == "0 of 3"


def test_learner_process_is_stopped_repeatedly(tmp_path: Path) -> None:
    script = tmp_path / "role.py"
    script.write_text("import time\nwhile True: time.sleep(0.01)\n")
    (tmp_path / "metrics.jsonl").touch()
    command = f"{sys.executable} {script} penstock.launch.role {NAME} & wait"
    shell = subprocess.Popen(["sh", "-c", command])
    seen, children, counts = [], [], list[int]()
    try:
        while not (children := psutil.Process(shell.pid).children()):
            time.sleep(0.01)
        [role] = children
        with stalls(tmp_path, counts, [shell] * (STALLED + 1)):
            for _ in range(50):
                seen.append(role.status())
                time.sleep(0.05)
        assert role.status() != psutil.STATUS_STOPPED
    finally:
        for process in (*children, shell):
            process.kill()
        shell.wait()
    stopped = [state == psutil.STATUS_STOPPED for state in seen]
    assert 10 <= sum(stopped) <= 40
    assert sum(b and not a for a, b in pairwise(stopped)) >= 2
    assert counts[0] >= 2


def test_restarted_learner_is_stalled_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    script = tmp_path / "role.py"
    script.write_text("import time\nwhile True: time.sleep(0.01)\n")
    command = f"while :; do {sys.executable} {script} penstock.launch.role {NAME}; done"
    shell = subprocess.Popen(["sh", "-c", command])
    stopped, ends_s = list[psutil.Process](), time.monotonic() + 30
    try:
        with stalls(tmp_path, list[int](), [shell] * (STALLED + 1)):
            while len(stopped) < 2 and time.monotonic() < ends_s:
                for role in psutil.Process(shell.pid).children():
                    if role not in stopped and role.status() == psutil.STATUS_STOPPED:
                        stopped.append(role)
                        role.kill()
                time.sleep(0.01)
    finally:
        psutil.Process(shell.pid).suspend()  # so that it starts no further one
        children = psutil.Process(shell.pid).children()
        for process in (shell, *children):
            process.kill()
        shell.wait()
    assert len(stopped) == 2
