"""`penstock/Memory-v0`: a corridor whose first observation alone shows where to turn at its end.

The T-maze of Bakker 2001, without walking back. An observation is three numbers: the sign (-1 or 1
at the start, 0 afterwards), whether the end is reached (0 or 1), and 1. Actions are left and right,
and only the one at the end counts: 1 if it matches the sign, else -1. So an episode returns 1 at
best, and 0 on average for a policy that forgets the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete

from penstock.envs.games.vector_game import Flags, StepResults, VectorGame
from penstock.envs.single import SingleEnv


class MemoryVectorEnv(VectorGame):
    """`num_envs` corridors; each episode draws a new length."""

    def __init__(self, num_envs: int = 1, *, lengths: Sequence[int] = (8, 24)) -> None:
        """Make the corridors.

        Args:
            num_envs: number of corridors.
            lengths: the fewest and the most steps from the sign to the end.

        Raises:
            ValueError: if the lengths are not two such numbers, from 1 on.
        """
        least, most = lengths
        if not 1 <= least <= most:
            raise ValueError(f"lengths {[*lengths]} must be two numbers from 1, the fewest first")

        super().__init__(num_envs, Box(-1, 1, (3,), np.float32), Discrete(2))
        self._lengths = least, most

        # The sign of each corridor, -1 or 1.
        self._signs = np.zeros(num_envs, np.int64)
        # Steps to the end, -1 beyond it.
        self._left = np.zeros(num_envs, np.int64)
        # The corridors at whose start one stands, where the sign is shown.
        self._begins = np.ones(num_envs, np.bool_)

    def step(self, actions: npt.NDArray[np.integer]) -> StepResults:
        """Take a step in each corridor. At its end the action is compared with the sign."""
        resets = self._left < 0
        ends = self._left == 0
        matches = (2 * actions - 1 == self._signs).astype(np.float32)
        reward = (2 * matches - 1) * ends

        self._left -= 1
        self._begin(resets)
        truncated = np.zeros(self.num_envs, np.bool_)
        return self._observe(), reward, ends, truncated, {}

    def _begin(self, begins: Flags) -> None:
        least, most = self._lengths
        signs = 2 * self.np_random.integers(2, size=self.num_envs) - 1
        lengths = self.np_random.integers(least, most + 1, size=self.num_envs)
        self._signs[begins] = signs[begins]
        self._left[begins] = lengths[begins]
        self._begins = begins

    def _observe(self) -> npt.NDArray[Any]:
        """Returns the observations, float32 ``[num_envs, 3]``."""
        shown_signs = self._signs * self._begins
        is_at_end = self._left == 0
        ones = np.ones(self.num_envs)
        return np.stack((shown_signs, is_at_end, ones), 1).astype(np.float32)


def make_single(**options: Any) -> SingleEnv:
    """One corridor; options as of `MemoryVectorEnv`."""
    return SingleEnv(MemoryVectorEnv(1, **options))
