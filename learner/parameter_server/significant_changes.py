"""What a worker sends under asp: the changes it has made that are significant.

Gaia's approximate synchronous parallel (Hsieh et al. 2017, "Gaia: Geo-Distributed Machine Learning
Approaching LAN Speeds") lets each data centre update a copy of the parameters and tell the others
only of changes that are significant, relative to the value changed. Here a worker is a data centre,
and the parameter server adds up what they all tell:

    local copy = shared values, as last pulled + own changes that were not sent yet
    an own change adds up until |change| > significance / sqrt(t) * |value|, then it is sent whole

``t`` is the worker's clock, so that nothing stays unsent for ever, which Gaia's proof of
convergence needs. Its mirror clock, the bound on how far workers drift apart, is `clock.Bounded`;
its selective barrier is not needed, since one server orders all messages. Each worker has an
optimizer of its own, and moments of its own: the server only adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.learner.optimizers.flat_optimizer import FlatOptimizer


class LocalCopy:
    """The parameters of ``optimizer``, as the local copy of shared ones."""

    def __init__(self, optimizer: FlatOptimizer, significance: float) -> None:
        self._optimizer = optimizer
        self._significance = significance
        self._shared = optimizer.values.clone()
        self._unsent = torch.zeros_like(optimizer.values)

    @torch.no_grad()
    def step(self, samples: int, steps: int) -> Tensor:
        """Take the optimizer's step here; the gradient's norm."""
        values = self._optimizer.values
        before = values.clone()
        norm = self._optimizer.step(samples, steps)
        self._unsent += values - before
        return norm

    @torch.no_grad()
    def significant(self, clock: int) -> tuple[Tensor, Tensor]:
        """Indices (int64, growing) and changes to send at ``clock`` (from 1): no longer unsent."""
        threshold = self._significance / clock**0.5
        values = self._optimizer.values
        indices = (self._unsent.abs() > threshold * values.abs()).nonzero().flatten()
        changes = self._unsent[indices]
        self._unsent[indices] = 0.0
        return indices, changes

    @torch.no_grad()
    def pulled(self, indices: Tensor | None, values: Tensor) -> None:
        """Take in the shared values, all or those at some indices."""
        if indices is None:
            self._shared.copy_(values)
        else:
            device = self._shared.device
            self._shared[indices.to(device)] = values.to(device)
        torch.add(self._shared, self._unsent, out=self._optimizer.values)
