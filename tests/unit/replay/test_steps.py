"""`Replay.add` with real environments, and with invalid arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from ale_py import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from penstock.replay import Replay, ReplayError
from replay_rows import row

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
def test_every_transition_of_a_real_environment_is_stored(
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
def test_invalid_step_is_refused_by_name_and_not_stored(
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
def test_same_step_autoreset_needs_final_observations(info: Any, words: list[str]) -> None:
    columns = {"obs": (np.float32, (4,)), "action": (np.int64, ())}
    replay = Replay(columns, 100, envs=2, autoreset="same_step")
    with pytest.raises(ReplayError) as refused:
        replay.add(**(GOOD | {"truncated": np.array([False, True]), "info": info}))
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(replay) == 0


def test_declared_extra_columns_are_stored() -> None:
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


def test_arrays_of_any_order_and_fitting_dtype_are_stored_equally() -> None:
    """Whatever came before: some are copied as wide words, some must be cast."""
    envs = 40
    replay = Replay({"obs": (np.float32, (4,)), "action": (np.int64, ())}, 100 * envs, envs=envs)
    values = np.random.default_rng(0).integers(-9, 9, (7, envs, 4)).astype(np.float32)
    forms: list[Callable[[Any], Any]] = [
        lambda a: a,
        lambda a: a.astype(np.float64),
        lambda a: a,
        lambda a: np.asfortranarray(a),
        lambda a: a.tolist(),
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a,
    ]
    for i, form in enumerate(forms):
        step = row(form(values[i]), form(-values[i]), envs, action=np.arange(envs) + 100 * i)
        replay.add(**step)
    batch = replay.gather.batch(np.flatnonzero(replay.table.valid), None)
    steps, who = np.divmod(batch.action, 100)
    np.testing.assert_array_equal(batch.obs, values[steps, who])
    np.testing.assert_array_equal(batch.next_obs, -values[steps, who])
    assert len(steps) == 7 * envs
