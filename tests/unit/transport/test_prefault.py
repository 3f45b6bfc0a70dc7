"""Prefaulted memory is resident before its use, and its contents are kept."""

from __future__ import annotations

import mmap
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay import Replay
from penstock.transport.shm import arena as arena_module
from penstock.transport.shm.arena import LEAST_NBYTES, Arena, Prefault

COLUMNS: dict[str, Any] = {"obs": (np.uint8, (1000,)), "action": (np.int64, ())}


def resident_nbytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "replay-prefault"]


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "replay-prefault":
            thread.join(20.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_large_buffer_becomes_resident(shared: bool) -> None:
    before = resident_nbytes()
    with Replay(COLUMNS, 150_000, unroll=100, shared=shared) as replay:
        nbytes = replay.stats()["nbytes"]
        assert nbytes > 2 * LEAST_NBYTES
        wait_for_threads()
        assert threads() == []
        assert resident_nbytes() - before > 0.95 * nbytes
        faults = minor_faults()
        replay.table.store.arena.bytes[:: mmap.PAGESIZE] = 0
        assert minor_faults() - faults < 100, "a page was not there"


def test_prefault_keeps_concurrent_writes() -> None:
    arena = Arena.private(2 * LEAST_NBYTES)
    values = np.random.default_rng(0).integers(0, 255, arena.bytes[::4096].shape, np.uint8)
    arena.bytes[::4096] = values
    Prefault(arena)
    wait_for_threads()
    np.testing.assert_array_equal(arena.bytes[::4096], values)
    assert int(arena.bytes.sum(dtype=np.int64)) == int(values.sum(dtype=np.int64))


def test_a_small_buffer_needs_no_thread() -> None:
    with Replay(COLUMNS, 1000):
        assert threads() == []


def test_prefault_stops_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        arena_module, "PIECE_NBYTES", mmap.PAGESIZE
    )  # far more than can be done soon
    before = resident_nbytes()
    with Replay(COLUMNS, 1_000_000) as replay:
        nbytes = replay.stats()["nbytes"]
        assert threads()
    assert threads() == []
    assert resident_nbytes() - before < 0.9 * nbytes


def test_prefault_stops_when_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "available_nbytes", lambda: LEAST_NBYTES // 2)
    arena, before = Arena.private(LEAST_NBYTES), resident_nbytes()
    Prefault(arena)
    wait_for_threads()
    assert resident_nbytes() - before < LEAST_NBYTES // 4
