"""The options of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.configs.algorithms import OnPolicyConfig
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Count, Fraction, NotNegative, Part, Positive


class PpoConfig(OnPolicyConfig):
    """PPO: actor-critic that trains on each batch several times, within bounds on how far the
    policy moves from the one that acted."""

    name: Literal["ppo"] = "ppo"
    gae_lambda: Fraction = 0.95
    """Weight of longer returns in advantages; lower means less variance, more bias."""
    epochs: Count = 4
    """How often each batch is trained on, each time in `learner.updates_per_batch` minibatches of
    its environments, reshuffled each time."""
    clip: Part = 0.2
    """Clipping range of the probability ratio between the current and the acting policy."""
    value_clip: Positive | None = None
    """Clipping range of a value around its value at the batch's start; null: no clipping."""
    target_kl: Positive | None = None
    """No further epoch once the mean exact KL divergence of the policy at the batch's start from
    the current one exceeds this; null: all epochs. The learner then waits for its device between
    epochs, as the host has to read the divergence."""
    entropy_cost: NotNegative = 0.01
    """Weight of the entropy bonus in the loss."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss."""
    normalize_advantages: Literal["minibatch", "batch", "none"] = "minibatch"
    """Set over which advantages are shifted and scaled to mean 0 and standard deviation 1. A
    `minibatch` is then computed at once, whatever `learner.micro_batch` says."""

    @property
    def passes(self) -> int:
        return self.epochs

    def contradictions(self) -> Iterator[Contradiction]:
        if self.target_kl is not None and self.epochs == 1:
            yield Contradiction(
                ("algo.target_kl", "algo.epochs"),
                f"algo.target_kl {self.target_kl:g} ends a batch between two epochs, and "
                "algo.epochs is 1; set algo.epochs=4 or algo.target_kl=null",
            )
