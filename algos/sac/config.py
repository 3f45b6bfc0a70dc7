"""The options of SAC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.configs.algorithms import OffPolicyConfig
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Fraction, LogStd, Number, Positive, Switch


class SacConfig(OffPolicyConfig):
    """SAC for continuous actions: a stochastic actor and two critics maximise reward and entropy.
    It samples from replay."""

    name: Literal["sac"] = "sac"
    tau: Fraction = 0.005
    """Step of the target critics towards the critics after every optimizer step: 1 copies them.
    Smaller values make the targets more stable and learning slower."""
    alpha: Positive = 1.0
    """Temperature: weight of entropy relative to reward; with `tune_alpha`, its initial value.
    Larger values make the policy more random."""
    tune_alpha: Switch = True
    """Whether the temperature is adapted, so that the policy's entropy stays at
    `target_entropy`."""
    target_entropy: Number | None = None
    """Entropy that `tune_alpha` keeps, in nats, for actions scaled to -1 ... 1. Larger values make
    the policy more random. null: minus the number of values in an action."""
    log_std_min: LogStd = -20.0
    """Lower bound on the natural logarithm of the policy's standard deviation, before tanh. Larger
    values keep the policy more random."""
    log_std_max: LogStd = 2.0
    """Upper bound on the natural logarithm of the policy's standard deviation, before tanh. Smaller
    values limit how random the policy can be."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the options that contradict each other, with the message for the user."""
        yield from super().contradictions()
        if self.log_std_min >= self.log_std_max:
            lower_min = max(self.log_std_max - 22, -20)
            yield Contradiction(
                ("algo.log_std_min", "algo.log_std_max"),
                f"algo.log_std_min {self.log_std_min:g} must lie below algo.log_std_max "
                f"{self.log_std_max:g}; set algo.log_std_min={lower_min:g}",
            )

        if self.target_entropy is not None and not self.tune_alpha:
            yield Contradiction(
                ("algo.target_entropy", "algo.tune_alpha"),
                f"algo.target_entropy {self.target_entropy:g} does nothing while algo.tune_alpha "
                "is off; set algo.tune_alpha=true or algo.target_entropy=null",
            )
