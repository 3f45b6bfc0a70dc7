"""The bodies of networks in torch: towers of layers, and the Nature CNN.

A net computes in two stages, so that inference can prepare its weights once and reuse them:

    weights()              parameters as the trunk uses them: cast, observation scale folded in
    features(obs, weights) float32 [B, width] of each tower; a CNN has one

Parameters are float32 and contiguous, so they can be views of one flat vector. ``dtype`` is what
the trunk's products are computed in; heads stay float32, since log-probabilities need it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.frame_order import in_order
from penstock.models.layout import CONVS, Activation, flat_features
from penstock.models.normalizer import FrameNormalizer
from penstock.models.torch_heads import PolicyNetwork, orthogonal
from penstock.models.towers_in_turn import towers_in_turn


class Trunk(PolicyNetwork):
    """A network up to its heads, and what of it acts."""

    def __init__(self, obs_scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.obs_scale = obs_scale
        self.dtype = dtype

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The trunk's weights and biases as `features` uses them."""

    @abstractmethod
    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        """Float32 ``[B, width]`` of each tower, of observations ``[..., *shape]`` of any dtype.

        The leading axes make up B. They may be strided: casting is the only copy.
        """

    @abstractmethod
    def acting_weights(self) -> list[Tensor]:
        """What `acting_outputs` needs of the parameters, ready to use."""

    @abstractmethod
    def acting_outputs(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        """What actions are decided by, float32 ``[B, outputs]``."""

    def _prepared(self, first: Tensor, *others: Tensor) -> list[Tensor]:
        scaled = first if self.obs_scale == 1 else first * self.obs_scale
        return [tensor.to(self.dtype) for tensor in (scaled, *others)]


class MlpTrunk(Trunk):
    """``towers`` networks of the same widths side by side: on a CPU in float32 one after the other,
    else by batched products."""

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
        return self._prepared(*self.hidden.parameters())

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
        """Inputs of the first layer, ``[B, in]``."""
        if self.normalizer is not None:
            obs = self.normalizer(self.numbers(obs))
        return obs.to(self.dtype).reshape(-1, self._inputs)

    def _in_turn(self, rows: Tensor) -> bool:
        """Whether towers are computed one after the other."""
        is_host = rows.device.type == "cpu" and self.dtype == torch.float32
        return is_host and not torch.compiler.is_compiling()


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
    """Three convolutions and a linear layer of ``width`` (Mnih et al. 2015)."""

    def __init__(
        self, frames: tuple[int, int, int], width: int, obs_scale: float, dtype: torch.dtype
    ) -> None:
        super().__init__(obs_scale, dtype)
        self._frames = frames
        channels = (frames[0], *(filters for filters, _, _ in CONVS))
        self.convs = nn.ModuleList(
            orthogonal(nn.Conv2d(before, filters, kernel, stride), math.sqrt(2))
            for before, (filters, kernel, stride) in zip(channels[:-1], CONVS, strict=True)
        )
        self.linear = orthogonal(nn.Linear(flat_features(*frames[1:]), width), math.sqrt(2))

    def weights(self) -> list[Tensor]:
        return self._prepared(*self.convs.parameters(), *self.linear.parameters())

    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden = obs.reshape(-1, *self._frames)
        if isinstance(self.normalizer, FrameNormalizer):
            hidden = self.normalizer.frames(hidden, self.dtype)
        else:
            hidden = in_order(hidden, self.dtype)
        for i, (_, _, stride) in enumerate(CONVS):
            hidden = F.conv2d(hidden, weights[2 * i], weights[2 * i + 1], stride).relu_()
        return (F.linear(hidden.flatten(1), weights[6], weights[7]).relu_().float(),)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, math.prod(self._frames))


def climb(hidden: Tensor, weights: list[Tensor], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Through the layers of towers: weights and biases in turn, inputs ``[towers, B, in]``."""
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        product = torch.baddbmm(bias[:, None], hidden.to(weight.dtype), weight)
        hidden = activation(product)
    return hidden


def linear_of_all(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The first layer of all towers, ``[towers, B, out]``, of the rows ``[B, in]`` that they share.

    One product with the towers' weights side by side, which in bfloat16 is faster than a batched
    one. In float32 it is not, and slower where layers are small.
    """
    towers, inputs, outputs = weight.shape
    side_by_side = weight.transpose(0, 1).reshape(inputs, -1)
    product = torch.addmm(bias.flatten(), rows, side_by_side)
    return product.view(-1, towers, outputs).transpose(0, 1)


class _Tanh(torch.autograd.Function):
    """numpy's tanh takes a seventh of the time of torch's on a CPU."""

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
    """Hyperbolic tangent, differentiable once; float32 of values of any dtype."""
    values = values.float()
    if values.device.type != "cpu":
        return torch.tanh(values)
    return _Tanh.apply(values)  # type: ignore[no-untyped-call, no-any-return]


def activate(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of `model.activation`."""
    return tanh if name == "tanh" else torch.relu
