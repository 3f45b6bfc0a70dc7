"""Which form of an environment is chosen, and the errors if none can be made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import make, probe
from penstock.envs.make import AFTER_OTHERS, FirstIndex, first_index
from user_shop import config, shopping


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from shopping(tmp_path, monkeypatch)


def one_step(env: EnvConfig, action: int) -> tuple[list[float], list[float]]:
    """First values of the observations, and rewards, of two environments after one step."""
    game = make(env, 2)
    space = game.info.observation_space
    out = np.zeros((2, *space.shape), space.dtype)
    game.reset_into(0, out)
    reward, _, _ = game.step_into(np.full(2, action, np.int32), out)
    game.close()
    return out.reshape(2, -1)[:, 0].tolist(), reward.tolist()


def test_fastest_vector_form_is_chosen_and_described() -> None:
    assert probe(config("CartPole-v1")).how == "CartPole-v1 is stepped by its own vector form"
    assert probe(config("ALE/Pong-v5")).how == "ALE/Pong-v5 is stepped by ale_py.AtariVectorEnv"
    assert probe(config("Acrobot-v1")).how == (
        "Acrobot-v1 is stepped one by one, by gymnasium's SyncVectorEnv"
    )
    assert "own vector form" in probe(config("penstock/Synthetic-v0")).how


@pytest.mark.parametrize(
    ("env_id", "form"),
    [("CartPole-v1", "its own vector form"), ("ALE/Pong-v5", "ale_py.AtariVectorEnv")],
)
def test_wrappers_disable_the_own_vector_form_with_a_note(env_id: str, form: str) -> None:
    wrapped = make(config(env_id, {"gymnasium.wrappers:ClipReward": {"max_reward": 0.5}}), 2)
    assert wrapped.info.how == (
        f"{env_id} is stepped one by one, by gymnasium's SyncVectorEnv: env.wrappers turn {form} "
        "off, which is faster"
    )
    assert isinstance(wrapped._vector, SyncVectorEnv)
    wrapped.close()


def test_ids_of_old_atari_environments_are_recognised() -> None:
    """With wrappers of the user's, who sees to it that frames are what can be learnt from."""
    info = probe(config("PongNoFrameskip-v4", {"gymnasium.wrappers:ClipReward": {"max_reward": 1}}))
    assert info.observation_space.shape == (210, 160, 3)
    assert "one by one" in info.how
    assert probe(config("PongNoFrameskip-v4", obs_type="ram")).observation_space.shape == (128,)


@pytest.mark.parametrize(
    "env_id",
    ["PongNoFrameskip-v4", "Pong-v4", "Pong-v0", "PongDeterministic-v4", "ale_py:Pong-v0"],
)
def test_old_atari_id_without_wrappers_is_refused_with_the_new_id(env_id: str) -> None:
    """Raw frames of 210x160 train, badly: CleanRL and Stable-Baselines3 wrap these ids."""
    with pytest.raises(UserError, match=rf"^environment {env_id} is an old .* train ALE/Pong-v5, "):
        probe(config(env_id))


def test_custom_environment_with_an_atari_name_is_not_atari(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe(config("ALE/Tennis-v5"))  # so that Atari is registered
    own = EnvSpec("Tennis-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    monkeypatch.setitem(gymnasium.registry, "Tennis-v0", own)
    assert probe(config("Tennis-v0")).observation_space.shape == (4,)


def test_env_info_has_spaces_and_frames_per_step() -> None:
    info = probe(config("ALE/Pong-v5", frameskip=3))
    assert info.observation_space.shape == (4, 84, 84)
    assert info.observation_space.dtype == np.uint8
    assert isinstance(info.action_space, gymnasium.spaces.Discrete)
    assert info.action_space.n == 6
    assert info.frames_per_step == 3
    assert probe(config("CartPole-v1")).frames_per_step == 1


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("env_id", ["shopping:Shop-v0", "shopping:shop", "shopping:Shop"])
def test_custom_environment_is_made_by_id_and_by_function(env_id: str) -> None:
    assert one_step(config(env_id, price=3), action=1) == ([11, 11], [3, 3])
    assert "SyncVectorEnv" in probe(config(env_id)).how
    space = probe(config(env_id)).action_space
    assert isinstance(space, gymnasium.spaces.Discrete)
    assert space.start == 10


@pytest.mark.usefixtures("shop")
def test_a_users_function_that_takes_num_envs_is_its_own_vector_form() -> None:
    assert one_step(config("shopping:shops", price=3), action=2) == ([12, 12], [3, 3])
    assert probe(config("shopping:shops")).how == "shopping:shops is stepped by its own vector form"


@pytest.mark.usefixtures("shop")
def test_next_step_autoreset_is_chosen_from_several_modes() -> None:
    assert one_step(config("shopping:shops_of_any_mode"), action=0) == ([10, 10], [2, 2])


@pytest.mark.usefixtures("shop")
def test_wrappers_are_applied_inside_out_with_their_options() -> None:
    wrapped = config(
        "shopping:shop",
        {"shopping:Doubled": {"times": 5}},
        {"gymnasium.wrappers:ClipReward": {"max_reward": 7}},
        "shopping:Doubled",
        price=3,
    )
    assert one_step(wrapped, action=0)[1] == [14, 14]


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_actions_of_a_box_run_from_minus_1_to_1(dtype: str) -> None:
    game = make(config("shopping:box", dtype=dtype), 3)
    out = np.zeros((3, 2))
    game.reset_into(0, out)
    actions = np.array([[-1, -1], [1, 1], [0.2, 1.0000001]], np.float32)
    before = actions.copy()
    game.step_into(actions, out)
    np.testing.assert_allclose(out, np.array([[-1, 0], [4, 1], [-1 + 1.2 * 2.5, 1]]), rtol=1e-6)
    np.testing.assert_array_equal(actions, before)
    assert out[1].tolist() == [4, 1]  # the bounds themselves are exact
    game.close()


def test_pendulum_equals_a_single_environment_with_scaled_actions() -> None:
    game, single = make(config("Pendulum-v1"), 1), gymnasium.make("Pendulum-v1")
    out = np.zeros((1, 3), np.float32)
    game.reset_into(5, out)
    np.testing.assert_array_equal(out[0], single.reset(seed=5)[0])
    for value in (0.5, -1.0, 0.3):
        reward, _, _ = game.step_into(np.full((1, 1), value, np.float32), out)
        obs, expected, *_ = single.step(np.array([2 * value], np.float32))
        np.testing.assert_allclose(out[0], obs, rtol=1e-6)
        assert reward[0] == pytest.approx(expected, rel=1e-6)
    game.close()


def test_wrapper_makes_unsupported_observations_fit() -> None:
    lake = config("FrozenLake-v1", "gymnasium.wrappers:FlattenObservation")
    assert probe(lake).observation_space.shape == (16,)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "penstock/Synthetic-v0"])
