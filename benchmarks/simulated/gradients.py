"""Gradients to reduce, of the sizes and the look of a Nature CNN's, and passes that make them.

Values of a layer are Student's t with 3 degrees of freedom: most are small, a few far out. Every
layer's weight has the norm 1, so that one among many is small, and biases are BIAS times as large
as the weights beside them. A part of each value is the same on all ranks and at all steps (what
there is to learn), the rest is noise of one rank and step: SIGNAL is the share of the first in the
standard deviation of a rank's gradient.

A draw takes long, so one is made at the start and each step takes it rolled, within each layer and
by a random distance: no value has its neighbour of another step or rank.

`Passes` are forward and backward passes that take time but no processor: every layer sleeps. The
backward pass is one of autograd, so that gradients arrive parameter by parameter, last layer first,
exactly as from a network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.interfaces import Codec, Collective, GradientPart
from penstock.learner.codecs.reducer import Reducer
from penstock.models.layout import Entry
from penstock.profiling.ledger import TimeLedger

FREEDOM = 3
SIGNAL = 0.3
BIAS = 4.0


class Draws:
    """Gradients of one rank among ``world``: call it with a step, from 0."""

    def __init__(self, listed: list[Entry], rank: int, world: int) -> None:
        edges = [0, *accumulate(math.prod(shape) for _, shape in listed)]
        self._layers = list(pairwise(edges))
        self._weight_sizes = [  # of the weight in each layer; a bias follows its weight
            math.prod(listed[i - (len(shape) == 1)][1]) for i, (_, shape) in enumerate(listed)
        ]
        self._rank, self._world = rank, world
        self._signal = self._draw(seed=0) * SIGNAL
        self._noise = self._draw(seed=1 + rank) * math.sqrt(1 - SIGNAL**2)

    def __call__(self, step: int, out: Tensor) -> Tensor:
        """Fill ``out`` (float32 ``[size]``) with this rank's share of the step's mean gradient."""
        generator = torch.Generator().manual_seed(step * self._world + self._rank)
        for start, stop in self._layers:
            by = int(torch.randint(stop - start, (), generator=generator))
            out[start : start + by] = self._noise[stop - by : stop]
            out[start + by : stop] = self._noise[start : stop - by]
        return out.add_(self._signal).div_(self._world)

    def _draw(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        size = self._layers[-1][1]
        chi2 = sum(torch.randn(size, generator=generator) ** 2 for _ in range(FREEDOM))
        assert isinstance(chi2, Tensor)
        values = torch.randn(size, generator=generator) / (chi2 / FREEDOM).sqrt()
        values /= math.sqrt(FREEDOM / (FREEDOM - 2))  # now of deviation 1
        for (start, stop), weights in zip(self._layers, self._weight_sizes, strict=True):
            values[start:stop] *= (1.0 if weights == stop - start else BIAS) / math.sqrt(weights)
        return values


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
    """Hands ``x`` on; its backward sleeps and gives ``parameter`` its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        return above[0], ctx.gradient, None, None
