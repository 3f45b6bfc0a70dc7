"""What can be wrong with a vector environment: what it says of itself, and whether it is true.

The decisive test is of NEXT_STEP: two copies play alike until an episode has ended, and are then
given different actions in the step that only resets. If they differ afterwards, it was played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.envs.checks import Checker, told
from penstock.envs.fits import misfit

Array = npt.NDArray[Any]
COUNT = 2


def check_vector(found: Checker, make: Callable[[int], VectorEnv], steps: int) -> None:
    """Add to `found` what is wrong with the vectors that `make` makes of a number of games."""
    vector = make(COUNT)
    try:
        sound = _check_face(found, vector) and _check_mode(found, vector)
        if not (sound and found.check_spaces("of the vector", _alone(vector))):
            return
    finally:
        if isinstance(vector, VectorEnv):
            found.close(vector)
    ended = _check_play(found, make, steps)
    if ended and not found.problems:
        _check_reset_row(found, make, ended)


def _check_face(found: Checker, vector: VectorEnv) -> bool:
    if not isinstance(vector, VectorEnv):
        found.add(
            "vector",
            f"a function that takes num_envs returned a {type(vector).__name__}; return a "
            "gymnasium.vector.VectorEnv, or do not take num_envs and return a single environment",
        )
        return False
    if vector.num_envs != COUNT:
        found.add("vector", f"num_envs={COUNT} made {vector.num_envs} games; make as many as asked")
        return False
    return True


def _check_mode(found: Checker, vector: VectorEnv) -> bool:
    mode = vector.metadata.get("autoreset_mode")
    if mode is AutoresetMode.NEXT_STEP:
        return True
    stated = f"says autoreset mode {mode.name}" if mode else "has no autoreset_mode in its metadata"
    found.add(
        "autoreset",
        f"the vector {stated}; an episode's final observation must not be lost, so reset in the "
        'step after its end and say metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}; a '
        "wrapper of the vector must pass the metadata on",
    )
    return False


def _alone(vector: VectorEnv) -> Any:
    """The spaces of a single environment, by the names that it has."""

    class Alone:
        observation_space = vector.single_observation_space
        action_space = vector.single_action_space

    return Alone()


def _check_play(found: Checker, make: Callable[[int], VectorEnv], steps: int) -> int:
    """Play, look at all that it returns, and twice, whether a seed decides it; returns the step
    that the first episode ended in, from 1, or 0."""
    vector, other = make(COUNT), make(COUNT)
    ended, over = 0, np.zeros(COUNT, np.bool_)
    try:
        for env in (vector, other):
            env.action_space.seed(7)
        shown, again = vector.reset(seed=7)[0], other.reset(seed=7)[0]
        if not _same(shown, again):
            _add_determinism(found, "their first observations")
        for step in range(1, steps + 1):
            action = vector.action_space.sample()
            results, others = vector.step(action), other.step(action)
            if not _look(found, vector, results, over):
                break
            if not all(_same(a, b) for a, b in zip(results[:4], others[:4], strict=True)):
                _add_determinism(found, f"what step {step} returned")
                break
            over = results[2] | results[3]
            ended = ended or (step if over.any() else 0)
    except Exception as error:
        found.add("step", f"playing the vector raised {told(error)}; correct it")
        return 0
    finally:
        found.close(vector)
        found.close(other)
    return ended


def _add_determinism(found: Checker, what: str) -> None:
    found.add(
        "determinism",
        f"two vectors that were reset with the same seed and given the same actions differ in "
        f"{what}; draw all chance from generators that reset(seed=...) seeds",
    )


def _look(found: Checker, vector: VectorEnv, results: Any, over: Array) -> bool:
    """Whether one step's results can be trained on."""
    if not (isinstance(results, tuple) and len(results) == 5):
        found.add(
            "step",
            "step did not return a tuple of five; return observations, rewards, terminated, "
            "truncated and infos",
        )
        return False
    observations, reward, terminated, truncated, _ = results
    if reason := misfit(vector.observation_space, observations):
        found.add(
            "observation",
            f"step returned observations{reason}; correct observation_space (of all games "
            "together), or what it returns",
        )
    rewards = np.asarray(reward)
    if rewards.shape != (COUNT,) or not np.isfinite(rewards).all():
        text = f"step returned the rewards {reward!r}; return an array of {COUNT} finite numbers"
        found.add("reward", text)
        return False
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        flags = np.asarray(flag)
        if flags.shape != (COUNT,) or flags.dtype != np.bool_:
            found.add("flags", f"step returned {name}={flag!r}; return an array of {COUNT} bools")
            return False
    if (rewards[over] != 0).any() or (terminated | truncated)[over].any():
        _add_autoreset(found, "it gave a reward or an end there")
    return True


def _check_reset_row(found: Checker, make: Callable[[int], VectorEnv], ended: int) -> None:
    """`ended`: the step that ends the first episode of a play with seed 7."""
    vectors = make(COUNT), make(COUNT)
    results: list[Any] = []
    try:
        for vector in vectors:
            vector.action_space.seed(7)
            vector.reset(seed=7)
        for _ in range(ended):
            action = vectors[0].action_space.sample()
            results = [vector.step(action) for vector in vectors]
        over = results[0][2] | results[0][3]
        for _ in range(5):  # of the actions that are ignored, some may be alike
            actions = [vectors[0].action_space.sample() for _ in vectors]
            for action in actions:
                action[~over] = actions[0][~over]
            if not np.array_equal(*actions):
                break
        after = [vector.step(action) for vector, action in zip(vectors, actions, strict=True)]
        if not all(_same(a, b) for a, b in zip(*(found[:4] for found in after), strict=True)):
            _add_autoreset(found, "what followed depended on the action")
    finally:
        for vector in vectors:
            found.close(vector)


def _add_autoreset(found: Checker, sign: str) -> None:
    found.add(
        "autoreset",
        "the vector says NEXT_STEP, where the step after an episode's end only resets: its action "
        f"is ignored, its reward 0; but {sign}; reset there, or remove the wrapper that resets in "
        "the same step",
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other)
