"""Frame stacks that are added: what is no shift of what came before is never stored as one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.replay import Replay, ReplayError
from penstock.replay.words import PARTS
from replay_rows import row, stacks


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
def test_an_obs_that_does_not_continue_the_last_begins_a_history(changed: int) -> None:
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


LARGE, FRAME = 150, 84 * 84  # too many to compare everything at every step


@pytest.mark.parametrize("copied", [False, True])
def test_wrong_stacks_of_a_large_vector_are_found_within_as_many_steps_as_parts(
    copied: bool,
) -> None:
    replay, s = stacking(envs=LARGE, frame=FRAME), stacks(PARTS + 4, envs=LARGE, frame=FRAME)
    s[3:, 77, 2, 4000] ^= 1  # one byte, where a shift has the newest frame of the one before
    refused = []
    for i in range(2 + PARTS):
        try:
            replay.add(**row(s[i].copy() if copied else s[i], s[i + 1], LARGE))
        except ReplayError as error:
            refused.append(str(error))
    assert refused
    assert all("environment 77 is no shift" in text for text in refused)
    replay.close()


@pytest.mark.parametrize(("bad", "ends"), [(0, ()), (1, (1,)), (2, (1,)), (3, (3,))])
def test_where_episodes_begin_and_end_all_of_a_large_vector_is_compared(
    bad: int, ends: tuple[int, ...]
) -> None:
    """At the first step, at the end of an episode and at the step after."""
    replay, s = stacking(envs=LARGE, frame=FRAME), stacks(5, envs=LARGE, frame=FRAME)
    for i in range(bad + 1):
        over = np.zeros(LARGE, bool)
        over[149] = i in ends
        step = row(s[i], s[i + 1].copy(), LARGE, terminated=over)
        if i == bad:
            step["next_obs"][149, 0, 7] ^= 1  # not the newest that both have
            with pytest.raises(ReplayError, match="environment 149 is no shift"):
                replay.add(**step)
        else:
            replay.add(**step)
    assert replay.stats()["inserted"] == bad * LARGE
    replay.close()


@pytest.mark.parametrize("envs", [2, LARGE])
@pytest.mark.parametrize("stack", [1, 2, 4])
def test_a_large_or_small_vector_goes_on_plainly_as_it_was_given(stack: int, envs: int) -> None:
    """Arrays that are handed on from step to step; a reset of all that nobody spoke of between."""
    shape = (stack, 4, FRAME // 4) if stack > 1 else (FRAME,)
    columns = {"obs": (np.uint8, shape), "action": (np.int64, ())}
    replay = Replay(columns, 20 * envs, frame_stack=stack, envs=envs, unroll=7)
    rng, given, obs = np.random.default_rng(0), [], None
    for i in range(12):
        if i in (0, 5):
            first = rng.integers(0, 255, (envs, *shape), np.uint8)
            obs = np.repeat(first[:, :1], stack, axis=1) if stack > 1 else first
        frame = rng.integers(0, 255, (envs, 1, *shape[1:]), np.uint8)
        after = np.concatenate([obs[:, 1:], frame], axis=1) if stack > 1 else frame + obs
        replay.add(**row(obs, after, envs, action=np.arange(envs) + 1000 * i))
        given.append((obs, after))
        obs = after
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    steps, who = np.divmod(batch.action, 1000)
    assert len(steps) == 12 * envs
    for i in range(12):
        mine = steps == i
        np.testing.assert_array_equal(batch.obs[mine], given[i][0][who[mine]])
        np.testing.assert_array_equal(batch.next_obs[mine], given[i][1][who[mine]])
    replay.close()


def test_an_array_that_is_written_over_is_noticed() -> None:
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
