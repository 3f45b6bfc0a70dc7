"""One optimizer step on a batch from replay, for each off-policy algorithm.

An update owns the networks, those that lag behind as targets, and the optimizers. Everything stays
on the device: nothing here waits for a GPU. Its ``sync`` connects it with other learners; one
that has no batch takes the step with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.algos import dqn, sac
from penstock.configs.algorithms import DqnConfig, SacConfig
from penstock.configs.sections import LearnerConfig
from penstock.learner.nonfinite import backward
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer, flatten
from penstock.learner.sync.gradient_sync import GradientSync, SingleLearner
from penstock.models.layout import DenseShape, HeadShape
from penstock.models.torch_nets import HeadNet, TwinCritics, build_net
from penstock.profiling.ledger import Part, TimeLedger

Batch = Mapping[str, Tensor]
Arrays = dict[str, npt.NDArray[Any]]


class UpdateResult(NamedTuple):
    """What an optimizer step found out; no gradients, on the device."""

    errors: Tensor
    """Absolute temporal differences, float32 ``[B]``."""
    sums: Tensor
    """`ReplayUpdate.statistics`, summed over the batch."""
    norm: Tensor
    """Of the gradient before clipping, ``[]``; not finite where the step was not taken."""


class ReplayUpdate(Protocol):
    """Networks and optimizers of one algorithm."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what `UpdateResult.sums` holds."""

    @property
    def published(self) -> list[Tensor]:
        """What actors get, in the layout's order."""

    sync: GradientSync

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Optimizer step ``number`` (from 1) on the ``total`` transitions of all learners' batches;
        the learning rate is that after ``env_steps``."""

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides `published` and the optimizers; written to on resume."""

    def loaded(self) -> None:
        """What `state` gave was written to."""

    def optimizers(self) -> dict[str, FlatOptimizer]:
        """By the name of what each updates."""


