"""The options of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.configs.algorithms import ActorCriticConfig
from penstock.configs.schedules import Clip, Weight
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Fraction, NotNegative, Positive, Small


class PpoConfig(ActorCriticConfig):
    """PPO: actor-critic that trains on each batch several times, within bounds on how far the
    policy moves in a batch."""

    name: Literal["ppo"] = "ppo"
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation and of V-trace: weight of longer returns in the
    advantages. Smaller values mean less variance and more bias."""
    advantages: Literal["gae", "vtrace"] = "gae"
    """Estimator of advantages and value targets where the policy that acted lags behind the one at
    the batch's start. `gae`: generalised advantage estimation, and an importance weight for each
    action in the policy's loss alone. `vtrace`: V-trace, in which importance weights correct the
    advantages and the value targets too. Without lag both are the same."""
    rho_clip: Positive = 1.0
    """Upper bound on the importance weight of an action: its probability by the policy at the
    batch's start over that by the policy that acted. Smaller values mean less variance and more
    bias in the correction of lag."""
    epochs: Small = 4
    """Passes over each batch. Each pass has `learner.updates_per_batch` minibatches, reshuffled for
    each pass. More passes use samples better, and move the policy farther in a batch."""
    minibatches: Literal["unrolls", "steps", "auto"] = "unrolls"
    """Content of a minibatch: `unrolls` are whole unrolls of some environments, as recurrent
    networks (`model.core`) need them; `steps` are any steps of the batch, as in the published
    algorithm, and their number need not divide `actors.envs`. `auto` is `steps` where `model.core`
    is `none`."""
    clip: Clip = 0.2
    """Clipping range of the probability ratio between the current policy and the one at the batch's
    start: 1 ± this. Smaller values mean smaller changes of the policy for each batch. A schedule
    changes it by agent steps, as that of `learner.lr`."""
    value_clip: Positive | None = None
    """Clipping range of a value around its value at the batch's start, in units of the scaled
    return. Smaller values mean slower changes of the value function. null: no clipping."""
    target_kl: Positive | None = None
    """Limit on the KL divergence of the policy at the batch's start from the current one, in nats,
    exact and averaged over the batch. Where it is exceeded after an epoch, the batch has no further
    epoch. The learner then waits for its device between epochs, as the host has to read the
    divergence. null: all epochs."""
    entropy_cost: Weight = 0.01
    """Weight of the entropy bonus in the loss. Larger values keep the policy more random. A
    schedule changes it by agent steps, as that of `learner.lr`."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss in the loss. Larger values favour the value function over the
    policy where they share a network."""
    normalize_advantages: Literal["minibatch", "batch", "none"] = "minibatch"
    """Set of samples over which advantages are shifted and scaled to mean 0 and standard deviation
    1; `none`: they are not. With `minibatch`, each minibatch is computed at once, and
    `learner.micro_batch` has no effect."""

    @property
    def passes(self) -> int:
        return self.epochs

    def by_steps(self, has_core: bool) -> bool:
        return self.minibatches == "steps" or (self.minibatches == "auto" and not has_core)

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the options that contradict each other, with the message for the user."""
        if self.target_kl is not None and self.epochs == 1:
            yield Contradiction(
                ("algo.target_kl", "algo.epochs"),
                f"algo.target_kl {self.target_kl:g} ends a batch between two epochs, and "
                "algo.epochs is 1; set algo.epochs=4 or algo.target_kl=null",
            )
