"""`Replay` as a whole: sizes, batches, priorities, threads and refusals."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from penstock.core import cgroup
from penstock.replay import (
    Batch,
    Prioritized,
    RateLimiter,
    Replay,
    ReplayError,
    Sequences,
    Uniform,
)
from penstock.replay.gather import Pool

PLAIN: dict[str, Any] = {"obs": (np.float32, (2,)), "action": (np.int64, ())}


def fill(replay: Replay | Any, first: int, count: int, **changes: Any) -> None:
    """Steps of one environment: observation i leads to i + 1, with reward i."""
    for i in range(first, first + count):
        step: dict[str, Any] = {"obs": [i, i], "next_obs": [i + 1, i + 1], "action": i}
        flags: dict[str, Any] = {"reward": float(i), "terminated": False, "truncated": False}
        replay.add(**(step | flags | changes))


def test_batch_has_the_documented_columns() -> None:
    replay = Replay(PLAIN, 100, discount=0.5, seed=0)
    fill(replay, 0, 9)
    fill(replay, 9, 1, terminated=True, truncated=True)
    batch = replay.sample(10)
    assert isinstance(batch, Batch)
    assert set(batch) == {
        "obs", "next_obs", "action", "reward", "discount", "terminated", "truncated", "weights",
        "keys",
    }  # fmt: skip
    assert batch.obs.dtype == np.float32
    for name in ("reward", "discount", "weights"):
        assert batch[name].dtype == np.float32
    np.testing.assert_array_equal(batch.obs[:, 0], batch.action)
    np.testing.assert_array_equal(batch.next_obs[:, 0], batch.action + 1)
    np.testing.assert_array_equal(batch.reward, batch.action)
    np.testing.assert_array_equal(batch.terminated, batch.action == 9)
    assert not batch.truncated.any()  # terminated wins
    np.testing.assert_array_equal(batch.discount, np.where(batch.action == 9, 0, 0.5))
    assert batch.weights.tolist() == [1] * 10
    with pytest.raises(AttributeError, match="no mask"):
        _ = batch.mask


def test_n_step_returns_match_a_sum_by_hand() -> None:
    replay = Replay(PLAIN, 100, n_step=3, discount=0.5)
    fill(replay, 0, 3)
    fill(replay, 3, 1, truncated=True)
    fill(replay, 4, 1)
    fill(replay, 5, 1, terminated=True)
    batch = replay.gather.batch(np.arange(6), None)
    # 0: 0 + 1/2 + 2/4; 1: 1 + 2/2 + 3/4; 2: 2 + 3/2, truncated; 3; 4: 4 + 5/2, terminated; 5
    assert batch.reward.tolist() == [1.0, 2.75, 3.5, 3.0, 6.5, 5.0]
    assert batch.discount.tolist() == [0.125, 0.125, 0.25, 0.5, 0.0, 0.0]
    assert batch.next_obs[:, 0].tolist() == [3, 4, 4, 4, 6, 6]
    assert batch.truncated.tolist() == [False, True, True, True, False, False]
    assert batch.terminated.tolist() == [False, False, False, False, True, True]


def test_n_step_return_ends_at_the_newest_row_of_its_stream() -> None:
    replay = Replay(PLAIN, 100, n_step=3, discount=0.5, unroll=4)
    fill(replay, 0, 4)
    assert replay.gather.batch(np.array([3]), None).reward.tolist() == [3.0]
    fill(replay, 4, 1)
    batch = replay.gather.batch(np.array([3]), None)
    assert (batch.reward[0], batch.discount[0], batch.next_obs[0, 0]) == (5.0, 0.25, 5)


def test_newest_rows_are_always_kept() -> None:
    replay = Replay(PLAIN, 50, unroll=8)
    for first in range(0, 300, 10):
        fill(replay, first, 10)
        actions = replay.gather.batch(np.flatnonzero(replay.table.valid), None).action
        newest = set(range(max(0, first + 10 - 50), first + 10))
        assert newest <= set(actions.tolist())
        assert len(replay) <= 50 + 2 * 8
    stats = replay.stats()
    assert stats["inserted"] == 300 == stats["stored"] + sum(stats["evicted"].values())


def test_capacity_holds_with_frame_stacks() -> None:
    """Although the oldest stored rows have lost frames of theirs."""
    columns = {"obs": (np.uint8, (4, 3)), "action": (np.int64, ())}
    replay = Replay(columns, 64, unroll=8, frame_stack=4, autoreset="next_step")
    frames = np.arange(203 * 3, dtype=np.uint8).reshape(203, 3)
    for i in range(199):
        fill(replay, i, 1, obs=frames[i : i + 4], next_obs=frames[i + 1 : i + 5])
        assert len(replay) >= min(64, i + 1)
    assert replay.stats()["evicted"]["history"] > 0


def test_n_step_returns_do_not_cross_streams() -> None:
    replay = Replay(PLAIN, 100, n_step=2, discount=1.0, writers=2)
    with replay.writer() as other:
        for i in range(3):
            fill(replay, i, 1)
            fill(other, 10 + i, 1)
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    got = dict(zip(batch.action.tolist(), batch.reward.tolist(), strict=True))
    assert got == {0: 1, 1: 3, 2: 2, 10: 21, 11: 23, 12: 12}
    assert replay.stats()["stored"] == 6


def test_rows_stay_consistent_while_threads_add_and_sample() -> None:
    replay = Replay(PLAIN, 2000, n_step=3, discount=1.0, unroll=32, writers=2)
    fill(replay, 0, 100)
    failures: list[BaseException] = []

    def adds(first: int) -> None:
        try:
            fill(replay, first, 3000)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=adds, args=(first,), daemon=True) for first in (10_000, 20_000)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        batch = replay.sample(64)
        np.testing.assert_array_equal(batch.obs[:, 0], batch.action)
        steps = batch.next_obs[:, 0] - batch.action
        assert ((steps >= 1) & (steps <= 3)).all()
        want = steps * batch.action + steps * (steps - 1) / 2
        np.testing.assert_array_equal(batch.reward, want)
    assert not failures
    stats = replay.stats()
    assert stats["inserted"] == 6100 == stats["stored"] + sum(stats["evicted"].values())
    fill(replay, 30_000, 10)  # those threads are gone; their lanes can be had again
    for _ in range(20):
        thread = threading.Thread(target=fill, args=(replay, 0, 1), daemon=True)
        thread.start()
        thread.join()


def test_priorities_of_rows_that_are_gone_are_ignored_and_counted() -> None:
    replay = Replay(PLAIN, 40, unroll=4, sampler=Prioritized(1.0, 1.0), seed=0)
    fill(replay, 0, 40)
    batch = replay.sample(32)
    fill(replay, 40, 30)
    gone = int((batch.action < 70 - len(replay)).sum())
    assert 0 < gone < 32
    assert replay.update_priorities(batch.keys, np.full(32, 1e6)) == 32 - gone
    assert replay.stats()["stale_updates"] == gone
    again = set(replay.sample(40).action.tolist())
    assert again <= set(batch.action.tolist())


@pytest.mark.parametrize("sampler", [Uniform, Prioritized])
def test_rows_are_evicted_after_max_times_sampled(sampler: Any) -> None:
    replay = Replay(PLAIN, 64, sampler=sampler(), max_times_sampled=3, seed=0)
    fill(replay, 0, 50)
    drawn: list[int] = []
    while len(replay) >= 8:
        batch = replay.sample(8)
        assert batch.weights.max() == 1
        drawn += batch.action.tolist()
    counts = np.bincount(drawn, minlength=50)
    assert counts.max() == 3
    stats = replay.stats()
    assert stats["evicted"] == {"max_times_sampled": int((counts == 3).sum())}
    assert stats["stored"] == int((counts < 3).sum())
    fill(replay, 50, 64)
    assert len(replay) >= 64


def test_replay_beyond_the_available_memory_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    atari = {"obs": (np.uint8, (4, 84, 84)), "action": (np.int64, ())}
    with pytest.raises(ReplayError, match=r"capacity 200000000 needs 1\d{3}\.\d\d GB.* to about"):
        Replay(atari, 200_000_000, frame_stack=4)
    monkeypatch.setattr(cgroup, "memory_left_nbytes", lambda: 10 << 20)
    with pytest.raises(ReplayError, match=r"needs 0\.08 GB and its control group has 0\.01 GB"):
        Replay(atari, 10_000, frame_stack=4)
    Replay(PLAIN, 1000).close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity": 0}, "capacity 0 must be"),
        ({"capacity": 2.5}, "capacity 2.5 must be"),
        ({"capacity": 3, "envs": 4}, "capacity 3 is below the 4 rows"),
        ({"n_step": 0}, "n_step 0"),
        ({"discount": 1.5}, "discount 1.5"),
        ({"autoreset": "later"}, "autoreset 'later'"),
        ({"max_times_sampled": 0}, "max_times_sampled 0"),
        ({"capacity": 1 << 33}, "keys can identify"),
        ({"capacity": 1e300}, "keys can identify"),
        ({"capacity": float("nan")}, "capacity nan must be"),
        ({"capacity": "10"}, "capacity '10' must be"),
        ({"unroll": 0}, "unroll 0 must be a whole number and at least 1"),
        ({"unroll": -3}, "unroll -3 must be"),
        ({"in_hand": 0}, "in_hand 0 must be"),
    ],
)
def test_invalid_sizes_are_refused(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"capacity": 10} | change
    with pytest.raises(ReplayError, match=words):
        Replay(PLAIN, **options)


def test_integral_floats_are_accepted_as_sizes() -> None:
    replay = Replay(PLAIN, 1e3, n_step=3.0, unroll=4.0)  # type: ignore[arg-type]
    assert (replay.capacity, replay.n_step, replay.layout.spec.unroll) == (1000, 3, 4)
    assert all(type(n) is int for n in (replay.capacity, replay.n_step))


@pytest.mark.parametrize("count", [1.5, 2.0, 0, -1, "2", None])
@pytest.mark.parametrize("options", [{}, {"limiter": RateLimiter()}, {"sequences": Sequences(2)}])
def test_batch_size_must_be_an_integer(count: Any, options: dict[str, Any]) -> None:
    replay = Replay(PLAIN, 100, **options)
    fill(replay, 0, 20)
    words = f"batch size {count!r} must be a whole number and at least 1"
    with pytest.raises(ReplayError, match=re.escape(words)):
        replay.sample(count)
    assert len(replay.sample(np.int64(3)).keys) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["values", "items", "update", "a.b", "a@side", 3, "records", "slot_records"]
)
def test_names_that_a_batch_cannot_have_are_refused(name: Any) -> None:
    with pytest.raises(ReplayError, match=rf"column.* {re.escape(repr(name))}"):
        Replay(PLAIN | {name: (np.float32, ())}, 100)


def test_slots_in_hand_are_added_to_the_capacity() -> None:
    """By default one for each writer, two where memory is shared."""
    for options, extra in (
        ({"writers": 3}, 3),
        ({"writers": 3, "shared": True}, 6),
        ({"writers": 30, "in_hand": 5, "shared": True}, 5),
    ):
        replay = Replay(PLAIN, 100, unroll=10, **options)  # type: ignore[arg-type]
        assert replay.stats()["slots"] == 10 + extra
        replay.close()


def test_end_flags_may_be_zero_and_one() -> None:
    replay = Replay(PLAIN, 100)
    fill(replay, 0, 1, terminated=0, truncated=np.int64(0))
    fill(replay, 1, 1, terminated=1, truncated=0)
    batch = replay.gather.batch(np.arange(2), None)
    assert batch.terminated.tolist() == [False, True]
    for value in (2, -1, 1.0, "yes"):
        with pytest.raises(ReplayError, match="terminated came with dtype"):
            fill(replay, 2, 1, terminated=value)
    assert len(replay) == 2


@pytest.mark.parametrize("framed", [False, True])
def test_environment_that_overwrites_its_observation_is_detected(framed: bool) -> None:
    """At its first step; where the episode ends, next_obs may be anything."""
    shape = (100,) if framed else (2,)
    space = {"camera": (np.float32, shape), "parts": spaces.Tuple([spaces.Discrete(3)])}
    replay = Replay({"obs": space, "action": (np.int64, ())}, 100)
    buffer = np.zeros(shape, np.float32)

    def add(after: Any, **changes: Any) -> None:
        seen = [{"camera": array, "parts": (np.array(1),)} for array in (buffer, after)]
        fill(replay, 0, 1, obs=seen[0], next_obs=seen[1], **changes)

    for same in (buffer, buffer[:]):
        with pytest.raises(ReplayError, match=r"obs\.camera and next_obs\.camera are the same mem"):
            add(same)
    add(buffer, terminated=True)
    add(buffer + 1)
    assert len(replay) == 2


def test_stacks_may_be_views_of_one_history() -> None:
    history = np.arange(12, dtype=np.uint8).reshape(6, 2)
    replay = Replay({"obs": (np.uint8, (3, 2)), "action": (np.int64, ())}, 100, frame_stack=3)
    for i in range(2):
        fill(replay, i, 1, obs=history[i : i + 3], next_obs=history[i + 1 : i + 4])
    assert len(replay) == 2


def test_invalid_batch_sizes_are_refused() -> None:
    replay = Replay(PLAIN, 100)
    with pytest.raises(ReplayError, match=r"batch of 8 needs as many rows, and 0 rows are stored"):
        replay.sample(8)
    fill(replay, 0, 5)
    for count, words in ((8, "5 rows are stored"), (101, "larger than the capacity"), (0, "batch")):
        with pytest.raises(ReplayError, match=words):
            replay.sample(count)
    keys = replay.sample(2).keys
    for priorities, words in (
        ([1, np.nan], "nan at position 1"),
        ([np.inf, 1], "inf at position 0"),
        ([1], "1 prior"),
    ):
        with pytest.raises(ReplayError, match=words):
            replay.update_priorities(keys, priorities)


def test_from_env_reads_spaces_and_autoreset_of_an_environment() -> None:
    single = Replay.from_env(gymnasium.make("CartPole-v1"), 1000)
    assert (single.autoreset, single.layout.spec.envs) == ("none", 1)
    vector = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    made = Replay.from_env(vector, 1000, columns={"logp": (np.float32, ())})
    assert (made.autoreset, made.layout.spec.envs) == ("next_step", 3)
    assert made.layout.obs == "obs"
    assert "logp" in made.layout.other_nests
    vector.metadata = {}
    with pytest.raises(ReplayError, match="autoreset="):
        Replay.from_env(vector, 1000)
    with pytest.raises(ReplayError, match="no observation_space"):
        Replay.from_env(spaces.Discrete(2), 1000)


def test_from_env_has_the_options_of_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    own, all_ = (inspect.signature(each).parameters for each in (Replay.from_env, Replay))
    assert set(own) == set(all_) - {"envs"} | {"env"}
    different = {"columns", "autoreset"}  # None: none in addition, that of the environment
    for name in set(own) & set(all_) - different:
        assert (own[name].default, own[name].annotation) == (
            all_[name].default, all_[name].annotation
        )  # fmt: skip
    given: dict[str, Any] = {name: object() for name in own.keys() - {"env", "columns"}}
    seen: dict[str, Any] = {}

    def record(self: Any, columns: Any, capacity: Any, **options: Any) -> None:
        seen.update(options, capacity=capacity)

    monkeypatch.setattr(Replay, "__init__", record)
    Replay.from_env(gymnasium.make("CartPole-v1"), **given)
    assert seen == given | {"envs": 1}


def test_the_same_seed_draws_the_same_rows() -> None:
    made = [Replay(PLAIN, 100, seed=3) for _ in range(2)]
    for replay in made:
        fill(replay, 0, 50)
    assert made[0].sample(20).action.tolist() == made[1].sample(20).action.tolist()


def test_batch_memory_is_reused_only_when_unreferenced() -> None:
    pool = Pool()
    shape, dtype = (1 << 16,), np.dtype(np.uint8)
    first = pool.empty(shape, dtype)
    where = first.ctypes.data
    second = pool.empty(shape, dtype)
    assert second.ctypes.data != where
    part = first.reshape(256, 256)[3:5]
    del first
    assert pool.empty(shape, dtype).ctypes.data != where  # a view is left
    del part
    assert pool.empty(shape, dtype).ctypes.data == where


def test_importing_replay_is_fast_and_imports_no_heavy_module() -> None:
    code = (
        "import sys, time; t = time.process_time(); import numpy; n = time.process_time(); "
        "import penstock.replay; print((time.process_time() - n) / (n - t), "
        "[m for m in ('torch', 'zmq', 'pydantic', 'gymnasium', 'cramjam') if m in sys.modules])"
    )
    root = str(Path(__file__).parents[3])
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
        for _ in range(3)
    ]
    of_numpy = [float(run.stdout.split()[0]) for run in runs]
    assert all(run.stdout.split(maxsplit=1)[1].strip() == "[]" for run in runs), runs[0].stdout
    assert min(of_numpy) < 3  # it is about as much again as numpy itself


def test_waiting_sample_precedes_the_next_add() -> None:
    replay = Replay(PLAIN, 100, seed=0)
    fill(replay, 0, 10)
    sampling = threading.Thread(target=replay.sample, args=(4,))
    with replay.lock.inner:  # as an add holds it
        sampling.start()
        while not replay.lock.turn.locked():  # where the next add waits
            assert sampling.is_alive()
    sampling.join(10.0)
    assert not sampling.is_alive()
