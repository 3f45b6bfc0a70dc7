"""The trunks of networks in torch: towers of layers, and the Nature CNN.

A network computes in two stages, so that inference can prepare its weights once and reuse them:

    weights()              parameters as the trunk uses them: cast, observation scale folded in
    features(obs, weights) float32 [B, width] of each tower; a CNN has one

Parameters are float32 and contiguous, so they can be views of one flat vector. ``dtype`` is the
precision of the trunk's products; heads stay float32, since log-probabilities need it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.configs.value_types import MemoryFormat
from penstock.device.choice import runs_behind
from penstock.models.frame_order import (
    divides,
    in_order,
    kernel_over_depth,
    space_to_depth,
)
from penstock.models.layout import CONVS, Activation, flat_features
from penstock.models.normalizer import FrameNormalizer
from penstock.models.torch_heads import PolicyNetwork, orthogonal


class Trunk(PolicyNetwork):
    """A network up to its heads, and the part of it that acts.

    Args:
        obs_scale: factor on the observations, which is folded into the first weight.
        dtype: precision of the trunk's products.
    """

    def __init__(self, obs_scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.obs_scale = obs_scale
        self.dtype = dtype

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Returns the trunk's weights and biases as `features` uses them."""

    @abstractmethod
    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns the features of each tower, float32 ``[B, width]``.

        ``obs`` ``[..., *shape]`` are of any dtype. The leading axes make up B. They may be strided:
        casting is the only copy.
        """

    @abstractmethod
    def acting_weights(self) -> list[Tensor]:
        """Returns what `acting_outputs` needs of the parameters, ready to use."""

    @abstractmethod
    def acting_outputs(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        """Returns what actions are decided by, float32 ``[B, outputs]``."""

    def _prepared(self, first: Tensor, *others: Tensor) -> list[Tensor]:
        scaled = first if self.obs_scale == 1 else first * self.obs_scale
        return [tensor.to(self.dtype) for tensor in (scaled, *others)]


class MlpTrunk(Trunk):
    """Networks of the same widths side by side, the towers.

    On a CPU in float32 they are computed one after the other, else by batched products.

    Args:
        towers: number of towers.
        widths: of the inputs and of each layer.
        activation: after each layer.
        obs_scale: factor on the observations.
        dtype: precision of the products.
    """

    def __init__(
        self,
        towers: int,
        widths: tuple[int, ...],
        activation: Activation,
        obs_scale: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(obs_scale, dtype)
        self._inputs = widths[0]
        self._activation = activation
        self._activate = activate(activation)
        self.hidden = nn.ModuleList(Towers(towers, *fans) for fans in pairwise(widths))

    def weights(self) -> list[Tensor]:
        # Not `parameters`, which searches all modules at each call.
        listed: list[Tensor] = []
        for layer in self.hidden:
            assert isinstance(layer, Towers)
            listed += (layer.weight, layer.bias)
        return self._prepared(*listed)

    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        rows = self._rows(obs)
        if self.dtype == torch.bfloat16:
            hidden = self._activate(linear_of_all(rows, *weights[:2]))
            return climb(hidden, weights[2:], self._activate).float().unbind(0)
        if self._in_turn(rows):
            return towers_in_turn(rows, weights, self._activation)
        return climb(rows.expand(len(weights[0]), -1, -1), weights, self._activate).unbind(0)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, self._inputs)

    def _rows(self, obs: Tensor) -> Tensor:
        """Returns the inputs of the first layer, ``[B, in]``."""
        if self.normalizer is not None:
            obs = self.normalizer(self.numbers(obs))
        return obs.to(self.dtype).reshape(-1, self._inputs)

    def _in_turn(self, rows: Tensor) -> bool:
        """Whether towers are computed one after the other."""
        is_host = rows.device.type == "cpu" and self.dtype == torch.float32
        # Derivatives by the rows are left to torch.
        return is_host and not rows.requires_grad and not torch.compiler.is_compiling()


class Towers(nn.Module):
    """One hidden layer of every tower: ``weight [towers, in, out]``, ``bias [towers, out]``."""

    def __init__(self, towers: int, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(towers, fan_in, fan_out))
        self.bias = nn.Parameter(torch.zeros(towers, fan_out))
        with torch.no_grad():
            for tower in self.weight:
                nn.init.orthogonal_(tower, math.sqrt(2))


class CnnTrunk(Trunk):
    """Three convolutions and a linear layer (Mnih et al. 2015).

    Args:
        frames: channels, height and width of an observation.
        width: of the linear layer.
        obs_scale: factor on the observations.
        dtype: precision of the products.
        memory_format: order of the frames in memory.
    """

    def __init__(
        self,
        frames: tuple[int, int, int],
        width: int,
        obs_scale: float,
        dtype: torch.dtype,
        memory_format: MemoryFormat,
    ) -> None:
        super().__init__(obs_scale, dtype)
        self._frames, self._memory_format = frames, memory_format
        self._gains_by_depth = dtype == torch.bfloat16 and memory_format == "channels_last"
        channels = (frames[0], *(filters for filters, _, _ in CONVS))
        self.convs = nn.ModuleList(
            orthogonal(nn.Conv2d(before, filters, kernel, stride), math.sqrt(2))
            for before, (filters, kernel, stride) in zip(channels[:-1], CONVS, strict=True)
        )
        self.linear = orthogonal(nn.Linear(flat_features(*frames[1:]), width), math.sqrt(2))

    def weights(self) -> list[Tensor]:
        first, *others = (*self.convs.parameters(), *self.linear.parameters())
        kernel = kernel_over_depth(first) if self._is_over_depth(first) else first
        return self._prepared(kernel, *others)

    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden = obs.reshape(-1, *self._frames)
        strides = [stride for _, _, stride in CONVS]
        if isinstance(self.normalizer, FrameNormalizer):
            hidden = self.normalizer.frames(hidden, self.dtype, 0, self._memory_format)
        elif self._is_over_depth(weights[0]):
            hidden, strides[0] = space_to_depth(hidden, self.dtype), 1
        else:
            hidden = in_order(hidden, self.dtype, self._memory_format)
        for i, stride in enumerate(strides):
            hidden = F.conv2d(hidden, weights[2 * i], weights[2 * i + 1], stride).relu_()
        return (F.linear(hidden.flatten(1), weights[6], weights[7]).relu_().float(),)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, math.prod(self._frames))

    def _is_over_depth(self, weight: Tensor) -> bool:
        """Returns whether the first convolution is computed over blocks of pixels."""
        if not self._gains_by_depth or isinstance(self.normalizer, FrameNormalizer):
            return False
        return divides(*self._frames[1:]) and not runs_behind(weight)


def climb(hidden: Tensor, weights: list[Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the features ``[towers, B, width]`` after the layers of all towers.

    ``hidden`` ``[towers, B, in]`` are the inputs; ``weights`` are weight and bias of each layer in
    turn, ``[towers, in, out]`` and ``[towers, out]``.
    """
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        product = torch.baddbmm(bias[:, None], hidden.to(weight.dtype), weight)
        hidden = activation(product)
    return hidden


