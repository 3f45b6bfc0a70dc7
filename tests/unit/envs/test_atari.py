"""Options of ale-py's vector environment."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from ale_py import AtariVectorEnv

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import atari, make, probe

# Options that are no preprocessing: threads, and what Penstock gives or refuses.
NOT_PREPROCESSING = {"self", "thread_affinity_offset", *atari._RESERVED}


def rewards(game_id: str, **kwargs: Any) -> set[int]:
    game = make(EnvConfig(id=game_id, kwargs=kwargs), 1)
    out = np.zeros((1, *game.info.observation_space.shape), np.uint8)
    game.reset_into(1, out)
    rng = np.random.default_rng(0)
    return {int(game.step_into(rng.integers(9, size=1), out)[0][0]) for _ in range(200)}


def test_every_option_of_the_library_has_a_default() -> None:
    theirs = set(inspect.signature(AtariVectorEnv.__init__).parameters)
    assert set(atari.OPTIONS) == theirs - NOT_PREPROCESSING


def test_the_pong_preset_sets_every_preprocessing_option() -> None:
    env = resolve("pong").env
    assert set(env.kwargs) == set(atari.OPTIONS)
    assert probe(env).frames_per_step == env.kwargs["frameskip"]


def test_default_rewards_are_unclipped() -> None:
    assert rewards("ALE/MsPacman-v5") == {0, 10}


def test_config_overrides_the_registered_id_which_overrides_defaults() -> None:
    registered = {"game": "pong", "frameskip": 5, "repeat_action_probability": 0.1}
    options = atari.options("ALE/Pong-v5", registered, {"frameskip": 2})
    assert options == {**atari.OPTIONS, **registered, "frameskip": 2}


@pytest.mark.slow
def test_thread_count_follows_the_actor_and_changes_no_result() -> None:
    def last(threads: int) -> Any:
        game = make(EnvConfig(id="ALE/Pong-v5"), 3, threads)
        out = np.zeros((3, 4, 84, 84), np.uint8)
        game.reset_into(9, out)
        for action in range(6):
            game.step_into(np.full(3, action, np.int32), out)
        game.close()
        return out

    np.testing.assert_array_equal(last(1), last(2))


@pytest.mark.parametrize(
    ("kwargs", "shape"),
    [
        ({"stack_num": 1}, (1, 84, 84)),
        ({"img_height": 40, "img_width": 60}, (4, 40, 60)),
        ({"grayscale": False, "stack_num": 2}, (2, 84, 84, 3)),
    ],
)
def test_observation_layout_follows_the_options(
    kwargs: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert probe(EnvConfig(id="ALE/Pong-v5", kwargs=kwargs)).observation_space.shape == shape


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"frame_skip": 4}, "there is no option frame_skip; the nearest is frameskip"),
        ({"stack_num": 0}, "stack_num is 0; it must be a whole number of at least 1"),
        ({"img_width": 84.0}, "img_width is 84.0; it must be a whole number"),
        ({"noop_max": -1}, "noop_max is -1; it must be a whole number of at least 0"),
        ({"maxpool": 1}, "maxpool is 1; it must be true or false"),
        ({"repeat_action_probability": 25}, "it must be a probability between 0 and 1"),
        ({"reward_clipping": True}, "reward_clipping must be false, .*set algo.reward_clip=1.0"),
        ({"life_loss_info": True}, "life_loss_info must be false, .*set episodic_life=true"),
        ({"num_threads": 2}, "num_threads is not set here; set actors.env_threads"),
        ({"batch_size": 2}, "batch_size is not set here; all environments"),
        ({"autoreset_mode": "SameStep"}, "autoreset_mode is not set here; it is always NEXT_STEP"),
        ({"continuous": True}, "continuous is not set here; only the discrete actions"),
        ({"game": "pong"}, "game is not set here; set env.id"),
    ],
)
def test_options_that_would_end_the_process_or_mislead_are_refused(
    kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"environment ALE/Pong-v5: .*{sentence}"):
        make(EnvConfig(id="ALE/Pong-v5", kwargs=kwargs), 1)
