"""Atari's lives as episodes (`episodic_life`), as in the published settings of Mnih et al. 2015.

A lost life ends an episode for the learner: no later reward counts for it. The game continues: the
next step only resets, as after any episode, and presses fire where the game waits for it (with
`use_fire_reset`). The observations of a life show no frame from before it. Returns and lengths
are those of whole games: `LIFE_LOST` marks the ends that are not the end of a game.

ale-py's own `episodic_life` begins a new game after every lost life, so that only first lives are
played; it stays off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

LIFE_LOST = "life_lost"  # in a step's info, bool [count]: a life has ended, and its game has not
NOOP, FIRE = 0, 1  # the first actions of every game that has a fire button


class LivesAsEpisodes(VectorEnv):
    """`ale_py.AtariVectorEnv`, or what films it, with lives as episodes."""

    def __init__(self, vector: VectorEnv, options: Mapping[str, Any]) -> None:
        """Take over ``vector``, made with ``options`` and without ale-py's `episodic_life`."""
        self._vector = vector
        self.num_envs = vector.num_envs
        self.metadata = vector.metadata
        self.render_mode = vector.render_mode
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space
        self.observation_space = vector.observation_space
        self.action_space = vector.action_space
        self._stack = options["stack_num"]
        self._resumes = FIRE if options["use_fire_reset"] and fires(options) else NOOP
        self._lost = np.zeros(self.num_envs, np.bool_)  # in the last step
        self._lives = np.zeros(self.num_envs, np.int32)
        self._owed = np.zeros(self.num_envs)  # rewards of steps that only reset
        self._blank = np.zeros(self.num_envs, np.int64)  # oldest frames that are another life's

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observations, info = self._vector.reset(seed=seed, options=options)
        self._lives = info["lives"].copy()
        self._lost[:] = False
        self._owed[:] = self._blank[:] = 0
        return observations, info

    def step(self, actions: npt.NDArray[Any]) -> Any:
        resumed = self._lost
        if resumed.any():
            actions = np.where(resumed, self._resumes, actions)
        observations, reward, terminated, truncated, info = self._vector.step(actions)
        lives, over = info["lives"], terminated | truncated
        self._lost = (lives < self._lives) & (lives > 0) & ~over & ~resumed
        self._lives = lives.copy()
        if resumed.any() or self._owed.any():  # a step that only resets may not pay
            paid = reward + self._owed
            self._owed = np.where(resumed, paid, 0)
            reward = np.where(resumed, 0, paid)
        self._hide_other_lives(observations, resumed, over)
        info[LIFE_LOST] = self._lost
        return observations, reward, terminated | self._lost, truncated, info

    def render(self) -> Any:
        return self._vector.render()

    def close(self, **kwargs: Any) -> None:
        self._vector.close(**kwargs)

    def _hide_other_lives(
        self, observations: npt.NDArray[Any], resumed: npt.NDArray[Any], over: npt.NDArray[Any]
    ) -> None:
        """Blank the frames from before a life in its first stacks, as ale-py does before a game."""
        self._blank = np.where(resumed, self._stack - 1, np.maximum(self._blank - 1, 0))
        for env in np.flatnonzero(self._blank):
            observations[env, : self._blank[env]] = 0
        self._blank[over] = 0


def fires(options: Mapping[str, Any]) -> bool:
    """Whether a game has a fire button: its second action then."""
    from ale_py import Action, ALEInterface, roms

    ale = ALEInterface()
    ale.loadROM(str(roms.get_rom_path(options["game"])))
    full = options["full_action_space"]
    actions = ale.getLegalActionSet() if full else ale.getMinimalActionSet()
    return len(actions) > FIRE and actions[FIRE] == Action.FIRE
