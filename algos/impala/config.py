"""The options of IMPALA."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import OnPolicyConfig
from penstock.configs.value_types import Fraction, NotNegative, Positive, Switch


class ImpalaConfig(OnPolicyConfig):
    """IMPALA: actor-critic with V-trace, which corrects for the lag of the acting policy."""

    name: Literal["impala"] = "impala"
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
    normalize_advantages: Switch = False
    """Whether the advantages of each update are shifted and scaled to mean 0 and deviation 1."""
