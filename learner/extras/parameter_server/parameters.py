"""The vector that all workers train, and how their pushes change it.

`Summed`, for the paces ssp, tap and backup, owns the run's only optimizer: gradients add up, and
one step is taken by their mean. `Shared`, for asp, owns none: workers step by themselves, and their
changes are added. Neither knows of workers, clocks or messages.

With several shards each holds a range of the parameters, whose gradient's norm is not that of the
whole gradient. So workers clip their gradients before they push them, and the optimizer here does
not clip.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.configs.sections import LearnerConfig
from penstock.core.params import Arrays
from penstock.learner.extras.parameter_server.protocol import (
    Floats,
    Indices,
    Packed,
    ServerMessage,
    Tally,
    dense,
    pack_dense,
    pack_sparse,
    sparse,
)
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.transport.wire import WireError

MAX_SIZE = 1 << 28  # largest number of parameters


class Change(NamedTuple):
    """The content of a push."""

    indices: Indices | None
    """The parameters that it changes, uint32 ``[n]``; None: all of them."""
    values: Floats
    """A gradient ``[size]``, or changes of these parameters ``[n]``; float32."""


class PackedVersion(NamedTuple):
    """The parameters of a version, packed once for all workers."""

    version: int
    packed: Packed


class ServerState(NamedTuple):
    """The state of a run that its parameter server holds."""

    version: int
    """Updates of the parameters."""
    samples: int
    """Samples whose gradients were applied."""
    tally: Tally
    """The counts of all workers together, as `Progress.growth`."""
    values: Floats
    """The parameters, float32 ``[size]``."""
    arrays: Arrays
    """The optimizer's arrays, as of `FlatOptimizer.state_dict`; none under asp."""


class Parameters(ABC):
    """Float32 ``values`` of ``size``, changed by pushes."""

    values: Floats

    def __init__(self, size: int, *, bf16: bool = False) -> None:
        """``bf16``: workers get the values rounded to bfloat16."""
        self.size = size
        self.samples = 0
        """Samples whose gradients were applied so far."""
        self._bf16 = bf16
        self._newest: PackedVersion | None = None

    @abstractmethod
    def read(self, message: ServerMessage) -> Change:
        """Read the content of a push. Raises WireError where it cannot be used."""

    @abstractmethod
    def add(self, change: Change, samples: int, version: int) -> None:
        """Add a change over ``samples``; its update will be ``version``."""

    @abstractmethod
    def update(self, *, alone: bool, steps: int) -> bool:
        """Apply the added changes.

        Args:
            alone: whether each push is a separate update, weighted by its share of samples.
            steps: agent steps trained on so far, which determine the learning rate.

        Returns:
            Whether there were changes.
        """

    @abstractmethod
    def arrays(self) -> Arrays:
        """Returns the optimizer's arrays."""

    @abstractmethod
    def load(self, state: ServerState) -> None:
        """Continue from a state."""

    def answer(self, worker_version: int, version: int) -> Packed:
        """Returns the values for a worker, packed.

        Args:
            worker_version: version of the worker's values; -1 for none.
            version: the current one.
        """
        if self._newest is None or self._newest.version != version:
            self._newest = PackedVersion(version, pack_dense(self.values, bf16=self._bf16))
        return self._newest.packed


class Summed(Parameters):
    """One optimizer for the gradients of all workers."""

    def __init__(self, size: int, cfg: LearnerConfig) -> None:
        super().__init__(size, bf16=cfg.reduce.codec == "bf16")
        self._optimizer = _optimizer(size, cfg)
        self.values = self._optimizer.values.numpy()
        self._grads = self._optimizer.grads.numpy()
        # Since the last update.
        self._new_samples = 0
        self._new_pushes = 0
        # Since the server began. Their ratio is the mean number of samples in a push.
        self._all_samples = 0
        self._all_pushes = 0

    def read(self, message: ServerMessage) -> Change:
        gradient = dense(message, self.size)
        _require_finite(gradient)
        return Change(None, gradient)

    def add(self, change: Change, samples: int, version: int) -> None:
        self._grads += change.values
        self._new_samples += samples
        self._new_pushes += 1
        self._all_samples += samples
        self._all_pushes += 1

    def update(self, *, alone: bool, steps: int) -> bool:
        """Take the optimizer's step by the sum of the added gradients."""
        if not self._new_samples:
            return False

        # A separate update divides the sum by the mean number of samples in a push. So it has the
        # weight of its share of samples.
        divisor = self._all_samples / self._all_pushes if alone else self._new_samples
        self._optimizer.learners_in_step = self._new_pushes
        self._optimizer.step(divisor, steps)
        self._optimizer.zero_grad()

        self.samples += self._new_samples
        self._new_samples = 0
        self._new_pushes = 0
        return True

    def arrays(self) -> Arrays:
        return self._optimizer.state_dict()

    def load(self, state: ServerState) -> None:
        self._optimizer.load_state_dict(state.arrays)
        self._optimizer.zero_grad()
        self._new_samples = 0
        self._new_pushes = 0
        self.values[:] = state.values
        self.samples = state.samples


