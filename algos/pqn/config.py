"""The options of PQN."""

from __future__ import annotations

from typing import Literal

from penstock.configs.algorithms import OnPolicyConfig
from penstock.configs.schedules import Chance, LinearSchedule
from penstock.configs.value_types import Fraction, Small


class PqnConfig(OnPolicyConfig):
    """PQN: Q-learning with lambda-returns on fresh unrolls, for actions to choose from. It has
    neither replay nor target network; layer normalisation (`model.layer_norm`) keeps it stable."""

    name: Literal["pqn"] = "pqn"
    q_lambda: Fraction = 0.65
    """Lambda of the returns that Q-values learn: weight of longer returns in the targets. Smaller
    values mean less variance, and rewards are carried back more slowly."""
    epochs: Small = 2
    """Passes over each batch. Each pass has `learner.updates_per_batch` minibatches, reshuffled for
    each pass. More passes use samples better, and fit targets of an older network more closely."""
    minibatches: Literal["unrolls", "steps", "auto"] = "auto"
    """Content of a minibatch: `unrolls` are whole unrolls of some environments, as recurrent
    networks (`model.core`) need them; `steps` are any steps of the batch, as in the published
    algorithm, and their number need not divide `actors.envs`. `auto` is `steps` where `model.core`
    is `none`."""
    epsilon: Chance = LinearSchedule.model_validate({"from": 1.0, "to": 0.05, "steps": 300_000})
    """Fraction of random actions, in every environment. A schedule changes it by agent steps, as
    that of `learner.lr`; actors follow it with the weights that they get."""

    @property
    def is_actor_critic(self) -> bool:
        return False

    @property
    def passes(self) -> int:
        return self.epochs

    def by_steps(self, has_core: bool) -> bool:
        return self.minibatches == "steps" or (self.minibatches == "auto" and not has_core)
