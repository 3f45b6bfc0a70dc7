"""MinAtar: `penstock/MinAtar-v0`, in a form that Penstock's networks read.

Observations are uint8 [channels, 10, 10], 255 where an object is and 0 elsewhere; actions are those
that have an effect in the game. MinAtar's own environment shows booleans with the channels last,
never truncates an endless episode, and begins an episode with the action that ended the last.

With `flicker` the game is one that needs memory: each observation is blank with that probability
(Hausknecht and Stone 2015, arXiv 1507.06527, section 5).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete
from minatar import Environment

Frame = npt.NDArray[np.uint8]

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
# Pixels of a cell in a picture, each way.
CELL = 12
# The actions of all games, by MinAtar's number.
ACTIONS = ("nothing", "left", "up", "right", "down", "fire")


class MinAtarEnv(gymnasium.Env[Frame, Any]):
    """One game.

    A checkpoint holds the attributes by their names (`penstock.envs.saved_state`).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    _flicker = 0.0  # also in checkpoints of versions without it, whose games have no such attribute

    def __init__(
        self,
        game: str = "breakout",
        sticky_action_prob: float = 0.1,
        difficulty_ramping: bool = True,
        max_episode_steps: int = 5000,
        flicker: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        """Make a game.

        Args:
            game: one of `GAMES`.
            sticky_action_prob: how often the last action is repeated instead.
            difficulty_ramping: whether a game becomes faster while it lasts, where it can.
            max_episode_steps: an episode is truncated after as many steps.
            flicker: the probability that an observation shows nothing.
            render_mode: as of gymnasium; pictures can be rendered in any mode.

        Raises:
            ValueError: for a game that does not exist, and a probability that is none.
        """
        if game not in GAMES:
            raise ValueError(f"there is no game {game}; choose from {', '.join(GAMES)}")
        if not 0 <= flicker <= 1:
            raise ValueError(f"flicker {flicker:g} is a probability; choose a number from 0 to 1")

        self.render_mode = render_mode
        self._game = Environment(game, sticky_action_prob, difficulty_ramping)
        # MinAtar's numbers of the actions that have an effect in the game.
        self._actions: list[int] = self._game.minimal_action_set()

        height, width, channels = self._game.state_shape()
        self.observation_space = Box(0, 255, (channels, height, width), np.uint8)
        self.action_space = Discrete(len(self._actions))

        self._max_steps = max_episode_steps
        self._flicker = flicker
        # Steps of the episode.
        self._age = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.seed(seed)  # None leaves the seed unchanged
        self._game.last_action = 0
        self._game.reset()
        self._age = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        reward, terminated = self._game.act(self._actions[action])
        self._age += 1
        truncated = self._age >= self._max_steps
        return self._observe(), float(reward), bool(terminated), truncated, {}

    def get_action_meanings(self) -> list[str]:
        """The names of the actions, in their order."""
        return [ACTIONS[action] for action in self._actions]

    def render(self) -> Any:
        """Returns a picture, uint8 [120, 120, 3], with a colour for each channel."""
        # The level of a cell is the number of its last channel with an object, from 0 to 1.
        state = self._game.state()
        channels = state.shape[-1]
        level = (state * np.arange(1, channels + 1)).max(-1) / channels

        colour = np.stack([level, level**2, np.sin(np.pi * level)], -1) * 255
        return colour.astype(np.uint8).repeat(CELL, 0).repeat(CELL, 1)

    def _observe(self) -> Frame:
        """Returns the observation, uint8 ``[channels, 10, 10]``."""
        if self._flicker and self.np_random.random() < self._flicker:
            return np.zeros(self.observation_space.shape or (), np.uint8)
        channels: Frame = self._game.state().view(np.uint8).transpose(2, 0, 1)
        return channels * np.uint8(255)
