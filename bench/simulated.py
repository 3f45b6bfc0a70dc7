"""Forward and backward passes that take time but no processor: every layer sleeps.

The backward pass is one of autograd, so that gradients arrive parameter by parameter, last layer
first, exactly as from a network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.interfaces import Codec, Collective, GradientPart
from penstock.learner.codecs.reducer import Reducer
from penstock.profiling.ledger import TimeLedger


class Passes:
    """Call it with a gradient, float32 ``[size]``: one step, at whose end ``grads`` is its sum."""

    def __init__(
        self,
        parts: Sequence[GradientPart],
        forward_s: float,
        backward_s: Sequence[float],
        codec: Codec,
        ring: Collective,
        thread: ThreadPoolExecutor,
        *,
        overlap: bool,
    ) -> None:
        """``backward_s`` is how long the gradient of each part takes."""
        size = parts[-1].stop
        self.grads = torch.zeros(size)
        self._parts, self._forward_s, self._backward_s = parts, forward_s, backward_s
        self._parameters = [nn.Parameter(torch.zeros(part.stop - part.start)) for part in parts]
        for part, parameter in zip(parts, self._parameters, strict=True):
            parameter.grad = self.grads[part.start : part.stop]
        self._reducer = Reducer(
            self.grads, self._parameters, codec, ring, thread, TimeLedger(), overlap=overlap
        )
        self._update = 10**9  # after every warm-up

    def __call__(self, gradient: Tensor) -> None:
        self._update += 1
        self.grads.zero_()
        time.sleep(self._forward_s)
        x = torch.zeros((), requires_grad=True)
        for part, parameter, seconds in zip(
            self._parts, self._parameters, self._backward_s, strict=True
        ):
            x = _Layer.apply(  # type: ignore[no-untyped-call]
                x, parameter, gradient[part.start : part.stop], seconds
            )
        self._reducer.prepare_backward(self._update, 1.0)
        x.backward()
        self._reducer.finish(self._update, 1.0)

    def close(self) -> None:
        self._reducer.close()


class _Layer(torch.autograd.Function):
    """Hands ``x`` on; its backward sleeps and gives ``parameter`` the gradient it was told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return above[0], ctx.gradient, None, None
