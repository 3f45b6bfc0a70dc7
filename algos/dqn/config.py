"""The options of DQN, and those that all algorithms with Q-values of choices share."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import OffPolicyConfig
from penstock.configs.schedules import Chance
from penstock.configs.value_types import Count, NotNegative, Positive, Small, Switch


class QLearningConfig(OffPolicyConfig):
    """Base of the config of an algorithm that learns Q-values of choices from replay."""

    n_step: Small = 3
    """Number of rewards summed in a target before it bootstraps from the target network (n-step
    return). Larger values carry rewards back faster, with more variance and more bias from
    actions of older policies."""
    double: Switch = True
    """Whether the trained network chooses the next action and the target network evaluates it
    (double DQN). This reduces the overestimation of values. If false, the target network does
    both."""
    duelling: Switch = True
    """Whether the network has two last hidden layers, one for the state's value and one for the
    actions' advantages (duelling network)."""
    target_every: Count = 1000
    """Optimizer steps between two updates of the target network. Larger values make the targets
    more stable and learning slower."""
    quantiles: Small = 1
    """Number of quantiles of the return that are learned for each action, whose mean decides
    (QR-DQN). 1 learns the expected return alone. More describe the distribution more finely, which
    mostly learns faster per step, and take longer."""
    noisy: Switch = False
    """Whether the linear layers have noise in their weights, whose size is learned, by which actors
    explore (noisy networks). It doubles the parameters of these layers. Set `epsilon` to 0 with
    it: then all that actors do at random is what the noise makes them do."""
    epsilon: Chance = 0.4
    """Fraction of random actions in the environment that explores most. Of the N environments of
    all actors, environment i explores at `epsilon ** (1 + i / (N - 1) * epsilon_alpha)`. With
    `penstock serve-env` seats 0, 1, 2, 3, 4 and so on have the exponents of 0, 1/2, 1/4, 3/4, 1/8
    and so on in place of i / (N - 1), so that any number of them is spread evenly. A schedule, as
    {from: 1, to: 0.01, steps: 250_000} with an `epsilon_alpha` of 0, is DQN's as published."""
    epsilon_alpha: NotNegative = 7.0
    """Spread of the exploration rates: with 0 all environments explore at `epsilon`, with 7 the
    last one explores at `epsilon ** 8`. Larger values mean less exploration."""
    huber: Positive = 1.0
    """Threshold of the Huber loss: TD errors within ± this value count squared, larger ones
    linearly. Smaller values limit the effect of large errors more."""


class DqnConfig(QLearningConfig):
    """DQN for actions to choose from, with double Q-learning, a duelling network, n-step returns
    and an exploration rate per environment as in Ape-X. It samples from replay."""

    name: Literal["dqn"] = "dqn"
