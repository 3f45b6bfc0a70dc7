"""A vector of environments whose observations and rewards numpy computes at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

Flags = npt.NDArray[np.bool_]
StepResults = tuple[Any, npt.NDArray[np.float32], Flags, Flags, dict[str, Any]]
"""Of a step: observations, rewards, terminated, truncated and infos."""


class VectorGame(VectorEnv, ABC):
    """`num_envs` environments of one kind.

    A subclass has the rules: `step`, `_begin` and `_observe`. A step after the end of an episode
    only resets. A checkpoint holds the attributes by their names (`penstock.envs.saved_state`).
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self, num_envs: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        """Give each of the environments these spaces."""
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all episodes anew."""
        super().reset(seed=seed)
        self._begin(np.ones(self.num_envs, np.bool_))
        return self._observe(), {}

    @abstractmethod
    def _begin(self, begins: Flags) -> None:
        """Begin new episodes in the environments that ``begins`` marks.

        Where all episodes have one length, these are all environments.
        """

    @abstractmethod
    def _observe(self) -> Any:
        """Returns the observations of all environments."""
