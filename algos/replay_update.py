"""The update of an off-policy algorithm: one optimizer step on a batch from replay.

An update owns the networks, also those that lag behind as targets, and asks its context for
optimizers. All results stay on the device: nothing here waits for a GPU. A learner that has no
batch takes the step together with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.core.interfaces import SharedOptimizer
from penstock.models.fitting import HeadShape
from penstock.models.torch_heads import HeadNet
from penstock.profiling.ledger import TimeLedger

Batch = Mapping[str, Tensor]


class UpdateResult(NamedTuple):
    """Result of an optimizer step: tensors on the device, without gradients."""

    errors: Tensor
    """Absolute temporal differences, float32 ``[B]``: one of each transition, or sequence."""
    sums: Tensor
    """`ReplayUpdate.statistics`, summed over the samples of the batch."""
    norm: Tensor
    """Norm of the gradient before clipping, ``[]``; not finite where the step was not taken."""

    @classmethod
    def of_nothing(cls, statistics: tuple[str, ...], norm: Tensor) -> UpdateResult:
        """Returns the result of a step without a batch: no errors, and sums of 0."""
        return cls(norm.new_empty(0), norm.new_zeros(len(statistics)), norm)


@dataclass(frozen=True)
class UpdateContext:
    """What a learner gives an update."""

    shape: HeadShape
    """Shape of the network that actors get, from `Algorithm.network`."""
    device: torch.device
    dtype: torch.dtype
    """Precision of forward and backward passes through convolutions."""
    micro_batch: int
    """Largest number of samples in one forward and backward pass."""
    ledger: TimeLedger
    """Time ledger of the thread that trains."""
    optimizer: Callable[[str, Iterable[tuple[str, nn.Parameter]]], SharedOptimizer]
    """(name, named parameters) -> their optimizer, which moves them into one vector. A checkpoint
    stores the optimizer's state under its name."""
    network: Callable[[], HeadNet]
    """Makes the network of `shape` on the device. With `model.normalize_observations` the learner
    brings the statistics of that one up to date with every batch, before `ReplayUpdate.take`; a
    network that lags behind as a target takes its `normalizer`."""


class ReplayUpdate(Protocol):
    """Networks and optimizers of one algorithm."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the entries of `UpdateResult.sums`."""

    @property
    def published(self) -> list[Tensor]:
        """Tensors of the policy that actors get, in the layout's order."""

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Take one optimizer step together with the other learners.

        Args:
            batch: transitions ``[B, ...]``, or sequences ``[length, B, ...]`` whose samples are the
                steps that ``mask`` names, without the burn-in, unless the algorithm counts them
                otherwise (`ReplayAlgorithm.samples_of`). ``state`` ``[B, ...]`` is the recurrent
                state before a sequence, where actors record a column of that name. None if this
                learner has no batch.
            total: samples in the batches of all learners.
            number: of the optimizer step, from 1.
            env_steps: agent steps so far, by which the learning rate is scheduled.
        """

    def state(self) -> dict[str, Tensor]:
        """Returns what a resumed run needs besides `published` and the optimizers.

        A resume writes into these tensors and then calls `loaded`.
        """

    def loaded(self) -> None:
        """Bring everything that depends on the tensors of `state` up to date after a resume."""
