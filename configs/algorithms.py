"""The section `algo`: one schema class per algorithm, chosen by `name`.

A new algorithm is one more class here, in the union `AlgoConfig` and in `penstock.algos`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from penstock.configs.section import Section
from penstock.configs.value_types import (
    Count,
    Fraction,
    Module,
    NotNegative,
    Number,
    Options,
    Part,
    Positive,
    Switch,
)

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
    normalize_rewards: Switch = False
    """Whether rewards are divided by the deviation of the discounted return so far."""
    normalize_advantages: Switch = False
    """Whether the advantages of each update are shifted and scaled to mean 0 and deviation 1."""
    epochs: ClassVar[int] = 1  # V-trace corrects for the lag of samples, not for their reuse


class PpoConfig(Section):
    """PPO: actor-critic that trains on each batch several times, within bounds on how far the
    policy moves from the one that acted."""

    name: Literal["ppo"] = "ppo"
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    gae_lambda: Fraction = 0.95
    """Weight of longer returns in advantages; lower means less variance, more bias."""
    epochs: Count = 4
    """How often each batch is trained on, each time in `learner.updates_per_batch` minibatches of
    its environments, dealt anew."""
    clip: Part = 0.2
    """How far a probability may move from that of the actor, as a ratio, before it gains nothing
    more."""
    value_clip: Positive | None = None
    """How far a value may move from that at the batch's start before it gains nothing more; null:
    any way."""
    target_kl: Positive | None = None
    """No further epoch once the mean KL divergence of the policy at the batch's start from the
    current one, exact, is above this; null: all epochs. The learner then waits for its device
    between epochs, as the host has to read the divergence."""
    entropy_cost: NotNegative = 0.01
    """Weight of the entropy bonus in the loss."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss."""
    normalize_advantages: Literal["minibatch", "batch", "none"] = "minibatch"
    """Over what advantages are shifted and scaled to mean 0 and deviation 1. A `minibatch` is then
    computed at once, whatever `learner.micro_batch` says."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""
    normalize_rewards: Switch = False
    """Whether rewards are divided by the deviation of the discounted return so far."""


class CustomConfig(Section):
    """An algorithm of one's own, which trains on fresh unrolls as `impala` and `ppo` do; see
    `examples/own_algorithm.py`."""

    name: Literal["custom"] = "custom"
    """The algorithm."""
    entry: Module
    """Where its functions are: a module, or an object or class in one, which is called without
    arguments."""
    settings: Options = Field(default_factory=dict)
    """What its own `Settings`, a dataclass or a pydantic model, is made of."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    epochs: Count = 1
    """How often each batch is trained on, each time in `learner.updates_per_batch` minibatches."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""
    normalize_rewards: Switch = False
    """Whether rewards are divided by the deviation of the discounted return so far."""


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


OnPolicyConfig = ImpalaConfig | PpoConfig | CustomConfig
OffPolicyConfig = DqnConfig | SacConfig


def _named(value: Any) -> Any:
    """A map that names no algorithm means the default one."""
    return {"name": DEFAULT, **value} if isinstance(value, dict) else value


AlgoConfig = Annotated[
    OnPolicyConfig | OffPolicyConfig, Field(discriminator="name"), BeforeValidator(_named)
]
