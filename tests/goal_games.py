"""Environments with goals, as a user writes them: single, with the functions of a GoalEnv."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

REACHED = 0.1


class PointReach(gymnasium.Env[Any, Any]):
    """A point in a square is moved to a goal: -1 a step, and 0 where it is there.

    Args:
        ends: whether an episode ends where the goal is reached.
        steps: of an episode.
    """

    def __init__(self, ends: bool = False, steps: int = 30) -> None:
        place = Box(-1, 1, (2,), np.float64)
        self.observation_space = Dict(
            {"achieved_goal": place, "desired_goal": place, "observation": place}
        )
        self.action_space = Box(-1, 1, (2,), np.float32)
        self._ends = ends
        self._steps = steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.uniform(-1, 1, (2, 2))
        self._done = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._place = np.clip(self._place + 0.15 * np.asarray(action, np.float64), -1, 1)
        self._done += 1
        reward = float(self.compute_reward(self._place, self._goal, {}))
        terminated = bool(self.compute_terminated(self._place, self._goal, {}))
        info = {"is_success": reward == 0}
        return self._observe(), reward, terminated, self._done >= self._steps, info

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return np.where(distance < REACHED, 0.0, -1.0)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self._ends & (self.compute_reward(achieved_goal, desired_goal, info) == 0)

    def _observe(self) -> dict[str, Any]:
        place = self._place.copy()
        return {"achieved_goal": place, "desired_goal": self._goal.copy(), "observation": place}


class WithoutReward(PointReach):
    compute_reward = None  # type: ignore[assignment]

    def has_wrapper_attr(self, name: str) -> bool:
        return name != "compute_reward" and super().has_wrapper_attr(name)


class OneReward(PointReach):
    """Its reward is a single number, whatever the number of rows."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -np.linalg.norm(achieved_goal - desired_goal)


class NoNumber(PointReach):
    """Its rewards are NaN for every goal."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.full(len(achieved_goal), np.nan)


class Words(PointReach):
    """Its rewards are texts."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return ["far"] * len(achieved_goal)


class Choices(PointReach):
    """Its goals are choices."""

    def __init__(self) -> None:
        super().__init__()
        place = Box(-1, 1, (2,), np.float64)
        self.observation_space = Dict(
            {"achieved_goal": Discrete(3), "desired_goal": Discrete(3), "observation": place}
        )


class OtherGoal(PointReach):
    """Its goals have other numbers than what is achieved."""

    def __init__(self) -> None:
        super().__init__()
        place = Box(-1, 1, (2,), np.float64)
        goal = Box(-1, 1, (3,), np.float64)
        self.observation_space = Dict(
            {"achieved_goal": place, "desired_goal": goal, "observation": place}
        )
