"""The parts of benchmarks/chaos.py: its schedule, what it measures, what it checks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from faults.invariants import check_balance
from faults.program import Broken, wait_until
from faults.progress import Progress
from faults.schedule import GAP_S, LONGEST_S, SHORTEST_S, schedule
from faults.topologies import TOPOLOGIES
from faults.vitals import slope

ROOT = Path(__file__).parents[3]


def test_equal_seeds_give_equal_faults() -> None:
    kinds = TOPOLOGIES["zmq"].kinds
    assert schedule(7, kinds, 50) == schedule(7, kinds, 50)
    assert schedule(7, kinds, 50) != schedule(8, kinds, 50)
    assert schedule(7, kinds, 50)[:20] == schedule(7, kinds, 20)


def test_faults_are_those_of_the_topology_and_within_bounds() -> None:
    for topology in TOPOLOGIES.values():
        for fault in schedule(1, topology.kinds, 200):
            assert fault.kind in topology.kinds
            assert SHORTEST_S <= fault.seconds <= LONGEST_S
            assert GAP_S[0] <= fault.gap_s <= GAP_S[1]


def test_slope_interval_excludes_zero_for_a_leak_and_not_for_noise() -> None:
    times = [float(t) for t in range(100)]
    noise = [(-1.0) ** t for t in range(100)]
    low, high = slope(times, noise).interval
    assert low < 0 < high
    low, high = slope(times, [2 * t + e for t, e in zip(times, noise, strict=True)]).interval
    assert low == pytest.approx(2, abs=0.05)
    assert high == pytest.approx(2, abs=0.05)
    assert slope([1.0, 1.0], [1.0, 2.0]).interval[0] < 0  # too little to say


def answer(**terms: Any) -> dict[str, Any]:
    sound = {"produced": 10, "trained": 6, "dropped": {"lag": 1}, "lost": {"gap": 2}}
    return {"accounting": {**sound, "in_flight": 1, **terms}, "trained_steps": 6}


def test_unbalanced_accounting_is_detected() -> None:
    check_balance(answer())
    with pytest.raises(Broken, match="does not balance, by -1"):
        check_balance(answer(trained=7))
    with pytest.raises(Broken, match="produced is 0"):
        check_balance(answer(produced=0, trained=0, dropped={}, lost={}, in_flight=0))
    with pytest.raises(Broken, match="no summary"):
        check_balance({})


def metrics(*trained: int) -> bytes:
    lines = ({"env_steps": t, "trained_steps": t, "learner_steps": t} for t in trained)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_training_goes_on_when_two_lines_in_a_row_grow(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    progress = Progress(path)
    progress.start()
    try:
        path.write_bytes(metrics(1, 2, 3))
        assert wait_until(lambda: progress.trained == 3, 5.0)
        struck_s = time.monotonic()
        with path.open("ab") as file:
            file.write(metrics(4, 5) + b'{"torn')
            file.flush()
            assert wait_until(lambda: progress.trained == 5, 5.0)
            assert progress.since(struck_s) is None
            file.write(b"\n" + metrics(6))
        assert wait_until(lambda: progress.since(struck_s) is not None, 5.0)
        assert progress.fallen() is None
        with path.open("ab") as file:
            file.write(metrics(2))
        assert wait_until(lambda: progress.fallen() is not None, 5.0)
        progress.begin()  # resumed from a checkpoint
        assert progress.fallen() is None
    finally:
        progress.close()


def test_faults_and_tests_named_on_the_reliability_page_exist() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"`([a-z]+:[a-z-]+)`", page))
    assert named <= {kind for topology in TOPOLOGIES.values() for kind in topology.kinds}
    sources = list((ROOT / "tests").rglob("test_*.py"))
    tests = {name for path in sources for name in re.findall(r"def (test_\w+)", path.read_text())}
    for name in re.findall(r"`(test_[\w*]+(?:\.py)?)`", page):
        found = any(path.match(name) for path in sources) if ".py" in name else name in tests
        assert found, name
