"""A game of random observations whose episodes end at random, for actors without an environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.observations import MASK, ObservationPart, laid_out, row_nbytes, views
from penstock.envs import EnvInfo

Array = npt.NDArray[Any]


class RandomGame:
    """Steps as `penstock.envs.BatchedEnv` does: the step after an end only resets."""

    life_lost = shortened = dropped = playing = None

    def __init__(
        self,
        count: int,
        action_space: Any,
        arrays: dict[str, tuple[tuple[int, ...], str]] | None = None,
        ends: float = 0.15,
        seed: int = 0,
    ) -> None:
        """``arrays``: shape and dtype of each part of an observation; None: one of 4 numbers."""
        self.count = count
        self._rng = np.random.default_rng(seed)
        self._ends = ends
        self._over = np.zeros(count, np.bool_)
        self.resets = 0
        parts = laid_out([(name, *about) for name, about in (arrays or {}).items()])
        space: Any = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        if parts:
            space = spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
        self.info = EnvInfo(space, action_space, 1, "by chance", parts)

    def reset_into(self, seed: int, out: Array) -> None:
        self._observe(out)

    def step_into(self, actions: Array, out: Array) -> tuple[Array, Array, Array]:
        self.resets += int(self._over.sum())
        ended = (self._rng.random(self.count) < self._ends) & ~self._over
        truncated = ended & (self._rng.random(self.count) < 0.5)
        rewards = self._rng.normal(size=self.count).astype(np.float32) * ~self._over
        self._over = ended
        self._observe(out)
        return rewards, ended & ~truncated, truncated

    def _observe(self, out: Array) -> None:
        parts: tuple[ObservationPart, ...] = self.info.parts
        if not parts:
            out[:] = self._rng.normal(size=out.shape)
            return
        for name, array in views(parts, out).items():
            if name == MASK:
                array[:] = self._rng.random(array.shape) < 0.6
                array[:, np.cumsum((0, *self.info.counts[:-1]))] = 1  # one of each choice
            elif array.dtype == np.uint8:
                array[:] = self._rng.integers(0, 256, array.shape)
            else:
                array[:] = self._rng.normal(size=array.shape)
