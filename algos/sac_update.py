"""The update of SAC: critics, then actor, then temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from penstock.algos import sac
from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.configs.algorithms import SacConfig
from penstock.models.layout import DenseShape
from penstock.models.torch_nets import HeadNet, TwinCritics, build_net
from penstock.profiling.ledger import Part


class SacUpdate:
    """Actor, twin critics with their targets, and temperature. Where the critics' step is skipped,
    as its gradient is not finite, those of actor and temperature are, too."""

    statistics = sac.STATISTICS

    def __init__(self, algo: SacConfig, ctx: UpdateContext) -> None:
        shape = ctx.shape
        assert isinstance(shape, DenseShape), shape
        self._algo = algo
        self._ledger = ctx.ledger
        self._target_entropy = sac.target_entropy(algo, shape.outputs // 2)
        self.actor: HeadNet = build_net(shape, ctx.dtype).to(ctx.device)
        self.critics = TwinCritics(shape).to(ctx.device)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(algo.alpha)], device=ctx.device))
        self._actor_optimizer = ctx.optimizer("actor", self.actor.named_parameters())
        self._critic_optimizer = ctx.optimizer("critics", self.critics.named_parameters())
        self._alpha_optimizer = ctx.optimizer("log_alpha", [("log_alpha", self.log_alpha)])
        self._optimizers = (self._actor_optimizer, self._critic_optimizer, self._alpha_optimizer)
        self._target = self._critic_optimizer.values.clone()
        weights = self.critics.weights()
        parts = self._target.split([weight.numel() for weight in weights])
        self.target_weights = [
            part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)
        ]
        self.published = [self._actor_optimizer.values, *self.actor.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        alpha = self.log_alpha.detach().exp()
        found = None if batch is None else self._critic_gradients(batch, alpha, total)
        self._ledger.switch(Part.OPTIMIZE)
        critic_norm = self._critic_optimizer.step(total, env_steps)
        acted = None if batch is None else self._actor_gradients(batch, alpha, total, critic_norm)
        self._ledger.switch(Part.OPTIMIZE)
        actor_norm = self._actor_optimizer.step(total, env_steps)
        if self._algo.tune_alpha:
            if acted is not None:
                self._temperature_gradient(acted[1], total, actor_norm)
            self._alpha_optimizer.step(total, env_steps)
        self._target.lerp_(self._critic_optimizer.values, self._algo.tau)
        norm = torch.hypot(critic_norm, actor_norm)
        if found is None or acted is None:
            return UpdateResult.of_nothing(self.statistics, norm)
        (critic_loss, errors, values), (actor_loss, logp) = found, acted
        entropy, alphas = -logp.sum(), alpha[0] * len(errors)
        sums = (critic_loss, actor_loss, errors.sum(), values, entropy, alphas)
        return UpdateResult(errors, torch.stack([value.detach() for value in sums]), norm)

    def state(self) -> dict[str, Tensor]:
        return {
            "critics": self._critic_optimizer.values,
            "target": self._target,
            "log_alpha": self._alpha_optimizer.values,
        }

    def loaded(self) -> None:
        """Everything is used as it is."""

    def _critic_gradients(
        self, batch: Batch, alpha: Tensor, total: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._ledger.switch(Part.FORWARD)
        with torch.no_grad():
            ahead = self._act(batch["next_obs"])
        loss, errors, values = sac.critic_loss(
            self.critics, self.target_weights, batch, *ahead, alpha
        )
        self._critic_optimizer.prepare_backward(total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss)
        return loss, errors, values

    def _actor_gradients(
        self, batch: Batch, alpha: Tensor, total: float, critic_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._ledger.switch(Part.FORWARD)
        action, logp = self._act(batch["obs"])
        loss = sac.actor_loss(self.critics, batch["obs"], action, logp, alpha)
        self._actor_optimizer.prepare_backward(total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss, critic_norm)
        return loss, logp

    def _temperature_gradient(self, logp: Tensor, total: float, actor_norm: Tensor) -> None:
        self._alpha_optimizer.prepare_backward(total)
        backward(sac.temperature_loss(self.log_alpha, logp, self._target_entropy), actor_norm)

    def _act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh actions ``[B, D]`` and their log-densities ``[B]``."""
        noise = torch.randn(len(obs), self.actor.head.out_features // 2, device=obs.device)
        return sac.policy_sample(self.actor, obs, self._algo, noise)
