"""The towers of an MLP on a CPU, one after the other, with their heads and derivatives.

The same numbers as batched products and torch's derivatives of them give, in less time: the
activations of one tower stay in the cache, biases are not copied for all rows, gradients of towers
are not copied together, and a pass of a small network is a dozen calls instead of a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.models.layout import Activation


def towers_in_turn(
    rows: Tensor, weights: Sequence[Tensor], activation: Activation, heads: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute all towers of the same rows; differentiable once, and not by the rows.

    Args:
        rows: float32 ``[B, in]``, on a CPU.
        weights: of each layer ``[towers, in, out]``, then its biases ``[towers, out]``.
        activation: after each of these layers.
        heads: of each tower the weight ``[outputs, width]`` and bias ``[outputs]`` of one more,
            linear layer.

    Returns:
        Of each tower its outputs ``[outputs, B]``, or without heads its features ``[B, width]``.
    """
    depth = len(weights) // 2
    return _TowersInTurn.apply(activation, depth, rows, *weights, *heads)  # type: ignore[no-untyped-call, no-any-return]


class _TowersInTurn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Activation, depth: int, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, heads = parameters[: 2 * depth], parameters[2 * depth :]
        hidden, outputs = [], []
        for tower in range(len(weights[0])):
            below = rows
            for layer in range(depth):
                weight, bias = weights[2 * layer : 2 * layer + 2]
                values = torch.addmm(bias[tower], below, weight[tower])
                if activation == "tanh":  # numpy's takes half of the time of torch's
                    array = values.numpy()
                    np.tanh(array, out=array)
                else:
                    values.relu_()
                hidden.append(values)
                below = values
            if heads:
                below = _head(below, heads[2 * tower], heads[2 * tower + 1])
            outputs.append(below)
        ctx.activation, ctx.depth = activation, depth
        ctx.save_for_backward(rows, *parameters, *hidden)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        depth, towers = ctx.depth, len(gradients)
        rows, *saved = ctx.saved_tensors
        first = len(saved) - depth * towers
        hidden, heads = saved[first:], saved[2 * depth : first]
        weights = saved[: 2 * depth]
        found = [torch.empty_like(parameter) for parameter in saved[:first]]
        slopes = [torch.empty_like(values) for values in hidden[:depth]]  # of one tower at a time
        for tower in reversed(range(towers)):  # the last one may still be in the cache
            gradient = gradients[tower]
            activations = hidden[tower * depth : (tower + 1) * depth]
            if heads:
                place = 2 * depth + 2 * tower
                torch.mm(gradient, activations[-1], out=found[place])
                torch.sum(gradient, 1, out=found[place + 1])
                gradient = torch.mm(gradient.t(), heads[2 * tower], out=slopes[-1])
            for layer in reversed(range(depth)):
                slope = slopes[layer]
                if ctx.activation == "tanh":
                    torch.ops.aten.tanh_backward.grad_input(
                        gradient, activations[layer], grad_input=slope
                    )
                else:
                    torch.ops.aten.threshold_backward.grad_input(
                        gradient, activations[layer], 0, grad_input=slope
                    )
                below = activations[layer - 1] if layer else rows
                torch.mm(below.t(), slope, out=found[2 * layer][tower])
                torch.sum(slope, 0, out=found[2 * layer + 1][tower])
                if layer:
                    weight = weights[2 * layer][tower]
                    gradient = torch.mm(slope, weight.t(), out=slopes[layer - 1])
        return None, None, None, *found


def _head(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Outputs ``[outputs, B]`` of features ``[B, width]``."""
    if len(weight) == 1:
        return torch.addmv(bias, features, weight[0])[None]
    return torch.addmm(bias[:, None], weight, features.t())