def linear_of_all(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the first layer of all towers, ``[towers, B, out]``, of the rows that they share.

    It is one product with the towers' weights side by side, which in bfloat16 is faster than a
    batched one. In float32 it is not, and slower where layers are small.

    Args:
        rows: ``[B, in]``.
        weight: ``[towers, in, out]``.
        bias: ``[towers, out]``.
    """
    towers, inputs, outputs = weight.shape
    side_by_side = weight.transpose(0, 1).reshape(inputs, -1)
    product = torch.addmm(bias.flatten(), rows, side_by_side)
    return product.view(-1, towers, outputs).transpose(0, 1)


def towers_in_turn(
    rows: Tensor, weights: Sequence[Tensor], activation: Activation, heads: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute all towers of the same rows on a CPU; differentiable once, and not by the rows.

    The numbers are those of batched products and of torch's derivatives of them, in less time: the
    activations of one tower stay in the cache, biases are not copied for all rows, gradients of
    towers are not copied together, and a pass of a small network is a dozen calls instead of a
    hundred.

    Args:
        rows: float32 ``[B, in]``, on a CPU.
        weights: of each layer the weight ``[towers, in, out]`` and the bias ``[towers, out]``.
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
    @once_differentiable
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
    """Returns the outputs ``[outputs, B]`` of a head for features ``[B, width]``."""
    if len(weight) == 1:
        return torch.addmv(bias, features, weight[0])[None]
    return torch.addmm(bias[:, None], weight, features.t())


class _Tanh(torch.autograd.Function):
    """numpy's tanh, which takes a seventh of the time of torch's on a CPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        out = torch.empty_like(values)
        np.tanh(values.numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, out)  # type: ignore[no-any-return]


def tanh(values: Tensor) -> Tensor:
    """Returns the hyperbolic tangent in float32, differentiable once, of values of any dtype."""
    values = values.float()
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.tanh(values)
    return _Tanh.apply(values)  # type: ignore[no-untyped-call, no-any-return]


def activate(name: Activation) -> Callable[[Tensor], Tensor]:
    """Returns the function of `model.activation`."""
    return tanh if name == "tanh" else torch.relu
