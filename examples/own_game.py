"""A custom environment in one class: a picker walks through an orchard and eats its apples.

    cd examples
    penstock check-env own_game:Orchard          # find mistakes, measure the rate
    penstock train own_game:Orchard algo.name=ppo stop.minutes=1

Options of `__init__` are set with `env.kwargs.size=8`. Random play eats 1.8 of 5 apples.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right, in rows and columns

Shown = dict[str, npt.NDArray[Any]]


class Orchard(gymnasium.Env[Any, Any]):
    """Each eaten apple is a reward of 1; an episode ends without apples or at the time limit."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(
        self, size: int = 6, apples: int = 5, max_steps: int = 30, render_mode: str | None = None
    ) -> None:
        self.size, self.apples, self.max_steps = size, apples, max_steps
        self.render_mode = render_mode
        # Several observation parts form a Dict, a single one is a Box. Numbers should be near
        # -1 ... 1, or uint8 from 0 to 255 like these, which networks read as 0 ... 1. The part
        # `action_mask` marks the allowed actions; only those are chosen.
        self.observation_space = spaces.Dict(
            {
                "board": spaces.Box(0, 255, (2, size, size), np.uint8),
                "time_left": spaces.Box(0, 1, (1,), np.float32),
                "action_mask": spaces.MultiBinary(len(MOVES)),
            }
        )
        self.action_space = spaces.Discrete(len(MOVES))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random, the only source of randomness
        cells = self.np_random.permutation(self.size**2)
        self.place = np.array(np.unravel_index(cells[0], (self.size, self.size)))
        self.board = np.zeros((self.size, self.size), np.bool_)
        self.board.flat[cells[1 : self.apples + 1]] = True
        self.age = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        self.place = self.place + MOVES[action]
        self.age += 1
        reward = float(self.board[tuple(self.place)])
        self.board[tuple(self.place)] = False
        # Terminated: no reward can follow. Truncated: the episode would continue, but is cut; then
        # the learner adds the value of the following states.
        terminated = not self.board.any()
        return self._show(), reward, terminated, self.age >= self.max_steps, {}

    def render(self) -> Any:
        """For `penstock record`: apples are red, the picker is white."""
        picture = np.full((self.size, self.size, 3), (30, 90, 30), np.uint8)
        picture[self.board] = 200, 30, 30
        picture[tuple(self.place)] = 255
        return picture.repeat(32, 0).repeat(32, 1)

    def _show(self) -> Shown:
        picker = np.zeros_like(self.board)
        picker[tuple(self.place)] = True
        target = self.place + MOVES
        return {
            "board": np.stack([self.board, picker]).astype(np.uint8) * 255,
            "time_left": np.array([1 - self.age / self.max_steps], np.float32),
            "action_mask": ((target >= 0) & (target < self.size)).all(1).astype(np.int8),
        }
