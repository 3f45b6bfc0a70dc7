"""The backward pass of a loss that may not be finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.device.choice import runs_behind


def backward(loss: Tensor, *norms: Tensor) -> None:
    """Add the gradients of ``loss`` (``[]``): all are NaN where it, or one of ``norms`` (``[]``),
    is not finite."""
    if not runs_behind(loss):  # asking costs less than computing with it
        sound = all(math.isfinite(value.item()) for value in (loss, *norms))
        loss.backward(None if sound else torch.full_like(loss, torch.nan))
        return
    factor = loss.detach() * 0.0 + 1.0  # 1, or NaN
    for norm in norms:
        factor = factor + norm * 0.0
    loss.backward(factor)
