"""Snapshots are restored exactly and written atomically."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay import snapshot
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.samplers import Linear, Prioritized
from penstock.replay.sequences import Sequences
from penstock.replay.snapshot import MANIFEST, Cut, FolderWriter
from snapshot_rows import assert_consistent, assert_equal, made, step

OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampler": lambda: Prioritized(0.7, Linear(0.4, 1.0, 5000)), "n_step": 3, "discount": 0.9},
    {"sampler": lambda: Prioritized(fast=False), "sequences": Sequences(6, 3, 2, True)},
    {"size": 100},  # frames, beside the records
    {"size": 100, "shared": True, "steps": 3},
    {"steps": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_loaded_replay_continues_identically(tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    if "sampler" in options:
        options["sampler"] = options["sampler"]()
    replay, _ = made(**options)
    stored = len(replay)
    if stored > 10:
        batch = replay.sample(10)
        replay.update_priorities(batch.keys, np.arange(10))
    replay.save(tmp_path / "deep" / "ckpt")
    loaded = Replay.load(tmp_path / "deep" / "ckpt")
    assert len(loaded) == stored
    kept = {"stored", "inserted", "evicted", "capacity", "slots", "rows", "stale_updates"}
    before, after = replay.stats(), loaded.stats()
    assert {k: before[k] for k in kept} == {k: after[k] for k in kept}
    for _ in range(5 if stored else 0):
        one, other = replay.sample(stored if stored < 10 else 20), None
        other = loaded.sample(stored if stored < 10 else 20)
        assert_equal(one, other)
        assert replay.update_priorities(one.keys, one.weights) == loaded.update_priorities(
            other.keys, other.weights
        )
    assert (loaded.n_step, loaded.discount) == (replay.n_step, replay.discount)
    for i in range(300):  # it is a replay like any other
        loaded.add(**step(i, options.get("size", 3)))
    if "sequences" not in options:
        assert_consistent(loaded.sample(50), loaded.n_step)


def test_policy_version_survives_a_snapshot(tmp_path: Path) -> None:
    """Else slots stored after the load would be of version 0, and be evicted once it is set."""
    replay, _ = made(max_policy_lag=3)
    replay.version = 7
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path)
    assert loaded.version == 7
    for i in range(16):
        loaded.add(**step(i, 3))
    loaded.version = 8
    with loaded.lock:
        loaded.collect()
    assert len(loaded) == 16  # those of version 0 are gone


def test_newer_snapshot_replaces_the_older(tmp_path: Path) -> None:
    replay, add = made()
    replay.save(tmp_path)
    add()
    replay.save(tmp_path)
    assert Replay.load(tmp_path).stats()["inserted"] == 151
    assert sorted(p.name for p in tmp_path.iterdir()) == ["replay-2", MANIFEST]


@pytest.mark.timeout(150)  # the other thread has the interpreter nearly all the time
def test_snapshot_is_consistent_while_a_thread_adds(tmp_path: Path) -> None:
    replay, add = made(3000, size=100, capacity=2000, writers=2, sampler=Prioritized(fast=False))
    ended = threading.Event()

    def adding() -> None:
        while not ended.is_set():
            add()

    thread = threading.Thread(target=adding, daemon=True)
    thread.start()
    try:
        for _ in range(2):
            replay.save(tmp_path)
            loaded = Replay.load(tmp_path)
            stats = loaded.stats()
            evicted = sum(stats["evicted"].values())
            assert stats["inserted"] == stats["stored"] + evicted
            assert stats["stored"] == np.count_nonzero(loaded.table.valid)
            rows = np.flatnonzero(loaded.table.valid)
            batch = loaded.gather.batch(rows, None)
            assert_consistent(batch)
            newest = stats["inserted"]
            expected = np.arange(newest - stats["stored"], newest)
            np.testing.assert_array_equal(np.sort(batch.action // 3), expected)
            loaded.sample(100)
            loaded.close()
    finally:
        ended.set()
        thread.join()
    assert replay.table.listeners == ()
    assert len(replay) >= 2000


def test_slots_evicted_during_a_snapshot_are_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kept slot leaves after the first was written."""
    replay, add = made(150, size=100)
    before = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    append, done = FolderWriter.append, list[bool]()

    def slow(self: Any, name: str, array: Any) -> None:
        append(self, name, array)
        if not done:
            done.append(True)
            for _ in range(500):
                add()

    monkeypatch.setattr(FolderWriter, "append", slow)
    replay.save(tmp_path)
    loaded = Replay.load(tmp_path)
    after = loaded.gather.batch(np.flatnonzero(loaded.table.valid), None)
    assert_equal(before, after)
    assert loaded.stats()["inserted"] == 150


