"""The learner's half of DQN: its loss, and the update of the Q-network and the target network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.algos.dqn.config import DqnConfig
from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.models.flat_parameters import flatten
from penstock.models.torch_heads import HeadNet, of_allowed
from penstock.profiling.ledger import Part

STATISTICS = ("q_loss", "td_error", "q_mean", "q_target_mean")


def loss(
    net: Callable[[Tensor], Tensor],
    target_net: Callable[[Tensor], Tensor],
    batch: Mapping[str, Tensor],
    cfg: DqnConfig,
    next_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weighted Huber loss, temporal differences and `STATISTICS` of transitions.

    With `double`, ``net`` chooses the next action and ``target_net`` evaluates it (van Hasselt et
    al. 2016, equation 4).

    Args:
        net: gives the Q-values ``[B, actions]`` of observations ``[B, *shape]``.
        target_net: the same for the network that lags behind.
        batch: ``obs`` and ``next_obs`` ``[B, *shape]``, ``action`` whole ``[B]``, and float32
            ``[B]``: ``reward`` (of n rows), ``discount`` (gamma^n, 0 where terminated) and
            ``weights``.
        cfg: the options.
        next_mask: ``[B, actions]``, 0 where ``next_obs`` forbids an action. The target is of the
            best action that is allowed.

    Returns:
        The loss ``[]``, the differences ``[B]`` (target minus value), and ``[len(STATISTICS)]``.
        Loss and statistics are sums over B, so that those of micro-batches add up. Differences and
        statistics carry no gradient.
    """
    action = batch["action"].long()[:, None]
    taken = net(batch["obs"]).gather(1, action)[:, 0]
    with torch.no_grad():
        next_q = target_net(batch["next_obs"])
        if cfg.double:
            best = of_allowed(net(batch["next_obs"]), next_mask).argmax(1, keepdim=True)
            next_value = next_q.gather(1, best)[:, 0]
        else:
            next_value = of_allowed(next_q, next_mask).amax(1)
        target = torch.addcmul(batch["reward"], batch["discount"], next_value)
    difference = target - taken
    clipped = difference.clamp(-cfg.huber, cfg.huber)
    # Half the square within the bounds, linear beyond; its gradient is the clipped difference.
    losses = clipped * (difference - 0.5 * clipped)
    total = torch.dot(losses, batch["weights"])
    difference, taken = difference.detach(), taken.detach()
    sums = (total.detach(), difference.abs().sum(), taken.sum(), target.sum())
    return total, difference, torch.stack(sums)


class DqnUpdate:
    """The Q-network with its optimizer, and the target network."""

    statistics = STATISTICS

    def __init__(self, algo: DqnConfig, ctx: UpdateContext) -> None:
        self._algo = algo
        self._ledger = ctx.ledger
        self._micro_batch = ctx.micro_batch

        # The target network begins as a copy; both normalise observations by the same statistics.
        self.net = ctx.network()
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
        self.target_net.normalizer = self.net.normalizer
        self._target = flatten(self.target_net.parameters())
        self.loaded()

        self.optimizer = ctx.optimizer("q", self.net.named_parameters())
        self.published = [self.optimizer.values, *self.net.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        self.optimizer.zero_grad()
        parts = [] if batch is None else self._backward(batch, total)
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.optimizer.step(total, env_steps)
        if number % self._algo.target_every == 0:
            self._target.copy_(self.optimizer.values)
            self.loaded()
        if not parts:
            return UpdateResult.of_nothing(self.statistics, norm)
        errors = torch.cat([differences for differences, _ in parts]).abs_()
        return UpdateResult(errors, torch.stack([sums for _, sums in parts]).sum(0), norm)

    def _backward(self, batch: Batch, total: float) -> list[tuple[Tensor, Tensor]]:
        """Add the gradients of a batch, one micro-batch after the other; returns their results."""
        count, parts = len(batch["reward"]), []
        for first in range(0, count, self._micro_batch):
            self._ledger.switch(Part.FORWARD)
            part = {k: v[first : first + self._micro_batch] for k, v in batch.items()}
            net = _with(self.net, self.net.acting_weights())
            mask = self.net.mask(part["next_obs"])
            total_loss, differences, sums = loss(net, self._target_q, part, self._algo, mask)
            if first + self._micro_batch >= count:
                self.optimizer.prepare_backward(total)
            self._ledger.switch(Part.BACKWARD)
            backward(total_loss)
            del total_loss  # with its activations, before the next pass makes others
            parts.append((differences, sums))
        return parts

    def state(self) -> dict[str, Tensor]:
        return {"target": self._target}

    @torch.no_grad()
    def loaded(self) -> None:
        """Prepare the weights of the target network once, not for every batch."""
        self._target_q = _with(self.target_net, self.target_net.acting_weights())


def _with(net: HeadNet, weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """The network by weights that are prepared already."""
    return lambda obs: net.acting_outputs(obs, weights)
