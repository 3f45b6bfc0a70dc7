"""Whether environments can be saved and restored exactly: a test with random actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.envs.checking.vector import draw_for
from penstock.envs.saved_state import NotSavableError
from penstock.envs.vector_env import BatchedEnv

Array = npt.NDArray[Any]
BEFORE, AFTER = 24, 40  # steps before the state is taken, and steps that are compared
SEEDS = 11, 23


def why_not_savable(make: Callable[[], BatchedEnv]) -> str:
    """Find out why environments cannot be saved and continue exactly.

    One vector is played, saved, and played on. A second one, seeded otherwise, is given the state
    and the same actions, and must return the same bits.

    Args:
        make: makes such a vector; one is open at a time.

    Returns:
        The reason, in words for a sentence; empty if the environments can be saved.
    """
    rng = np.random.default_rng(SEEDS[0])
    try:
        env = make()
        try:
            shown = _reset(env, SEEDS[0])
            env.state_dict()  # raises for most that cannot be saved, before they are played
            for _ in range(BEFORE):
                _step(env, draw_for(env, shown, rng), shown)
            state = to_bytes(env.state_dict())
            actions, seen = [], []
            for _ in range(AFTER):
                actions.append(draw_for(env, shown, rng))
                seen.append(_step(env, actions[-1], shown))
        finally:
            env.close()
        env = make()
        try:
            shown = _reset(env, SEEDS[1])
            env.load_state_dict(from_bytes(state))
            again = [_step(env, action, shown) for action in actions]
        finally:
            env.close()
    except NotSavableError as error:
        return str(error)
    except Exception as error:  # of the environment's own code, to which random actions are new
        return f"it raised {type(error).__name__} when this was tested"
    if again == seen:
        return ""
    number = [one == other for one, other in zip(seen, again, strict=True)].index(False) + 1
    return f"step {number} after it was restored returned something else"


def _reset(env: BatchedEnv, seed: int) -> Array:
    space = env.info.observation_space
    shown = np.zeros((env.count, *space.shape), space.dtype)
    env.reset_into(seed, shown)
    return shown


def _step(env: BatchedEnv, action: Array, shown: Array) -> tuple[bytes, ...]:
    """Step, write the next observations to ``observations``, and return all results as bytes."""
    results = env.step_into(action, shown)
    return tuple(np.asarray(values).tobytes() for values in (shown, *results))
