"""Episodes that fail cost themselves, and not the run (`env.on_error=drop_episode`).

A step that raises, or returns an observation or a reward that is not finite, becomes one that only
resets: the environment is reset at once, and the step returns the first observation of the next
episode, with reward 0 and without flags. `DROPPED` in its info marks it, so that it is neither
trained on nor a result. A reset whose observation is not finite is repeated. An exception of a
reset is raised.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from penstock.configs.errors import UserError
from penstock.core.notes import note_logger
from penstock.core.place import brief, brief_with_place, place, users_error
from penstock.envs.packing import find_bad_reward, leaves_of, value_at

logger = note_logger(__name__)

# Key of a step's info, with the value True if the step failed.
DROPPED = "penstock/episode_dropped"
# One environment may have as many failed episodes without one between them that ended.
MOST_IN_A_ROW = 100
# An episode of as many steps counts as one that ended.
LONG = 1000
# Type and place of each error that this process has noted.
_noted: set[tuple[str, str]] = set()


class DropFailedEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resets its environment where a step fails."""

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        """Wrap ``env``, which messages call ``name``."""
        super().__init__(env)
        self._name = name
        # Steps since the last failure.
        self._steps = 0
        # Failed episodes since the last one that ended.
        self._in_a_row = 0

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment, again until its observation is finite."""
        while True:
            observation, info = self.env.reset(**kwargs)
            try:
                self._check(observation, 0.0)
            except ValueError as error:
                self._on_failure(error)
                # The same seed may begin alike.
                kwargs = {}
                continue
            return observation, info

    def step(self, action: Any) -> Any:
        """Step the environment; if that fails, return the first observation of the next episode."""
        self._steps += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self._check(observation, reward)
        except UserError:
            raise
        except Exception as error:
            self._on_failure(error)
            observation, info = self.reset()
            return observation, 0.0, False, False, {**info, DROPPED: True}

        if terminated or truncated:
            self._in_a_row = 0
        return observation, reward, terminated, truncated, info

    def _check(self, observation: Any, reward: Any) -> None:
        """Raise ValueError for numbers that would destroy the network."""
        if bad := find_bad_reward(np.array([reward], np.float64)):
            raise ValueError(f"it returned {bad}")
        for keys, space in leaves_of(self.observation_space):
            is_float = space.dtype is not None and space.dtype.kind == "f"
            if is_float and not np.isfinite(value_at(keys, observation)).all():
                raise ValueError("it returned an observation with a NaN or an infinity")

    def _on_failure(self, error: Exception) -> None:
        """Count a failed episode, and note the error if it is the first of its kind.

        Raises:
            UserError: if too many episodes have failed in a row.
        """
        if self._steps >= LONG:
            self._in_a_row = 0
        self._in_a_row += 1
        self._steps = 0

        what = brief_with_place(error)
        if self._in_a_row > MOST_IN_A_ROW:
            text = (
                f"environment {self._name}: {MOST_IN_A_ROW} episodes in a row failed, the last "
                f"with {what}, and env.on_error=drop_episode is for rare errors; correct it"
            )
            raise users_error(text, error) from error

        error_type = brief(error).partition(":")[0]
        kind = (error_type, place(error))
        if kind not in _noted:
            _noted.add(kind)
            logger.info(
                "environment %s: an episode was dropped, as it failed with %s; further ones are "
                "counted as dropped: env_error",
                self._name,
                what,
            )