@pytest.mark.parametrize("rows", ["frames", "unroll+1"])
@pytest.mark.parametrize(
    ("piece_nbytes", "after"), [(1 << 22, n) for n in range(9)] + [(100, n) for n in (5, 20, 30)]
)
def test_open_slot_is_saved_as_it_was_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, piece_nbytes: int, after: int
) -> None:
    """The next step moves the final observations of the newest row away, to begin episodes; it
    comes when so many pieces were written."""
    monkeypatch.setattr(snapshot, "PIECE_NBYTES", piece_nbytes)
    columns = {"obs": (np.uint8, (3, 5, 7)), "action": (np.int64, ())}
    spec = Replay(columns, 60, envs=2, unroll=10, frame_stack=3).layout.spec
    rowed = tuple(replace(c, rows=rows) if c.rows == "frames" else c for c in spec.columns)
    replay = Replay(replace(spec, columns=rowed), 60, frame_stack=3, seed=0)
    frames = np.random.default_rng(0).integers(0, 255, (40, 2, 3, 5, 7), np.uint8)
    stacks = [np.ascontiguousarray(frames[i : i + 3, :, 0].swapaxes(0, 1)) for i in range(38)]

    def add(at: int, *, ends: bool = False) -> None:
        replay.add(
            obs=stacks[at],
            next_obs=stacks[at + 1],
            action=np.arange(2),
            reward=np.ones(2, np.float32),
            terminated=np.zeros(2, bool),
            truncated=np.array([ends, False]),
        )

    for at in range(12):
        add(at)
    add(12, ends=True)
    everything = np.flatnonzero(replay.table.valid)
    before = replay.gather.batch(everything, None)
    append, written = FolderWriter.append, list[str]()

    def then_go_on(self: Any, name: str, array: Any) -> None:
        append(self, name, array)
        written.append(name)
        if len(written) == after + 1:
            for at in range(20, 25):  # stacks that do not continue: both begin anew
                add(at)

    monkeypatch.setattr(FolderWriter, "append", then_go_on)
    replay.save(tmp_path)
    assert len(written) > after
    loaded = Replay.load(tmp_path)
    np.testing.assert_array_equal(np.flatnonzero(loaded.table.valid), everything)
    assert_equal(before, loaded.gather.batch(everything, None))


class MeasuredLock:
    """A lock that knows the longest that it was held, in seconds of the holder's work."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.longest_s = lock, 0.0

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._since_s = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        self._lock.__exit__(*error)


def test_snapshot_never_holds_the_lock_for_a_whole_slot(tmp_path: Path) -> None:
    """A slot has 64 MB; one is open."""
    columns = {"obs": (np.uint8, (1000,)), "action": (np.int64, ())}
    replay = Replay(columns, 160_000, envs=640, unroll=100)
    zeros: dict[str, Any] = {
        name: np.zeros(640, dtype)
        for name, dtype in (("action", int), ("reward", "f4"), ("terminated", "?"))
    }
    obs = np.ones((640, 1000), np.uint8)
    for _ in range(150):
        replay.add(obs=obs, next_obs=obs + 1, truncated=np.zeros(640, bool), **zeros)
    start_s = time.thread_time()
    copies = [data.copy() for data in replay.table.store.slots[0].payload]
    whole_s = time.thread_time() - start_s

    def longest_s() -> float:
        lock: Any = MeasuredLock(replay.lock)
        snapshot.save(tmp_path, replay.table, lock, lambda: {})
        return float(lock.longest_s)

    # What else the machine does slows one down now and then, and makes none quicker.
    assert any(longest_s() < whole_s / 2 for _ in range(4))
    assert sum(data.nbytes for data in copies) > 64e6
    replay.close()


def test_each_step_copies_its_share_of_the_next_evicted_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of 8 steps all leave before they are written: an eighth, or so, at a time."""
    monkeypatch.setattr(snapshot, "LEAST_SHARE_NBYTES", 1)
    replay, add = made(150, size=100)
    before = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    copied = list[int]()
    extend, append = snapshot._Copy.extend, FolderWriter.append

    def counting(self: Any, payload: Any, nbytes: int) -> bool:
        done = self.done
        ended = extend(self, payload, nbytes)
        copied[-1] += self.done - done
        return ended

    def then_add(self: Any, name: str, array: Any) -> None:
        append(self, name, array)
        for _ in range(0 if copied else 120):
            copied.append(0)
            add()

    monkeypatch.setattr(snapshot._Copy, "extend", counting)
    monkeypatch.setattr(FolderWriter, "append", then_add)
    replay.save(tmp_path)
    slot = sum(data.nbytes for data in replay.table.store.slots[0].payload)
    assert sum(copied) > 10 * slot
    assert max(copied[10:]) <= slot / 7 + 1  # the first had no step to be copied at
    loaded = Replay.load(tmp_path)
    assert_equal(before, loaded.gather.batch(np.flatnonzero(loaded.table.valid), None))


def test_second_concurrent_snapshot_is_refused(tmp_path: Path) -> None:
    replay, _ = made()
    Cut(replay.table, replay.lock).begin()
    with pytest.raises(ReplayError, match="a snapshot of this replay is being written; wait"):
        replay.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
