"""First episodes of different lengths, so that environments begin their later ones at other steps.

Episodes that all end at a time limit would otherwise begin together in all environments, again and
again: one batch would be all beginnings, and the next ones would hold none. The first episode of
environment k is truncated after a share of the limit, the fractional part of (k + 1) times the
golden ratio; for any number of environments these shares are spread evenly (Weyl 1916).

Trainings with rsl_rl do the same with random elapsed times (`init_at_random_ep_len`). A shortened
episode is no result: `SHORTENED` marks its end. An environment that refuses to be reset there plays
on instead of beginning again, and the rest of its episode is no result either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium

# Key of a step's info, with the value True at the end of a shortened episode.
SHORTENED = "penstock/first_episode_shortened"
GOLDEN_RATIO = (1 + math.sqrt(5)) / 2

Single = gymnasium.Env[Any, Any]


def shares(first: int, count: int) -> list[float]:
    """Returns the share of its time limit that the first episode of each environment has.

    Args:
        first: the number of the first environment among those of the run.
        count: number of environments.

    Returns:
        A share in [0, 1) for each environment.
    """
    return [(number + 1) * GOLDEN_RATIO % 1 for number in range(first, first + count)]


def staggered(makes: Sequence[Callable[[], Single]], first: int) -> list[Callable[[], Single]]:
    """Returns constructors of environments that shorten their first episode.

    An environment without a time limit stays as it is.

    Args:
        makes: the constructor of each environment.
        first: the number of the first environment among those of the run.
    """
    pairs = zip(makes, shares(first, len(makes)), strict=True)
    return [partial(_staggered, make, share) for make, share in pairs]


def _staggered(make: Callable[[], Single], share: float) -> Single:
    """Make an environment whose first episode has a share of its time limit."""
    env = make()
    limit = env.spec.max_episode_steps if env.spec else None
    return env if limit is None else ShortFirstEpisode(env, math.ceil(share * limit))


class ShortFirstEpisode(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates the first episode after ``steps`` steps.

    A checkpoint holds the attributes by their names (`penstock.envs.saved_state`).
    """

    # Both belong to the class unless they are set, as earlier saved states have neither.
    _cut: tuple[Any] | None = None
    """The observation at which the episode was truncated, until the reset that follows."""
    _plays_on = False
    """Whether the environment has refused that reset, and its first episode lasts."""

    def __init__(self, env: Single, steps: int) -> None:
        super().__init__(env)
        self._steps = steps
        # Steps of the first episode that remain; 0 in all later ones.
        self._left = steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment; if it refuses after a truncation, its episode is played on."""
        # A seed begins anew; without one it is the reset at an episode's end.
        self._left = self._steps if seed is not None else 0
        cut, self._cut = self._cut, None
        self._plays_on = False
        if cut is None or seed is not None:
            return self.env.reset(seed=seed, options=options)

        try:
            return self.env.reset(options=options)
        except Exception:
            # An environment that fails for another reason fails in its next call too.
            self._plays_on = True
            last_observation = cut[0]
            return last_observation, {}

    def step(self, action: Any) -> Any:
        """Step the environment, and truncate the first episode after its share."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._left:
            self._left -= 1
            if not (self._left or terminated or truncated):
                self._cut = (deepcopy(observation),)
                return observation, reward, False, True, {**info, SHORTENED: True}
        elif self._plays_on and (terminated or truncated):
            # The rest of an episode that was truncated before is no result either.
            info = {**info, SHORTENED: True}
        return observation, reward, terminated, truncated, info
