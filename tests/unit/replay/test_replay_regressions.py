"""Regressions of errors that once passed silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay import Prioritized, Replay, ReplayError, Sequences, Writer

COLUMNS = {"obs": (np.float32, (1,)), "action": (np.int64, ())}


def step(at: float, *, ended: bool = False) -> dict[str, Any]:
    obs, after = np.array([at], np.float32), np.array([at + 1], np.float32)
    flags = {"terminated": ended, "truncated": False}
    return {"obs": obs, "next_obs": after, "action": 0, "reward": 1.0, **flags}


def test_returns_are_as_long_in_shared_memory_as_in_private() -> None:
    for shared in (False, True):
        replay = Replay(COLUMNS, 200, n_step=3, discount=0.5, shared=shared, seed=0)
        for i in range(100):
            replay.add(**step(i))
        batch = replay.sample(64)
        whole = batch.obs[:, 0] < 97
        np.testing.assert_array_equal(batch.reward[whole], 1.75)
        np.testing.assert_array_equal(batch.discount[whole], 0.125)
        np.testing.assert_array_equal(batch.next_obs[whole], batch.obs[whole] + 3)
        replay.close()


def test_n_step_returns_do_not_cross_an_abandoned_episode() -> None:
    """Episodes of 5 steps from 0, 100, 200 ...; a return of 3 stops where its episode does."""
    replay = Replay(COLUMNS, 200, n_step=3, discount=0.5, seed=0)
    sequences = Replay(COLUMNS, 200, sequences=Sequences(4), seed=0)
    for i in range(100):
        at = 100 * (i // 5) + i % 5
        replay.add(**step(at))
        sequences.add(**step(at))
    batch = replay.sample(100)
    into = batch.obs[:, 0] % 100
    steps = np.minimum(3, 5 - into)
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.obs[:, 0] + steps)
    np.testing.assert_array_equal(batch.discount, 0.5**steps)
    drawn = sequences.sample(32).obs[:, :, 0]
    np.testing.assert_array_equal(np.diff(drawn, axis=0), 1)


def test_closing_a_stream_twice_does_not_affect_other_streams() -> None:
    replay = Replay(COLUMNS, 200, writers=2, seed=0)
    for i in range(150):
        replay.add(**step(i))
    first = replay.writer()
    first.add(**step(0))
    first.close()
    second = replay.writer()
    first.close()
    with pytest.raises(ReplayError, match="closed"):
        first.add(**step(1))
    for i in range(20):
        second.add(**step(i))
    assert len(replay) == 171 == replay.table.valid.sum()


def test_only_a_new_replay_is_restored(tmp_path: Path) -> None:
    replay, used = Replay(COLUMNS, 200, seed=0), Replay(COLUMNS, 200, seed=0)
    for i in range(50):
        replay.add(**step(i))
    replay.save(tmp_path / "snapshot")
    used.add(**step(0))
    with pytest.raises(ReplayError, match="new"):
        used.restore(tmp_path / "snapshot")
    assert len(used) == 1


def test_rows_of_a_slot_are_valid_by_default() -> None:
    sampler = Prioritized(1.0, 1.0)
    replay = Replay(COLUMNS, 200, unroll=10, shared=True, sampler=sampler, seed=0)
    with Writer.attach(replay.serve()) as writer:
        for sequence in range(3):
            with writer.slot(timeout_s=5.0) as slot:
                for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
                    slot.columns[name][...] = 0
                slot.columns["reward"][:, 0] = np.arange(10) + 10 * sequence
    assert replay.stats()["inserted"] == 30
    assert set(replay.sample(30).reward) == set(range(30))
    replay.close()


def test_row_without_a_priority_does_not_affect_other_priorities() -> None:
    sampler = Prioritized(1.0, 1.0)
    replay = Replay(COLUMNS, 200, unroll=20, shared=True, sampler=sampler, seed=0)
    with Writer.attach(replay.serve()) as writer:
        for i in range(20):
            known = None if i == 7 else 100.0 if i == 3 else 0.01
            writer.add(**step(i), priority=known)
        writer.flush()
    while replay.stats()["inserted"] < 20:
        pass
    drawn = np.concatenate([replay.sample(20).obs[:, 0] for _ in range(50)])
    # Row 7 is rated like the highest priority so far: 1 before this slot, 100 with it.
    share = np.mean(drawn == 3)
    assert 100 / 200.18 - 0.05 < share < 100 / 101.18 + 0.03
    replay.close()
