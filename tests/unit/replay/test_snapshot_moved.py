"""Restoring a snapshot into another number of slots: which rows are kept, and their links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.limiter import RateLimiter
from penstock.replay.samplers import Prioritized, Uniform
from penstock.replay.sequences import Sequences
from snapshot_rows import assert_consistent, made, step

SLOTS: dict[str, dict[str, Any]] = {
    "fewer": {"capacity": 40},
    "more": {"in_hand": 9},
    "many more": {"capacity": 1000},
}


def rows_of(replay: Replay) -> Any:
    """All rows that count, by the number of their step."""
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    order = np.argsort(batch.action)
    return {name: batch[name][order] for name in ("action", "obs", "reward", "discount")}


def two_streams(**options: Any) -> Replay:
    """Two streams whose slots alternate; the steps of the second are numbered from 10,000 on."""
    replay, _ = made(0, writers=2, **options)
    with replay.writer() as one, replay.writer() as other:
        for i in range(90):
            one.add(**step(i, 3))
            other.add(**step(10_000 + i, 3))
    return replay


def into(folder: Path, **options: Any) -> Replay:
    replay, _ = made(0, **({"writers": 2} | options))
    replay.restore(folder)
    stats = replay.stats()
    assert stats["inserted"] == stats["stored"] + sum(stats["evicted"].values())
    assert stats["stored"] == np.count_nonzero(replay.table.valid) == len(replay)
    return replay


@pytest.mark.parametrize("sizes", SLOTS.values(), ids=SLOTS)
def test_resized_replay_keeps_the_newest_rows_and_separate_streams(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    saved = two_streams(n_step=3, discount=0.5)
    saved.save(tmp_path)
    loaded = into(tmp_path, n_step=3, discount=0.5, **sizes)
    assert loaded.slots_moved
    before, after = rows_of(saved), rows_of(loaded)
    if "capacity" not in sizes or sizes["capacity"] >= 100:
        assert len(loaded) == len(saved)
    else:
        assert 40 <= len(loaded) < len(saved)
    kept = np.isin(before["action"], after["action"])
    for name, values in before.items():
        np.testing.assert_array_equal(values[kept], after[name], name)
    with loaded.writer() as new:  # other streams do not follow those of the snapshot
        for i in range(20, 60):
            new.add(**step(20_000 + i, 3))
            rows = rows_of(loaded)
            old = np.isin(rows["action"], before["action"])
            which = np.isin(before["action"], rows["action"])
            np.testing.assert_array_equal(before["reward"][which], rows["reward"][old])
    drawn = loaded.sample(32)
    assert_consistent(drawn, 3)


def test_repeatedly_resized_replay_keeps_the_rows_that_fit(tmp_path: Path) -> None:
    replay, sizes = two_streams(n_step=3), [9, 3, 14, 1]
    for number, in_hand in enumerate(sizes):
        replay.save(tmp_path)
        replay = into(tmp_path, n_step=3, in_hand=in_hand)
        for i in range(100):
            replay.add(**step(1000 * number + i, 3))
        assert len(replay) >= 100
        assert_consistent(replay.sample(100), 3)


@pytest.mark.parametrize("sizes", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("limit", [None, 50])
def test_resized_replay_keeps_priorities_and_counts(
    tmp_path: Path, sizes: dict[str, Any], limit: int | None
) -> None:
    saved = two_streams(sampler=Prioritized(1.0, fast=False), max_times_sampled=limit)
    batch = saved.sample(50)
    saved.update_priorities(batch.keys, batch.action / 3.0)
    saved.save(tmp_path)
    loaded = into(tmp_path, sampler=Prioritized(1.0, fast=False), max_times_sampled=limit, **sizes)

    def by_step(replay: Replay, name: str) -> dict[int, float]:
        rows = np.flatnonzero(replay.table.valid)
        sampler: Any = replay.sampler
        if name == "draw_counts":
            values = sampler._draw_counts
        else:
            values = (sampler if limit is None else sampler.sampler)._tree.leaves
        batch = replay.gather.batch(rows, None)
        return dict(zip(batch.action.tolist(), values[rows].tolist(), strict=True))

    for name in ["leaves"] + ["draw_counts"] * (limit is not None):
        before, after = by_step(saved, name), by_step(loaded, name)
        assert after == {number: before[number] for number in after}
        assert len(set(after.values())) > 1
    loaded.sample(20)


@pytest.mark.parametrize("sizes", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("pad", [True, False])
def test_resized_replay_keeps_sequences_within_their_streams(
    tmp_path: Path, sizes: dict[str, Any], pad: bool
) -> None:
    options: dict[str, Any] = {"sequences": Sequences(6, 3, 2, pad)}
    saved = two_streams(sampler=Prioritized(1.0, fast=False), **options)
    batch = saved.sample(30)
    saved.update_priorities(batch.keys, np.arange(30))
    saved.save(tmp_path)
    loaded = into(tmp_path, sampler=Prioritized(1.0, fast=False), **options, **sizes)

    def starts(replay: Replay) -> dict[int, float]:
        sampler: Any = replay.sampler
        numbers = np.flatnonzero(sampler._in_use)
        actions = replay.gather.batch(sampler._row_of_number[numbers], None).action[0]
        leaves = sampler.sampler._tree.leaves[numbers]
        return dict(zip(actions.tolist(), leaves.tolist(), strict=True))

    before, after = starts(saved), starts(loaded)
    assert after.items() <= before.items()
    assert len(after) > 3
    if sizes != SLOTS["fewer"]:
        assert after == before
    for i in range(60):
        loaded.add(**step(20_000 + i, 3))
        batch = loaded.sample(20)
        number = np.where(
            batch.mask, batch.action // 3 - np.arange(6)[:, None], batch.action[0] // 3
        )
        assert (number == number[0]).all()


@pytest.mark.parametrize("sizes", SLOTS.values(), ids=SLOTS)
def test_resized_replay_keeps_frame_stacks_within_their_stream(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    """A frame is the number of its step, and episodes are long: rows whose older frames were in a
    slot without room are not drawn."""
    columns = {"obs": (np.uint8, (4, 1, 1)), "action": (np.int64, ())}

    def stacked(**options: Any) -> Replay:
        given: dict[str, Any] = {"capacity": 100, "unroll": 8, "frame_stack": 4, "writers": 2}
        return Replay(columns, **(given | options))

    def frames(i: int) -> np.ndarray:
        return np.arange(i, i + 4, dtype=np.uint8)[:, None, None]

    flags: dict[str, Any] = {"terminated": False, "truncated": False, "reward": 0.0}
    saved = stacked()
    with saved.writer() as one, saved.writer() as other:
        for i in range(90):
            for writer, first in ((one, 0), (other, 100)):
                seen, then = frames(first + i), frames(first + i + 1)
                writer.add(obs=seen, next_obs=then, action=first + i, **flags)
    saved.save(tmp_path)
    loaded = stacked(**sizes)
    loaded.restore(tmp_path)
    assert loaded.slots_moved
    rows = loaded.gather.batch(np.flatnonzero(loaded.table.valid), None)
    assert len(rows.action) >= 40
    expected = rows.action[:, None] + np.arange(4)
    np.testing.assert_array_equal(rows.obs[:, :, 0, 0], expected)
    np.testing.assert_array_equal(rows.next_obs[:, :, 0, 0], expected + 1)


def test_limiter_counts_only_the_rows_that_fit(tmp_path: Path) -> None:
    made(150, limiter=RateLimiter(None, 60))[0].save(tmp_path)
    loaded = into(tmp_path, capacity=60, limiter=RateLimiter(None, 60))
    assert loaded.rate_limited is not None
    assert loaded.rate_limited.limiter.counts.stored == len(loaded)


def test_custom_sampler_without_load_moved_is_refused(tmp_path: Path) -> None:
    class Own(Uniform):
        load_moved = None  # type: ignore[assignment]

    made(sampler=Own())[0].save(tmp_path)
    with pytest.raises(ReplayError, match=r"another number of slots, and Own has no load_moved"):
        into(tmp_path, sampler=Own(), capacity=40)
    assert len(into(tmp_path, sampler=Own(), writers=1)) > 100
