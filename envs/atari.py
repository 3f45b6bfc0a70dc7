"""Atari through `ale_py.AtariVectorEnv`: emulation and preprocessing in C++, rewards raw.

Its defaults differ from those of `gymnasium.make` and of `make_vec`, so every option has a value
here. An id's registered options (sticky actions at 0.25) come over these, and env.kwargs over both.
Bad values are refused here because several of them end the process in C++.

Observations are uint8 [stack_num, img_height, img_width], with a last axis of 3 if not `grayscale`.
ale-py does not look at the frame that ends an episode, so the newest frame of a final observation
is up to one step older than it should be; frames of a stack from before an episode are zeros.
With `episodic_life` lives are episodes (`penstock.envs.lives`), and returns those of whole games.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode

from penstock.configs.errors import UserError
from penstock.core.loading import check_keywords, explaining_errors

if TYPE_CHECKING:
    from ale_py import AtariVectorEnv
    from gymnasium.envs.registration import EnvSpec

    from penstock.configs.sections import EnvConfig

PREFIX = "ALE/"
# Ids of games before ale-py's vector environment, such as PongNoFrameskip-v4.
_OLD_ID = re.compile(r"(\w+?)(Deterministic|NoFrameskip)?-v[04]")

# Every option with its value where neither an id nor the config says another.
OPTIONS: dict[str, int | float | bool] = {
    "frameskip": 4,
    "maxpool": True,
    "repeat_action_probability": 0.25,
    "full_action_space": False,
    "max_num_frames_per_episode": 108_000,
    "noop_max": 30,
    "use_fire_reset": True,
    "episodic_life": False,
    "life_loss_info": False,
    "reward_clipping": False,
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "stack_num": 4,
}

# The least values of some whole numbers; it is 1 for the others.
_AT_LEAST = {"noop_max": 0, "thread_affinity_offset": -1}

# Options that Penstock passes itself, each with what to set instead.
_RESERVED = {
    "game": "set env.id",
    "num_envs": "set actors.envs",
    "num_threads": "set actors.env_threads",
    "batch_size": "all environments of an actor are stepped together",
    "autoreset_mode": "it is always NEXT_STEP",
    "continuous": "only the discrete actions are supported",
    "continuous_action_threshold": "only the discrete actions are supported",
}

# Options that must stay false, with the reason and what to set instead.
_UNSUITED = {
    "reward_clipping": "it clips the shown returns too; set algo.reward_clip=1.0, which clips for "
    "the learner only",
    "life_loss_info": "ale-py does not reset after a lost life then; set episodic_life=true",
}


def register(purpose: str) -> None:
    """Make gymnasium register the ids `ALE/...`.

    Raises:
        UserError: if ale-py cannot be imported; its sentence begins with ``purpose``.
    """
    with explaining_errors(purpose):
        importlib.import_module("ale_py")


def refuse_raw(name: str, spec: EnvSpec | None, env: EnvConfig) -> None:
    """Raise UserError for an old id of a game, such as `PongNoFrameskip-v4`.

    Such an environment neither scales nor stacks frames. It is accepted if the config has wrappers,
    which may do so, or if its observations are the emulator's memory.

    Args:
        name: the environment's id in gymnasium's registry.
        spec: its registration, if it has one.
        env: the config's section.
    """
    old_id = _OLD_ID.fullmatch(name)
    if not old_id:
        return
    new_id = f"{PREFIX}{old_id[1]}-v5"
    is_others = spec is not None and not str(spec.entry_point).startswith("ale_py")
    if new_id not in gymnasium.registry or is_others:
        return

    is_processed = env.wrappers or env.kwargs.get("obs_type") == "ram"
    if spec is None or not is_processed:
        raise UserError(
            f"environment {env.id} is an old form of {new_id} that leaves it to wrappers to skip, "
            f"scale and stack frames; train {new_id}, which does, or name wrappers in env.wrappers"
        )


def options(name: str, registered: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all options of an Atari environment, checked.

    Args:
        name: id of the environment.
        registered: its options in gymnasium's registry, with `game`.
        kwargs: the options of the config (`env.kwargs`).

    Raises:
        UserError: for an option that does not exist or is set elsewhere, and for a bad value.
    """
    from ale_py import AtariVectorEnv

    purpose = f"environment {name}"
    check_keywords(AtariVectorEnv, kwargs, purpose, reserved=_RESERVED)
    for option, value in kwargs.items():
        _check(purpose, option, value)
    return {**OPTIONS, **registered, **kwargs}


def make_vector(options: Mapping[str, Any], count: int, threads: int) -> AtariVectorEnv:
    """Make `count` games on `threads` threads of their own, without `episodic_life`.

    Args:
        options: of `options`.
        count: number of games.
        threads: number of ale-py's threads.
    """
    from ale_py import AtariVectorEnv

    return AtariVectorEnv(
        num_envs=count,
        num_threads=threads,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        **{**options, "episodic_life": False},
    )


def _check(purpose: str, option: str, value: Any) -> None:
    """Raise UserError for a bad value of an option; its sentence begins with ``purpose``."""
    if option in _UNSUITED and value is not False:
        raise UserError(f"{purpose}: {option} must be false, as {_UNSUITED[option]}")

    default = OPTIONS.get(option)
    if isinstance(default, bool):
        fits = isinstance(value, bool)
        rule = "true or false"
    elif isinstance(default, float):
        fits = type(value) in (int, float) and 0 <= value <= 1
        rule = "a probability between 0 and 1"
    else:
        least = _AT_LEAST.get(option, 1)
        fits = type(value) is int and value >= least
        rule = f"a whole number of at least {least}"
    if not fits:
        raise UserError(f"{purpose}: {option} is {value!r}; it must be {rule}")
