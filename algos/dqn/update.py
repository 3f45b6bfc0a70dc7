"""The learner's half of DQN: its loss, and the update of the Q-network and the target network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.algos.dqn.config import QLearningConfig
from penstock.algos.dqn.losses import (
    action_values,
    best_actions,
    over_choices,
    row_losses,
    sum_of_means,
)
from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.configs.schedules import LinearSchedule
from penstock.models.flat_parameters import flatten
from penstock.models.layout import EPSILON_RATE
from penstock.models.torch_heads import HeadNet
from penstock.profiling.ledger import Part

STATISTICS = ("q_loss", "td_error", "q_mean", "q_target_mean")


class MicroBatchResult(NamedTuple):
    """What `loss` returns of one micro-batch besides the loss; neither carries a gradient."""

    differences: Tensor
    """Temporal differences ``[B]``, target minus value."""
    sums: Tensor
    """The sums `STATISTICS`."""


def loss(
    net: Callable[[Tensor], Tensor],
    target_net: Callable[[Tensor], Tensor],
    batch: Mapping[str, Tensor],
    cfg: QLearningConfig,
    next_mask: Tensor | None = None,
    branches: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weighted loss, temporal differences and `STATISTICS` of transitions.

    With `double`, ``net`` chooses the next action and ``target_net`` evaluates it (van Hasselt et
    al. 2016, equation 4).

    Args:
        net: gives the values of observations ``[B, *shape]``: ``[B, outputs]``, or of quantiles
            ``[B, outputs, N]``.
        target_net: the same for the network that lags behind.
        batch: ``obs`` and ``next_obs`` ``[B, *shape]``, ``action`` whole ``[B, *shape]``, and
            float32 ``[B]``: ``reward`` (of n rows), ``discount`` (gamma^n, 0 where terminated) and
            ``weights``.
        cfg: the options.
        next_mask: ``[B, outputs]``, 0 where ``next_obs`` forbids an action. The target is of the
            best action that is allowed.
        branches: number of actions of each choice; by default an action is one choice.

    Returns:
        The loss ``[]``, the differences ``[B]`` (target minus value), and ``[len(STATISTICS)]``.
        Loss and statistics are sums over B, so that those of micro-batches add up. Differences and
        statistics carry no gradient.
    """
    values = net(batch["obs"])
    branches = branches or (values.shape[1],)
    action = batch["action"].long().reshape(len(values), -1)
    taken = action_values(values, action, branches)

    with torch.no_grad():
        next_values = target_net(batch["next_obs"])
        chooser = net(batch["next_obs"]) if cfg.double else next_values
        best = best_actions(chooser, next_mask, branches)
        next_value = over_choices(action_values(next_values, best, branches))
        reward = batch["reward"]
        discount = batch["discount"]
        if next_value.ndim == 2:  # Each quantile is discounted.
            reward = reward[:, None]
            discount = discount[:, None]
        target = torch.addcmul(reward, discount, next_value)

    losses, difference = row_losses(taken, target, cfg.huber)
    total = torch.dot(losses, batch["weights"])

    q_sum = sum_of_means(taken.detach())
    sums = (total.detach(), difference.abs().sum(), q_sum, sum_of_means(target))
    return total, difference, torch.stack(sums)


class DqnUpdate:
    """The Q-network with its optimizer, and the target network."""

    statistics = STATISTICS

    def __init__(self, algo: QLearningConfig, ctx: UpdateContext) -> None:
        self._algo = algo
        self._ledger = ctx.ledger
        self._micro_batch = ctx.micro_batch
        """Rows of a batch in one pass."""

        # The target network begins as a copy; both normalise observations by the same statistics.
        self.net = ctx.network()
        self._branches = self.net.head_shape.branches
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
        self.target_net.normalizer = self.net.normalizer
        self._target = flatten(self.target_net.parameters())
        self.loaded()

        self.optimizer = ctx.optimizer("q", self.net.named_parameters())
        self.published = [self.optimizer.values, *self.net.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Take one optimizer step, and copy the network to the target network when it is due."""
        if self._algo.noisy:
            self._draw_noise()
        self.optimizer.zero_grad()
        results = [] if batch is None else self._backward(batch, total)
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.optimizer.step(total, env_steps)

        if number % self._algo.target_every == 0:
            self._target.copy_(self.optimizer.values)
            self.loaded()
        if isinstance(self._algo.epsilon, LinearSchedule):
            self.net.get_buffer(EPSILON_RATE).fill_(self._algo.epsilon.at(env_steps))

        if not results:
            return UpdateResult.of_nothing(self.statistics, norm)
        errors = torch.cat([result.differences for result in results]).abs_()
        sums = torch.stack([result.sums for result in results]).sum(0)
        return UpdateResult(errors, sums, norm)

    def _backward(self, batch: Batch, total: float) -> list[MicroBatchResult]:
        """Add the gradients of a batch, one micro-batch after the other; returns their results."""
        count = len(batch["weights"])
        results = []
        for start in range(0, count, self._micro_batch):
            end = start + self._micro_batch
            micro_batch = self._rows(batch, slice(start, end))

            self._ledger.switch(Part.FORWARD)
            total_loss, differences, sums = self._loss(micro_batch)

            # The last backward pass completes the gradients.
            if end >= count:
                self.optimizer.prepare_backward(total)
            self._ledger.switch(Part.BACKWARD)
            backward(total_loss)

            # This frees the activations before the next pass makes others.
            del total_loss
            results.append(MicroBatchResult(differences, sums))
        return results

    def _rows(self, batch: Batch, rows: slice) -> Batch:
        """Returns some rows of a batch."""
        return {name: column[rows] for name, column in batch.items()}

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the loss of a micro-batch, and its `MicroBatchResult`."""
        return loss(
            net=_with_weights(self.net, self.net.training_weights()),
            target_net=self._target_q,
            batch=batch,
            cfg=self._algo,
            next_mask=self.net.mask(batch["next_obs"]),
            branches=self._branches,
        )

    def _draw_noise(self) -> None:
        """Draw noise for both networks, each its own (Fortunato et al. 2017, equation 15).

        The network chooses next actions with the noise of its values, as in Rainbow.
        """
        self.net.draw_noise()
        self.target_net.draw_noise()
        self.loaded()

    def state(self) -> dict[str, Tensor]:
        return {"target": self._target}

    @torch.no_grad()
    def loaded(self) -> None:
        """Prepare the weights of the target network once, not for every batch."""
        self._target_q = _with_weights(self.target_net, self.target_net.training_weights())


def _with_weights(net: HeadNet, weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the network as a function of observations that uses weights prepared before."""
    return lambda obs: net.values(obs, weights)
