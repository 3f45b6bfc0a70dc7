"""A first game of one's own: take the key, then open the door with it.

    cd examples
    penstock check-env key_door:KeyDoor
    penstock train key_door:KeyDoor algo.name=ppo stop.minutes=3

A board of 9 x 9 cells is an image of four planes, and two numbers say what it does not show. The
only reward comes when the door opens: 1, less 0.9 of the share of the steps that were taken. An
action has two choices, a move and what the hand does before it; a mask forbids what has no effect.
The best possible return of an episode is found by search: `optimum`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

SIZE = 9
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))  # up, down, left, right, in rows and columns
COLOURS = {
    "walls": (90, 90, 90),
    "player": (240, 240, 240),
    "key": (230, 190, 40),
    "door": (150, 80, 30),
}

Cell = tuple[int, int]
Shown = dict[str, npt.NDArray[Any]]


class KeyDoor(gymnasium.Env[Any, Any]):
    """An episode ends when the door opens, or after `max_steps`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 6}  # noqa: RUF012

    def __init__(
        self, walls: int = 6, max_steps: int = 200, render_mode: str | None = None
    ) -> None:
        self.walls_count, self.max_steps, self.render_mode = walls, max_steps, render_mode
        self.observation_space = spaces.Dict(
            {
                "board": spaces.Box(0, 255, (len(COLOURS), SIZE, SIZE), np.uint8),
                "status": spaces.Box(0, 1, (2,), np.float32),  # key in hand, share of steps left
                "action_mask": spaces.MultiBinary(len(MOVES) + 2),
            }
        )
        self.action_space = spaces.MultiDiscrete([len(MOVES), 2])  # move; whether the hand is used

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        super().reset(seed=seed)
        self.age, self.has_key, least = 0, False, math.inf
        while math.isinf(least):  # until key and door can be reached
            cells = self.np_random.permutation(SIZE**2)
            self.walls = np.zeros((SIZE, SIZE), np.bool_)
            self.walls.flat[cells[3 : 3 + self.walls_count]] = True
            self.player, self.key, self.door = (divmod(int(cell), SIZE) for cell in cells[:3])
            least = self.distance(self.player, self.key) + self.distance(self.key, self.door) + 1
        self.optimum = self._worth(least)
        return self._show(), {"optimum": self.optimum}

    def step(self, action: Any) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        move, hand = (int(choice) for choice in action)
        self.age += 1
        opened = bool(hand) and self._can_open()
        self.has_key = self.has_key or (bool(hand) and self.player == self.key)
        target = _beside(self.player, move)
        self.player = target if self._is_free(target) else self.player
        reward = self._worth(self.age) if opened else 0.0
        # The observation shows the steps that are left, so nothing follows the last one.
        return self._show(), reward, opened or self.age >= self.max_steps, False, {}

    def distance(self, start: Cell, end: Cell) -> float:
        """Moves from one cell to another, by breadth-first search; infinite if there is no way."""
        found, queue = {start: 0}, deque([start])
        while queue:
            cell = queue.popleft()
            if cell == end:
                return found[cell]
            for target in (_beside(cell, move) for move in range(len(MOVES))):
                if target not in found and self._is_free(target):
                    found[target] = found[cell] + 1
                    queue.append(target)
        return math.inf

    def render(self) -> Any:
        """For `penstock record`."""
        picture = np.full((SIZE, SIZE, 3), 30, np.uint8)
        for plane, colour in zip(self._board(), COLOURS.values(), strict=True):
            picture[plane > 0] = colour
        return picture.repeat(32, 0).repeat(32, 1)

    def _show(self) -> Shown:
        can_use = self._can_open() or (not self.has_key and self.player == self.key)
        moves = [self._is_free(_beside(self.player, move)) for move in range(len(MOVES))]
        return {
            "board": self._board(),
            "status": np.array([self.has_key, 1 - self.age / self.max_steps], np.float32),
            "action_mask": np.array([*moves, True, can_use], np.int8),
        }

    def _board(self) -> npt.NDArray[np.uint8]:
        board = np.zeros((len(COLOURS), SIZE, SIZE), np.uint8)
        board[0] = self.walls
        board[1][self.player] = 1
        board[2][self.key] = not self.has_key
        board[3][self.door] = 1
        return board * np.uint8(255)

    def _can_open(self) -> bool:
        return self.has_key and self.player == self.door

    def _is_free(self, cell: Cell) -> bool:
        return 0 <= cell[0] < SIZE and 0 <= cell[1] < SIZE and not self.walls[cell]

    def _worth(self, steps: float) -> float:
        """The reward of a door that opens in this step."""
        return 1 - 0.9 * steps / self.max_steps


def _beside(cell: Cell, move: int) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
