"""`penstock/BitFlip-v0`: bits that are flipped one at a time until they are those of a goal.

Andrychowicz et al. 2017, arXiv 1707.01495, section 3.1. Bits and goal of an episode are drawn
uniformly, never the same. A step costs 1 until it reaches the goal, which ends the episode with
success and costs nothing; otherwise it ends after as many steps as there are bits. With many bits a
goal is hardly ever reached by chance, so no reward shows the way.

An observation is a Dict of `observation` and `achieved_goal`, both the present bits, and
`desired_goal`. The info of a step has `is_success`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete

from penstock.envs.games.vector_game import Flags, StepResults, VectorGame

Bits = npt.NDArray[np.float32]


class BitFlipVectorEnv(VectorGame):
    """`num_envs` rows of bits."""

    def __init__(self, num_envs: int = 1, *, bits: int = 15) -> None:
        """Make the rows.

        Args:
            num_envs: number of rows.
            bits: of each row.

        Raises:
            ValueError: if there is no bit.
        """
        if bits < 1:
            raise ValueError(f"bits {bits} must be at least 1")

        row = Box(0, 1, (bits,), np.float32)
        observation_space = Dict({"observation": row, "achieved_goal": row, "desired_goal": row})
        super().__init__(num_envs, observation_space, Discrete(bits))
        self._count = bits

        self._bits = np.zeros((num_envs, bits), np.float32)
        self._goals = np.zeros((num_envs, bits), np.float32)
        # Steps of each episode so far.
        self._steps = np.zeros(num_envs, np.int64)
        # The rows whose episode has ended, which the next step resets.
        self._ended = np.zeros(num_envs, np.bool_)

    def step(self, actions: npt.NDArray[np.integer]) -> StepResults:
        """Flip one bit of each row, or begin anew where the last step ended an episode."""
        resets = self._ended
        plays = np.flatnonzero(~resets)
        flipped = actions[plays]
        self._bits[plays, flipped] = 1 - self._bits[plays, flipped]
        self._steps[plays] += 1

        reward = self.compute_reward(self._bits, self._goals, {})
        reward[resets] = 0.0
        terminated = self.compute_terminated(self._bits, self._goals, {}) & ~resets
        truncated = (self._steps >= self._count) & ~terminated & ~resets

        self._begin(resets)
        self._ended = terminated | truncated
        return self._observe(), reward, terminated, truncated, {"is_success": terminated.copy()}

    def compute_reward(
        self, achieved_goal: Bits, desired_goal: Bits, info: Any
    ) -> npt.NDArray[np.float32]:
        """Returns the rewards ``[B]`` of goals ``[B, bits]``: 0 where they agree, else -1."""
        reached = self.compute_terminated(achieved_goal, desired_goal, info)
        return reached.astype(np.float32) - 1

    def compute_terminated(self, achieved_goal: Bits, desired_goal: Bits, info: Any) -> Flags:
        """Returns in which rows the goals ``[B, bits]`` agree, ``[B]``."""
        agree: Flags = (achieved_goal == desired_goal).all(axis=-1)
        return agree

    def _begin(self, begins: Flags) -> None:
        shape = self._bits.shape
        bits = self.np_random.integers(2, size=shape).astype(np.float32)
        goals = self.np_random.integers(2, size=shape).astype(np.float32)

        # A goal that is there already gets another bit, drawn too.
        other_bit = self.np_random.integers(self._count, size=self.num_envs)
        equal = np.flatnonzero((bits == goals).all(axis=1))
        goals[equal, other_bit[equal]] = 1 - goals[equal, other_bit[equal]]

        self._bits[begins] = bits[begins]
        self._goals[begins] = goals[begins]
        self._steps[begins] = 0

    def _observe(self) -> dict[str, Bits]:
        """Returns the observations, arrays ``[num_envs, bits]`` by their keys."""
        return {
            "observation": self._bits.copy(),
            "achieved_goal": self._bits.copy(),
            "desired_goal": self._goals.copy(),
        }
