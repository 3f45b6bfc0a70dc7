"""The synthetic environment: its returns, sizes, step times and injected faults."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import snappy

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, find_bad_observation, make
from penstock.envs.games.synthetic import SyntheticVectorEnv

PASS_THROUGH = "gymnasium.wrappers:OrderEnforcing"


def game_of(count: int, **kwargs: Any) -> tuple[BatchedEnv, npt.NDArray[Any]]:
    game = make(EnvConfig(id="penstock/Synthetic-v0", kwargs=kwargs), count)
    space = game.info.observation_space
    out = np.zeros((count, *space.shape), space.dtype)
    game.reset_into(1, out)
    return game, out


def paying(observations: npt.NDArray[Any], n_actions: int) -> npt.NDArray[Any]:
    """The action that pays, read off the observations alone: whose part is bright."""
    flat = observations.reshape(len(observations), -1)
    bright: npt.NDArray[Any] = flat.argmax(axis=1)
    return bright * n_actions // flat.shape[1]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"obs_shape": [5], "n_actions": 5, "episode_steps": 9},
        {"obs_shape": [3, 4, 2], "n_actions": 7, "obs_dtype": "uint8", "episode_steps": 3},
        {"obs_shape": [2], "n_actions": 1, "truncate": True, "episode_steps": 1},
    ],
)
def test_optimal_play_earns_one_per_step_and_episodes_have_the_set_length(
    kwargs: dict[str, Any],
) -> None:
    game, out = game_of(6, **kwargs)
    steps, truncate = kwargs["episode_steps"], kwargs.get("truncate", False)
    for t in range(1, 4 * (steps + 1) + 1):
        reward, terminated, truncated = game.step_into(paying(out, kwargs["n_actions"]), out)
        step = t % (steps + 1)  # 0 is the step that resets
        np.testing.assert_array_equal(reward, np.full(6, float(step > 0)))
        np.testing.assert_array_equal(terminated, np.full(6, step == steps and not truncate))
        np.testing.assert_array_equal(truncated, np.full(6, step == steps and truncate))


def test_random_play_earns_one_nth_per_step() -> None:
    game, out = game_of(100, obs_shape=[4], n_actions=4, episode_steps=100)
    rng = np.random.default_rng(0)
    returns = sum(game.step_into(rng.integers(4, size=100), out)[0] for _ in range(100))
    assert np.mean(returns) == pytest.approx(25, abs=4 * np.sqrt(100 * 0.25 * 0.75 / 100))


def test_other_actions_earn_zero() -> None:
    game, out = game_of(8, n_actions=3)
    for _ in range(50):
        reward, _, _ = game.step_into((paying(out, 3) + 1) % 3, out)
        assert not reward.any()


def test_frames_compress_about_as_well_as_atari_frames() -> None:
    _, out = game_of(16, obs_shape=[4, 84, 84], obs_dtype="uint8", n_actions=6)
    assert set(np.unique(out)) == {0, 255}
    assert 12 < out.nbytes / len(snappy.compress(out.tobytes())) < 25


@pytest.mark.parametrize("busy", [False, True])
def test_step_takes_the_set_time_for_each_environment(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    game, out = game_of(10, step_time_s=0.002, busy=busy)
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    began_s = time.perf_counter()
    game.step_into(np.zeros(10, np.int64), out)
    assert slept_s == ([] if busy else [0.02])
    assert (time.perf_counter() - began_s >= 0.02) or not busy


def test_construction_takes_the_set_time() -> None:
    began_s = time.perf_counter()
    SyntheticVectorEnv(1, construct_time_s=0.05)
    assert time.perf_counter() - began_s >= 0.05


@pytest.mark.parametrize("wrappers", [[], [PASS_THROUGH]])
def test_environment_crashes_at_the_set_step(wrappers: list[Any]) -> None:
    env = EnvConfig(id="penstock/Synthetic-v0", kwargs={"crash_at_step": 3}, wrappers=wrappers)
    game = make(env, 2)
    out = np.zeros((2, 4), np.float32)
    game.reset_into(0, out)
    for _ in range(2):
        game.step_into(np.zeros(2, np.int64), out)
    with pytest.raises(RuntimeError, match="crash_at_step"):
        game.step_into(np.zeros(2, np.int64), out)


def test_environment_returns_nan_at_the_set_step() -> None:
    game, out = game_of(2, nan_at_step=2)
    found = []
    for _ in range(3):
        game.step_into(np.zeros(2, np.int64), out)
        found.append(find_bad_observation(out[None]))
    assert found == [None, "nan at [0] of environment 0's observation in row 0", None]


SCRIPT = """
import sys, numpy as np
from penstock.envs.games.synthetic import SyntheticVectorEnv
env = SyntheticVectorEnv(2, **{sys.argv[1]: 2})
env.reset(seed=0)
for _ in range(2):
    print("step", flush=True)
    env.step(np.zeros(2, int))
print("went on")
"""


def test_environment_kills_its_process_at_the_set_step() -> None:
    command = [sys.executable, "-c", SCRIPT, "exit_at_step"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "step\nstep\n")


def test_environment_hangs_at_the_set_step() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "hang_at_step"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert [process.stdout.readline() for _ in range(2)] == ["step\n", "step\n"]
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.kill()
    assert process.communicate()[0] == ""


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"obs_dtype": "float16"}, "obs_dtype is float16; it must be float32 or uint8"),
        ({"obs_dtype": "uint8", "nan_at_step": 1}, "nan_at_step needs obs_dtype float32"),
        ({"obs_shape": [2, 2], "n_actions": 5}, "n_actions 5 must be from 1 to the 4 values"),
        ({"n_action": 5}, "there is no option n_action; the nearest is n_actions"),
    ],
)
def test_wrong_options_are_refused(kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make(EnvConfig(id="penstock/Synthetic-v0", kwargs=kwargs), 2)
