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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.core_inputs import REWARD
from penstock.algos.ops.backward import backward
from penstock.algos.ops.frame_stacks import some_observations
from penstock.algos.registry import algorithm
from penstock.algos.slots import RETURN
from penstock.configs.errors import UserError
from penstock.configs.schedules import over_run, schedules, with_values
from penstock.configs.schema import Config
from penstock.core.interfaces import BatchPlan, Share, StepHooks, StepResult
from penstock.core.params import Floats
from penstock.core.specs import HEADER, SlotSpec
from penstock.device.choice import device_of
from penstock.envs import EnvInfo
from penstock.learner.base_trainer import (
    NO_HOOKS,
    OPTIMIZER,
    BaseTrainer,
    normalizer_statistics,
)
from penstock.learner.device_statistics import DeviceStatistics, kind_of
from penstock.learner.minibatches import BatchSteps, Minibatch, deal, deal_steps, pieces
from penstock.learner.passes import PassSize, compile_network
from penstock.learner.sources.staging import StagingBatch, torch_dtype
from penstock.learner.stored_teachers import load_teachers
from penstock.models.compute_form import in_memory_format
from penstock.models.torch_nets import build_net
from penstock.profiling.ledger import Part, TimeLedger

# Name of the sums of `RewardScale` in a checkpoint.
REWARDS = "rewards/sums"
# Scaled rewards are clipped at so many standard deviations.
MOST_REWARD = 10.0
# Added to a variance, so that it is not zero.
EPSILON = 1e-8

AddOthers = Callable[[Tensor], None]
"""Adds the values of the other learners to a tensor, in place."""


class BatchColumns(NamedTuple):
    """The data of a batch from which its updates take their minibatches."""

    columns: dict[str, Tensor]
    """The columns ``[T(+1), E, ...]`` by name."""
    steps: BatchSteps | None
    """The same data in the order of an epoch; None in a division by environments."""


