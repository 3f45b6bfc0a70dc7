"""The trainer: network, optimizer, algorithm and counters of one learner, without any transport.

The learner's process gives it batches from shared memory, the lockstep mode from the same process.
A batch is split into ``updates_per_batch`` updates, anew in each epoch, by environments or by steps
(`minibatches`), and an update into micro-batches (`passes`). Their gradients add up, over
``accumulate`` batches and over the learners that ``sync`` connects, and one step is taken by their
sum over the number of agent steps. `penstock.algos.base.UnrollAlgorithm` is the algorithm's part.

`Trainer.step` trains on a batch: `_prepare_columns` once, then `_update` for each minibatch, which
calls `_backward` for each micro-batch and `_loss` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.ops.backward import backward
from penstock.algos.ops.frame_stacks import some_observations
from penstock.algos.registry import algorithm
from penstock.algos.slots import RETURN
from penstock.configs.errors import UserError
from penstock.configs.schedules import over_run, schedules, with_values
from penstock.configs.schema import Config
from penstock.core.interfaces import StepHooks, StepResult
from penstock.core.params import Floats
from penstock.core.specs import SlotSpec
from penstock.device.choice import device_of
from penstock.envs import EnvInfo
from penstock.learner.base_trainer import (
    NO_HOOKS,
    OPTIMIZER,
    BaseTrainer,
    normalizer_statistics,
)
from penstock.learner.device_statistics import DeviceStatistics, kind_of
from penstock.learner.minibatches import BatchSteps, Minibatch, Share, deal, deal_steps, pieces
from penstock.learner.passes import PassSize, compile_network
from penstock.learner.sources.staging import StagingBatch, torch_dtype
from penstock.models.compute_form import in_memory_format
from penstock.models.torch_nets import build_net
from penstock.profiling.ledger import Part, TimeLedger

# Name of the sums of `RewardScale` in a checkpoint.
REWARDS = "rewards/sums"
AddOthers = Callable[[Tensor], None]
# Scaled rewards are clipped at so many standard deviations.
MOST_REWARD = 10.0
# Added to a variance, so that it is not zero.
EPSILON = 1e-8


class Trainer(BaseTrainer[StagingBatch]):
    """Updates one network on unrolls."""

    def __init__(self, config: Config, info: EnvInfo, ledger: TimeLedger | None = None) -> None:
        algo = algorithm(config.algo)
        assert isinstance(algo, UnrollAlgorithm), config.algo
        shape = in_memory_format(algo.network(config, info), config.learner.memory_format)
        super().__init__(config, info, ledger, shape)
        self._algo = algo
        self._scheduled = over_run(config.algo, config.stop.env_steps)
        self._has_schedules = bool(schedules(self._scheduled))
        self._cfg = algo.settled(with_values(self._scheduled, 0))
        self._whole = algo.whole(self._cfg)
        self._by_steps = config.algo.by_steps(config.model.core != "none")
        self._pass_size = PassSize(config.learner.micro_batch, device_of(self.device))
        self._per_slot = frozenset(c.name for c in self.spec.columns if c.rows == "slot")
        self.model = build_net(shape, self._dtype).to(self.device)
        if config.learner.compile:
            compile_network(self.model)
        self.optimizer = self._add_optimizer("model", self.model.named_parameters())
        self.updates = config.algo.passes * config.learner.updates_per_batch
        """Most updates of one batch."""
        self._shares: list[Share] = []  # of the batch that was planned last
        self._updates_done = 0  # of the batch in training
        self._batches = 0
        self._before: list[Tensor] = []  # `shared`, before the batches of the next update
        self._norms: list[Tensor] = []  # of this batch's updates
        self._accumulated = 0.0  # samples, of all learners, in the gradients so far
        self.device_statistics = DeviceStatistics(
            algo.statistics,
            self.device,
            moments=algo.moments,
            by_epoch=algo.by_epoch,
            epoch_updates=config.learner.updates_per_batch,
            grad_clip=self.optimizer.grad_clip,
        )
        self._early_stops: list[bool] = []  # of the batches since the last `statistics`
        self._rewards = RewardScale(self.device) if config.algo.normalizes_rewards else None

    def plan_updates(self, batch: StagingBatch | None) -> Floats:
        """Count a batch, and deal its samples out to updates."""
        if batch is None:
            return np.zeros(self.updates)
        updates = self.config.learner.updates_per_batch
        self.progress.count_unrolls(batch.summary, batch.steps)
        divide = deal_steps if self._by_steps else deal
        self._shares = divide(batch.arrays["alive"], updates, self.updates // updates)
        return np.array([share.steps for share in self._shares], np.float64)

    def step(
        self,
        batch: StagingBatch | None,
        totals: Floats | None = None,
        hooks: StepHooks = NO_HOOKS,
    ) -> StepResult:
        """Train on every sample of a batch."""
        self.hooks = hooks
        if totals is None:
            assert batch is not None
            totals = self.plan_updates(batch)
        shares: Sequence[Share | None] = [None] * len(totals)
        columns = self._nobody if batch is None else batch.tensors
        if batch is not None:
            for span in batch.spans:
                self.progress.count_age(*span)
            # By steps, the steps of each environment are spread over all updates of an epoch.
            updates = 1 if self._by_steps else self.config.learner.updates_per_batch
            self.progress.count_lag(batch.summary, updates)
            if self._runs_behind:
                self._ledger.switch(Part.H2D)  # the stream, not the host, may wait for the copy
            batch.wait_on_device()
            shares = self._shares
        self._updates_done = 0
        self._batches += 1
        if not self._before:
            self._before = self._copy_shared()
        if self._has_schedules:
            now = with_values(self._scheduled, self.progress.trained_steps)
            self._cfg = self._algo.settled(now)
        columns = self._prepared(columns)
        steps = BatchSteps(columns, self._per_slot, self._uploader) if self._by_steps else None
        for share, total in zip(shares, totals, strict=True):
            if not self._goes_on(columns):
                break
            self._update(columns, steps, share, float(total))
            self._updates_done += 1
            hooks.after_update(len(totals) - self._updates_done)
        self._early_stops.append(self._updates_done < len(totals))
        self._undo_where_skipped()
        self.queue.launched()
        return self._result(0 if batch is None else batch.steps)

    def unfinished(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batches": self._batches % self.config.learner.accumulate}
        if self._accumulated:
            state |= {
                "samples": self._accumulated,
                "gradients": self.optimizer.grads.cpu().numpy().copy(),
                "before": [tensor.cpu().numpy().copy() for tensor in self._before],
            }
        return state

    @torch.no_grad()
    def load_unfinished(self, state: dict[str, Any]) -> None:
        self._batches = int(state["batches"])
        if "samples" in state:
            self._accumulated = float(state["samples"])
            self.optimizer.grads.copy_(torch.from_numpy(state["gradients"]))
            self._before = [torch.from_numpy(array).to(self.device) for array in state["before"]]

    def regrouped(self) -> None:
        super().regrouped()
        self._batches = 0
        self._accumulated = 0.0
        self._before, self._norms = [], []

    def shared(self) -> dict[str, Tensor]:
        found = normalizer_statistics(self.model)
        return found if self._rewards is None else found | {"rewards": self._rewards.sums}

    def tensors(self) -> list[Tensor]:
        return [] if self._rewards is None else [self._rewards.sums]

    def published(self) -> list[Tensor]:
        return [self.optimizer.values, *self.model.buffers()]

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        state = super().state_dict()
        if self._rewards is not None:
            state[REWARDS] = self._rewards.sums.cpu().numpy().copy()
        return state

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        super().load_state_dict(state)
        if self._rewards is not None:
            sums = state.get(REWARDS, np.zeros(3))  # a run without them may be continued
            self._rewards.sums.copy_(torch.from_numpy(np.array(sums)))

    def _prefix(self, optimizer: str) -> str:
        return OPTIMIZER

    def _batch_statistics(self) -> dict[str, float]:
        """``early_stops`` is the share of batches that had not all of their epochs."""
        stops, self._early_stops = self._early_stops, []
        if stops and self._algo.going_on is not None and self.config.algo.passes > 1:
            return {"early_stops": sum(stops) / len(stops)}
        return {}

    def interrupted(self, batch: StagingBatch) -> StepResult:
        """The result for a batch whose group was lost: its agent steps trained on at least once."""
        once = self._shares[: self.config.learner.updates_per_batch]
        return StepResult(sum(share.steps for share in once[: self._updates_done]))

    def _undo_where_skipped(self) -> None:
        """Undo the normalisers' statistics of a batch all of whose updates were skipped."""
        if not self._norms:
            return
        self._restore_shared(self._before, torch.stack(self._norms).isfinite().any())
        self._before, self._norms = [], []

    @cached_property
    def _nobody(self) -> dict[str, Tensor]:
        return empty_batch(self.spec, self.device)

    def _prepared(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns of a batch, with those that the algorithm adds before its first update."""
        columns = dict(columns)
        self._ledger.switch(Part.FORWARD)
        if self._rewards is not None:
            columns["reward"] = self._rewards(columns, self.sync.all_reduce)
        if self.model.normalizer is not None:
            seen = some_observations(columns, self.model.normalizer.most_rows)
            self.model.observe(*seen, self.sync.all_reduce)
        if self._algo.prepare is not None:
            columns |= self._algo.prepare(self.model, columns, *self._parts(columns))
            if self._algo.moments:
                self.device_statistics.add_batch(columns.pop("moments"))
        return columns

    def _goes_on(self, columns: dict[str, Tensor]) -> bool:
        """Whether to take the next update of a batch; checked at the start of each later epoch."""
        epoch, update = divmod(self._updates_done, self.config.learner.updates_per_batch)
        if update or not epoch or self._algo.going_on is None:
            return True
        self._ledger.switch(Part.FORWARD)
        cfg, parts, _ = self._parts(columns)
        return self._algo.going_on(self.model, columns, cfg, parts, self._reduce_and_wait)

    def _reduce_and_wait(self, values: Tensor) -> None:
        """Add other learners' values; the caller reads the sum, for which the host waits."""
        self.sync.all_reduce(values)
        self.queue.drain()

    def _parts(self, columns: dict[str, Tensor]) -> tuple[Any, list[slice | Tensor], Any]:
        """The further arguments of functions on a whole batch."""
        envs = slice(0, columns["alive"].shape[1])
        size = self._micro_envs
        if self._whole:  # all of an update fits, so its loss is computed at once
            size = max(size, envs.stop // self.config.learner.updates_per_batch)
        return self._cfg, list(pieces(envs, size)), self.sync.all_reduce

    @property
    def _micro_envs(self) -> int:
        """Environments of a micro-batch."""
        return max(1, self._pass_size.rows // (self.spec.unroll + 1))

    def _update(
        self,
        columns: dict[str, Tensor],
        steps: BatchSteps | None,
        share: Share | None,
        total: float,
    ) -> None:
        """One optimizer step, or a part of one, on ``total`` samples of all learners.

        ``share`` is this learner's minibatch, if it has any, of ``columns``, or of ``steps``.
        """
        if self._accumulated == 0:
            self.optimizer.zero_grad()
        self._accumulated += total
        complete = self._batches % self.config.learner.accumulate == 0
        if share is not None and total:
            self._backward(columns, steps, share, complete)
        elif self._whole and total:
            with torch.no_grad():
                self._loss(columns, None, slice(0, 1))  # which sums up with the other learners
        if share is not None:
            self.device_statistics.count(share.steps)
        if not complete or not self._accumulated:
            return
        total, self._accumulated = self._accumulated, 0.0
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.sync.step(self.optimizer, total, self.progress.trained_steps)
        self.progress.count_updates(1)
        self.device_statistics.updated(norm, self._updates_done)
        if self._before:
            self._norms.append(norm)

    def _backward(
        self, columns: dict[str, Tensor], steps: BatchSteps | None, share: Share, complete: bool
    ) -> None:
        """Add the gradients of a minibatch, micro-batch by micro-batch."""
        places = share.places
        if isinstance(places, Tensor):
            places = self._uploader.send({"places": places.numpy()}).arrive()["places"]
        size = self._micro_envs
        if steps is not None and share.order is not None:
            steps.set_order(share.order)
            size = self._pass_size.rows
        parts = [places] if self._whole else list(pieces(places, size))
        forward = self._measured_loss if self._pass_size.unknown else self._loss
        for number, part in enumerate(parts, start=1):
            self._ledger.switch(Part.FORWARD)
            loss, sums = forward(columns, steps, part)
            if complete and number == len(parts):
                self.sync.prepare_backward(self.optimizer, self._accumulated)
            self.hooks.before_backward()
            self._ledger.switch(Part.BACKWARD)
            backward(loss)
            del loss  # with its activations, before the next pass makes others
            self.device_statistics.add(sums)

    def _measured_loss(
        self, columns: dict[str, Tensor], steps: BatchSteps | None, places: slice | Tensor
    ) -> tuple[Tensor, Tensor]:
        """`_loss`; its saved activations determine the size of later passes."""
        number = len(places) if isinstance(places, Tensor) else places.stop - places.start
        rows = number if steps is not None else number * (self.spec.unroll + 1)
        compiles = self.config.learner.compile
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with self._pass_size.measured(rows), eager:
            return self._loss(columns, steps, places)

    def _loss(
        self, columns: dict[str, Tensor], steps: BatchSteps | None, places: slice | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of some environments of ``columns``, or of some of ``steps``."""
        batch: Mapping[str, Tensor] = columns
        if steps is not None:
            assert isinstance(places, slice), places
            batch, places = Minibatch(steps, places), slice(None)
        found = self._algo.loss(self.model, batch, self._cfg, places, self.sync.all_reduce)
        if not isinstance(found, tuple) or len(found) != 2:
            raise UserError(
                f"loss returned {type(found).__name__}; return the loss and the sums of STATISTICS"
            )
        if not isinstance(found[0], Tensor) or found[0].shape != ():
            raise UserError(
                f"loss returned a loss of {kind_of(found[0])}; return a tensor of shape [], the "
                "sum over the alive rows"
            )
        return found


def empty_batch(spec: SlotSpec, device: torch.device) -> dict[str, Tensor]:
    """Returns a batch of one environment without agent steps, as columns by name.

    With it a learner without samples takes part in sums over all learners.
    """
    return {
        c.name: torch.zeros(
            (*spec.rows_of(c)[:-1], 1, *c.shape), dtype=torch_dtype(c.dtype), device=device
        )
        for c in spec.columns
    }


class RewardScale:
    """Scales rewards by the standard deviation of the discounted return so far, and clips them.

    To ± `MOST_REWARD` (Engstrom et al. 2020, arXiv 2005.12729, appendix A.1).
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Number of returns, their sum and the sum of their squares."""

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor], add_others: AddOthers) -> Tensor:
        """Add the returns of a batch and of other learners; returns the scaled rewards."""
        returns, mask = batch[RETURN].flatten().double(), batch["alive"].flatten().double()
        living = returns * mask
        more = torch.stack((mask.sum(), living.sum(), living.dot(living)))
        add_others(more)
        self.sums += more
        number = self.sums[0].clamp(min=1)
        variance = self.sums[2] / number - (self.sums[1] / number).square()
        scale = (variance.clamp_(min=0) + EPSILON).rsqrt_().float()
        return (batch["reward"] * scale).clamp_(-MOST_REWARD, MOST_REWARD)
