"""The section `algo`: one schema class per algorithm, chosen by `name`.

A second algorithm is a second class here, and `AlgoConfig` becomes
``Annotated[ImpalaConfig | ItsConfig, Field(discriminator="name")]``.
"""

from __future__ import annotations

from typing import Literal

from penstock.configs.section import Section
from penstock.configs.values import Fraction, NotNegative, Positive, Switch


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


AlgoConfig = ImpalaConfig
