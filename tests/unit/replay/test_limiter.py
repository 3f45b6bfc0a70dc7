"""The rate limiter: its rules by hand, and by search that no caller waits for ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.replay.errors import ReplayError
from penstock.replay.limiter import (
    Counts,
    LimiterRule,
    RateLimiter,
    balance,
    inserts_missing,
    needed_band,
    samples_missing,
)
from waiting import wait_until

RULE = LimiterRule(samples_per_insert=4.0, min_size=100, band=50.0)


def counts(inserted: int, sampled: int, removed: int = 0) -> Counts:
    return Counts(inserted, sampled, removed, earning_from=RULE.min_size)


@pytest.mark.parametrize(
    ("inserted", "sampled", "earned"),
    [(0, 0, 0), (99, 0, 0), (100, 0, 0), (110, 0, 40), (110, 25, 15), (110, 90, -50)],
)
def test_inserts_beyond_min_size_earn_and_samples_spend(
    inserted: int, sampled: int, earned: float
) -> None:
    assert balance(RULE, counts(inserted, sampled)) == earned


@pytest.mark.parametrize(
    ("inserted", "sampled", "insert", "missing"),
    [
        (0, 0, 1000, 0),  # below min_size whatever comes is let in
        (100, 0, 12, 0),  # 48 of at most 50
        (100, 0, 13, 2),  # 52
        (110, 0, 3, 2),  # 40 + 12
        (110, 2, 3, 0),
        (110, 0, 100, 390),
    ],
)
def test_insert_waits_for_the_missing_samples(
    inserted: int, sampled: int, insert: int, missing: int
) -> None:
    assert samples_missing(RULE, counts(inserted, sampled), insert) == missing


@pytest.mark.parametrize(
    ("inserted", "sampled", "sample", "missing"),
    [
        (0, 0, 1, 100),
        (99, 0, 50, 1),
        (100, 0, 50, 0),
        (100, 0, 51, 1),
        (100, 0, 54, 1),
        (100, 0, 55, 2),
        (90, 0, 55, 12),  # ten to min_size, then two that earn
        (110, 40, 51, 1),
        (110, 39, 51, 0),
    ],
)
def test_sample_waits_for_the_missing_inserts(
    inserted: int, sampled: int, sample: int, missing: int
) -> None:
    assert inserts_missing(RULE, counts(inserted, sampled), sample) == missing


def test_evicted_items_do_not_count_as_stored() -> None:
    after = counts(inserted=200, sampled=300, removed=130)
    assert inserts_missing(RULE, after, 10) == 30
    assert samples_missing(RULE, after, 1000) == 0


def test_limiter_without_a_ratio_enforces_only_min_size() -> None:
    limiter = RateLimiter(min_size=10)
    assert limiter.may_insert(10**9)
    limiter.inserted(9)
    assert not limiter.may_sample(1)
    limiter.inserted(1)
    assert limiter.may_sample(10**9)


@given(
    ratio=st.sampled_from([0.1, 0.25, 0.7, 1.0, 3.0, 8.0]),
    min_size=st.integers(1, 40),
    batch=st.integers(1, 30),
    insert=st.integers(1, 30),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), max_size=80),
)
def test_one_side_can_always_proceed_within_the_narrowest_band(
    ratio: float,
    min_size: int,
    batch: int,
    insert: int,
    sizes: list[tuple[int, int, bool]],
) -> None:
    """And whoever goes on stays within the band."""
    rule = LimiterRule(ratio, min_size, needed_band(ratio, batch, insert))
    now = Counts(earning_from=min_size)
    for sample, add, sample_first in sizes:
        sample, add = min(sample, batch), min(add, insert)
        may_sample = not inserts_missing(rule, now, sample)
        may_insert = not samples_missing(rule, now, add)
        assert may_sample or may_insert
        if may_sample and (sample_first or not may_insert):
            now.sampled += sample
            assert balance(rule, now) >= -rule.band - 1e-5
        else:
            began = now.inserted >= min_size
            now.inserted += add
            assert not began or balance(rule, now) <= rule.band + 1e-5


@given(
    ratio=st.sampled_from([0.1, 0.7, 1.0, 3.0, 8.0]),
    inserted=st.integers(0, 300),
    sampled=st.integers(0, 1000),
    count=st.integers(1, 100),
)
def test_missing_count_is_sufficient_and_minimal(
    ratio: float, inserted: int, sampled: int, count: int
) -> None:
    rule = LimiterRule(ratio, 50, 60.0)
    now = Counts(inserted, sampled, earning_from=50)
    missing = inserts_missing(rule, now, count)
    later = Counts(inserted + missing, sampled, earning_from=50)
    assert inserts_missing(rule, later, count) == 0
    if missing:
        later.inserted -= 1
        assert inserts_missing(rule, later, count) == 1
    missing = samples_missing(rule, now, count)
    later = Counts(inserted, sampled + missing, earning_from=50)
    assert samples_missing(rule, later, count) == 0
    if missing:
        later.sampled -= 1
        assert samples_missing(rule, later, count) == 1


# ---------------------------------------------------------------- predicted deadlocks


def test_too_narrow_band_is_refused() -> None:
    with pytest.raises(ReplayError, match="make it at least 384"):
        RateLimiter(8.0, 1000, band=383, batch=256, insert=64)
    RateLimiter(8.0, 1000, band=384, batch=256, insert=64)


def test_oversized_batch_is_refused_and_not_remembered() -> None:
    limiter = RateLimiter(1.0, 1, band=10)
    limiter.inserted(100)
    with pytest.raises(ReplayError, match="too narrow for samples of 20 and inserts of 1"):
        limiter.await_sample(20, timeout_s=0)
    assert limiter.await_sample(19, timeout_s=0)


def test_default_band_grows_with_the_sizes() -> None:
    limiter = RateLimiter(2.0, 1)
    limiter.expect(batch=32, insert=8)
    assert limiter.rule.band == 32 + 2 * 8
    limiter.expect(batch=4)
    assert limiter.rule.band == 48


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RateLimiter(1.0, 501, capacity=500), "min_size 501 is above the capacity of 500"),
        (lambda: RateLimiter(1.0, 501).expect(capacity=500), "above the capacity of 500"),
        (lambda: RateLimiter(0.0), "samples_per_insert 0.0 must be above 0"),
        (lambda: RateLimiter(float("nan")), "samples_per_insert nan must be above 0"),
        (lambda: RateLimiter(1.0, 0), "min_size 0 must be at least 1"),
        (lambda: RateLimiter(1.0, 1, float("nan")), "band nan is too narrow"),
    ],
)
def test_invalid_limiter_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        make()


# ---------------------------------------------------------------- changing and waiting


def test_a_new_ratio_counts_from_now_on() -> None:
    """A thousand inserted at 8 do not make a debt at 2."""
    limiter = RateLimiter(8.0, 1, band=100)
    limiter.inserted(1001)
    limiter.sampled(7990)
    limiter.update(samples_per_insert=2.0)
    assert limiter.may_sample(110)
    assert not limiter.may_sample(111)
    limiter.inserted(5)
    assert limiter.may_sample(120)
    assert not limiter.may_sample(121)


def test_invalid_update_changes_no_setting() -> None:
    limiter = RateLimiter(8.0, 10, band=100, batch=64, capacity=50)
    with pytest.raises(ReplayError, match="min_size 51 is above the capacity of 50"):
        limiter.update(min_size=51)
    with pytest.raises(ReplayError, match=r"band 30\.0 is too narrow"):
        limiter.update(band=30.0)
    with pytest.raises(ReplayError, match=r"samples_per_insert -1\.0"):
        limiter.update(samples_per_insert=-1.0, band=200)
    assert limiter.rule == LimiterRule(8.0, 10, 100)


def test_reasons_name_what_is_missing() -> None:
    limiter = RateLimiter(4.0, 100, 50, batch=60)
    limiter.inserted(80)
    assert_waits(limiter, lambda: limiter.await_sample(60, 5.0), "sampling 60 waits for 23 more")
    limiter.inserted(20)
    assert limiter.reasons == [
        "sampling 60 waits for 3 more inserts: the balance would fall to -60, below the band of "
        "-50 around 4 samples per insert"
    ]
    limiter.inserted(3)
    wait_until(lambda: limiter.counts.sampled == 60)
    assert limiter.reasons == []


def test_an_insert_waits_until_enough_was_sampled() -> None:
    limiter = RateLimiter(1.0, 1, 10)
    limiter.inserted(11)
    assert not limiter.await_insert(5, timeout_s=0.01)
    assert limiter.counts.inserted == 11
    assert_waits(limiter, lambda: limiter.await_insert(5, 5.0), "inserting 5 waits for 5 more samp")
    assert "the balance would rise to 15, above the band of 10 around 1" in limiter.reasons[0]
    limiter.sampled(5)
    wait_until(lambda: limiter.counts.inserted == 16)


def test_update_releases_waiting_callers() -> None:
    limiter = RateLimiter(1.0, 1000)
    limiter.inserted(10)
    assert_waits(limiter, lambda: limiter.await_sample(1, 5.0), "10 items are stored and min_size")
    limiter.update(min_size=10)
    wait_until(lambda: limiter.counts.sampled == 1)


def test_two_waiting_samples_do_not_both_take_the_last_place() -> None:
    limiter = RateLimiter(1.0, 1, 10, batch=10)
    limiter.inserted(1)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(limiter.await_sample(10, 0.2)), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, True]
    assert limiter.counts.sampled == 10


def test_adding_and_sampling_threads_keep_the_ratio() -> None:
    limiter = RateLimiter(4.0, 64, batch=32, insert=16)

    def add() -> None:
        for _ in range(200):
            assert limiter.await_insert(16, 10.0)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    for _ in range((200 * 16 - 64) * 4 // 32):
        assert limiter.await_sample(32, 10.0)
        assert abs(balance(limiter.rule, limiter.counts)) <= limiter.rule.band
    thread.join()
    assert balance(limiter.rule, limiter.counts) == 0


def test_limiter_state_survives_json() -> None:
    limiter = RateLimiter(8.0, 10, band=200, batch=64)
    limiter.inserted(30)
    limiter.sampled(100)
    limiter.update(samples_per_insert=3.0)
    other = RateLimiter()
    other.load_state_dict(json.loads(json.dumps(limiter.state_dict())))
    assert other.rule == limiter.rule
    assert other.counts == limiter.counts


def assert_waits(limiter: RateLimiter, call: Callable[[], bool], reason: str) -> None:
    """Start `call` in a thread that ends by itself, and see it wait for `reason`."""
    threading.Thread(target=call, daemon=True).start()
    wait_until(lambda: bool(limiter.reasons))
    assert reason in limiter.reasons[0]
