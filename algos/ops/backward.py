"""The backward pass of a loss that may not be finite.

Without `retain_graph` torch frees each activation as soon as it is used. To free one that a Python
object stood for takes the interpreter lock, so that on a CPU the pass would wait, again and again,
for the thread that prepares the next batch. Delete the loss after the pass: that frees them all.
A graph of `torch.compile` reuses its memory in the pass, and cannot be retained.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from penstock.device.choice import runs_behind


def backward(loss: Tensor, *norms: Tensor) -> None:
    """Add the gradients of ``loss`` to the parameters.

    All gradients are NaN if the loss, or one of ``norms``, is not finite, so that the optimizer
    skips the step. All arguments are ``[]``.
    """
    # On a CPU, reading the numbers costs less than computing with them.
    if not runs_behind(loss):
        is_finite = all(math.isfinite(value.item()) for value in (loss, *norms))
        gradient = None if is_finite else torch.full_like(loss, torch.nan)
        may_be_compiled = "torch._dynamo" in sys.modules
        loss.backward(gradient, retain_graph=not may_be_compiled)
        return

    # On a GPU nothing may wait for the numbers: the factor is 1, or NaN.
    factor = loss.detach() * 0.0 + 1.0
    for norm in norms:
        factor = factor + norm * 0.0
    loss.backward(factor)
