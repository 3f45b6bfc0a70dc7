"""`Replay.add` on real environments, and with what nobody should pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from ale_py import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from penstock.replay import Replay, ReplayError
from penstock.replay.words import PARTS

ENVS = 3


def cartpole(mode: AutoresetMode) -> SyncVectorEnv:
    make = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=12)] * ENVS
    return SyncVectorEnv(make, autoreset_mode=mode)


def stacked_cartpole(mode: AutoresetMode) -> SyncVectorEnv:
    def make() -> Any:
        return FrameStackObservation(gymnasium.make("CartPole-v1", max_episode_steps=12), 4)

    return SyncVectorEnv([make] * ENVS, autoreset_mode=mode)


def pong(mode: AutoresetMode) -> AtariVectorEnv:
    return AtariVectorEnv(
        "pong", ENVS, num_threads=1, max_num_frames_per_episode=80, autoreset_mode=mode
    )


def play(env: Any, replay: Replay, steps: int, seed: int) -> list[dict[str, Any]]:
    """Random steps, added as they came; returns what each decision was, worked out by hand."""
    rng = np.random.default_rng(seed)
    same_step = env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    obs, _ = env.reset(seed=seed)
    over, decisions = np.zeros(ENVS, bool), []
    for _ in range(steps):
        action = rng.integers(0, 2, ENVS)
        after, reward, terminated, truncated, info = env.step(action)
        replay.add(
            obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated,
            next_obs=after, info=info,
        )  # fmt: skip
        for i in range(ENVS):
            if over[i] and not same_step:
                continue  # this step only reset
            ended = bool(terminated[i] or truncated[i])
            final = info["final_obs"][i] if ended and same_step else after[i]
            decisions.append(
                {
                    "obs": obs[i].copy(),
                    "next_obs": np.array(final),
                    "reward": float(reward[i]),
                    "terminated": bool(terminated[i]),
                    "truncated": bool(truncated[i] and not terminated[i]),
                }
            )
        over = terminated | truncated
        obs = after
    env.close()
    return decisions


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize(
    ("make", "options"), [(cartpole, {}), (stacked_cartpole, {"frame_stack": 4}), (pong, {}),
                          (pong, {"frame_stack": 4})]
)  # fmt: skip
def test_every_transition_of_a_real_environment_comes_back(
    make: Any, options: dict[str, Any], mode: AutoresetMode
) -> None:
    env = make(mode)
    replay = Replay.from_env(env, 10_000, unroll=16, **options)
    decisions = play(env, replay, 100, seed=1)
    assert len(replay) == len(decisions)
    assert sum(d["truncated"] or d["terminated"] for d in decisions) > 10
    # Rows lie in the order in which they were added.
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    for key in ("obs", "next_obs", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(batch[key], [d[key] for d in decisions], key)
    np.testing.assert_array_equal(batch.discount, np.float32(0.99) * ~batch.terminated)
    replay.close()


def test_a_single_environment_is_reset_by_hand() -> None:
    env = FrameStackObservation(gymnasium.make("CartPole-v1", max_episode_steps=9), 3)
    replay = Replay.from_env(env, 500, frame_stack=3)
    want = []
    for seed in range(30):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            action = env.action_space.sample()
            after, reward, terminated, truncated, info = env.step(action)
            replay.add(
                obs=obs, action=action, reward=reward, terminated=terminated,
                truncated=truncated, next_obs=after, info=info,
            )  # fmt: skip
            want.append((obs, after))
            obs, over = after, terminated or truncated
    rows = np.flatnonzero(replay.table.valid)
    batch = replay.gather.batch(rows, None)
    assert len(rows) == len(want)
    np.testing.assert_array_equal(batch.obs, [obs for obs, _ in want])
    np.testing.assert_array_equal(batch.next_obs, [after for _, after in want])


# ------------------------------------------------------------------------------- frame stacks


def stacks(count: int, envs: int = 1, frame: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    """[count, envs, 4, frame]: stacks of consecutive random frames."""
    frames = np.random.default_rng(seed).integers(0, 255, (count + 3, envs, frame), np.uint8)
    return np.stack([frames[i : i + 4].swapaxes(0, 1) for i in range(count)])


def stacking(envs: int = 1, frame: int = 8, **options: Any) -> Replay:
    columns = {"obs": (np.uint8, (4, frame)), "action": (np.int64, ())}
    return Replay(columns, 100 * envs, frame_stack=4, envs=envs, unroll=10, **options)


def row(obs: Any, after: Any, envs: int = 1, **changes: Any) -> dict[str, Any]:
    flags = np.zeros(envs, bool)
    return {
        "obs": obs, "next_obs": after, "action": np.arange(envs), "reward": np.zeros(envs),
        "terminated": flags, "truncated": flags,
    } | changes  # fmt: skip


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


def test_wrong_stacks_of_a_large_vector_are_found_within_as_many_steps_as_parts() -> None:
    envs, frame = 200, 84 * 84
    replay, s = stacking(envs=envs, frame=frame), stacks(PARTS + 2, envs=envs, frame=frame)
    s[1:, 77, 2, 4000:] ^= 1  # where a shift has the newest frame of the one before
    refused = []
    for i in range(PARTS):
        try:
            replay.add(**row(s[i], s[i + 1], envs))
        except ReplayError as error:
            refused.append(str(error))
    assert refused
    assert all("environment 77 is no shift" in text for text in refused)
    replay.close()


def test_an_array_that_is_written_over_is_noticed() -> None:
    """As environments do that always return the same array."""
    replay, s = stacking(), stacks(6)
    buffer = s[0].copy()
    with pytest.raises(ReplayError, match="no shift of obs"):
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


# ------------------------------------------------------------------------------- bad input


@pytest.fixture
def plain() -> Replay:
    return Replay({"obs": (np.float32, (4,)), "action": (np.int64, ())}, 100, envs=2)


GOOD = row(np.zeros((2, 4), np.float32), np.zeros((2, 4), np.float32), 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"obs": np.zeros((2, 5), np.float32)}, ["obs", "[2, 5]", "[2, 4]"]),
        ({"next_obs": np.zeros((3, 4), np.float32)}, ["next_obs", "[3, 4]", "[2, 4]"]),
        ({"action": np.zeros(2)}, ["action", "float64", "int64"]),
        ({"reward": np.zeros((2, 1))}, ["reward", "[2, 1]", "[2]"]),
        ({"terminated": np.zeros(2)}, ["terminated", "float64", "bool"]),
        ({"truncated": False}, ["truncated", "[]", "[2]"]),
        ({"value": np.zeros(2)}, ["value", "[]"]),
        ({"priority": [np.nan, 1.0]}, ["priority", "nan"]),
        ({"priority": [1.0]}, ["priority", "2 numbers"]),
        (
            {"terminated": np.array([True, False]), "info": {"final_obs": np.zeros((2, 4))}},
            ["final_obs", "autoreset='same_step'"],
        ),
    ],
)
def test_bad_input_is_named_and_stores_nothing(
    plain: Replay, change: dict[str, Any], words: list[str]
) -> None:
    for _ in range(2):
        with pytest.raises(ReplayError) as refused:
            plain.add(**(GOOD | change))
        assert all(word in str(refused.value) for word in words), refused.value
    assert plain.stats()["inserted"] == 0
    plain.add(**GOOD)
    assert len(plain) == 2


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (None, ["environment 1", "no final_obs", "info="]),
        ({}, ["environment 1", "no final_obs"]),
        ({"final_obs": np.zeros((2, 3), np.float32)}, ["final_obs", "[3]"]),
        (
            {"final_obs": np.zeros((2, 4)), "_final_obs": np.array([True, False])},
            ["environment 1", "_final_obs"],
        ),
    ],
)
def test_same_step_needs_final_observations(info: Any, words: list[str]) -> None:
    columns = {"obs": (np.float32, (4,)), "action": (np.int64, ())}
    replay = Replay(columns, 100, envs=2, autoreset="same_step")
    with pytest.raises(ReplayError) as refused:
        replay.add(**(GOOD | {"truncated": np.array([False, True]), "info": info}))
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(replay) == 0


def test_further_columns_are_declared_and_come_back() -> None:
    columns = {"obs": (np.float32, (2,)), "action": (int, ()), "logp": (np.float32, ())}
    replay = Replay(columns | {"memory": {"h": (np.float32, (3,)), "c": (np.int8, ())}}, 10)
    step: dict[str, Any] = {"obs": [1, 2], "next_obs": [2, 3], "action": 1, "reward": 1.0}
    flags: dict[str, Any] = {"terminated": False, "truncated": False}
    memory = {"h": [1, 2, 3], "c": 4}
    replay.add(**step, **flags, logp=-0.5, memory=memory)
    with pytest.raises(ReplayError, match="logp"):
        replay.add(**step, **flags, memory=memory)
    batch = replay.sample(1)
    assert batch.logp.tolist() == [-0.5]
    assert batch.memory["h"].tolist() == [[1, 2, 3]]
    assert batch.memory["c"].tolist() == [4]
