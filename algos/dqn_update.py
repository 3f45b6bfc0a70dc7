"""The update of DQN: the network that learns, and the one that lags behind as target."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.algos import dqn
from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.configs.algorithms import DqnConfig
from penstock.models.flat_parameters import flatten
from penstock.models.torch_nets import HeadNet, build_net
from penstock.profiling.ledger import Part


class DqnUpdate:
    """Q-network and target network."""

    statistics = dqn.STATISTICS

    def __init__(self, algo: DqnConfig, ctx: UpdateContext) -> None:
        self._algo = algo
        self._ledger = ctx.ledger
        self._micro_batch = ctx.micro_batch
        self.net: HeadNet = build_net(ctx.shape, ctx.dtype).to(ctx.device)
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
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
        """Gradients of a batch, micro-batch by micro-batch; differences and statistics of each."""
        count, parts = len(batch["reward"]), []
        for first in range(0, count, self._micro_batch):
            self._ledger.switch(Part.FORWARD)
            part = {k: v[first : first + self._micro_batch] for k, v in batch.items()}
            net = _with(self.net, self.net.acting_weights())
            loss, differences, sums = dqn.loss(net, self._target_q, part, self._algo)
            if first + self._micro_batch >= count:
                self.optimizer.prepare_backward(total)
            self._ledger.switch(Part.BACKWARD)
            backward(loss)
            parts.append((differences, sums))
        return parts

    def state(self) -> dict[str, Tensor]:
        return {"target": self._target}

    @torch.no_grad()
    def loaded(self) -> None:
        """Prepare the target network's weights once, not for every batch."""
        self._target_q = _with(self.target_net, self.target_net.acting_weights())


def _with(net: HeadNet, weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """The network by weights that are prepared already."""
    return lambda obs: net.acting_outputs(obs, weights)
