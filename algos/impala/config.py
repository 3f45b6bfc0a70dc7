"""The options of IMPALA."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import ActorCriticConfig
from penstock.configs.schedules import Weight
from penstock.configs.value_types import Fraction, NotNegative, Positive, Switch


class ImpalaConfig(ActorCriticConfig):
    """IMPALA: actor-critic with V-trace, which corrects for the lag of the acting policy."""

    name: Literal["impala"] = "impala"
    trace_lambda: Fraction = 1.0
    """Lambda of V-trace: weight of longer returns in the value targets. Smaller values mean less
    variance and more bias."""
    rho_clip: Positive = 1.0
    """Upper bound on the importance weight of each temporal difference (rho-bar in V-trace). At
    smaller values the values learnt are nearer to those of the acting policy; larger values mean
    more variance."""
    c_clip: Positive = 1.0
    """Upper bound on the importance weights in the product that carries later temporal differences
    back (c-bar in V-trace). Smaller values mean less variance and slower learning of values."""
    entropy_cost: Weight = 0.01
    """Weight of the entropy bonus in the loss. Larger values keep the policy more random. A
    schedule changes it by agent steps, as that of `learner.lr`."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss in the loss. Larger values favour the value function over the
    policy where they share a network."""
    normalize_advantages: Switch = False
    """Whether the advantages of each update are shifted and scaled to mean 0 and standard deviation
    1. The policy's step then does not depend on the size of rewards."""
