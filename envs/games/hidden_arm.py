"""`penstock/HiddenArm-v0`: arms of which one pays, another one in each episode, and nothing to see.

A bandit of Wang et al. 2016, arXiv 1611.05763, and Duan et al. 2016, arXiv 1611.02779, whose arms
pay without chance: 1 for the right one, else 0. Observations are always 1, so only the own action
and its reward tell which arm is right. The best policy tries one arm after another until one pays,
which takes (arms - 1) / 2 steps without a reward on average: with 2 arms and 10 steps an episode
returns 9.5. A policy that does not know what it did and was paid returns steps / arms: 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

from penstock.envs.games.vector_game import Flags, StepResults, VectorGame
from penstock.envs.single import SingleEnv


class HiddenArmVectorEnv(VectorGame):
    """`num_envs` bandits, which begin their episodes together."""

    def __init__(self, num_envs: int = 1, *, arms: int = 2, steps: int = 10) -> None:
        """Make the bandits.

        Args:
            num_envs: number of bandits.
            arms: of each, one of which pays.
            steps: of an episode.

        Raises:
            ValueError: for fewer than 2 arms or 1 step.
        """
        if arms < 2 or steps < 1:
            raise ValueError(f"arms {arms} must be at least 2, and steps {steps} at least 1")

        super().__init__(num_envs, Box(0, 1, (1,), np.float32), Discrete(arms))
        self._arms = arms
        self._steps = steps

        # The arm of each bandit that pays.
        self._paying = np.zeros(num_envs, np.int64)
        # Steps that were taken in the episodes, which all have the same length.
        self._taken = 0

    def step(self, actions: npt.NDArray[np.integer]) -> StepResults:
        """Pull an arm of each bandit."""
        ends = np.zeros(self.num_envs, np.bool_)
        reward = np.zeros(self.num_envs, np.float32)
        if self._taken == self._steps:
            self._begin(np.ones(self.num_envs, np.bool_))
        else:
            reward[:] = actions == self._paying
            self._taken += 1
            ends[:] = self._taken == self._steps
        return self._observe(), reward, ends, np.zeros_like(ends), {}

    def _begin(self, begins: Flags) -> None:
        self._paying = self.np_random.integers(self._arms, size=self.num_envs)
        self._taken = 0

    def _observe(self) -> npt.NDArray[Any]:
        return np.ones((self.num_envs, 1), np.float32)


def make_single(**options: Any) -> SingleEnv:
    """One bandit; options as of `HiddenArmVectorEnv`."""
    return SingleEnv(HiddenArmVectorEnv(1, **options))
