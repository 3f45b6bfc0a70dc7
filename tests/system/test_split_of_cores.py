"""Runs with `actors.count=auto`, with real processes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.autotune import cores as core_tuner
from penstock.autotune.cores import Load, Split
from penstock.monitor.run_folder.lines import objects

SLOW_ENV = """
import time

import gymnasium


class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.004)
        return self.env.step(action)


def make():
    return Slow(gymnasium.make("CartPole-v1"))
"""
SMALL = {
    "algo.name": "impala",
    "actors.count": "auto",
    "actors.envs": 4,
    "actors.unroll": 8,
    "eval.every_steps": None,
    "run.interval_s": 0.25,
}


class IdleMachine:
    """Two idle cores, whatever else runs beside this test."""

    def since_last(self) -> float:
        return 2.0


@pytest.fixture(autouse=True)
def decisions_every_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(core_tuner, "WINDOW_S", 1.0)
    monkeypatch.setattr(core_tuner, "IdleCores", IdleMachine)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW_ENV)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    found = objects((run_dir / "logs" / "events.jsonl").read_bytes())
    return [event for event in found if event["kind"] == kind]


def notes(run_dir: Path) -> list[str]:
    texts = [event["text"] for event in events(run_dir, "note")]
    return [text for text in texts if text.startswith("actors.count: ")]


@pytest.mark.slow
def test_a_learner_that_waits_for_slow_environments_gets_more_actors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(core_tuner, "usable_cores", lambda: 9.0)  # whatever the actors use
    limits = {"stop.env_steps": 9000, "stop.minutes": 1}
    summary = penstock.train("slow:make", SMALL | limits, run_dir=tmp_path / "run", progress=False)
    assert summary.accounting.balanced
    first, *_ = notes(summary.run_dir)
    assert first.startswith("actors.count: 4 actors instead of 2, as the learner waits")
    rates: dict[bool, list[float]] = {False: [], True: []}
    for metrics in summary.history():
        rates[metrics["actors_alive"] >= 4].append(metrics["steps_per_s"])
    assert statistics.median(rates[True]) > 1.4 * statistics.median(rates[False])
    assert summary.metrics["actors_restarted"] == 0


@pytest.mark.system
def test_steps_are_accounted_for_when_actors_end_and_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = iter([1, 3, 1, 2])

    def decide(self: core_tuner.CoreSplit, load: Load) -> Split | None:
        actors = next(wanted, None)
        if actors is None:
            return None
        self.now = Split(actors, 1, "a test wants it")
        return self.now

    monkeypatch.setattr(core_tuner.CoreSplit, "decide", decide)
    options = SMALL | {"stop.return": None, "stop.minutes": 0.3}
    summary = penstock.train("CartPole-v1", options, run_dir=tmp_path / "run", progress=False)
    assert summary.accounting.balanced
    assert not summary.accounting.lost
    assert [text.split()[1] for text in notes(summary.run_dir)][:2] == ["1", "3"]
    assert all(event["data"]["expected"] for event in events(summary.run_dir, "exit"))
    assert summary.metrics["actors_restarted"] == 0
