"""Atari's lives as episodes (`episodic_life`), as in the published settings of Mnih et al. 2015.

A lost life ends an episode for the learner: no later reward counts for it. The game continues: the
next step only resets, as after any episode, and presses fire in games with a fire button (with
`use_fire_reset`). The observations of a life show no frame from before it. Returns and lengths
are those of whole games: `LIFE_LOST` marks the ends that are not the end of a game. A game that
ends in a step that only resets, which is rare, ends one step later for the learner.

ale-py's own `episodic_life` begins a new game after every lost life, so that only first lives are
played; it stays off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv, VectorWrapper

LIFE_LOST = (
    "penstock/life_lost"  # in a step's info, bool [count]: a life has ended, and its game has not
)
NOOP, FIRE = 0, 1  # the first actions of every game that has a fire button


class LivesAsEpisodes(VectorWrapper[Any, Any, Any, Any, Any]):
    """`ale_py.AtariVectorEnv`, or what films it, with lives as episodes.

    A checkpoint may hold the attributes by their names (`penstock.envs.saved_state`).
    """

    def __init__(self, vector: VectorEnv, options: Mapping[str, Any]) -> None:
        """Take over ``vector``, made with ``options`` and without ale-py's `episodic_life`."""
        super().__init__(vector)
        # Frames of an observation.
        self._stack = options["stack_num"]
        # The action of a step that only resets while its game continues.
        self._resumes = FIRE if options["use_fire_reset"] and fires(options) else NOOP

        # Rows whose next step only resets though their game continues.
        self._resets = np.zeros(self.num_envs, np.bool_)
        self._lives = np.zeros(self.num_envs, np.int32)
        # Rewards of steps that only reset, which the step after pays.
        self._owed = np.zeros(self.num_envs)
        # Ends of games in steps that only reset: terminated, truncated and the observation by the
        # row. The step after shows them.
        self._late: dict[int, tuple[bool, bool, Any]] = {}
        # Frames of each stack that are older than the life, and are shown as zeros. Those that are
        # older than the game are zeros anyway.
        self._blank = np.zeros(self.num_envs, np.int64)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observations, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"].copy()
        self._resets[:] = False
        self._late = {}
        self._owed[:] = self._blank[:] = 0
        return observations, info

    def step(self, actions: npt.NDArray[Any]) -> Any:
        resets, late = self._resets, self._late
        if resets.any():
            actions = np.where(resets, self._resumes, actions)
        observations, reward, terminated, truncated, info = self.env.step(actions)
        lives, over = info["lives"], terminated | truncated
        lost = (lives < self._lives) & (lives > 0) & ~over & ~resets
        self._lives = lives.copy()
        if resets.any() or self._owed.any():  # a step that only resets may not pay
            paid = reward + self._owed
            self._owed = np.where(resets, paid, 0)
            reward = np.where(resets, 0, paid)
        self._blank = np.where(resets, self._stack - 1, np.maximum(self._blank - 1, 0))
        for env in np.flatnonzero(self._blank).tolist():
            observations[env, : self._blank[env]] = 0
        terminated |= lost
        self._resets = lost.copy()
        self._late = {}
        for env in np.flatnonzero(over & resets).tolist():  # shown as the end of the step after
            self._late[env] = bool(terminated[env]), bool(truncated[env]), observations[env].copy()
            terminated[env] = truncated[env] = False
        for env, (terminates, truncates, final) in late.items():
            terminated[env], truncated[env], observations[env] = terminates, truncates, final
            self._resets[env] = True  # its next game has already begun
        info[LIFE_LOST] = lost
        return observations, reward, terminated, truncated, info


def fires(options: Mapping[str, Any]) -> bool:
    """Returns whether a game has a fire button, which is its second action then.

    Args:
        options: of `penstock.envs.atari.options`.
    """
    if options["full_action_space"]:
        return True
    from ale_py import Action, ALEInterface, roms

    ale = ALEInterface()
    ale.loadROM(str(roms.get_rom_path(options["game"])))
    actions = ale.getMinimalActionSet()
    return len(actions) > FIRE and actions[FIRE] == Action.FIRE
