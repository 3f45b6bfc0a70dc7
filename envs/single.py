"""A vector environment of one, as gymnasium's single interface.

So single-environment wrappers apply to it, and see what the vector form would have shown.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv


class SingleEnv(gymnasium.Env[Any, Any]):
    """Takes over a vector environment of one."""

    def __init__(self, vector: VectorEnv) -> None:
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self.render_mode = getattr(vector, "render_mode", None)
        self.metadata = dict(vector.metadata)
        self._vector = vector

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observations, info = self._vector.reset(seed=seed, options=options)
        return observations[0], _first(info)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = np.array([action], self.action_space.dtype)
        observations, reward, terminated, truncated, info = self._vector.step(actions)
        return (
            observations[0],
            float(reward[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            _first(info),
        )

    def render(self) -> Any:
        pictures = self._vector.render()
        return pictures[-1] if pictures else None

    def close(self) -> None:
        self._vector.close()


def _first(info: dict[str, Any]) -> dict[str, Any]:
    """Returns the info of the only environment of a vector."""
    return {name: values[0] for name, values in info.items()}
