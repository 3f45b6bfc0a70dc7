"""The trainer of an off-policy algorithm: networks, optimizers and counters, without any replay.

`Trainer` is the counterpart for algorithms that train on unrolls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.base import ReplayAlgorithm
from penstock.algos.registry import algorithm
from penstock.algos.replay_update import ReplayUpdate, UpdateContext, UpdateResult
from penstock.configs.errors import UserError
from penstock.configs.schedules import over_run
from penstock.configs.schema import Config
from penstock.core.interfaces import BatchPlan, StepHooks, StepResult
from penstock.core.params import Floats
from penstock.device.transfers import Download
from penstock.envs import EnvInfo
from penstock.learner.base_trainer import NO_HOOKS, BaseTrainer, normalizer_statistics
from penstock.learner.device_statistics import DeviceStatistics, kind_of
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.sources.batch_sampler import ReplayBatch
from penstock.models.compute_form import ROWS, in_memory_format
from penstock.models.torch_heads import HeadNet
from penstock.models.torch_nets import build_net
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import unstack

# Most rows of a pass on a GPU: more than a batch from replay usually has.
MOST_ROWS = 1 << 14
# Columns of every batch.
NAMES = ("obs", "action", "reward", "next_obs", "discount")
# Columns that only some batches have.
OPTIONAL_NAMES = ("weights", "mask", "state")


class OffPolicyTrainer(BaseTrainer[ReplayBatch]):
    """Updates the networks of one algorithm on batches from replay."""

    def __init__(self, config: Config, info: EnvInfo, ledger: TimeLedger | None = None) -> None:
        """``ledger`` is that of the training thread.

        Raises UserError if observations are to be normalised, and the algorithm's update does not
        make its network by the context.
        """
        algo = algorithm(config.algo)
        assert isinstance(algo, ReplayAlgorithm), config.algo
        shape = in_memory_format(algo.network(config, info), config.learner.memory_format)
        super().__init__(config, info, ledger, shape)
        if algo.least_exploring(config, 0) is not None:
            self.progress.follow_least_exploring()

        self._columns = (*NAMES, *OPTIONAL_NAMES, *algo.batch_columns)
        """The columns of a batch that an update takes."""
        self._samples_of = algo.samples_of
        self._prioritized = config.replay.prioritized
        self._stack = config.transport.frame_stack or 1
        self.step_hooks = NO_HOOKS
        """The hooks of the step in progress. The algorithm's update calls its optimizers by itself,
        so `SyncedOptimizer` reads them here."""
        space = info.observation_space
        self._ignored_obs = torch.from_numpy(np.zeros((1, *space.shape), space.dtype)).to(
            self.device
        )
        """One observation ``[1, *shape]`` that does not count, for a step without a batch."""

        self._network: HeadNet | None = None
        """The network whose observations are normalised; None if the update makes its own."""

        def make_network() -> HeadNet:
            self._network = build_net(shape, self._dtype).to(self.device)
            return self._network

        rows = config.learner.micro_batch or (MOST_ROWS if self._runs_behind else ROWS)
        context = UpdateContext(
            shape=shape,
            device=self.device,
            dtype=self._dtype,
            micro_batch=rows,
            ledger=self._ledger,
            optimizer=lambda name, named: SyncedOptimizer(self._add_optimizer(name, named), self),
            network=make_network,
        )
        cfg = over_run(config.algo, config.stop.env_steps)
        self._update: ReplayUpdate = algo.make_update(cfg, context)
        if config.model.normalize_observations and self._network is None:
            raise UserError(
                f"model.normalize_observations true does nothing for algo.name {config.algo.name}, "
                "whose Update makes its network without the context; make it by context.network(), "
                "or set model.normalize_observations=false"
            )
        self.device_statistics = DeviceStatistics(
            self._update.statistics,
            self.device,
            source="Update.take",
            listed="Update.statistics",
        )

    def shared_statistics(self) -> dict[str, Tensor]:
        return normalizer_statistics(self._network)

    def plan_updates(self, batch: ReplayBatch | None) -> BatchPlan:
        """Count the samples of the one update on a batch."""
        return BatchPlan(np.array([0.0 if batch is None else self._samples_of(batch.data)]))

    def step(
        self,
        batch: ReplayBatch | None,
        plan: BatchPlan | None = None,
        *,
        totals: Floats | None = None,
        hooks: StepHooks = NO_HOOKS,
    ) -> StepResult:
        """Take one optimizer step, together with the other learners.

        Args:
            batch: None if this learner takes part without samples.
            plan: of the batch; made here by default.
            totals: samples over all learners, float64 ``[1]``; by default those of the plan.
            hooks: called before each backward pass.

        Returns:
            The result, with TD errors if the replay samples by priority.
        """
        self.step_hooks = hooks
        plan = self.plan_updates(batch) if plan is None else plan
        total = float((plan.counts if totals is None else totals)[0])
        if self.sync.world > 1 and self._prioritized:
            self._rescale_weights(batch)
        if batch is None:
            self._take_update(None, samples=0, total=total)
            return self._result(0)

        data = batch.data
        if "frames" in data:  # the stacks are made on the device
            self._ledger.switch(Part.H2D)
            frames = self._uploader.send({"frames": data["frames"]}).tensors_on_current_stream()[
                "frames"
            ]
            data["obs"], data["next_obs"] = unstack(frames, self._stack)

        samples = self._samples_of(data)
        tensors = batch.tensors or self.tensors_of(data)
        errors = self._take_update(tensors, samples=samples, total=total)
        return self._result(samples, Download(errors) if self._prioritized else None)

    def interrupted_result(self, plan: BatchPlan) -> StepResult:
        """Returns the result for a batch whose group was lost: its one update was not taken."""
        return StepResult(0)

    def _rescale_weights(self, batch: ReplayBatch | None) -> None:
        """Divide importance weights by the largest of all learners' batches, not of this one.

        Each learner draws as many rows from its own shard of the N rows. So the chance of a row of
        shard r is P_r / learners, and its weight (N P_r / learners)^-beta. The largest weight is
        that of the least P_r of all. In the ratio of two weights only the ratio of the P_r is left.
        """
        own_least = math.inf if batch is None else batch.min_probability
        least = self.sync.all_reduce_min(own_least)
        if batch is not None:
            batch.data["weights"] *= np.float32((least / own_least) ** batch.beta)

    def update(
        self, batch: Mapping[str, npt.NDArray[Any] | Tensor] | None, total: float | None = None
    ) -> Tensor:
        """Take one optimizer step on the arrays of a batch.

        Args:
            batch: `NAMES`, in the meaning of `penstock.algos.dqn.update.loss`, and any of
                `OPTIONAL_NAMES` (weights are 1 if absent); None if this learner has no batch.
            total: the number of samples of all learners together, by default of the batch.

        Returns:
            Absolute temporal differences, float32 ``[B]``, on the trainer's device, so that a GPU
            need not be waited for. A difference that is not finite is 0 in it, and its update is
            skipped.
        """
        samples = 0 if batch is None else self._samples_of(batch)
        tensors = None if batch is None else self.tensors_of(batch)
        return self._take_update(
            tensors, samples=samples, total=samples if total is None else total
        )

    def tensors_of(self, batch: Mapping[str, npt.NDArray[Any] | Tensor]) -> dict[str, Tensor]:
        """Returns what an update takes of ``batch``, as tensors on the trainer's device.

        They are for the calling thread's stream. On a CPU they share the batch's memory, and any
        thread may call this.
        """
        if self._runs_behind:
            self._ledger.switch(Part.H2D)

        columns = {name: batch[name] for name in self._columns if name in batch}
        tensors: dict[str, Tensor] = self._uploader.send(columns).tensors_on_current_stream()
        if "weights" not in tensors:
            tensors["weights"] = tensors["reward"].new_ones(tensors["reward"].shape[-1:])
        return tensors

    def _take_update(
        self, tensors: Mapping[str, Tensor] | None, *, samples: int, total: float
    ) -> Tensor:
        """Take one optimizer step on what `tensors_of` returned.

        Args:
            tensors: None if this learner has no batch.
            samples: the number of samples of the batch.
            total: the same of all learners' batches.

        Returns:
            Absolute temporal differences, as `update`.
        """
        self._ledger.switch(Part.OPTIMIZE if tensors is None else Part.FORWARD)
        previous_statistics = self._observe(tensors)
        number = self.progress.learner_steps + 1
        result = self._update.take(tensors, total, number, self.progress.trained_steps)
        check_result(result, tensors)

        # A step whose gradient is not finite was skipped: its observations do not count.
        self._restore_shared(previous_statistics, result.norm.isfinite())
        self.progress.count_updates(1)
        self.device_statistics.add(result.sums)
        self.device_statistics.count(samples)
        self.device_statistics.on_update(result.norm)
        errors = result.errors.nan_to_num_(0.0, 0.0)
        self.queue.on_batch_queued()
        return errors

    def _observe(self, batch: Mapping[str, Tensor] | None) -> list[Tensor]:
        """Add the observations of all learners' drawn batches to the statistics that observations
        are normalised by.

        They follow what is trained on, not what is played: a row counts as often as it is drawn,
        and with priorities those count most that are drawn most. What pads sequences does not
        count.

        Returns:
            Copies of the statistics before that.
        """
        previous_statistics = self._copy_shared()
        if self._network is None or not previous_statistics:
            return previous_statistics

        if batch is None:
            obs = self._ignored_obs
            alive = torch.zeros(1, dtype=torch.bool, device=self.device)
        else:
            obs = batch["obs"]
            shape = batch["reward"].shape
            if len(shape) == 2:  # sequences
                alive = batch["mask"].bool()
            else:
                alive = torch.ones(shape, dtype=torch.bool, device=self.device)

        most = self._network.normalizer.most_rows if self._network.normalizer else None
        if most is not None:  # rows are drawn at random, so the first ones do as well as any
            first = slice(max(1, most // alive[0].numel()))
            obs = obs[first]
            alive = alive[first]
        self._network.observe(obs, alive, self.sync.all_reduce)
        return previous_statistics

    def on_regroup(self) -> None:
        super().on_regroup()
        self._update.loaded()  # `DeviceQueue.leave_group` may have restored its state

    def tensors(self) -> list[Tensor]:
        """Returns target networks and whatever else the algorithm keeps."""
        return list(self._update.state().values())

    def published_tensors(self) -> list[Tensor]:
        return self._update.published

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {
            name: tensor.detach().cpu().numpy() for name, tensor in self._update.state().items()
        }
        return arrays | super().state_dict()

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a `state_dict`. Raises ValueError for one with other names."""
        present = self.state_dict()
        if present.keys() != state.keys():
            raise ValueError(f"state of {sorted(state)}, but this run needs {sorted(present)}")

        with torch.no_grad():
            for name, tensor in self._update.state().items():
                tensor.copy_(torch.from_numpy(np.array(state[name])))
        self._update.loaded()
        super().load_state_dict(state)


