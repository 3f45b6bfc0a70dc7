"""One vector of games, with one meaning of a step whatever makes them.

Invariants:
- NEXT_STEP autoreset. When a step ends environment i's episode, the observation it writes is the
  episode's final one. The *next* step only resets i: its action is ignored, its reward 0, both
  flags False, and the observation it writes is the first of the next episode.
- `terminated` and `truncated` are never both set: where a game says both, terminated wins.
- Rewards are raw. Discrete actions count from 0, wherever the game's own begin, and Box actions
  run from -1 to 1 in each value, whatever the game's own bounds are.
"""

from __future__ import annotations

from collections.abc import Callable
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
    action_space: Discrete | Box
    """Of one environment, as the game has it; policies choose 0 ... n - 1 also where `start` is not
    0, and from -1 to 1 also where the bounds are others."""
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
        self._to_game = _action_map(action_space)

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

        actions: contiguous int32 or int64 [count], each in 0 ... n - 1, which is not checked; for a
            Box float32 [count, *shape], what is beyond -1 and 1 counts as these.
        out: as in `reset_into`.
        Returns reward (real [count]), terminated and truncated (bool [count]): never written to
        again by the game, nor to be written to.
        """
        if self._to_game is not None:
            actions = self._to_game(actions)
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


def _action_map(space: Discrete | Box) -> Callable[[Array], Array] | None:
    """From actions as policies choose them to the game's own; None where they are the same."""
    if isinstance(space, Discrete):
        start = int(space.start)
        return (lambda actions: actions + start) if start else None
    low, high = space.low, space.high
    half = high / 2 - low / 2

    def scaled(actions: Array) -> Array:
        # Clipped, since rounding must not leave the bounds, which environments check.
        found: Array = np.multiply(actions + 1, half, dtype=space.dtype)
        found += low
        np.clip(found, low, high, out=found)
        return found

    return scaled


def _checked_spaces(name: str, vector: VectorEnv) -> tuple[Box, Discrete | Box]:
    observation, action = vector.single_observation_space, vector.single_action_space
    if not isinstance(observation, Box):
        raise UserError(
            f"environment {name} has observations of {_brief(observation)}, and only Box is "
            "supported; set env.wrappers=[gymnasium.wrappers:FlattenObservation], or a wrapper of "
            "yours that makes them a Box"
        )
    if isinstance(action, Discrete):
        return observation, action
    if not isinstance(action, Box) or action.dtype.kind != "f":
        raise UserError(
            f"environment {name} has actions of {_brief(action)}, and only Discrete and a Box of "
            "floats are supported; set env.wrappers to a wrapper of yours that offers a list of "
            "actions to choose from"
        )
    if not action.is_bounded() or not (action.low < action.high).all():
        raise UserError(
            f"environment {name} has actions of {_brief(action)}, and a Box of actions must have "
            "finite bounds, the lower below the upper; give its action space such bounds, or set "
            "env.wrappers to a wrapper of yours that does"
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
