"""The options of TD3."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import OffPolicyConfig
from penstock.configs.value_types import Count, Fraction, NotNegative, Positive


class Td3Config(OffPolicyConfig):
    """TD3 for continuous actions: a deterministic actor, trained less often than its two critics.
    It samples from replay."""

    name: Literal["td3"] = "td3"
    tau: Fraction = 0.005
    """Step of the target networks towards the networks, with every update of the actor: 1 copies
    them. Smaller values make the targets more stable and learning slower."""
    policy_delay: Count = 2
    """Optimizer steps of the critics for each one of the actor and of the target networks. Larger
    values let the critics become more exact before the actor follows them."""
    exploration_noise: NotNegative = 0.1
    """Standard deviation of the normal noise that actors add to their actions, for actions scaled
    to -1 ... 1. Larger values explore more."""
    target_noise: NotNegative = 0.2
    """Standard deviation of the normal noise on the target actor's actions, on the same scale.
    Larger values make the critics smoother in the action."""
    target_noise_clip: Positive = 0.5
    """Bound on the size of that noise, on the same scale."""
