"""A replay with a rate limiter: waiting callers, timeouts and counts."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from penstock.replay import RateLimiter, Replay, ReplayError, Writer

COLUMNS = {"obs": (np.float32, (2,)), "action": (np.int64, ())}


def step(value: float = 0.0, *, ended: bool = False) -> dict[str, Any]:
    obs = np.full(2, value, np.float32)
    flags = {"terminated": ended, "truncated": False}
    return {"obs": obs, "next_obs": obs + 1, "action": 1, "reward": value, **flags}


def make(limiter: RateLimiter, timeout_s: float = 0.05, **options: Any) -> Replay:
    return Replay(COLUMNS, 100, limiter=limiter, timeout_s=timeout_s, seed=0, **options)


def test_sampling_waits_for_min_size() -> None:
    replay = make(RateLimiter(min_size=5))
    for i in range(4):
        replay.add(**step(i))
    with pytest.raises(ReplayError, match="4 items are stored and min_size is 5"):
        replay.sample(2)
    replay.add(**step(4))
    assert len(replay.sample(2).reward) == 2


def test_rows_are_sampled_about_samples_per_insert_times() -> None:
    """min_size 4 and a band of 4: 4 free samples, then 2 for each insert."""
    limiter = RateLimiter(2.0, min_size=4, band=4.0)
    replay = make(limiter)
    for i in range(4):
        replay.add(**step(i))
    replay.sample(2)
    replay.sample(2)
    with pytest.raises(ReplayError, match="waits for 1 more inserts"):
        replay.sample(2)
    for _ in range(4):
        replay.add(**step())
    with pytest.raises(ReplayError, match="waits for 2 more samples"):
        replay.add(**step())
    assert limiter.counts.inserted == len(replay) == 8
    assert limiter.counts.sampled == 4


def test_failed_calls_are_not_counted() -> None:
    limiter = RateLimiter(min_size=1)
    replay = make(limiter)
    replay.add(**step())
    with pytest.raises(ReplayError):
        replay.add(**(step() | {"action": np.zeros(7)}))
    with pytest.raises(ReplayError):
        replay.sample(50)
    assert limiter.counts.inserted == 1
    assert limiter.counts.sampled == 0


def test_evicted_rows_are_counted() -> None:
    limiter = RateLimiter(min_size=1)
    replay = make(limiter)
    for i in range(1000):
        replay.add(**step(i))
    stats = replay.stats()
    assert limiter.counts.inserted == 1000
    assert limiter.counts.stored == stats["stored"] < 200


def test_adding_and_sampling_threads_keep_each_other_in_step() -> None:
    limiter = RateLimiter(3.0, min_size=10, band=20.0)
    replay = make(limiter, timeout_s=10.0)

    def play() -> None:
        for i in range(300):
            replay.add(**step(i))

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    for _ in range(145):
        replay.sample(6)
        counts = limiter.counts
        assert abs(3 * max(0, counts.inserted - 10) - counts.sampled) <= 20
    thread.join()
    assert limiter.counts.inserted == 300
    assert limiter.counts.sampled == 870


def test_remote_writer_ahead_of_the_limiter_gets_no_slots() -> None:
    limiter = RateLimiter(1.0, min_size=8, band=40.0)
    replay = make(limiter, shared=True, unroll=4, timeout_s=5.0)
    with Writer.attach(replay.serve()) as writer:
        with suppress(TimeoutError):
            for i in range(200):
                writer.add(**step(i), timeout_s=0.2)
        before = replay.stats()["inserted"]
        assert before <= 8 + 40 + 3 * 4
        for _ in range(5):
            replay.sample(8)
        ends_s = time.monotonic() + 5
        added = 0
        while added < 8 and time.monotonic() < ends_s:
            writer.add(**step(), timeout_s=2.0)
            added += 1
        writer.flush()
        while replay.stats()["inserted"] == before and time.monotonic() < ends_s:
            time.sleep(0.01)
        assert replay.stats()["inserted"] > before
    replay.close()


def test_remote_inserts_count_by_slot_and_cause_no_deadlock() -> None:
    """A slot that exceeds the band alone would never be lent."""
    with pytest.raises(ReplayError, match="too narrow for samples of 1 and inserts of 16 at 4"):
        make(RateLimiter(4.0, min_size=8, band=30.0), shared=True, unroll=16)
    replay = make(RateLimiter(4.0, min_size=8), shared=True, unroll=16, timeout_s=1.0)

    def learn() -> None:
        with suppress(ReplayError):  # nothing is added any more
            while True:
                replay.sample(8)

    thread = threading.Thread(target=learn, daemon=True)
    thread.start()
    with Writer.attach(replay.serve()) as writer:
        for i in range(160):
            writer.add(**step(i), timeout_s=1.0)
    thread.join()
    assert replay.stats()["inserted"] == 160
    replay.close()


def test_oversized_batch_does_not_widen_the_band() -> None:
    limiter = RateLimiter(1.0, min_size=1)
    replay = make(limiter)
    for count in (0, -3, 101):
        with pytest.raises(ReplayError, match=r"at least 1|larger than the capacity of 100"):
            replay.sample(count)
    assert limiter.rule.band == 2


def test_step_without_a_free_stream_is_not_counted() -> None:
    limiter = RateLimiter(min_size=1)
    replay = make(limiter)
    for _ in range(16):
        replay.writer()
    with pytest.raises(ReplayError, match="16 streams are open"):
        replay.add(**step())
    assert limiter.counts.inserted == 0


def test_evicted_rows_do_not_count_for_min_size() -> None:
    replay = make(RateLimiter(min_size=5), max_times_sampled=1)
    for i in range(9):
        replay.add(**step(i))
    replay.sample(5)
    with pytest.raises(ReplayError, match="4 items are stored and min_size is 5"):
        replay.sample(1)
    assert len(replay) == 4
