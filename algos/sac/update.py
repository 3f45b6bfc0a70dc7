"""The learner's half of SAC: the networks, and the losses, each a sum over the batch.

An update minimises the critics' loss first (`penstock.algos.ops.twin_critics`), then `actor_loss`,
then `temperature_loss`. Equations are those of Haarnoja et al. 2018, arXiv 1812.05905.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.algos.ops.backward import backward
from penstock.algos.ops.twin_critics import CriticLoss, Critics, TrainedCritics
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.algos.sac.config import SacConfig
from penstock.models.distributions import HALF_LOG_2PI, log_slope
from penstock.profiling.ledger import Part

STATISTICS = ("critic_loss", "actor_loss", "td_error", "q_mean", "entropy", "alpha")


class ActorLoss(NamedTuple):
    """The loss of the actor on a batch, without a gradient."""

    loss: Tensor
    """Sum over the batch, ``[]``."""
    logp: Tensor
    """Log-densities ``[B]`` of the actor's actions."""


def squashed(outputs: Tensor, noise: Tensor, log_std: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Returns actions ``tanh(mean + std * noise)`` ``[B, D]`` and their log-densities ``[B]``.

    The paper's appendix C.

    Args:
        outputs: of the actor, ``[B, 2 D]``: means, then logarithms of standard deviations.
        noise: standard normal, ``[B, D]``.
        log_std: smallest and largest logarithm of a standard deviation.
    """
    mean, log_stds = outputs.chunk(2, 1)
    log_stds = log_stds.clamp(*log_std)
    unsquashed = torch.addcmul(mean, log_stds.exp(), noise)

    # The density of the normal numbers, corrected by the slope of tanh.
    log_density = -0.5 * noise.square() - HALF_LOG_2PI - log_stds - log_slope(unsquashed)
    return unsquashed.tanh(), log_density.sum(1)


def soft_target(
    target_critics: Critics,
    batch: Mapping[str, Tensor],
    next_action: Tensor,
    next_logp: Tensor,
    alpha: Tensor,
) -> Tensor:
    """Returns the target of both critics ``[B]``, without a gradient: equations 5 and 6.

    Args:
        target_critics: those that lag behind, whose smaller value counts.
        batch: as for `penstock.algos.dqn.update.loss`.
        next_action: the actor's action for ``next_obs``, ``[B, D]``.
        next_logp: its log-density, ``[B]``.
        alpha: the temperature, ``[1]``.
    """
    with torch.no_grad():
        next_q = target_critics(batch["next_obs"], next_action).amin(0)
        soft_value = next_q - alpha * next_logp
        return torch.addcmul(batch["reward"], batch["discount"], soft_value)


def actor_loss(
    critics: Critics, obs: Tensor, action: Tensor, logp: Tensor, alpha: Tensor
) -> Tensor:
    """Returns the sum of ``alpha * logp - Q``, equation 9, ``[]``.

    Its gradient reaches the actor only, through ``action`` ``[B, D]`` and ``logp`` ``[B]``.
    """
    return (alpha * logp - critics.of_action(obs, action).amin(0)).sum()


def temperature_loss(log_alpha: Tensor, logp: Tensor, target_entropy: float) -> Tensor:
    """Returns the loss of the temperature, equation 18, ``[]``: too little entropy makes it grow.

    As in the authors' code the factor is ``log_alpha``, not alpha: the sign of the gradient is the
    same, and a small alpha is not slow to grow again.
    """
    return -(log_alpha * (logp.detach() + target_entropy)).sum()


def target_entropy(cfg: SacConfig, action_size: int) -> float:
    """Returns the target entropy in nats; by default minus the number of values in an action."""
    return -float(action_size) if cfg.target_entropy is None else cfg.target_entropy


class SacUpdate:
    """Actor, twin critics with their targets, and temperature.

    Where the critics' step is skipped, because its gradient is not finite, those of actor and
    temperature are skipped too.
    """

    statistics = STATISTICS

    def __init__(self, algo: SacConfig, ctx: UpdateContext) -> None:
        self._algo = algo
        self._ledger = ctx.ledger
        self._action_size = ctx.shape.outputs // 2
        self._target_entropy = target_entropy(algo, self._action_size)

        # All networks normalise observations by the actor's statistics.
        self.actor = ctx.network()
        self._actor_optimizer = ctx.optimizer("actor", self.actor.named_parameters())
        self.critics = TrainedCritics(ctx, self.actor.normalizer, self._action_size, algo.tau)
        self.log_alpha = nn.Parameter(torch.full((1,), math.log(algo.alpha), device=ctx.device))
        self._alpha_optimizer = ctx.optimizer("log_alpha", [("log_alpha", self.log_alpha)])

        self._optimizers = (self._actor_optimizer, self.critics.optimizer, self._alpha_optimizer)
        self.published = [self._actor_optimizer.values, *self.actor.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Take one step of each optimizer, and move the target critics towards the critics."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        alpha = self.log_alpha.detach().exp()

        critic_result = None
        if batch is not None:
            critic_result = self._critic_gradients(batch, alpha, total)
        self._ledger.switch(Part.OPTIMIZE)
        critic_norm = self.critics.optimizer.step(total, env_steps)

        actor_result = None
        if batch is not None:
            actor_result = self._actor_gradients(batch, alpha, total, critic_norm=critic_norm)
        self._ledger.switch(Part.OPTIMIZE)
        actor_norm = self._actor_optimizer.step(total, env_steps)

        if self._algo.tune_alpha:
            if actor_result is not None:
                self._temperature_gradient(actor_result.logp, total, actor_norm)
            self._alpha_optimizer.step(total, env_steps)
        self.critics.follow()

        norm = torch.hypot(critic_norm, actor_norm)
        if critic_result is None or actor_result is None:
            return UpdateResult.of_nothing(self.statistics, norm)

        errors = critic_result.errors
        sums = (
            critic_result.loss,
            actor_result.loss,
            errors.sum(),
            critic_result.value_sum,
            -actor_result.logp.sum(),
            alpha[0] * len(errors),
        )
        return UpdateResult(errors, torch.stack([value.detach() for value in sums]), norm)

    def state(self) -> dict[str, Tensor]:
        return self.critics.state() | {"log_alpha": self._alpha_optimizer.values}

    @torch.no_grad()
    def loaded(self) -> None:
        """A temperature that is not tuned is that of the config, which may have changed since."""
        if not self._algo.tune_alpha:
            self._alpha_optimizer.values.fill_(math.log(self._algo.alpha))

    def _critic_gradients(self, batch: Batch, alpha: Tensor, total: float) -> CriticLoss:
        """Add the gradients of the critics; the result carries none."""
        self._ledger.switch(Part.FORWARD)
        with torch.no_grad():
            next_action, next_logp = self._act(batch["next_obs"])
        target = soft_target(
            self.critics.target_net,
            batch,
            next_action=next_action,
            next_logp=next_logp,
            alpha=alpha,
        )
        return self.critics.add_gradients(batch, target, total)

    def _actor_gradients(
        self, batch: Batch, alpha: Tensor, total: float, *, critic_norm: Tensor
    ) -> ActorLoss:
        """Add the gradients of the actor, which are NaN unless ``critic_norm`` is finite."""
        self._ledger.switch(Part.FORWARD)
        action, logp = self._act(batch["obs"])
        loss = actor_loss(self.critics.net, batch["obs"], action=action, logp=logp, alpha=alpha)

        self._actor_optimizer.prepare_backward(total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss, critic_norm)
        return ActorLoss(loss.detach(), logp.detach())

    def _temperature_gradient(self, logp: Tensor, total: float, actor_norm: Tensor) -> None:
        """Add the gradient of the temperature, which is NaN unless ``actor_norm`` is finite."""
        self._alpha_optimizer.prepare_backward(total)
        backward(temperature_loss(self.log_alpha, logp, self._target_entropy), actor_norm)

    def _act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draws actions ``[B, D]`` of the actor; returns them and their log-densities ``[B]``."""
        noise = torch.randn(len(obs), self._action_size, device=obs.device)
        bounds = (self._algo.log_std_min, self._algo.log_std_max)
        return squashed(self.actor(obs), noise, bounds)