def test_equal_seeds_repeat_episodes_and_other_seeds_do_not(env_id: str) -> None:
    def firsts(seed: int) -> list[float]:
        game = make(config(env_id, **kwargs), 8)
        out = np.zeros((8, *game.info.observation_space.shape), np.float32)
        game.reset_into(seed, out)
        return [float(value) for value in out.ravel()]

    kwargs = {"n_actions": 4} if "Synthetic" in env_id else {}
    assert firsts(3) == firsts(3)
    assert firsts(3) != firsts(3 + 8)
    assert firsts(2**63) == firsts(2**63)


class Informs(gymnasium.Env[Any, Any]):
    """Says who won, which is None before the end, and which moves are legal, which vary."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        legal = np.arange(self.np_random.integers(1, 5))
        over = bool(self.np_random.random() < 0.3)
        info = {"winner": 1 if over else None, "legal": legal}
        return np.zeros(2, np.float32), 0.0, over, False, info


@pytest.mark.parametrize("threads", [1, 2])
def test_infos_may_differ_between_environments(threads: int) -> None:
    game = make(config(f"{__name__}:Informs"), 4, threads)
    out = np.zeros((4, 2), np.float32)
    game.reset_into(0, out)
    ends = sum(int(game.step_into(np.zeros(4, np.int32), out)[1].sum()) for _ in range(40))
    assert ends > 20
    game.close()


def test_importing_envs_imports_no_torch() -> None:
    code = "import sys, penstock.envs; sys.exit('torch' in sys.modules or 'ale_py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("threads", "calls"), [(1, 1), (2, 2)])  # threads report each call, too
def test_each_constructor_and_each_reset_is_progress(threads: int, calls: int) -> None:
    beats: list[None] = []
    game = make(EnvConfig(id="broken_envs:Sound"), 3, threads, beat=lambda: beats.append(None))
    assert len(beats) == 3
    game.reset_into(0, out := np.zeros((3, 2), np.float32))
    assert len(beats) == 3 + 3 * calls
    for _ in range(6):  # the sixth only resets
        before = len(beats)
        game.step_into(np.zeros(3, np.int32), out)
    assert len(beats) == before + 3 * calls
    game.close()


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("name", ["numbered", "Numbered", "numbered_vector"])
def test_function_with_an_index_gets_the_number_of_each_environment(name: str) -> None:
    game = make(config(f"shopping:{name}"), 3, first=first_index(actor=2, envs=3))
    out = np.zeros((3, 2))
    game.reset_into(0, out)
    assert game.step_into(np.zeros(3, np.int32), out)[0].tolist() == [6, 7, 8]
    game.close()


@pytest.mark.usefixtures("shop")
def test_configured_index_is_given_to_all_environments() -> None:
    assert one_step(config("shopping:numbered", index=5), 0)[1] == [5, 5]


def test_environment_indices_of_actors_are_unique() -> None:
    others = range(FirstIndex.COMMAND, AFTER_OTHERS)
    for envs in (24, 300):
        numbers = [first_index(actor, envs) + i for actor in range(500) for i in range(envs)]
        assert len(set(numbers)) == len(numbers)
        assert not set(numbers) & set(others)
    assert first_index(0, 24) == 0
    assert first_index(3, 24) == 72


@pytest.mark.usefixtures("shop")
def test_metadata_of_none_is_treated_as_empty() -> None:
    make(config("shopping:Unnamed"), 2).close()
