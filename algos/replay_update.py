"""One optimizer step on a batch from replay: what the update of an off-policy algorithm is.

An update owns the networks, those that lag behind as targets, and asks its context for optimizers.
Everything stays on the device: nothing here waits for a GPU. A learner that has no batch takes the
step with the others.
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
    """What an optimizer step found out; no gradients, on the device."""

    errors: Tensor
    """Absolute temporal differences, float32 ``[B]``: one of each transition, or sequence."""
    sums: Tensor
    """`ReplayUpdate.statistics`, summed over the samples of the batch."""
    norm: Tensor
    """Of the gradient before clipping, ``[]``; not finite where the step was not taken."""

    @classmethod
    def of_nothing(cls, statistics: tuple[str, ...], norm: Tensor) -> UpdateResult:
        """Of a step without a batch."""
        return cls(norm.new_empty(0), norm.new_zeros(len(statistics)), norm)


@dataclass(frozen=True)
class UpdateContext:
    """What a learner gives an update."""

    shape: HeadShape
    """The network that actors get, by `Algorithm.network`."""
    device: torch.device
    dtype: torch.dtype
    """Of forward and backward passes through convolutions."""
    micro_batch: int
    ledger: TimeLedger
    """Of the thread that trains."""
    optimizer: Callable[[str, Iterable[tuple[str, nn.Parameter]]], SharedOptimizer]
    """Makes the optimizer of named parameters, which it moves into one vector; its own name is that
    of the state in a checkpoint."""
    network: Callable[[], HeadNet]
    """Makes the network of `shape` on the device. With `model.normalize_observations` the learner
    brings the statistics of that one up to date with every batch, before `ReplayUpdate.take`; a
    network that lags behind as a target takes its `normalizer`."""


class ReplayUpdate(Protocol):
    """Networks and optimizers of one algorithm."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what `UpdateResult.sums` holds."""

    @property
    def published(self) -> list[Tensor]:
        """What actors get, in the layout's order."""

    def take(self, batch: Batch | None, total: float, number: int, env_steps: int) -> UpdateResult:
        """Optimizer step ``number`` (from 1) on the ``total`` samples of all learners' batches; the
        learning rate is that after ``env_steps``.

        Samples are transitions ``[B, ...]``, or the steps of sequences ``[length, B, ...]`` that
        ``mask`` names, without the burn-in. ``state`` ``[B, ...]`` is the recurrent state before a
        sequence, where actors record a column of that name.
        """

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs besides `published` and the optimizers; written to on resume."""

    def loaded(self) -> None:
        """What `state` gave was written to."""
