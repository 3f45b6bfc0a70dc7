"""The section `algo`: one schema class per algorithm, chosen by `name`.

A new algorithm is one more class here, in the union `AlgoConfig` and in `penstock.algos`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from penstock.configs.section import Section
from penstock.configs.values import Count, Fraction, NotNegative, Number, Positive, Switch

DEFAULT = "impala"


class ImpalaConfig(Section):
    """IMPALA: actor-critic with V-trace, which corrects for the lag of the acting policy."""

    name: Literal["impala"] = "impala"
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    trace_lambda: Fraction = 1.0
    """Weight of longer returns in V-trace's targets; lower means less variance, more bias."""
    rho_clip: Positive = 1.0
    """Bound on the importance weight of a temporal difference: which policy is evaluated."""
    c_clip: Positive = 1.0
    """Bound on the importance weight that carries corrections back in time."""
    entropy_cost: NotNegative = 0.01
    """Weight of the entropy bonus in the loss."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""
    normalize_advantages: Switch = False
    """Whether the advantages of each update are shifted and scaled to mean 0 and deviation 1."""


class DqnConfig(Section):
    """DQN for actions to choose from: double, duelling, n-step, with actors that explore each at a
    rate of its own, as in Ape-X. Learns from replay."""

    name: Literal["dqn"] = "dqn"
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    n_step: Count = 3
    """Rewards that are summed before a target goes on with the network's own value."""
    double: Switch = True
    """Whether the trained network chooses the next action and the target network only values it,
    which overestimates less."""
    duelling: Switch = True
    """Whether the last hidden layer is two of them, for the state's value and for the actions'
    advantages."""
    target_every: Count = 1000
    """Optimizer steps from one copy of the network into the target network to the next."""
    epsilon: Fraction = 0.4
    """Share of random actions of the most curious environment. Environment i of all N actors'
    explores at `epsilon ** (1 + i / (N - 1) * epsilon_alpha)`."""
    epsilon_alpha: NotNegative = 7.0
    """How much less the others explore: 0 makes all alike, 7 brings the last to `epsilon ** 8`."""
    huber: Positive = 1.0
    """Temporal differences beyond ± this count linearly in the loss, those within squared."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""


class SacConfig(Section):
    """SAC for actions that are numbers: a stochastic actor and two critics, which seek reward and
    entropy alike. Learns from replay."""

    name: Literal["sac"] = "sac"
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    tau: Fraction = 0.005
    """Share of the critics that goes into the target critics after every optimizer step."""
    alpha: Positive = 1.0
    """Temperature, the worth of entropy against reward; where `tune_alpha` is on, at the start."""
    tune_alpha: Switch = True
    """Whether the temperature is learnt, so that the policy keeps the target entropy."""
    target_entropy: Number | None = None
    """Entropy in nats, of actions scaled to -1 ... 1, that `tune_alpha` steers to; null: minus the
    number of values in an action."""
    log_std_min: Number = -20.0
    """Lower bound on the logarithm of the policy's standard deviation."""
    log_std_max: Number = 2.0
    """Upper bound on the logarithm of the policy's standard deviation."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""


OffPolicyConfig = DqnConfig | SacConfig


def _named(value: Any) -> Any:
    """A map that names no algorithm means the default one."""
    return {"name": DEFAULT, **value} if isinstance(value, dict) else value


AlgoConfig = Annotated[
    ImpalaConfig | DqnConfig | SacConfig, Field(discriminator="name"), BeforeValidator(_named)
]