class DqnUpdate:
    """Q-network and target network."""

    statistics = dqn.STATISTICS
    sync: GradientSync

    def __init__(
        self,
        algo: DqnConfig,
        learner: LearnerConfig,
        shape: HeadShape,
        dtype: torch.dtype,
        device: torch.device,
        ledger: TimeLedger,
    ) -> None:
        self._algo = algo
        self._ledger = ledger
        self._micro_batch = learner.micro_batch
        self.sync = SingleLearner()
        self.net: HeadNet = build_net(shape, dtype).to(device)
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
        self._target = flatten(self.target_net.parameters())
        self.loaded()
        self.optimizer = FlatOptimizer(self.net.named_parameters(), learner)
        self.published = [self.optimizer.values, *self.net.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        self.optimizer.zero_grad()
        parts = [] if batch is None else self._backward(batch, total)
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.sync.step(self.optimizer, total, env_steps)
        if number % self._algo.target_every == 0:
            self._target.copy_(self.optimizer.values)
            self.loaded()
        if not parts:
            return _nothing(self.statistics, norm)
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
                self.sync.prepare_backward(self.optimizer, total)
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

    def optimizers(self) -> dict[str, FlatOptimizer]:
        return {"q": self.optimizer}


class SacUpdate:
    """Actor, twin critics with their targets, and temperature. Where the critics' step is skipped,
    as its gradient is not finite, those of actor and temperature are, too."""

    statistics = sac.STATISTICS
    sync: GradientSync

    def __init__(
        self,
        algo: SacConfig,
        learner: LearnerConfig,
        shape: DenseShape,
        dtype: torch.dtype,
        device: torch.device,
        ledger: TimeLedger,
    ) -> None:
        self._algo = algo
        self._ledger = ledger
        self.sync = SingleLearner()
        self._target_entropy = sac.target_entropy(algo, shape.outputs // 2)
        self.actor: HeadNet = build_net(shape, dtype).to(device)
        self.critics = TwinCritics(shape).to(device)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(algo.alpha)], device=device))
        self._actor_optimizer = FlatOptimizer(self.actor.named_parameters(), learner)
        self._critic_optimizer = FlatOptimizer(self.critics.named_parameters(), learner)
        self._alpha_optimizer = FlatOptimizer([("log_alpha", self.log_alpha)], learner)
        self._target = self._critic_optimizer.values.clone()
        weights = self.critics.weights()
        parts = self._target.split([weight.numel() for weight in weights])
        self.target_weights = [
            part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)
        ]
        self.published = [self._actor_optimizer.values, *self.actor.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        for optimizer in self.optimizers().values():
            optimizer.zero_grad()
        alpha = self.log_alpha.detach().exp()
        found = None if batch is None else self._critic_gradients(batch, alpha, total)
        self._ledger.switch(Part.OPTIMIZE)
        critic_norm = self.sync.step(self._critic_optimizer, total, env_steps)
        acted = None if batch is None else self._actor_gradients(batch, alpha, total, critic_norm)
        self._ledger.switch(Part.OPTIMIZE)
        actor_norm = self.sync.step(self._actor_optimizer, total, env_steps)
        if self._algo.tune_alpha:
            if acted is not None:
                self._temperature_gradient(acted[1], total, actor_norm)
            self.sync.step(self._alpha_optimizer, total, env_steps)
        self._target.lerp_(self._critic_optimizer.values, self._algo.tau)
        norm = torch.hypot(critic_norm, actor_norm)
        if found is None or acted is None:
            return _nothing(self.statistics, norm)
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

    def optimizers(self) -> dict[str, FlatOptimizer]:
        return {
            "actor": self._actor_optimizer,
            "critics": self._critic_optimizer,
            "log_alpha": self._alpha_optimizer,
        }

    def _critic_gradients(
        self, batch: Batch, alpha: Tensor, total: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._ledger.switch(Part.FORWARD)
        with torch.no_grad():
            ahead = self._act(batch["next_obs"])
        loss, errors, values = sac.critic_loss(
            self.critics, self.target_weights, batch, *ahead, alpha
        )
        self.sync.prepare_backward(self._critic_optimizer, total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss)
        return loss, errors, values

    def _actor_gradients(
        self, batch: Batch, alpha: Tensor, total: float, critic_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._ledger.switch(Part.FORWARD)
        action, logp = self._act(batch["obs"])
        loss = sac.actor_loss(self.critics, batch["obs"], action, logp, alpha)
        self.sync.prepare_backward(self._actor_optimizer, total)
        self._ledger.switch(Part.BACKWARD)
        backward(loss, critic_norm)
        return loss, logp

    def _temperature_gradient(self, logp: Tensor, total: float, actor_norm: Tensor) -> None:
        self.sync.prepare_backward(self._alpha_optimizer, total)
        backward(sac.temperature_loss(self.log_alpha, logp, self._target_entropy), actor_norm)

    def _act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh actions ``[B, D]`` and their log-densities ``[B]``."""
        noise = torch.randn(len(obs), self.actor.head.out_features // 2, device=obs.device)
        return sac.policy_sample(self.actor, obs, self._algo, noise)


def _with(net: HeadNet, weights: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """The network by weights that are prepared already."""
    return lambda obs: net.acting_outputs(obs, weights)


def _nothing(statistics: tuple[str, ...], norm: Tensor) -> UpdateResult:
    """Of a step without a batch."""
    return UpdateResult(norm.new_empty(0), norm.new_zeros(len(statistics)), norm)


def arrays(update: ReplayUpdate) -> Arrays:
    """All that `load_arrays` needs; on a CPU they share the update's memory."""
    found = {name: tensor.detach().cpu().numpy() for name, tensor in update.state().items()}
    for name, optimizer in update.optimizers().items():
        found |= {f"optimizer/{name}/{k}": v for k, v in optimizer.state_dict().items()}
    return found


@torch.no_grad()
def load_arrays(update: ReplayUpdate, stored: Mapping[str, npt.NDArray[Any]]) -> None:
    """Go on from `arrays`; ValueError for those of another algorithm or optimizer."""
    wanted = arrays(update)
    if wanted.keys() != stored.keys():
        raise ValueError(f"state of {sorted(stored)}, but this run needs {sorted(wanted)}")
    for name, tensor in update.state().items():
        tensor.copy_(torch.from_numpy(np.array(stored[name])))
    update.loaded()
    for name, optimizer in update.optimizers().items():
        prefix = f"optimizer/{name}/"
        own = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        optimizer.load_state_dict(own)
