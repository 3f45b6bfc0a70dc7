"""The time ledger: parts are disjoint and cover the wall clock."""

from __future__ import annotations

import time

import pytest

from penstock.profiling.ledger import TimeLedger, fractions


def test_parts_add_up_to_wall_time_and_each_gets_its_own() -> None:
    began_s = time.perf_counter()
    ledger = TimeLedger()
    for part, seconds in (("wait_data", 0.03), ("compute", 0.06), ("wait_data", 0.02)):
        ledger.switch(part)
        time.sleep(seconds)
    spent = ledger.snapshot()
    wall_s = time.perf_counter() - began_s
    assert sum(spent.values()) == pytest.approx(wall_s, abs=2e-3)
    assert spent["wait_data"] >= 0.05
    assert 0.06 <= spent["compute"] <= wall_s - 0.05


def test_snapshot_does_not_change_the_part() -> None:
    ledger = TimeLedger()
    ledger.switch("compute")
    first = ledger.snapshot()
    time.sleep(0.01)
    second = ledger.snapshot()
    assert fractions(second, first)["compute"] == pytest.approx(1.0)


def test_fractions_of_hand_made_snapshots() -> None:
    shares = fractions(
        {"compute": 9.0, "wait_data": 3.0, "other": 1.0}, {"compute": 3.0, "other": 1}
    )
    assert shares == {"compute": 6 / 9, "wait_data": 3 / 9, "other": 0.0}
    assert fractions({}, {}) == {}
