"""The trainer: network, optimizer, algorithm and counters of one learner, without any transport.

The learner's process feeds it from shared memory, the lockstep mode from the same process. A batch
is split by environments into ``updates_per_batch`` updates, and an update into micro-batches that
fit the processor's cache; their gradients add up, over ``accumulate`` batches and over the learners
that ``exchange`` connects, and one step is taken by their sum over the number of agent steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos import impala, slot_spec
from penstock.configs.algorithms import ImpalaConfig
from penstock.configs.errors import UserError
from penstock.configs.schema import Config, LearnerConfig
from penstock.envs import GameInfo
from penstock.learner.exchange.base import Alone, Exchange, Floats
from penstock.learner.optimizer import FlatOptimizer
from penstock.learner.progress import Progress
from penstock.learner.staging import StagingBatch
from penstock.models.fitting import actor_critic_shape
from penstock.models.layout import CnnShape, NetShape, QCnnShape
from penstock.models.precision import cpu_gains_by_bf16
from penstock.models.torch_nets import build_net
from penstock.models.torch_setup import set_up_torch
from penstock.profiling.device import DeviceClock
from penstock.profiling.ledger import Part, TimeLedger

OPTIMIZER = "optimizer/"  # before the names of an optimizer's state


class DivergedError(UserError):
    """The loss or a gradient is not a finite number any more."""


class Trainer:
    """Updates one network; not thread-safe."""

    def __init__(self, config: Config, info: GameInfo, ledger: TimeLedger | None = None) -> None:
        set_up_torch(config.learner.threads)
        torch.manual_seed(config.run.seed)
        assert isinstance(config.algo, ImpalaConfig), config.algo
        self.config = config
        self._ledger = ledger or TimeLedger()
        self._algo = config.algo
        self.device = pick_device(config.learner.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.spec = slot_spec(config, info)
        shape = actor_critic_shape(config.model, info)
        self.layout = shape.layout
        dtype = trunk_dtype(config.learner.precision, self.device, shape)
        self.model = build_net(shape, dtype).to(self.device)
        self.optimizer = FlatOptimizer(self.model.named_parameters(), config.learner)
        self.progress = Progress(config.stop, info.frames_per_step)
        self.exchange: Exchange = Alone()
        self._updates_done = 0  # of the batch in training
        self._trained = torch.cuda.Event() if self.device.type == "cuda" else None
        self._clock: DeviceClock | None = None
        self._batches = 0
        self._accumulated = 0.0  # samples, of all learners, in the gradients so far
        self._clear()

    def time_device(self, ledger: TimeLedger) -> None:
        """Note in ``ledger`` when the GPU, which must be the device, is in which part."""
        self._clock = DeviceClock(self.device, ledger)

    def book(self, batch: StagingBatch) -> Floats:
        """Count a batch that is about to be trained on; the agent steps of each of its updates,
        float64 ``[updates]``."""
        updates = self.config.learner.updates_per_batch
        self.progress.played(batch.arrays, batch.steps, updates)
        return np.array([batch.alive(envs) for envs in self._shares(batch)], np.float64)

    def train(self, batch: StagingBatch | None, totals: Floats | None = None) -> bool:
        """Train once on every sample of a batch; True when weights are due to be published.

        ``totals`` are what all learners have booked together, by default this one alone; ``batch``
        is None where it has nothing to give.
        """
        if totals is None:
            assert batch is not None
            totals = self.book(batch)
        if self._trained is not None:
            self._ledger.switch(Part.DEVICE)
            self._trained.synchronize()  # one batch queued ahead: time shows where it is spent
        shares: Sequence[slice | None] = [None] * len(totals)
        if self._clock is not None:
            self._clock.settle()
        if self._clock is not None and batch is not None:
            self._clock.mark(Part.H2D)  # the stream, not the host, may wait for the copy
        if batch is not None:
            batch.wait_on_device()
            shares = self._shares(batch)
        self._updates_done = 0
        self._batches += 1
        for envs, total in zip(shares, totals, strict=True):
            self._update(batch if envs else None, envs or slice(0), float(total))
            self._updates_done += 1
        if self._trained is not None:
            self._trained.record()
        if self._clock is not None:
            self._clock.mark(Part.WAIT)
        return self.progress.publish_due(self.config.learner.publish_every)

    def regrouped(self) -> None:
        """Begin anew with other learners: what was half done is given up."""
        self._batches = 0
        self._accumulated = 0.0

    def optimizers(self) -> dict[str, FlatOptimizer]:
        """By the name of what each updates."""
        return {"model": self.optimizer}

    def published(self) -> list[Tensor]:
        """What actors get, in the layout's order: parameters, then buffers."""
        return [self.optimizer.values, *self.model.buffers()]

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """What a resumed run needs besides `published`, by name."""
        return {OPTIMIZER + k: v for k, v in self.optimizer.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from a `state_dict`; ValueError for one of another kind."""
        self.optimizer.load_state_dict(under(OPTIMIZER, state))

    def statistics(self) -> dict[str, float]:
        """Means over the updates since the last call. Raises DivergedError for a number that is
        not finite: the weights are then still those before it appeared."""
        if not self._updates:
            return {}
        steps = max(1, self._steps)
        means = dict(zip(impala.STATISTICS, (self._sums / steps).tolist(), strict=True))
        means["grad_norm"] = float(self._norms) / self._updates
        self._clear()
        check_finite(means, self.config.learner, self.progress.learner_steps)
        return means

    def steps_done(self, batch: StagingBatch) -> int:
        """Agent steps of those updates of a batch that were taken before the group was lost."""
        return sum(batch.alive(envs) for envs in self._shares(batch)[: self._updates_done])

    def _shares(self, batch: StagingBatch) -> list[slice]:
        """The environments of each update."""
        updates = self.config.learner.updates_per_batch
        envs = batch.arrays["alive"].shape[1] // updates
        return [slice(i * envs, (i + 1) * envs) for i in range(updates)]

    def _update(self, batch: StagingBatch | None, share: slice, total: float) -> None:
        """One optimizer step, or a part of one, on ``total`` samples of all learners, of which the
        environments ``share`` of the batch are this one's."""
        if self._accumulated == 0:
            self.optimizer.zero_grad()
        self._accumulated += total
        complete = self._batches % self.config.learner.accumulate == 0
        if batch is not None and total:
            self._backward(batch, share, complete)
        elif self._algo.normalize_advantages and total:
            self.exchange.sum(torch.zeros(3, dtype=torch.float64, device=self.device))
        if batch is not None:
            self._steps += batch.alive(share)
        if not complete or not self._accumulated:
            return
        total, self._accumulated = self._accumulated, 0.0
        self._enter(Part.OPTIMIZE)
        norm = self.exchange.step(self.optimizer, total, self.progress.trained_steps)
        self.progress.updated(1)
        self._norms += norm
        self._updates += 1

    def _backward(self, batch: StagingBatch, share: slice, complete: bool) -> None:
        """Add the gradients of some environments, micro-batch by micro-batch."""
        size = max(1, self.config.learner.micro_batch // batch.arrays["obs"].shape[0])
        if self._algo.normalize_advantages:
            size = share.stop - share.start  # over the whole update, however large
        for first in range(share.start, share.stop, size):
            envs = slice(first, min(first + size, share.stop))
            self._enter(Part.FORWARD)
            loss, sums = impala.loss(self.model, batch.tensors, self._algo, envs, self.exchange.sum)
            if complete and envs.stop == share.stop:
                self.exchange.arm(self.optimizer, self._accumulated)
            self._enter(Part.BACKWARD)
            loss.backward()
            self._sums += sums

    def _enter(self, part: Part) -> None:
        """The host is in ``part``, and what it puts on a GPU belongs to it."""
        self._ledger.switch(part)
        if self._clock is not None:
            self._clock.mark(part)

    def _clear(self) -> None:
        self._sums = torch.zeros(len(impala.STATISTICS), device=self.device)
        self._norms = torch.zeros((), device=self.device)
        self._steps = self._updates = 0


def check_finite(means: Mapping[str, float], cfg: LearnerConfig, steps: int) -> None:
    """Raise DivergedError for a number that is not finite, found before learner step ``steps``."""
    bad = [name for name, value in means.items() if not math.isfinite(value)]
    if bad:
        raise DivergedError(
            f"{', '.join(bad)} became {means[bad[0]]} before learner step {steps}; resume from the "
            f"last checkpoint with a lower learner.lr (now {cfg.lr:g}) or a lower "
            f"learner.grad_clip (now {cfg.grad_clip})"
        )


def under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def trunk_dtype(precision: str, device: torch.device, shape: NetShape) -> torch.dtype:
    """What `learner.precision` means for a network on a device."""
    if precision == "auto":
        fast = device.type == "cuda" or cpu_gains_by_bf16()
        precision = "bf16" if fast and isinstance(shape, CnnShape | QCnnShape) else "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


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
