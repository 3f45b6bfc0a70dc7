"""Whether environments can be saved and restored exactly: a test with random actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.envs.checking.vector import draw_for
from penstock.envs.saved_state import NotSavableError
from penstock.envs.vector_env import BatchedEnv

Array = npt.NDArray[Any]
StepBytes = tuple[bytes, ...]
"""Observations, reward, terminated and truncated of a step, as bytes."""

# Steps that are played before the state is saved.
STEPS_BEFORE = 24
# Steps that are compared afterwards.
STEPS_COMPARED = 40
# The second environments begin otherwise, so that only the state can make them alike.
FIRST_SEED = 11
SECOND_SEED = 23


def why_not_savable(make: Callable[[], BatchedEnv]) -> str:
    """Find out why environments cannot be saved and continue exactly.

    One vector is played, saved, and played on. A second one, seeded otherwise, is given the state
    and the same actions, and must return the same bits.

    Args:
        make: makes such a vector; one is open at a time.

    Returns:
        The reason, in words for a sentence; empty if the environments can be saved.
    """
    try:
        original = _play_and_save(make)
        restored_results = _play_restored(make, original)
    except NotSavableError as error:
        return str(error)
    # Random actions are new to the environment's own code, which may raise anything.
    except Exception as error:
        return f"it raised {type(error).__name__} when this was tested"

    pairs = zip(original.results, restored_results, strict=True)
    for number, (result, restored_result) in enumerate(pairs, 1):
        if result != restored_result:
            return f"step {number} after it was restored returned something else"
    return ""


class _PlayedOn(NamedTuple):
    """A saved vector, and how it went on."""

    state: npt.NDArray[np.uint8]
    """The saved state, of `to_bytes`."""
    actions: list[Array]
    """The actions of each later step, ``[count, *shape]``."""
    results: list[StepBytes]


def _play_and_save(make: Callable[[], BatchedEnv]) -> _PlayedOn:
    """Play a vector, save it, and play on."""
    rng = np.random.default_rng(FIRST_SEED)
    env = make()
    try:
        observations = _reset(env, FIRST_SEED)
        # It raises for most that cannot be saved, before they are played.
        env.state_dict()
        for _ in range(STEPS_BEFORE):
            _step(env, draw_for(env, observations, rng), observations)

        original = _PlayedOn(to_bytes(env.state_dict()), actions=[], results=[])
        for _ in range(STEPS_COMPARED):
            action = draw_for(env, observations, rng)
            original.actions.append(action)
            original.results.append(_step(env, action, observations))
    finally:
        env.close()
    return original


def _play_restored(make: Callable[[], BatchedEnv], original: _PlayedOn) -> list[StepBytes]:
    """Returns the results of a second vector, which is given the saved state and the actions."""
    env = make()
    try:
        observations = _reset(env, SECOND_SEED)
        env.load_state_dict(from_bytes(original.state))
        return [_step(env, action, observations) for action in original.actions]
    finally:
        env.close()


def _reset(env: BatchedEnv, seed: int) -> Array:
    """Reset, and return the first observations, ``[count, *shape]``, in an array for later ones."""
    space = env.info.observation_space
    observations = np.zeros((env.count, *space.shape), space.dtype)
    env.reset_into(seed, observations)
    return observations


def _step(env: BatchedEnv, action: Array, observations: Array) -> StepBytes:
    """Step, write the next observations to ``observations``, and return all results as bytes."""
    results = env.step_into(action, observations)
    return tuple(np.asarray(values).tobytes() for values in (observations, *results))
