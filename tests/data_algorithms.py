"""DQN on other data, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.algos.base import ReplayAlgorithm
from penstock.algos.dqn import algorithm
from penstock.algos.dqn.algorithm import DQN
from penstock.algos.dqn.config import DqnConfig
from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext, UpdateResult
from penstock.core.interfaces import Dataset, SampleSpec, TransitionSequences
from penstock.models.torch_nets import build_net

BURN_IN = 1  # of all sequences


def train_dqn_on(
    data: SampleSpec | Dataset, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> None:
    """Make ``algo.name=dqn`` an algorithm that trains on ``data``."""
    draws = data.draws if isinstance(data, Dataset) else data
    if isinstance(draws, TransitionSequences):
        changes["make_update"] = SequenceUpdate
    changed: ReplayAlgorithm[DqnConfig] = replace(DQN, data=lambda cfg: data, **changes)
    monkeypatch.setattr(algorithm, "DQN", changed)


class SequenceUpdate:
    """One-step Q-learning on every step of a sequence after the first `BURN_IN`."""

    statistics = ("q_loss",)

    def __init__(self, algo: DqnConfig, ctx: UpdateContext) -> None:
        self.net = build_net(ctx.shape, ctx.dtype).to(ctx.device)
        self.optimizer = ctx.optimizer("q", self.net.named_parameters())
        self.published = [self.optimizer.values, *self.net.buffers()]

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        self.optimizer.zero_grad()
        if batch is None:
            return UpdateResult.of_nothing(self.statistics, self.optimizer.step(total, env_steps))
        trained = batch["mask"].clone()
        trained[:BURN_IN] = False
        assert trained.sum() == total, "samples are the steps after the burn-in"
        value = self._values(batch["obs"]).gather(2, batch["action"].long()[..., None])[..., 0]
        with torch.no_grad():
            ahead = self._values(batch["next_obs"]).amax(2)
        errors = (batch["reward"] + batch["discount"] * ahead - value) * trained
        loss = 0.5 * torch.dot(errors.square().sum(0), batch["weights"])
        self.optimizer.prepare_backward(total)
        backward(loss)
        norm = self.optimizer.step(total, env_steps)
        found = errors.detach().abs().amax(0)
        return UpdateResult(found, loss.detach()[None], norm)

    def state(self) -> dict[str, Tensor]:
        return {}

    def loaded(self) -> None:
        pass

    def _values(self, obs: Tensor) -> Tensor:
        values: Tensor = self.net(obs.flatten(0, 1))
        return values.reshape(*obs.shape[:2], -1)
