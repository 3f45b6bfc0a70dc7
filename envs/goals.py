"""What an environment says of goals that were not its own, for hindsight replay.

Its observations are a Dict with `achieved_goal` and `desired_goal`, and it has the functions of
gymnasium-robotics' GoalEnv, which take a row for each of B transitions:

    compute_reward(achieved_goal, desired_goal, info)       the rewards [B] of what was achieved
    compute_terminated(achieved_goal, desired_goal, info)   whether that ends the episode; optional
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from penstock.configs.errors import UserError
from penstock.core.loading import explaining_errors
from penstock.core.observations import ObservationPart
from penstock.envs.make import FirstIndex, make
from penstock.envs.packing import find_bad_reward
from penstock.envs.space_difference import brief

if TYPE_CHECKING:
    from penstock.configs.sections import EnvConfig
    from penstock.core.params import Array

ACHIEVED = "achieved_goal"
DESIRED = "desired_goal"
# Rows of the call that shows whether a function takes several.
TRIED_ROWS = 3


class Goals:
    """The goals of one environment, which is made for its functions and never played."""

    parts: tuple[ObservationPart, ...]
    """The parts of its observations."""

    def __init__(self, config: EnvConfig, first: int = FirstIndex.LEARNER) -> None:
        """Make the environment. Arguments as of `penstock.envs.make`.

        Raises:
            UserError: it has no goals, or its functions do not compute a row each.
        """
        self._env = make(config, count=1, whole_games=True, first=first)
        self._name = config.id
        try:
            self.parts = self._env.info.parts
            goal_shape = self._goal_shape()
            self._reward = self._needed_function("compute_reward")
            self._terminated = self._env.function("compute_terminated")

            tried = np.zeros((TRIED_ROWS, *goal_shape), np.float32)
            self.rewards(tried, tried)
            self.terminated(tried, tried)
        except BaseException:
            self.close()
            raise

    def rewards(self, achieved: Array, desired: Array) -> npt.NDArray[np.float32]:
        """Returns the rewards ``[B]`` of goals achieved for those desired, each ``[B, *shape]``."""
        rewards = self._called(self._reward, "compute_reward", achieved, desired, np.float32)
        if rewards.shape != (len(achieved),):
            raise self._wrong_shape("compute_reward", rewards, len(achieved))
        if bad := find_bad_reward(rewards):
            raise UserError(
                f"environment {self._name}: compute_reward returned {bad}; correct it, or set "
                "algo.hindsight=0"
            )
        return rewards

    def terminated(self, achieved: Array, desired: Array) -> npt.NDArray[np.bool_]:
        """Returns whether episodes end by what was achieved, ``[B]``; arguments as of `rewards`."""
        if self._terminated is None:
            return np.zeros(len(achieved), np.bool_)
        ends = self._called(self._terminated, "compute_terminated", achieved, desired, np.bool_)
        if ends.shape not in ((), (len(achieved),)):
            raise self._wrong_shape("compute_terminated", ends, len(achieved))
        return np.broadcast_to(ends, len(achieved))

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _goal_shape(self) -> tuple[int, ...]:
        """Returns the shape of a goal; UserError if achieved and desired ones do not agree."""
        parts = {part.name: part for part in self.parts}
        if ACHIEVED not in parts or DESIRED not in parts:
            names = ", ".join(parts) or "a single array"
            raise UserError(
                f"environment {self._name} has no goals that algo.hindsight could replace: its "
                f"observation is {names}, and needs {ACHIEVED} and {DESIRED}; set algo.hindsight=0"
            )

        achieved = parts[ACHIEVED]
        desired = parts[DESIRED]
        is_same = achieved.shape == desired.shape
        # Choices are stored one-hot, which the environment's functions do not expect.
        own_space: Any = self._env.info.spaces[0]
        goal_spaces = own_space[ACHIEVED], own_space[DESIRED]
        are_boxes = all(isinstance(space, Box) for space in goal_spaces)
        if not is_same or not are_boxes or {achieved.dtype, desired.dtype} != {"<f4"}:
            raise UserError(
                f"environment {self._name} has an {ACHIEVED} of {brief(goal_spaces[0])} and a "
                f"{DESIRED} of {brief(goal_spaces[1])}, and algo.hindsight needs two Boxes of "
                "numbers of one shape; give them the same space, or set algo.hindsight=0"
            )
        return achieved.shape

    def _needed_function(self, name: str) -> Callable[..., Any]:
        """Returns a function of the environment; UserError if it has none."""
        function = self._env.function(name)
        if function is None:
            raise UserError(
                f"environment {self._name} has no {name}(achieved_goal, desired_goal, info), by "
                "which algo.hindsight rewards another goal; give it one, or set algo.hindsight=0"
            )
        return function

    def _called(
        self,
        function: Callable[..., Any],
        name: str,
        achieved: Array,
        desired: Array,
        dtype: type[np.generic],
    ) -> npt.NDArray[Any]:
        """Returns what a function of the environment computes of goals, as an array."""
        with explaining_errors(f"environment {self._name}: {name} of {len(achieved)} rows"):
            return np.asarray(function(achieved, desired, {}), dtype)

    def _wrong_shape(self, name: str, result: Array, rows: int) -> UserError:
        return UserError(
            f"environment {self._name}: {name} returned the shape {list(result.shape)} for {rows} "
            "rows of goals, and must compute each row alone; use axis=-1 in norms and comparisons, "
            "or set algo.hindsight=0"
        )