class Shared(Parameters):
    """The sum of all changes; a worker gets the values changed since its last pull."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.values = np.zeros(size, np.float32)
        self._changed_at = np.zeros(size, np.int64)  # the version of each value's last change
        self._new_samples = 0  # since the last update

    def read(self, message: ServerMessage) -> Change:
        indices, changes = sparse(message, self.size)
        _require_finite(changes)
        return Change(indices, changes)

    def add(self, change: Change, samples: int, version: int) -> None:
        self.values[change.indices] += change.values
        self._changed_at[change.indices] = version
        self._new_samples += samples

    def update(self, *, alone: bool, steps: int) -> bool:
        # `add` has changed the values already.
        new_samples, self._new_samples = self._new_samples, 0
        self.samples += new_samples
        return new_samples > 0

    def arrays(self) -> Arrays:
        return {}

    def load(self, state: ServerState) -> None:
        self.values[:] = state.values
        self._changed_at[:] = state.version
        self._new_samples = 0
        self.samples = state.samples

    def answer(self, worker_version: int, version: int) -> Packed:
        indices = np.flatnonzero(self._changed_at > worker_version)
        # An entry costs an index beside its value.
        if worker_version < 0 or 2 * indices.size > self.size:
            return super().answer(worker_version, version)
        return pack_sparse(indices.astype(np.uint32), self.values[indices])


def part_of(size: int, shard: int, shards: int) -> slice:
    """Returns the range of a vector of ``size`` parameters that a shard of the server holds.

    ``shard`` is its number among ``shards``.
    """
    return slice(size * shard // shards, size * (shard + 1) // shards)


def make_parameters(size: int, cfg: LearnerConfig) -> Parameters:
    """Make the parameters of a server for `learner.pace`, ``size`` numbers."""
    return Shared(size) if cfg.pace == "asp" else Summed(size, cfg)


def template(size: int, cfg: LearnerConfig) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the optimizer's arrays for ``size`` parameters.

    Allocates nothing of that size.
    """
    if cfg.pace == "asp":
        return {}
    arrays_of_one = _optimizer(1, cfg).state_dict()
    return {name: (size,) if array.ndim else () for name, array in arrays_of_one.items()}


def pack_state(values: Floats, arrays: Mapping[str, npt.NDArray[Any]]) -> Packed:
    """Pack a state's payload: parameters, then the arrays by name."""
    flat_arrays = [np.asarray(arrays[name], np.float32).ravel() for name in sorted(arrays)]
    return pack_dense(np.concatenate([values, *flat_arrays]))


def unpack_state(
    message: ServerMessage, size: int, shapes: Mapping[str, tuple[int, ...]]
) -> ServerState:
    """Read a state that `pack_state` has packed; its arrays are copies.

    Args:
        message: head and payload.
        size: number of parameters.
        shapes: names and shapes of the optimizer's arrays, as of `template`.

    Raises:
        WireError: if the payload has another size, or a number is not finite.
    """
    names = sorted(shapes)
    sizes = [int(np.prod(shapes[name])) for name in names]
    flat = dense(message, size + sum(sizes))
    _require_finite(flat)

    ends = np.cumsum([size, *sizes])
    values, *flat_arrays = np.split(np.array(flat, np.float32), ends[:-1])
    arrays = {
        name: flat_array.reshape(shapes[name])
        for name, flat_array in zip(names, flat_arrays, strict=True)
    }
    head = message.head
    return ServerState(head.version, head.samples, head.tally, values=values, arrays=arrays)


def _optimizer(size: int, cfg: LearnerConfig) -> FlatOptimizer:
    """Make the optimizer of ``size`` parameters, zeros; with several shards it does not clip."""
    if cfg.server_shards > 1:
        cfg = cfg.model_copy(update={"grad_clip": None})
    return FlatOptimizer([("all", nn.Parameter(torch.zeros(size)))], cfg)


def _require_finite(values: Floats) -> None:
    """Raise WireError where a number is not finite, or so large that its square is not."""
    with np.errstate(all="ignore"):  # a dot product is one pass, without a mask of the whole size
        if not np.isfinite(np.dot(values, values)):
            raise WireError("not_finite")
