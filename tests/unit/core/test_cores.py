"""Idle cores by the kernel's counters."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.core.cores import IdleCores

TEXT = """cpu  900 0 900 9000 900 0 0 0 0 0
cpu0 {0} 0 50 {1} {2} 0 0 0 0 0
cpu1 10 0 50 {3} 0 0 0 0 0 0
cpu2 10 0 50 {4} 0 0 0 0 0 0
intr 1234
"""


def test_only_usable_cores_count_as_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stat = tmp_path / "stat"
    stat.write_text(TEXT.format(10, 1000, 0, 1000, 1000))
    idle = IdleCores(stat)
    now_s = 110.0
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # in 10 s: core 0 idles for 3 s and waits for a disk for 1 s, core 2 idles for 8 s
    stat.write_text(
        TEXT.format(10, 1000 + 3 * ticks_per_s, ticks_per_s, 9_000_000, 1000 + 8 * ticks_per_s)
    )
    assert idle.since_last() == pytest.approx(1.2)
    assert idle.since_last() is None  # no time has passed


def test_idle_cores_are_unknown_without_the_kernels_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert IdleCores(tmp_path / "missing").since_last() is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 7})  # 7 is not in the file
    stat = tmp_path / "stat"
    stat.write_text(TEXT.format(1, 2, 3, 4, 5))
    assert IdleCores(stat).since_last() is None


def test_idle_cores_do_not_exceed_all_cores() -> None:
    idle = IdleCores()
    sum(range(2_000_000))
    found = idle.since_last()
    assert found is not None
    assert 0.0 <= found <= len(os.sched_getaffinity(0)) + 0.5  # ticks are 10 ms long
