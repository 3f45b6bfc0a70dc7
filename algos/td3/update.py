"""The learner's half of TD3: the networks, and the losses, each a sum over the batch.

An update minimises the critics' loss (`penstock.algos.ops.twin_critics`), and every
`algo.policy_delay` updates then `actor_loss`. Equations are those of algorithm 1 of Fujimoto et al.
2018, arXiv 1802.09477.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.algos.ops.backward import backward
from penstock.algos.ops.twin_critics import Critics, TrainedCritics
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.algos.td3.config import Td3Config
from penstock.models.flat_parameters import flatten
from penstock.profiling.ledger import Part

STATISTICS = ("critic_loss", "actor_loss", "td_error", "q_mean")


def smoothed_target(
    target_critics: Critics,
    target_actor: Callable[[Tensor], Tensor],
    batch: Mapping[str, Tensor],
    noise: Tensor,
    noise_clip: float,
) -> Tensor:
    """Returns the target of both critics ``[B]``, without a gradient.

    Args:
        target_critics: those that lag behind, whose smaller value counts.
        target_actor: gives the numbers ``[B, D]`` whose tanh is the action for an observation.
        batch: as for `penstock.algos.dqn.update.loss`.
        noise: of the actions before it is clipped, ``[B, D]``.
        noise_clip: bound on its size.
    """
    with torch.no_grad():
        next_obs = batch["next_obs"]
        next_action = target_actor(next_obs).tanh() + noise.clamp(-noise_clip, noise_clip)
        next_q = target_critics(next_obs, next_action.clamp_(-1.0, 1.0)).amin(0)
        return torch.addcmul(batch["reward"], batch["discount"], next_q)


def actor_loss(critics: Critics, actor: Callable[[Tensor], Tensor], obs: Tensor) -> Tensor:
    """Returns the sum of ``-Q`` of the first critic, ``[]``.

    Its gradient reaches the actor only. ``obs`` are ``[B, *shape]``.
    """
    return -critics.of_action(obs, actor(obs).tanh(), count=1).sum()


class Td3Update:
    """Actor and twin critics with their targets.

    Where the critics' step is skipped, because its gradient is not finite, that of the actor is
    skipped too.
    """

    statistics = STATISTICS

    def __init__(self, algo: Td3Config, ctx: UpdateContext) -> None:
        self._algo = algo
        self._ledger = ctx.ledger
        self._action_size = ctx.shape.outputs

        # All networks normalise observations by the actor's statistics.
        self.actor = ctx.network()
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_actor.normalizer = self.actor.normalizer
        self._target = flatten(self.target_actor.parameters())
        self._actor_optimizer = ctx.optimizer("actor", self.actor.named_parameters())
        self.critics = TrainedCritics(ctx, self.actor.normalizer, self._action_size, algo.tau)
        self.published = [self._actor_optimizer.values, *self.actor.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Take one step of the critics; if it is due, also one of the actor and of all targets."""
        self.critics.optimizer.zero_grad()
        critic_result = None
        if batch is not None:
            self._ledger.switch(Part.FORWARD)
            target = self._target_of(batch)
            critic_result = self.critics.add_gradients(batch, target, total)
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.critics.optimizer.step(total, env_steps)

        loss = None
        if number % self._algo.policy_delay == 0:
            self._actor_optimizer.zero_grad()
            if batch is not None:
                loss = self._actor_gradients(batch, total, critic_norm=norm)
            self._ledger.switch(Part.OPTIMIZE)
            actor_norm = self._actor_optimizer.step(total, env_steps)
            norm = torch.hypot(norm, actor_norm)

            self._target.lerp_(self._actor_optimizer.values, self._algo.tau)
            self.critics.follow()

        if critic_result is None:
            return UpdateResult.of_nothing(self.statistics, norm)

        # The actor's loss stands for all updates since the last one of it.
        errors = critic_result.errors
        sums = (
            critic_result.loss,
            norm.new_zeros(()) if loss is None else loss * self._algo.policy_delay,
            errors.sum(),
            critic_result.value_sum,
        )
        return UpdateResult(errors, torch.stack(sums), norm)

    def state(self) -> dict[str, Tensor]:
        return self.critics.state() | {"target_actor": self._target}

    def loaded(self) -> None:
        """Does nothing: nothing depends on the tensors of `state`."""

    def _target_of(self, batch: Batch) -> Tensor:
        """Returns the critics' target ``[B]`` of a batch, with noise that is drawn here."""
        reward = batch["reward"]
        noise = torch.randn(len(reward), self._action_size, device=reward.device)
        noise *= self._algo.target_noise
        return smoothed_target(
            self.critics.target_net,
            self.target_actor,
            batch,
            noise=noise,
            noise_clip=self._algo.target_noise_clip,
        )

    def _actor_gradients(self, batch: Batch, total: float, *, critic_norm: Tensor) -> Tensor:
        """Add the gradients of the actor, which are NaN unless ``critic_norm`` is finite.

        Returns its loss, without a gradient.
        """
        self._ledger.switch(Part.FORWARD)
        loss = actor_loss(self.critics.net, self.actor, batch["obs"])

        self._actor_optimizer.prepare_backward(total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss, critic_norm)
        return loss.detach()
