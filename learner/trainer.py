"""The trainer: network, optimizer, algorithm and counters of one learner, without any transport.

The learner's process feeds it from shared memory, the lockstep mode from the same process. A batch
is split by environments into ``updates_per_batch`` updates, and an update into micro-batches that
fit the processor's cache; their gradients add up, and one step is taken by their sum over the
number of agent steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.algos import impala, slot_spec
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.envs import GameInfo
from penstock.learner.optimizer import FlatOptimizer
from penstock.learner.progress import Progress
from penstock.learner.staging import StagingBatch
from penstock.models.layout import CnnShape, NetShape, net_shape
from penstock.models.precision import cpu_gains_by_bf16
from penstock.models.torch_nets import build_net
from penstock.models.torch_setup import set_up_torch


class DivergedError(UserError):
    """The loss or a gradient is not a finite number any more."""


class Trainer:
    """Updates one network; not thread-safe."""

    def __init__(self, config: Config, info: GameInfo) -> None:
        set_up_torch(config.learner.threads)
        torch.manual_seed(config.run.seed)
        self.config = config
        self.device = pick_device(config.learner.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.spec = slot_spec(config, info)
        shape = net_shape(config.model, info.observation_space, info.action_space)
        self.layout = shape.layout
        self.model = build_net(shape, self._trunk_dtype(shape)).to(self.device)
        self.optimizer = FlatOptimizer(self.model.parameters(), config.learner)
        self.progress = Progress(config.stop, info.frames_per_step)
        self._trained = torch.cuda.Event() if self.device.type == "cuda" else None
        self._clear()

    def train(self, batch: StagingBatch) -> bool:
        """Train once on every sample of a batch; True when weights are due to be published."""
        updates = self.config.learner.updates_per_batch
        if self._trained is not None:
            self._trained.synchronize()  # one batch queued ahead: time shows where it is spent
        batch.wait_on_device()
        envs = batch.arrays["alive"].shape[1] // updates
        for i in range(updates):
            self._update(batch, i * envs, (i + 1) * envs)
        if self._trained is not None:
            self._trained.record()
        self.progress.trained(batch.arrays, batch.steps, updates)
        every, steps = self.config.learner.publish_every, self.progress.learner_steps
        return steps // every > (steps - updates) // every

    def published(self) -> list[Tensor]:
        """What actors get, in the layout's order: parameters, then buffers."""
        return [self.optimizer.values, *self.model.buffers()]

    def statistics(self) -> dict[str, float]:
        """Means over the updates since the last call. Raises DivergedError for a number that is
        not finite: the weights are then still those before it appeared."""
        if not self._updates:
            return {}
        means = dict(zip(impala.STATISTICS, (self._sums / self._steps).tolist(), strict=True))
        means["grad_norm"] = float(self._norms) / self._updates
        self._clear()
        bad = [name for name, value in means.items() if not math.isfinite(value)]
        if bad:
            raise DivergedError(
                f"{', '.join(bad)} became {means[bad[0]]} before learner step "
                f"{self.progress.learner_steps}; resume from the last checkpoint with a lower "
                f"learner.lr (now {self.config.learner.lr:g}) or a lower learner.grad_clip (now "
                f"{self.config.learner.grad_clip})"
            )
        return means

    def _update(self, batch: StagingBatch, start: int, stop: int) -> None:
        """One optimizer step on the environments from ``start`` to ``stop``."""
        steps = batch.alive(slice(start, stop))
        if not steps:
            return
        self.optimizer.zero_grad()
        size = max(1, self.config.learner.micro_batch // batch.arrays["obs"].shape[0])
        if self.config.algo.normalize_advantages:
            size = stop - start  # over the whole update, however large
        for first in range(start, stop, size):
            envs = slice(first, min(first + size, stop))
            loss, sums = impala.loss(self.model, batch.tensors, self.config.algo, envs)
            loss.backward()
            self._sums += sums
        norm = self.optimizer.step(steps, self.progress.trained_steps)
        self._norms += norm
        self._steps += steps
        self._updates += 1

    def _clear(self) -> None:
        self._sums = torch.zeros(len(impala.STATISTICS), device=self.device)
        self._norms = torch.zeros((), device=self.device)
        self._steps = self._updates = 0

    def _trunk_dtype(self, shape: NetShape) -> torch.dtype:
        precision = self.config.learner.precision
        if precision == "auto":
            precision = "bf16" if self._gains_by_bf16(shape) else "fp32"
        return torch.bfloat16 if precision == "bf16" else torch.float32

    def _gains_by_bf16(self, shape: NetShape) -> bool:
        fast = self.device.type == "cuda" or cpu_gains_by_bf16()
        return fast and isinstance(shape, CnnShape)


def pick_device(name: str) -> torch.device:
    """The device of `learner.device`; UserError where there is none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"learner.device {name} is not there: {torch.cuda.device_count()} CUDA devices are "
            "found; set learner.device=auto or cpu"
        )
    return device
