"""How `penstock bench --peers` reads and summarises runs of other systems."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from peers.systems import OURS, find, over, summary
from penstock.core.machine import CHECKOUT


def test_peers_are_those_that_are_installed(tmp_path: Path) -> None:
    python = tmp_path / ".venv-sf/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    program = CHECKOUT / "benchmarks/peers/run_sample_factory.py"
    assert find("pong", tmp_path) == {"sample_factory": (python, program)}
    assert set(find("cartpole", tmp_path)) == {"sample_factory", "sample_factory_vector"}


def test_median_run_of_a_peer_counts_with_unsolved_runs_as_slowest() -> None:
    runs = [{"case": "cartpole", "steps_per_s": rate} for rate in (10.0, 30.0, 20.0)]
    runs += [{"case": "cartpole", "error": "it broke"}]
    runs += [{"case": "cartpole-475", "solved_at_s": at_s} for at_s in (8.0, None, 12.0)]
    found = summary(runs)
    assert (found["steps_per_s"], found["solved_at_s"]) == (20.0, 12.0)
    never = summary([{"case": "cartpole-475", "solved_at_s": None}])
    assert (never["steps_per_s"], never["solved_at_s"]) == (None, None)
    ours = {"steps_per_s": 500.0, "solved_at_s": 3.0}
    assert over(ours, found) == {"rate_ratio": 25.0, "time_ratio": 0.25}
    assert over(ours, never) == {}
    assert OURS not in found


def test_the_log_of_sample_factory_is_read() -> None:
    pytest.importorskip("ale_py")
    Log = runpy.run_path(str(CHECKOUT / "benchmarks/peers/run_sample_factory.py"))["Log"]
    log = Log(4, 475.0)
    for second, text in [
        (10, "Decorrelating experience for 32 frames..."),
        (15, "Fps is (10 sec: nan, 60 sec: nan). Total num frames: 0. Throughput: 0: nan."),
        (20, "Fps is (10 sec: 1.0, 60 sec: 1.0). Total num frames: 4000. Throughput: 0: 2."),
        (20, "Avg episode reward: [(0, '104.320')]"),
        (25, "Fps is (10 sec: 1.0, 60 sec: 1.0). Total num frames: 8000. Throughput: 0: 2."),
        (30, "Fps is (10 sec: 1.0, 60 sec: 1.0). Total num frames: 24000. Throughput: 0: 2."),
        (30, "Avg episode reward: [(0, '480.100')]"),
    ]:
        log.read(f"\x1b[36m[2026-01-02 03:04:{second},000][7] {text}\x1b[0m")
    # Frames are four to a step: 2,000 steps at 25 s, 6,000 at 30 s. Training began after 15 s.
    assert log.result() == {
        "steps_per_s": 800.0, "solved_at_s": 15.0, "steps": 6000, "return": 480.1,
        "curve": [
            {"seconds": 5.0, "steps": 1000, "return": 104.32},
            {"seconds": 15.0, "steps": 6000, "return": 480.1},
        ],
    }  # fmt: skip


def test_a_curve_leaves_out_a_line_that_was_never_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    of_run = runpy.run_path(str(CHECKOUT / "benchmarks/curve.py"))["of_run"]
    line = {"time_s": 1.5, "env_steps": 20, "learner_steps": 2, "episode_return_mean": 7.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(line)}\n{{"time_s": 2.5, "env_st')
    [curve] = of_run(tmp_path)
    assert [(p["seconds"], p["steps"], p["return"]) for p in curve] == [(1.5, 20, 7.0)]
