"""Rows that are too old are evicted in whole slots and counted by reason."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.writer import Writer

COLUMNS = {"obs": (np.float32, (2,)), "action": (np.int64, ())}
UNROLL = 4


def made(**options: Any) -> Replay:
    return Replay(COLUMNS, 40, unroll=UNROLL, seed=0, **options)


def add(replay: Any, i: int, times: int = 1) -> None:
    for _ in range(times):
        obs = np.full(2, i, np.float32)
        replay.add(obs=obs, action=i, reward=0, terminated=False, truncated=False, next_obs=obs + 1)


def stored(replay: Replay) -> set[int]:
    """Actions that can be drawn."""
    return set(replay.sample(1).action.tolist()) | set(
        replay.gather.batch(np.flatnonzero(replay.table.valid), None).action.tolist()
    )


def balanced(replay: Replay) -> dict[str, int]:
    stats = replay.stats()
    evicted: dict[str, int] = stats["evicted"]
    assert stats["inserted"] == stats["stored"] + sum(evicted.values())
    return evicted


def test_rows_older_than_their_time_to_live_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replay = made(ttl_s=10.0)
    for i in range(3):  # published at 1000, 1004 and 1008 s
        add(replay, i, UNROLL)
        now += 4
    add(replay, 3)
    assert stored(replay) == {1, 2, 3}  # at 1012 s
    assert balanced(replay) == {"ttl": UNROLL}
    now = 1014.0
    assert stored(replay) == {1, 2, 3}  # exactly 10 s old
    now = 1014.1
    assert stored(replay) == {2, 3}
    now = 5000.0
    assert stored(replay) == {3}  # being written
    assert balanced(replay) == {"ttl": 3 * UNROLL}


def test_rows_beyond_max_policy_lag_are_evicted() -> None:
    replay = made(max_policy_lag=2)
    for version in range(5):
        replay.version = version
        add(replay, version, UNROLL)
    assert replay.version == 4
    assert stored(replay) == {2, 3, 4}
    assert balanced(replay) == {"lag": 2 * UNROLL}
    replay.version = 5
    add(replay, 5)
    assert stored(replay) == {3, 4, 5}
    replay.version = 100
    assert stored(replay) == {5}
    assert replay.update_priorities(replay.sample(1).keys, [1.0]) == 1


def test_old_slots_behind_fresh_ones_are_evicted() -> None:
    """A suspended writer publishes what an old policy played after the others did."""
    replay = made(max_policy_lag=1, writers=2)
    with replay.writer() as slow, replay.writer() as fast:
        add(slow, 0)
        replay.version = 1
        add(fast, 1, UNROLL)
        add(slow, 0, UNROLL - 1)
        assert stored(replay) == {0, 1}
        replay.version = 2
        assert stored(replay) == {1}
        add(fast, 2, UNROLL)
        replay.version = 3
        assert stored(replay) == {2}
    assert balanced(replay) == {"lag": 2 * UNROLL}


def test_slots_that_arrive_too_late_are_evicted_on_arrival() -> None:
    """Also where the version did not change meanwhile; by a writer that says what it played."""
    replay = made(max_policy_lag=1, shared=True, writers=3)
    replay.version = 7
    add(replay, 7, UNROLL)
    assert stored(replay) == {7}
    writer = Writer.attach(replay.serve())
    for version in (5, 6, 5):
        with writer.slot(timeout_s=5.0, version=version) as slot:
            slot.columns["action"][...] = version
            for name in ("terminated", "truncated"):
                slot.columns[name][...] = False
            slot.columns["alive"][...] = 1
    deadline_s = time.monotonic() + 10
    while replay.stats()["inserted"] < 4 * UNROLL and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert stored(replay) == {6, 7}
    assert balanced(replay) == {"lag": 2 * UNROLL}
    writer.close()
    replay.close()


def test_steps_of_a_remote_writer_have_its_version() -> None:
    replay = made(max_policy_lag=1, shared=True, writers=2)
    replay.version = 7
    with Writer.attach(replay.serve()) as writer:
        for writer.version in (5, 6, 7):
            add(writer, writer.version, UNROLL)
        deadline_s = time.monotonic() + 10
        while replay.stats()["inserted"] < 3 * UNROLL and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert stored(replay) == {6, 7}
        assert balanced(replay) == {"lag": UNROLL}
    replay.close()


def test_keys_of_evicted_rows_are_stale() -> None:
    replay = made(max_policy_lag=0)
    add(replay, 0, UNROLL)
    keys = replay.sample(4).keys
    replay.version = 1
    add(replay, 1)
    replay.sample(1)
    assert replay.update_priorities(keys, np.ones(4)) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ttl_s": 0.0}, "ttl_s 0.0 must be above 0 seconds; None keeps all"),
        ({"ttl_s": float("nan")}, "ttl_s nan must be above 0 seconds; None keeps all"),
        ({"max_policy_lag": -1}, "max_policy_lag -1 must be at least 0 versions; None keeps all"),
    ],
)
def test_invalid_eviction_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        made(**options)
