"""Replays to take snapshots of, whose every value follows from the number of its step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.replay.buffer import Replay


def step(i: int, size: int) -> dict[str, Any]:
    """Returns step ``i`` of a stream, whose every value follows from ``i``."""
    return {
        "obs": np.full(size, i, np.float32),
        "next_obs": np.full(size, i + 1, np.float32),
        "action": i * 3,
        "reward": float(i),
        "terminated": i % 17 == 16,
        "truncated": i % 23 == 22,
    }


def made(
    steps: int = 150, size: int = 3, capacity: int = 100, **options: Any
) -> tuple[Replay, Callable[[], None]]:
    """Returns a replay with so many steps, and a function that adds the next step."""
    columns = {"obs": (np.float32, (size,)), "action": (np.int64, ())}
    replay = Replay(columns, capacity, unroll=8, seed=5, **options)
    count = iter(range(10**9))

    def add() -> None:
        replay.add(**step(next(count), size))

    for _ in range(steps):
        add()
    return replay, add


def assert_equal(a: Any, b: Any) -> None:
    """Asserts that two batches have equal columns."""
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], name)


def assert_consistent(batch: Any, n_step: int = 1) -> None:
    """Asserts that every row of a batch is one that `step` made."""
    i = batch.action // 3
    np.testing.assert_array_equal(batch.obs[:, 0], i)
    assert (batch.obs == batch.obs[:, :1]).all()
    if n_step == 1:
        np.testing.assert_array_equal(batch.reward, i)
        np.testing.assert_array_equal(batch.next_obs[:, 0], i + 1)


def files(folder: Path) -> list[Path]:
    """Returns the files of a snapshot."""
    return sorted(p for p in folder.rglob("*") if p.is_file())
