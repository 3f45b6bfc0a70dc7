"""Runs that failed, or did not reach the goal, are no better than those that did."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import cartpole
import memory
import pong
from penstock.core import cgroup


@pytest.mark.parametrize(
    ("times", "median_s"),
    [
        ([1.0, 2.0, 3.0], 2.0),
        ([1.0, None, 3.0], 3.0),  # the one that did not is slower than all others
        ([1.0, None, None], None),
        ([None], None),
    ],
)
def test_seed_that_did_not_solve_the_game_is_included(
    times: list[float | None], median_s: float | None
) -> None:
    assert cartpole.median_s([{"solved_at_s": at_s} for at_s in times]) == median_s


def test_memory_of_a_failed_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(command: Any, **options: Any) -> subprocess.Popen[bytes]:
        return made([sys.executable, "-c", "import sys; sys.exit(3)"])

    def watch(run: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
        run.wait()
        return [(60.0 * i, 100.0) for i in range(9)]

    made = subprocess.Popen
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # else it starts itself anew
    monkeypatch.setattr(sys, "argv", ["memory.py"])
    monkeypatch.setattr(subprocess, "Popen", failed)
    monkeypatch.setattr(memory, "watch", watch)
    with pytest.raises(SystemExit, match="the run failed with 3"):
        memory.main()


def test_the_ideal_of_pong_is_on_the_cores_of_the_quota(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stages are not measured, which takes long."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # else it starts itself anew
    monkeypatch.setattr(sys, "argv", ["pong.py", "--json", "--kinds"])
    monkeypatch.setattr(pong, "in_place", lambda *given: {"environment": {"core_ms": 0.6}})
    monkeypatch.setattr(pong, "learner", lambda *given: {"core_ms": 0.4})
    monkeypatch.setattr(cgroup, "cores", lambda: 0.5)  # of a container
    pong.main()
    assert json.loads(capsys.readouterr().out)["ideal_steps_per_s"] == pytest.approx(500.0)
