"""The options of DQN."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import OffPolicyConfig
from penstock.configs.value_types import Count, Fraction, NotNegative, Positive, Switch


class DqnConfig(OffPolicyConfig):
    """DQN for discrete actions: double, duelling, n-step, with an exploration rate per environment
    as in Ape-X. Learns from replay."""

    name: Literal["dqn"] = "dqn"
    n_step: Count = 3
    """Number of rewards summed in a target before it bootstraps from the network (n-step
    return)."""
    double: Switch = True
    """Whether the trained network chooses the next action and the target network only values it,
    which overestimates less."""
    duelling: Switch = True
    """Whether the network has two last hidden layers, one for the state's value and one for the
    actions' advantages."""
    target_every: Count = 1000
    """Optimizer steps between two updates of the target network."""
    epsilon: Fraction = 0.4
    """Fraction of random actions in the environment that explores most. Environment i of all N
    actors' explores at `epsilon ** (1 + i / (N - 1) * epsilon_alpha)`."""
    epsilon_alpha: NotNegative = 7.0
    """How much less the others explore: 0 makes all alike, 7 brings the last to `epsilon ** 8`."""
    huber: Positive = 1.0
    """Huber loss: TD errors within ± this count squared, those beyond linearly."""
