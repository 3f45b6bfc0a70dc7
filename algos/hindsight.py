"""Hindsight replay: transitions are also trained on as if a goal achieved later had been asked for.

Andrychowicz et al. 2017, arXiv 1707.01495, with the strategy "future" of section 4.5: a goal is one
that was achieved at the transition or later in its episode, each step alike. The published 4
replaced goals for each one as played are a fraction of 0.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.configs.algorithms import OffPolicyConfig
from penstock.configs.schema import Config
from penstock.core.observations import views
from penstock.core.rewards import Rewards, adjust_rewards
from penstock.envs.goals import ACHIEVED, DESIRED, Goals
from penstock.envs.make import FirstIndex

# Longest way from a transition to its goal, in steps.
HORIZON = 10_000


class Hindsight:
    """A `core.interfaces.Relabel` that replaces goals."""

    def __init__(self, goals: Goals, fraction: float, rewards: Rewards) -> None:
        """Replace nothing yet.

        Args:
            goals: of the run's environment; `close` closes them.
            fraction: of the transitions whose goal is replaced.
            rewards: how rewards are changed for training.
        """
        self._goals = goals
        self._fraction = fraction
        self._rewards = rewards

    def __call__(
        self,
        batch: dict[str, Any],
        future: Callable[[int], Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> None:
        """Replace goals, with the rewards and the ends of episodes that follow from them."""
        later = future(HORIZON)
        rows = np.flatnonzero(rng.random(len(batch["reward"])) < self._fraction)
        if not len(rows):
            return

        parts = self._goals.parts
        obs = views(parts, batch["obs"])
        next_obs = views(parts, batch["next_obs"])
        goals = views(parts, later["next_obs"])[ACHIEVED][rows]
        obs[DESIRED][rows] = goals
        next_obs[DESIRED][rows] = goals

        achieved = next_obs[ACHIEVED][rows]
        rewards = self._goals.rewards(achieved, goals)
        adjust_rewards(self._rewards, rewards)
        batch["reward"][rows] = rewards

        # An episode that ended for another cause than its goal has ended for every goal.
        ends = rows[self._goals.terminated(achieved, goals)]
        batch["terminated"][ends] = True
        batch["discount"][ends] = 0.0

    def close(self) -> None:
        """Close the environment of the goals."""
        self._goals.close()


def make_hindsight(config: Config, rank: int) -> Hindsight | None:
    """Makes the hindsight of a run on the learner ``rank``; None without `algo.hindsight`.

    Raises UserError if the environment has no goals.
    """
    cfg = config.algo
    if not isinstance(cfg, OffPolicyConfig) or not cfg.hindsight:
        return None
    return Hindsight(Goals(config.env, first=FirstIndex.LEARNER + rank), cfg.hindsight, cfg)
