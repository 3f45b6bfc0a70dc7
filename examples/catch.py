"""Catch, a custom vector environment: a ball falls, and a paddle at the bottom must be under it.

An episode lasts 8 steps and returns 1 if the ball was caught, otherwise 0. Optimal play always
catches it, random play about one time in three. The direction of the ball must be inferred from
pixels, and the reward of a move is delayed until the ball is down.

    cd examples && penstock train catch.yaml
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

ROWS = COLUMNS = 9
REACH = 1  # cells of the paddle to either side of its middle
CELL = 5  # pixels
LEFT, STAY, RIGHT = range(3)


class Catch(VectorEnv):
    """`num_envs` environments with simultaneous episodes; frames are uint8 [1, 45, 45]."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        shape = (1, ROWS * CELL, COLUMNS * CELL)
        self.single_observation_space = Box(0, 255, shape, np.uint8)
        self.single_action_space = Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._row = 0
        self._ball = np.zeros(num_envs, np.int64)  # its column
        self._paddle = np.zeros(num_envs, np.int64)  # the column of its middle

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._begin()
        return self._draw(), {}

    def step(
        self, actions: npt.NDArray[np.integer]
    ) -> tuple[
        npt.NDArray[np.uint8],
        npt.NDArray[np.float32],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        reward = np.zeros(self.num_envs, np.float32)
        if self._row == ROWS - 1:  # the last step ended the episode: this one begins the next
            self._begin()
        else:
            self._row += 1
            moved = self._paddle + actions - STAY
            self._paddle = moved.clip(REACH, COLUMNS - 1 - REACH)
        down = self._row == ROWS - 1
        if down:
            reward[:] = abs(self._ball - self._paddle) <= REACH
        ended, goes_on = np.full(self.num_envs, down), np.zeros(self.num_envs, np.bool_)
        return self._draw(), reward, ended, goes_on, {}

    def _begin(self) -> None:
        self._row = 0
        self._ball = self.np_random.integers(COLUMNS, size=self.num_envs)
        self._paddle = self.np_random.integers(REACH, COLUMNS - REACH, size=self.num_envs)

    def _draw(self) -> npt.NDArray[np.uint8]:
        board = np.zeros((self.num_envs, ROWS, COLUMNS), np.uint8)
        games = np.arange(self.num_envs)
        for offset in range(-REACH, REACH + 1):
            board[games, -1, self._paddle + offset] = 128
        board[games, self._row, self._ball] = 255
        return board.repeat(CELL, axis=1).repeat(CELL, axis=2)[:, None]
