"""A shop that shows one of many items, each of which belongs on one of four shelves.

Which shelf is a property of the item that only experience tells, as items have nothing but a
number. The right shelf pays 1.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

SHELVES = 4
STEPS = 20


class Shop(VectorEnv):
    """`num_envs` shops with the same items, whose episodes of 20 items begin together."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, *, items: int = 10_000, parts: bool = False) -> None:
        self.num_envs = num_envs
        item = Discrete(items, start=1)
        light = Box(0, 1, (2,), np.float32)
        self._parts = parts
        self.single_observation_space = Dict(item=item, light=light) if parts else item
        self.single_action_space = Discrete(SHELVES)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._shelves = np.random.default_rng(99).integers(SHELVES, size=items)
        self._items = np.zeros(num_envs, np.int64)
        self._taken = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        return self._show(), {}

    def step(self, actions: npt.NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ends = np.zeros(self.num_envs, np.bool_)
        reward = np.zeros(self.num_envs, np.float32)
        if self._taken == STEPS:
            self._taken = 0
        else:
            reward[:] = actions == self._shelves[self._items]
            self._taken += 1
            ends[:] = self._taken == STEPS
        return self._show(), reward, ends, np.zeros_like(ends), {}

    def _show(self) -> Any:
        self._items = self.np_random.integers(len(self._shelves), size=self.num_envs)
        if not self._parts:
            return self._items + 1
        light = self.np_random.random((self.num_envs, 2), np.float32)
        return {"item": self._items + 1, "light": light}


gymnasium.register("test/Shop-v0", vector_entry_point="shop_game:Shop")
