"""Exploration by random actions, for algorithms that learn Q-values."""

from __future__ import annotations

import numpy as np

from penstock.configs.schedules import LinearSchedule, value_at
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.models.acting.categorical import (
    EpsilonGreedySampler,
    ExploringSampler,
    Ladder,
    MultiEpsilonGreedySampler,
)
from penstock.models.actions import Choices, action_spec


def epsilon_greedy(
    config: Config,
    spaces: Spaces,
    *,
    epsilon: float | LinearSchedule,
    alpha: float,
    seed: int,
    actor: int,
) -> ExploringSampler:
    """Returns what chooses the actions of an actor's environments by their Q-values.

    Args:
        config: of the run.
        spaces: of its environments, whose actions are choices.
        epsilon: the rate of exploration. Of a schedule, weights bring the present value
            (`models.layout.SingleHead.shows_epsilon`).
        alpha: how much rates differ between environments (`Ladder`).
        seed: of the random numbers.
        actor: number of the actor, on which its rates depend.
    """
    ladder = ladder_of(config, epsilon=epsilon, alpha=alpha, actor=actor)
    rng = np.random.default_rng(seed)

    actions = action_spec(config, spaces)
    assert isinstance(actions, Choices), actions
    if actions.shape == ():
        return EpsilonGreedySampler(actions.outputs, ladder, rng)
    return MultiEpsilonGreedySampler(actions.counts, actions.shape, ladder, rng)


def ladder_of(
    config: Config, *, epsilon: float | LinearSchedule, alpha: float, actor: int
) -> Ladder:
    """Returns the rates of an actor's environments; the arguments are those of `epsilon_greedy`."""
    envs = config.actor_envs
    return Ladder(
        base=value_at(epsilon, 0),
        alpha=alpha,
        first=actor * envs,
        count=envs,
        total=config.first_actors * envs,
    )
