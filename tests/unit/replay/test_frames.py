"""Frame stacks added to a replay: only true shifts are stored as single frames."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.replay import Replay, ReplayError, frames
from penstock.replay.frames import EVERY, PARTS
from replay_rows import row, stacks


def add_all(replay: Replay, rows: list[dict[str, Any]]) -> None:
    for step in rows:
        replay.add(**step)


def stacking(envs: int = 1, frame: int = 8, **options: Any) -> Replay:
    columns = {"obs": (np.uint8, (4, frame)), "action": (np.int64, ())}
    return Replay(columns, 100 * envs, frame_stack=4, envs=envs, unroll=10, **options)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_next_obs_that_is_no_shift_of_obs_is_refused_and_nothing_is_stored(wrong: int) -> None:
    replay, s = stacking(envs=2), stacks(4, envs=2)
    replay.add(**row(s[0], s[1], 2))
    after = s[2].copy()
    after[1, wrong, 5] ^= 1  # one bit of one of the frames that obs had too
    with pytest.raises(ReplayError, match=r"next_obs of environment 1 is no shift.*frame_stack=4"):
        replay.add(**row(s[1], after, 2))
    assert len(replay) == 2
    replay.add(**row(s[1], s[2], 2))  # and it goes on as if that had not been
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    np.testing.assert_array_equal(batch.obs, np.concatenate([s[0], s[1]]))
    np.testing.assert_array_equal(batch.next_obs, np.concatenate([s[1], s[2]]))


@pytest.mark.parametrize("changed", [0, 1, 2, 3])
def test_obs_that_does_not_continue_the_last_begins_a_new_history(changed: int) -> None:
    """Although nobody said that an episode ended; whichever frame tells."""
    replay, s = stacking(n_step=3), stacks(8)
    other = s[2:6].copy()
    for i in range(4):  # the same change in each stack that has the frame
        if changed - i >= 0:
            other[i, 0, changed - i] ^= 1
    steps = [(s[0], s[1]), (s[1], s[2]), *pairwise(other)]
    for obs, after in steps:
        replay.add(**row(obs, after, reward=np.ones(1)))
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    np.testing.assert_array_equal(batch.obs, np.concatenate([obs for obs, _ in steps]))
    # Returns end where the first history does.
    np.testing.assert_array_equal(batch.next_obs[:2], [s[2][0], s[2][0]])
    np.testing.assert_allclose(batch.reward, [1.99, 1.0, 1 + 0.99 + 0.99**2, 1.99, 1.0], rtol=1e-6)


MANY = 40  # environments


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of any size are too large to compare everything at every step."""
    monkeypatch.setattr(frames, "COMPLETE_NBYTES", 0)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("env", [0, 27, 39])
def test_wrong_byte_in_a_large_vector_is_found_in_its_turn(
    large: None, env: int, copied: bool
) -> None:
    steps = EVERY * PARTS
    replay, s = stacking(envs=MANY, frame=100), stacks(steps + 4, envs=MANY, frame=100)
    s[3:, env, 2, 50] ^= 1  # where a shift has the newest frame of the one before
    rows = [row(s[i].copy() if copied else s[i], s[i + 1], MANY) for i in range(2 + steps)]
    with pytest.raises(ReplayError, match=f"environment {env} is no shift"):
        add_all(replay, rows)


@pytest.mark.parametrize(("bad", "ends"), [(0, ()), (1, (1,)), (2, (1,)), (3, (3,))])
def test_where_episodes_begin_and_end_all_of_a_large_vector_is_compared(
    large: None, bad: int, ends: tuple[int, ...]
) -> None:
    """At the first step, at the end of an episode and at the step after."""
    replay, s = stacking(envs=MANY), stacks(5, envs=MANY)
    for i in range(bad + 1):
        over = np.zeros(MANY, bool)
        over[39] = i in ends
        step = row(s[i], s[i + 1].copy(), MANY, terminated=over)
        if i == bad:
            step["next_obs"][39, 0, 7] ^= 1  # not the newest that both have
            with pytest.raises(ReplayError, match="environment 39 is no shift"):
                replay.add(**step)
        else:
            replay.add(**step)
    assert replay.stats()["inserted"] == bad * MANY


@pytest.mark.parametrize("envs", [1, 2, MANY])
@pytest.mark.parametrize("stack", [1, 2, 4])
@pytest.mark.parametrize("complete_nbytes", [0, 1 << 20])
def test_consecutive_steps_are_stored_unchanged(
    stack: int, envs: int, complete_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays that are handed on from step to step; a reset of all that nobody spoke of between."""
    monkeypatch.setattr(frames, "COMPLETE_NBYTES", complete_nbytes)
    shape = (stack, 300) if stack > 1 else (300,)
    columns = {"obs": (np.uint8, shape), "action": (np.int64, ())}
    replay = Replay(columns, 20 * envs, frame_stack=stack, envs=envs, unroll=7)
    rng, given = np.random.default_rng(0), []
    for i in range(12):
        if i in (0, 5):
            first = rng.integers(0, 255, (envs, *shape), np.uint8)
            obs = np.repeat(first[:, :1], stack, axis=1) if stack > 1 else first
        frame = rng.integers(0, 255, (envs, 1, 300), np.uint8)
        after = np.concatenate([obs[:, 1:], frame], axis=1) if stack > 1 else frame[:, 0]
        replay.add(**row(obs, after, envs, action=np.arange(envs) + 1000 * i))
        given.append((obs, after))
        obs = after
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    assert batch.action.tolist() == [env + 1000 * i for i in range(12) for env in range(envs)]
    np.testing.assert_array_equal(batch.obs, np.concatenate([before for before, _ in given]))
    np.testing.assert_array_equal(batch.next_obs, np.concatenate([after for _, after in given]))


def test_overwritten_array_is_detected() -> None:
    """As environments do that always return the same array."""
    replay, s = stacking(), stacks(6)
    buffer = s[0].copy()
    with pytest.raises(ReplayError, match="obs and next_obs are the same memory"):
        replay.add(**row(buffer, buffer))
    replay.add(**row(s[0], s[1]))
    buffer[...] = s[1]
    replay.add(**row(buffer, s[2]))
    buffer[...] = s[2]
    replay.add(**row(buffer, s[3]))
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    np.testing.assert_array_equal(batch.obs, s[:3, 0])


def test_frames_that_find_no_side_rows_are_counted_and_not_stored_wrong() -> None:
    """40 environments that begin with histories of their own: 3 side rows each, and there are 8."""
    envs = 40
    replay, s = stacking(envs=envs), stacks(6, envs=envs)
    for i in range(5):
        replay.add(**row(s[i], s[i + 1], envs, action=np.arange(envs) + 100 * i))
    side = replay.layout.spec.side
    lost = (envs - side // 3) * 3  # of each that found no room, until three frames are stored
    assert replay.stats()["evicted"] == {"history": lost}
    assert len(replay) == 5 * envs - lost
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    for obs, after, action in zip(batch.obs, batch.next_obs, batch.action, strict=True):
        step, env = divmod(int(action), 100)
        np.testing.assert_array_equal(obs, s[step, env])
        np.testing.assert_array_equal(after, s[step + 1, env])
