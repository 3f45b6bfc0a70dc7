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

# Key of a step's info. Its value marks where a life has ended and its game has not, bool [count].
LIFE_LOST = "penstock/life_lost"
# The first two actions of every game that has a fire button.
NOOP = 0
FIRE = 1


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
        """Begin new games everywhere."""
        observations, info = self.env.reset(seed=seed, options=options)
        self._lives = info["lives"].copy()
        self._resets[:] = False
        self._late = {}
        self._owed[:] = 0
        self._blank[:] = 0
        return observations, info

    def step(self, actions: npt.NDArray[Any]) -> Any:
        """Step every game; an episode ends with each life."""
        resets = self._resets
        late_ends = self._late
        if resets.any():
            actions = np.where(resets, self._resumes, actions)
        observations, reward, terminated, truncated, info = self.env.step(actions)

        lives = info["lives"]
        game_over = terminated | truncated
        life_lost = (lives < self._lives) & (lives > 0) & ~game_over & ~resets
        self._lives = lives.copy()

        # A step that only resets may not pay a reward, so the next step pays it.
        if resets.any() or self._owed.any():
            payable = reward + self._owed
            self._owed = np.where(resets, payable, 0)
            reward = np.where(resets, 0, payable)

        # A life's observations show no frame from before it.
        self._blank = np.where(resets, self._stack - 1, np.maximum(self._blank - 1, 0))
        for row in np.flatnonzero(self._blank).tolist():
            observations[row, : self._blank[row]] = 0

        terminated |= life_lost
        self._resets = life_lost.copy()

        # A game's end in a step that only resets is shown as the end of the step after.
        self._late = {}
        for row in np.flatnonzero(game_over & resets).tolist():
            final = observations[row].copy()
            self._late[row] = bool(terminated[row]), bool(truncated[row]), final
            terminated[row] = False
            truncated[row] = False
        for row, (terminates, truncates, final) in late_ends.items():
            terminated[row] = terminates
            truncated[row] = truncates
            observations[row] = final
            # The game's own reset came in the step before.
            self._resets[row] = True

        info[LIFE_LOST] = life_lost
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
