"""A custom off-policy algorithm: Munchausen-DQN (Vieillard et al. 2020, arXiv 2007.14430).

    penstock train own_offpolicy.yaml        # in this folder: CartPole in a minute

`network` and `action_sampler` define the computation of actors, and `Update` trains on a batch of
transitions from replay. Without `columns` here, actors record the columns of DQN. They import this
file too, and do not need torch: it is imported where it is used.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.models.acting.categorical import EpsilonGreedySampler
from penstock.models.fitting import q_shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Settings:
    """The options in `algo.settings`."""

    temperature: float = 0.03  # of the policy that is the softmax of the values
    bonus: float = 0.9  # share of its log-probability that is added to the reward
    least_bonus: float = -1.0  # lower bound on temperature * log-probability (l0 in the paper)
    epsilon: float = 0.05
    tau: float = 0.02  # share of the network that moves into the target at every step (Polyak)


def network(config: Any, spaces: Any) -> Any:
    """A value for each action."""
    return q_shape(config, spaces)


def action_sampler(config: Any, spaces: Any, seed: int, actor: int) -> EpsilonGreedySampler:
    """The greedy action, or with probability epsilon a random one."""
    epsilon = np.full(config.actor_envs, config.algo.settings.epsilon)
    return EpsilonGreedySampler(int(spaces.action_space.n), epsilon, np.random.default_rng(seed))


class Update:
    """The trained network, and the target network that follows it."""

    statistics = ("q_loss", "td_error", "policy_entropy")  # means of these are in metrics.jsonl

    def __init__(self, cfg: Any, context: Any) -> None:
        from penstock.models.flat_parameters import flatten

        self.cfg, self.net = cfg, context.network()
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
        self.target_net.normalizer = self.net.normalizer
        self.target = flatten(self.target_net.parameters())
        self.optimizer = context.optimizer("q", self.net.named_parameters())
        self.published = [self.optimizer.values, *self.net.buffers()]  # weights for actors

    def take(self, batch: Any, total: float, number: int, env_steps: int) -> Any:
        """One step on `total` transitions; `batch` is None if this learner has no transitions."""
        from penstock.algos.replay_update import UpdateResult

        self.optimizer.zero_grad()
        found = None if batch is None else self.gradients(batch, total)
        norm = self.optimizer.step(total, env_steps)
        self.target.lerp_(self.optimizer.values, self.cfg.settings.tau)
        nothing = UpdateResult.of_nothing(self.statistics, norm)
        return nothing if found is None else UpdateResult(*found, norm)

    def gradients(self, batch: dict[str, Tensor], total: float) -> tuple[Tensor, Tensor]:
        """Absolute TD errors [B], the priorities of replay, and the sums of `statistics`."""
        import torch

        settings, action = self.cfg.settings, batch["action"].long()[:, None]
        temperature = settings.temperature
        with torch.no_grad():
            allowed = self.target_net.allowed_outputs  # by the action mask, where there is one
            q, next_q = (allowed(batch[name], -1e9) for name in ("obs", "next_obs"))
            logp = torch.log_softmax(q / temperature, 1)
            next_logp = torch.log_softmax(next_q / temperature, 1)
            munchausen = (temperature * logp.gather(1, action)[:, 0]).clamp(settings.least_bonus, 0)
            value = (next_logp.exp() * (next_q - temperature * next_logp)).sum(1)
            target = batch["reward"] + settings.bonus * munchausen + batch["discount"] * value
        errors = target - self.net(batch["obs"]).gather(1, action)[:, 0]
        loss = 0.5 * errors.square().dot(batch["weights"])  # a sum: Penstock divides by `total`
        self.optimizer.prepare_backward(total)
        loss.backward()
        errors, entropy = errors.abs().detach(), -(logp.exp() * logp).sum()
        return errors, torch.stack((loss.detach(), errors.sum(), entropy))

    def state(self) -> dict[str, Tensor]:
        """State for the checkpoint besides network and optimizer; loaded in place on resume."""
        return {"target": self.target}

    def loaded(self) -> None:
        """Called after a checkpoint was loaded into `state`."""