class Trainer(BaseTrainer[StagingBatch]):
    """Updates one network on unrolls."""

    def __init__(self, config: Config, info: EnvInfo, ledger: TimeLedger | None = None) -> None:
        """``ledger`` is that of the training thread."""
        algo = algorithm(config.algo)
        assert isinstance(algo, UnrollAlgorithm), config.algo
        shape = in_memory_format(algo.network(config, info), config.learner.memory_format)
        super().__init__(config, info, ledger, shape)

        self._algo = algo
        self._options = ScheduledOptions(algo, config)
        self._needs_whole_update = algo.whole(self._options.current)
        """Whether the loss must see all environments of an update at once."""
        self._by_steps = config.algo.by_steps(config.model.core != "none")
        """Whether minibatches are divided by steps, and not by environments."""
        self.updates = config.algo.passes * config.learner.updates_per_batch
        """Most updates of one batch."""
        self._pass_size = PassSize(config.learner.micro_batch, device_of(self.device))
        self._per_slot = frozenset(c.name for c in self.spec.columns if c.rows == "slot")
        """Columns that have a value for each slot, and not for each step."""

        self.model = build_net(shape, self._dtype).to(self.device)
        if config.learner.compile:
            compile_network(self.model)
        self.optimizer = self._add_optimizer("model", self.model.named_parameters())
        self._accumulation = Accumulation(config.learner.accumulate)
        self._rewards = RewardScale(self.device) if config.algo.normalizes_rewards else None
        self._teachers = load_teachers(config, info, self.device)

        self._early_stops: list[bool] = []
        """Whether each batch since the last `statistics` was left before its last epoch."""
        self.device_statistics = DeviceStatistics(
            algo.statistics,
            self.device,
            moments=algo.moments,
            by_epoch=algo.by_epoch,
            epoch_updates=config.learner.updates_per_batch,
            grad_clip=self.optimizer.grad_clip,
        )

    def plan_updates(self, batch: StagingBatch | None) -> BatchPlan:
        """Count a batch, and deal its samples out to updates."""
        if batch is None:
            return BatchPlan(np.zeros(self.updates))

        self.progress.count_unrolls(batch.summary, batch.steps)
        updates = self.config.learner.updates_per_batch
        divide = deal_steps if self._by_steps else deal
        shares = divide(batch.arrays["alive"], updates, self.updates // updates)
        return BatchPlan(np.array([share.steps for share in shares], np.float64), shares)

    def step(
        self,
        batch: StagingBatch | None,
        plan: BatchPlan | None = None,
        *,
        totals: Floats | None = None,
        hooks: StepHooks = NO_HOOKS,
    ) -> StepResult:
        """Train on every sample of a batch, and on the other learners' samples together with them.

        Args:
            batch: None if this learner takes part without samples.
            plan: of the batch; made here by default.
            totals: samples of each update over all learners, float64 ``[updates]``; by default
                those of the plan.
            hooks: called before each backward pass and after each update.
        """
        plan = self.plan_updates(batch) if plan is None else plan
        totals = plan.counts if totals is None else totals
        shares: Sequence[Share | None] = plan.shares
        if batch is None:
            columns = self._empty_columns
            headers = np.empty(0, HEADER)
            shares = [None] * len(totals)
        else:
            columns = self._receive(batch)
            headers = batch.headers

        self._accumulation.begin_batch(self._copy_shared)
        self._options.follow(self.progress.trained_steps)
        columns = self._prepare_columns(columns, headers)
        steps = BatchSteps(columns, self._per_slot, self._uploader) if self._by_steps else None
        data = BatchColumns(columns, steps)

        for share, total in zip(shares, totals, strict=True):
            if not self._takes_update(plan.updates_done, columns):
                break
            self._update(data, share, float(total), position=plan.updates_done, hooks=hooks)
            plan.updates_done += 1
            hooks.after_update(len(totals) - plan.updates_done)

        self._early_stops.append(plan.updates_done < len(totals))
        self._restore_shared_if_skipped()
        self.queue.on_batch_queued()
        return self._result(0 if batch is None else batch.steps)

    def interrupted_result(self, plan: BatchPlan) -> StepResult:
        """Returns the result for a batch whose group was lost: its agent steps that were trained on
        at least once."""
        first_epoch = plan.shares[: self.config.learner.updates_per_batch]
        return StepResult(sum(share.steps for share in first_epoch[: plan.updates_done]))

    def unfinished_update(self) -> dict[str, Any]:
        return self._accumulation.state_dict(self.optimizer.grads)

    def load_unfinished(self, state: dict[str, Any]) -> None:
        self._accumulation.load_state_dict(state, self.optimizer.grads)

    def on_regroup(self) -> None:
        super().on_regroup()
        self._accumulation.reset()

    def shared_statistics(self) -> dict[str, Tensor]:
        statistics = normalizer_statistics(self.model)
        if self._rewards is not None:
            statistics["rewards"] = self._rewards.sums
        return statistics

    def tensors(self) -> list[Tensor]:
        return [] if self._rewards is None else [self._rewards.sums]

    def published_tensors(self) -> list[Tensor]:
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

    @cached_property
    def _empty_columns(self) -> dict[str, Tensor]:
        """The columns with which this learner takes part without a batch."""
        return empty_batch(self.spec, self.device)

    @property
    def _micro_envs(self) -> int:
        """Environments of a micro-batch."""
        return max(1, self._pass_size.rows // (self.spec.unroll + 1))

    def _receive(self, batch: StagingBatch) -> dict[str, Tensor]:
        """Count the age and policy lag of a batch, and wait for its copy to the device.

        Returns its columns.
        """
        self.progress.count_ages(batch.headers)
        # By steps, the steps of each environment are spread over all updates of an epoch.
        updates = 1 if self._by_steps else self.config.learner.updates_per_batch
        self.progress.count_lag(batch.summary, updates)

        if self._runs_behind:
            self._ledger.switch(Part.H2D)  # the stream, not the host, may wait for the copy
        batch.wait_on_device()
        return batch.tensors

    def _prepare_columns(
        self, columns: dict[str, Tensor], headers: npt.NDArray[np.void]
    ) -> dict[str, Tensor]:
        """Add the columns of teachers, scale rewards, update the observations' normaliser, and add
        the algorithm's columns.

        Returns the columns of the batch for all of its updates. All learners call this in the same
        turn, as it sums values over them. ``headers`` are those of the batch's slots.
        """
        columns = dict(columns)
        self._ledger.switch(Part.FORWARD)
        if self._teachers is not None and self._options.current.teaching is not None:
            columns |= self._teachers(columns, headers, self._batch_parts(columns))

        if self._rewards is not None:
            if self.model.core_inputs is not None:
                columns[REWARD] = columns["reward"]
            columns["reward"] = self._rewards(columns, self.sync.all_reduce)

        if self.model.normalizer is not None:
            obs, alive = some_observations(columns, self.model.normalizer.most_rows)
            self.model.observe(obs, alive, self.sync.all_reduce)

        if self._algo.prepare is not None:
            parts = self._batch_parts(columns)
            columns |= self._algo.prepare(
                self.model, columns, self._options.current, parts, self.sync.all_reduce
            )
            if self._algo.moments:
                self.device_statistics.add_batch(columns.pop("moments"))
        return columns

    def _batch_parts(self, columns: Mapping[str, Tensor]) -> list[slice | Tensor]:
        """Returns the environments of a whole batch, as many at a time as are computed together."""
        envs = slice(0, columns["alive"].shape[1])
        size = self._micro_envs
        if self._needs_whole_update:  # all of an update fits, so its loss is computed at once
            size = max(size, envs.stop // self.config.learner.updates_per_batch)
        return list(pieces(envs, size))

    def _takes_update(self, updates_done: int, columns: dict[str, Tensor]) -> bool:
        """Returns whether to take the next update of a batch, after ``updates_done``.

        The algorithm decides at the start of each epoch but the first, for the whole epoch.
        """
        epoch, update = divmod(updates_done, self.config.learner.updates_per_batch)
        if update or not epoch or self._algo.going_on is None:
            return True

        self._ledger.switch(Part.FORWARD)
        parts = self._batch_parts(columns)
        return self._algo.going_on(
            self.model, columns, self._options.current, parts, self._reduce_and_wait
        )

    def _reduce_and_wait(self, values: Tensor) -> None:
        """Add other learners' values; the caller reads the sum, for which the host waits."""
        self.sync.all_reduce(values)
        self.queue.drain()

    def _update(
        self,
        data: BatchColumns,
        share: Share | None,
        total: float,
        *,
        position: int,
        hooks: StepHooks,
    ) -> None:
        """Add the gradients of a minibatch, and take an optimizer step if the update is complete.

        Args:
            data: the batch.
            share: this learner's minibatch; None without samples.
            total: samples of all learners' minibatches.
            position: number of the update in the batch, from 0.
            hooks: called before each backward pass.
        """
        accumulation = self._accumulation
        if accumulation.samples == 0:
            self.optimizer.zero_grad()
        accumulation.samples += total

        if share is not None and total:
            self._backward(data, share, hooks)
        elif self._needs_whole_update and total:
            # Its loss sums up values with the other learners, so this one takes part.
            with torch.no_grad():
                self._loss(data._replace(steps=None), slice(0, 1))
        if share is not None:
            self.device_statistics.count(share.steps)
        if not accumulation.is_complete or not accumulation.samples:
            return

        samples = accumulation.take_samples()
        self._ledger.switch(Part.OPTIMIZE)
        norm = self.sync.step(self.optimizer, samples, self.progress.trained_steps)
        self.progress.count_updates(1)
        self.device_statistics.on_update(norm, position)
        accumulation.add_norm(norm)

    def _backward(self, data: BatchColumns, share: Share, hooks: StepHooks) -> None:
        """Add the gradients of a minibatch, micro-batch by micro-batch."""
        places = share.places
        if isinstance(places, Tensor):
            places = self._uploader.send({"places": places.numpy()}).tensors_on_current_stream()[
                "places"
            ]

        # The size of a micro-batch is in environments, or in steps in a division by steps.
        size = self._micro_envs
        if data.steps is not None and share.order is not None:
            data.steps.set_order(share.order)
            size = self._pass_size.rows
        parts = [places] if self._needs_whole_update else list(pieces(places, size))

        compute_loss = self._measured_loss if self._pass_size.unknown else self._loss
        for number, part in enumerate(parts, start=1):
            self._ledger.switch(Part.FORWARD)
            loss, sums = compute_loss(data, part)

            # The last micro-batch completes the gradients: they may be reduced meanwhile.
            if self._accumulation.is_complete and number == len(parts):
                self.sync.prepare_backward(self.optimizer, self._accumulation.samples)

            hooks.before_backward()
            self._ledger.switch(Part.BACKWARD)
            backward(loss)
            del loss  # its activations are freed before the next pass makes others
            self.device_statistics.add(sums)

    def _measured_loss(self, data: BatchColumns, places: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Compute `_loss` and measure its saved activations, which determine the size of later
        passes."""
        number = len(places) if isinstance(places, Tensor) else places.stop - places.start
        rows = number if data.steps is not None else number * (self.spec.unroll + 1)
        compiles = self.config.learner.compile
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with self._pass_size.measured(rows), eager:
            return self._loss(data, places)

    def _loss(self, data: BatchColumns, places: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of some places of a batch: of environments, or of steps in an epoch.

        Returns the loss ``[]``, a sum over alive rows, and the sums of the algorithm's statistics.

        Raises:
            UserError: the algorithm's `loss` returned something else.
        """
        batch: Mapping[str, Tensor] = data.columns
        if data.steps is not None:
            assert isinstance(places, slice), places
            batch = Minibatch(data.steps, places)
            places = slice(None)

        result = self._algo.loss(
            self.model, batch, self._options.current, places, self.sync.all_reduce
        )
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(
                f"loss returned {type(result).__name__}; return the loss and the sums of STATISTICS"
            )
        if not isinstance(result[0], Tensor) or result[0].shape != ():
            raise UserError(
                f"loss returned a loss of {kind_of(result[0])}; return a tensor of shape [], the "
                "sum over the alive rows"
            )
        return result

    def _restore_shared_if_skipped(self) -> None:
        """Undo the normalisers' statistics of a batch all of whose updates were skipped."""
        accumulation = self._accumulation
        if accumulation.norms:
            any_taken = torch.stack(accumulation.norms).isfinite().any()
            self._restore_shared(accumulation.shared, any_taken)
            accumulation.forget_shared()


class ScheduledOptions:
    """The options of an algorithm, some of which may follow schedules over the run."""

    def __init__(self, algo: UnrollAlgorithm[Any], config: Config) -> None:
        """Begin at the first step of the run."""
        self._algo = algo
        self._schedules = over_run(config.algo, config.stop.env_steps)
        self._changes = bool(schedules(self._schedules))
        self.current = algo.resolve_options(with_values(self._schedules, 0))
        """The options at the step of the last `follow`."""

    def follow(self, trained_steps: int) -> None:
        """Set the options to their values after ``trained_steps`` agent steps."""
        if self._changes:
            self.current = self._algo.resolve_options(with_values(self._schedules, trained_steps))


class Accumulation:
    """The batches that were added to the next update, of which `learner.accumulate` make one.

    The gradients themselves add up in the optimizer.
    """

    def __init__(self, batches_per_update: int) -> None:
        """``batches_per_update`` is `learner.accumulate`."""
        self._batches_per_update = batches_per_update
        self._batches = 0
        """Batches since the run began, or since its learners have changed."""
        self.samples = 0.0
        """Samples of all learners in the gradients so far."""
        self.shared: list[Tensor] = []
        """Copies of the shared statistics, made before the first of these batches."""
        self.norms: list[Tensor] = []
        """Gradient norms ``[]`` of the updates taken since; not finite where one was skipped."""

    @property
    def is_complete(self) -> bool:
        """Whether the present batch is the last one of an update."""
        return self._batches % self._batches_per_update == 0

    def begin_batch(self, copy_shared: Callable[[], list[Tensor]]) -> None:
        """Count a batch; ``copy_shared`` copies the statistics before they change."""
        self._batches += 1
        if not self.shared:
            self.shared = copy_shared()

    def take_samples(self) -> float:
        """Returns the number of samples in the gradients, which an optimizer step uses now."""
        samples, self.samples = self.samples, 0.0
        return samples

    def add_norm(self, norm: Tensor) -> None:
        """Note the gradient norm of an update, if there are statistics to undo."""
        if self.shared:
            self.norms.append(norm)

    def forget_shared(self) -> None:
        """Drop the copies; the next batch makes others."""
        self.shared = []
        self.norms = []

    def reset(self) -> None:
        """Drop everything: the gradients belonged to other learners."""
        self._batches = 0
        self.samples = 0.0
        self.forget_shared()

    def state_dict(self, gradients: Tensor) -> dict[str, Any]:
        """Returns JSON values and arrays for `load_state_dict`, with a copy of the gradients."""
        state: dict[str, Any] = {"batches": self._batches % self._batches_per_update}
        if self.samples:
            state |= {
                "samples": self.samples,
                "gradients": gradients.cpu().numpy().copy(),
                "before": [tensor.cpu().numpy().copy() for tensor in self.shared],
            }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], gradients: Tensor) -> None:
        """Continue from a `state_dict`, and write its gradients into ``gradients``."""
        self._batches = int(state["batches"])
        if "samples" in state:
            self.samples = float(state["samples"])
            gradients.copy_(torch.from_numpy(state["gradients"]))
            copies = (torch.from_numpy(array) for array in state["before"])
            self.shared = [copy.to(gradients.device) for copy in copies]


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
        mask = batch["alive"].flatten().double()
        returns = batch[RETURN].flatten().double() * mask
        sums = torch.stack((mask.sum(), returns.sum(), returns.dot(returns)))
        add_others(sums)
        self.sums += sums

        number = self.sums[0].clamp(min=1)
        variance = self.sums[2] / number - (self.sums[1] / number).square()
        scale = (variance.clamp_(min=0) + EPSILON).rsqrt_().float()
        return (batch["reward"] * scale).clamp_(-MOST_REWARD, MOST_REWARD)
