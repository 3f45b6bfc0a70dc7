"""One vector of games, with one meaning of a step whatever makes them.

Invariants:
- NEXT_STEP autoreset. When a step ends environment i's episode, the observation it writes is the
  episode's final one. The *next* step only resets i: its action is ignored, its reward 0, both
  flags False, and the observation it writes is the first of the next episode.
- `terminated` and `truncated` are never both set: where a game says both, terminated wins.
- Rewards are raw. Actions count from 0, wherever the game's own begin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.configs.errors import UserError

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

SEEDS = 2**30  # ale-py takes int32, and gives environment i of a vector seed + i


@dataclass(frozen=True)
class GameInfo:
    """What a game looks like to a policy, and how it came about."""

    observation_space: Box
    """Of one environment."""
    action_space: Discrete
    """Of one environment; policies choose 0 ... n - 1, also where the game's `start` is not 0."""
    frames_per_step: int
    """Emulator frames in one agent step; 1 where there is no emulator."""
    how: str
    """A sentence to print: what steps the environments, and what was not used because of what."""


class VectorGame:
    """`count` environments stepped together; see the module for what a step means."""

    def __init__(self, name: str, vector: VectorEnv, frames_per_step: int, how: str) -> None:
        """Takes over `vector`. Raises UserError where Penstock cannot play it."""
        observation_space, action_space = _checked_spaces(name, vector)
        _check_autoreset(name, vector)
        self.info = GameInfo(observation_space, action_space, frames_per_step, how)
        self.count = vector.num_envs
        self._name = name
        self._vector = vector
        self._start = int(action_space.start)

    def reset_into(self, seed: int, out: Array) -> None:
        """Begin new episodes everywhere, and write their first observations.

        seed: >= 0, the same seed gives the same episodes. Environments may be seeded with seed,
            seed + 1, ..., so give two vectors seeds that lie further apart than `count`.
        out: [count, *shape] of the observation space's dtype.
        """
        observations, _ = self._vector.reset(seed=seed % SEEDS)
        found = np.asarray(observations)
        if found.shape != out.shape or not np.can_cast(found.dtype, out.dtype, "same_kind"):
            raise UserError(
                f"environment {self._name} returned observations {found.dtype}{[*found.shape]} "
                f"where its observation space says {out.dtype}{[*out.shape]}; correct its space"
            )
        np.copyto(out, found)

    def step_into(self, actions: Array, out: Array) -> tuple[Array, Flags, Flags]:
        """Step every environment, and write the observations that follow.

        actions: contiguous int32 or int64 [count], each in 0 ... n - 1, which is not checked.
        out: as in `reset_into`.
        Returns reward (real [count]), terminated and truncated (bool [count]): never written to
        again by the game, nor to be written to.
        """
        if self._start:
            actions = actions + self._start
        observations, reward, terminated, truncated, _ = self._vector.step(actions)
        np.copyto(out, observations)
        return reward, terminated, truncated > terminated

    def close(self) -> None:
        self._vector.close()


def find_bad_observation(observations: Array) -> str | None:
    """Where the first NaN or infinity is, in words for an error's sentence; None if all is well.

    observations: [rows, count, *shape], of any dtype; only floats can be bad.
    """
    if observations.dtype.kind != "f":
        return None
    finite = np.isfinite(observations)
    if finite.all():
        return None
    row, env, *index = np.unravel_index(int(np.argmin(finite)), finite.shape)
    place = ", ".join(str(i) for i in index)
    value = observations[(row, env, *index)]
    return f"{value} at [{place}] of environment {env}'s observation in row {row}"


def _checked_spaces(name: str, vector: VectorEnv) -> tuple[Box, Discrete]:
    observation, action = vector.single_observation_space, vector.single_action_space
    if not isinstance(observation, Box):
        raise UserError(
            f"environment {name} has observations of {_brief(observation)}, and only Box is "
            "supported; set env.wrappers=[gymnasium.wrappers:FlattenObservation], or a wrapper of "
            "yours that makes them a Box"
        )
    if not isinstance(action, Discrete):
        raise UserError(
            f"environment {name} has actions of {_brief(action)}, and only Discrete is supported; "
            "set env.wrappers to a wrapper of yours that offers a list of actions to choose from"
        )
    return observation, action


def _check_autoreset(name: str, vector: VectorEnv) -> None:
    mode = vector.metadata.get("autoreset_mode")
    if mode is not AutoresetMode.NEXT_STEP:
        stated = f"autoreset mode is {mode.name}" if mode else "metadata has no autoreset_mode"
        raise UserError(
            f"environment {name} is a vector environment whose {stated}, and it must be NEXT_STEP, "
            "where an episode's final observation is not lost; give it that mode, or set env.id to "
            "a module:function that returns a single gymnasium.Env"
        )


def _brief(space: object) -> str:
    text = str(space)
    return text if len(text) <= 80 else f"{text[:77]}..."