def check_result(result: object, batch: Mapping[str, Tensor] | None) -> None:
    """Check what an algorithm's `ReplayUpdate.take` has returned for a batch.

    Raises:
        UserError: it is not an `UpdateResult`, or its tensors have other shapes or gradients.
    """
    if not isinstance(result, UpdateResult):
        raise UserError(
            f"Update.take returned {type(result).__name__}; return an UpdateResult(errors, sums, "
            "norm) of penstock.algos.replay_update, also if the batch is None"
        )

    count = 0 if batch is None else batch["reward"].shape[-1]
    for name, value, shape, meaning in (
        ("errors", result.errors, [count], "the absolute temporal difference of each of the batch"),
        ("norm", result.norm, [], "the gradient's norm that optimizer.step returned"),
    ):
        if not isinstance(value, Tensor) or list(value.shape) != shape:
            raise UserError(
                f"Update.take returned {name} of {kind_of(value)} for a batch of {count}; return a "
                f"tensor of shape {shape}, {meaning}"
            )

    if result.errors.requires_grad or not result.errors.is_floating_point():
        raise UserError(
            f"Update.take returned errors of {result.errors.dtype} "
            f"{'with' if result.errors.requires_grad else 'without'} a gradient; return floats "
            "without one: errors.abs().detach()"
        )


class SyncedOptimizer:
    """A `SharedOptimizer` that takes its steps through the trainer's connection with the others."""

    def __init__(self, flat: FlatOptimizer, trainer: OffPolicyTrainer) -> None:
        self._flat = flat
        self._trainer = trainer

    @property
    def values(self) -> Tensor:
        return self._flat.values

    def zero_grad(self) -> None:
        self._flat.zero_grad()

    def prepare_backward(self, total: float) -> None:
        self._trainer.sync.prepare_backward(self._flat, total)
        self._trainer.step_hooks.before_backward()

    def step(self, total: float, env_steps: int) -> Tensor:
        return self._trainer.sync.step(self._flat, total, env_steps)
