"""The base of the trainers: a device, optimizers, progress, statistics, and their state.

`Trainer` trains on unrolls, `OffPolicyTrainer` on batches from replay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.algos.samples import scales, slot_spec
from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.schedules import over_run, schedules
from penstock.configs.schema import Config
from penstock.core.interfaces import B_contra, HostValues, StepHooks, StepResult, Update
from penstock.device.choice import device_of, pick_device
from penstock.device.transfers import DeviceUploader
from penstock.envs import EnvInfo
from penstock.learner.device_queue import DeviceQueue
from penstock.learner.device_statistics import DeviceStatistics
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.passes import form_of, trunk_dtype
from penstock.learner.progress import Progress
from penstock.learner.sync.gradient_sync import GradientSync, SingleLearner
from penstock.models.fitting import AnyShape
from penstock.models.torch_heads import PolicyNetwork
from penstock.models.torch_setup import set_up_torch
from penstock.profiling.ledger import TimeLedger

# Prefix of the names of an optimizer's state in a checkpoint.
OPTIMIZER = "optimizer/"
# The default of `Update.step`: nothing is called within a step.
NO_HOOKS = StepHooks()


class BaseTrainer(Update[B_contra], ABC):
    """Networks, optimizers and counters of one learner, without any transport; not thread-safe."""

    device_statistics: DeviceStatistics
    """Sums and norms of the updates."""

    def __init__(
        self, config: Config, info: EnvInfo, ledger: TimeLedger | None, shape: AnyShape
    ) -> None:
        """Set up torch for the calling thread, which is the one that trains.

        Args:
            config: of the run.
            info: the properties of the run's environments.
            ledger: time ledger of the training thread.
            shape: the network that actors get.
        """
        set_up_torch(config.learner.first_threads)
        torch.manual_seed(config.run.seed)
        self.config = config
        self.info = info

        # The device, and how passes are computed on it.
        self.device = pick_device(config.learner.device)
        device = device_of(self.device)
        device.enter_thread()
        self._runs_behind = device.runs_behind
        """Whether the device computes while the host goes on, as a GPU does."""
        self._uploader = DeviceUploader(device)
        self.form = form_of(config, self.device, shape)
        """How passes are computed on a CPU; None on a GPU."""
        self._dtype = trunk_dtype(config.learner.precision, self.device, shape)

        # What actors send and get.
        self.spec = slot_spec(config, info)
        self.layout = shape.layout
        self.scales = scales(config, info)

        self._optimizers: dict[str, FlatOptimizer] = {}
        self.progress = Progress(config.stop, info.frames_per_step, config.env.record)
        self._ledger = ledger or TimeLedger()
        self.queue = DeviceQueue(self.device, self._ledger)
        self.sync: GradientSync = SingleLearner()
        """The connection with the other learners."""

    @abstractmethod
    def published_tensors(self) -> list[Tensor]:
        """Returns the tensors that actors get, in the layout's order: parameters, then buffers."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Returns what else updates change on the device.

        These tensors are neither `published_tensors` nor in optimizers.
        """

    @abstractmethod
    def shared_statistics(self) -> dict[str, Tensor]:
        """Returns the statistics over all learners' samples by name, which are equal on each."""

    def optimizers(self) -> dict[str, FlatOptimizer]:
        """Returns the optimizers, by the name of the parameters that each updates."""
        return self._optimizers

    def unfinished_update(self) -> dict[str, Any]:
        """Returns the state of an update that needs more batches (`learner.accumulate`).

        JSON values and arrays; empty if each batch is an update.
        """
        return {}

    def load_unfinished(self, state: dict[str, Any]) -> None:
        """Continue from the state that `unfinished_update` returned."""

    def on_regroup(self) -> None:
        """Begin anew with other learners; an unfinished update is dropped."""
        self.device_statistics.on_regroup()

    def statistics(self, *, wait: bool = False) -> dict[str, float]:
        """Returns means over the updates since the last call, without skipped ones.

        On a GPU they are over the updates of the interval before, unless ``wait`` is set.
        ``learning_rate`` is that of the last update. ``epsilon`` is the present rate of
        exploration, if it is a schedule.
        """
        means = self.device_statistics.take(wait=wait) | self._batch_statistics()
        rates = [each.lr for each in self._optimizers.values() if each.lr is not None]
        if means and rates:
            means["learning_rate"] = rates[0]  # the same for all optimizers
        algo = over_run(self.config.algo, self.config.stop.env_steps)
        epsilon = schedules(algo).get("epsilon")
        if means and epsilon is not None:
            means["epsilon"] = epsilon.at(self.progress.trained_steps)
        return means

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays that a resumed run needs besides `published_tensors`, by name."""
        return {
            self._prefix(name) + k: v
            for name, optimizer in self._optimizers.items()
            for k, v in optimizer.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a `state_dict`. Raises ValueError for one of another kind."""
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(under(self._prefix(name), state))

    def _prefix(self, optimizer: str) -> str:
        """Returns the prefix of the names of an optimizer's state in `state_dict`."""
        return f"{OPTIMIZER}{optimizer}/"

    def _batch_statistics(self) -> dict[str, float]:
        """Returns means over the batches since the last call, beside those over updates."""
        return {}

    def _add_optimizer(
        self, name: str, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> FlatOptimizer:
        """Make the optimizer of some parameters, with the learning rate's schedule over the run."""
        learner = over_run(self.config.learner, self.config.stop.env_steps)
        self._optimizers[name] = FlatOptimizer(parameters, learner)
        return self._optimizers[name]

    def _result(self, steps: int, errors: HostValues | None = None) -> StepResult:
        """Returns the result of a step that has trained on ``steps`` samples."""
        every = 1 if lent_by_batch(self.config) else self.config.learner.publish_every
        return StepResult(steps, self.progress.publish_due(every), errors)

    def _copy_shared(self) -> list[Tensor]:
        """Returns copies of `shared_statistics`, for `_restore_shared`."""
        return [tensor.clone() for tensor in self.shared_statistics().values()]

    def _restore_shared(self, copies: Sequence[Tensor], is_taken: Tensor) -> None:
        """Undo the changes of `shared_statistics` unless an update was taken.

        ``is_taken``, bool ``[]``, is on the device, so that the host need not wait for it.
        """
        for tensor, copy in zip(self.shared_statistics().values(), copies, strict=True):
            tensor.copy_(torch.where(is_taken, tensor, copy))


def normalizer_statistics(net: PolicyNetwork | None) -> dict[str, Tensor]:
    """Returns the statistics by which a network normalises observations, by name; empty without
    them."""
    if net is None or net.normalizer is None:
        return {}
    return dict(net.normalizer.named_buffers(prefix="normalizer"))


def under(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays whose names begin with a prefix, by their names without it."""
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
