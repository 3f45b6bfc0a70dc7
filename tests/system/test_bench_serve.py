"""The benchmarks of `penstock serve`, with few messages: what they measure is sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]


def run(benchmark: str, *options: str) -> dict[str, Any]:
    """The result of a benchmark, which exits with 0."""
    command = [sys.executable, str(CHECKOUT / "benchmarks" / benchmark), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_serving_is_measured_against_the_echo_in_turns() -> None:
    result = run("serve.py", "--seconds", "0.3", "--rounds", "2", "--calls", "100")
    for latencies in result["latency"].values():
        assert len(latencies) == 3
        assert all(0 < times["p50_ms"] <= times["p99_ms"] for times in latencies.values())
    rates = result["rates"]
    assert all(rate["decisions_per_s"] > 0 for rate in rates.values())
    assert all(len(rate["runs"]) == 2 for rate in rates.values())
    compared = [name for name, rate in rates.items() if "ratio" in rate]
    assert compared == ["served, 1 connection", "served, 256 connections"]


def test_hostile_games_harm_neither_memory_nor_an_honest_game() -> None:
    result = run("hostile_games.py", "--messages", "20000", "--seed", "7")
    assert result["sound"]
    assert result["messages"] >= 20_000
    assert {"fault seat", "fault flags", "fault reward", "fault observation"} <= set(
        result["answers"]
    )
    assert result["honest_decisions"] > 0
