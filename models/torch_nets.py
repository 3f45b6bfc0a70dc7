"""The networks in torch, for training and for inference.

A net computes in two stages, so that inference can prepare its weights once and reuse them:

    weights()              parameters as the trunk uses them: cast, observation scale folded in
    features(obs, weights) [towers, B, width] float32; an MLP has two towers, a CNN one
    logits, value          heads on the first and the last tower, always float32

Parameters are float32 and contiguous, so they can be views of one flat vector. ``dtype`` is what
the trunk's products are computed in; the heads stay float32, since log-probabilities need it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.configs.schema import ModelConfig
from penstock.models.layout import (
    CONVS,
    FEATURES,
    POLICY,
    TOWERS,
    VALUE,
    CnnShape,
    MlpShape,
    NetShape,
    net_shape,
)

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def build(
    cfg: ModelConfig,
    observation_space: Any,
    action_space: Any,
    dtype: torch.dtype = torch.float32,
) -> Net:
    """The network of `net_shape`, initialised from torch's global random generator."""
    return build_net(net_shape(cfg, observation_space, action_space), dtype)


def build_net(shape: NetShape, dtype: torch.dtype = torch.float32) -> Net:
    """A network of the given shape, whose trunk computes in ``dtype``."""
    return Mlp(shape, dtype) if isinstance(shape, MlpShape) else NatureCnn(shape, dtype)


class Net(nn.Module, ABC):
    """A trunk of features with a policy head and a value head."""

    policy: nn.Linear
    value: nn.Linear

    def __init__(self, shape: NetShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The trunk's weights and biases as `features` uses them."""

    @abstractmethod
    def features(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        """Float32 ``[towers, B, width]`` of observations ``[..., *shape]`` of any dtype.

        The leading axes make up B. They may be strided: casting is the only copy.
        """

    def policy_weights(self) -> list[Tensor]:
        """What of `weights` the policy needs."""
        return self.weights()

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, actions]`` and values ``[B]`` of observations ``[..., *shape]``."""
        towers = self.features(obs, self.weights()).unbind(0)
        value = torch.addmv(self.value.bias, towers[VALUE], self.value.weight[0])
        return self.logits(towers[POLICY]), value

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[B, actions]`` of features ``[B, width]``; contiguous along B.

        In this order both the log-softmax over few actions and the weight's gradient are several
        times faster.
        """
        return torch.addmm(self.policy.bias[:, None], self.policy.weight, features.t()).t()

    def _prepared(self, first: Tensor, *others: Tensor) -> list[Tensor]:
        scaled = first * self.shape.obs_scale
        return [tensor.to(self.dtype) for tensor in (scaled, *others)]

    def _make_heads(self, width: int) -> None:
        self.policy = _orthogonal(nn.Linear(width, self.shape.actions), 0.01)
        self.value = _orthogonal(nn.Linear(width, 1), 1.0)


class Mlp(Net):
    """Two towers of the same widths, computed together by batched products."""

    def __init__(self, shape: MlpShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype)
        self._activate = tanh if shape.activation == "tanh" else torch.relu
        widths = pairwise((shape.inputs, *shape.hidden))
        self.hidden = nn.ModuleList(Towers(fan_in, fan_out) for fan_in, fan_out in widths)
        self._make_heads(shape.hidden[-1])

    def weights(self) -> list[Tensor]:
        return self._prepared(*self.hidden.parameters())

    def policy_weights(self) -> list[Tensor]:
        return [tensor[:1] for tensor in self.weights()]

    def features(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        layers = list(zip(weights[::2], weights[1::2], strict=True))
        hidden = obs.to(self.dtype).reshape(-1, weights[0].shape[1]).expand(len(weights[0]), -1, -1)
        for weight, bias in layers:
            product = torch.baddbmm(bias[:, None], hidden.to(self.dtype), weight)
            hidden = self._activate(product.float())
        return hidden


class Towers(nn.Module):
    """One hidden layer of every tower: ``weight [TOWERS, in, out]``, ``bias [TOWERS, out]``."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(TOWERS, fan_in, fan_out))
        self.bias = nn.Parameter(torch.zeros(TOWERS, fan_out))
        with torch.no_grad():
            for tower in self.weight:
                nn.init.orthogonal_(tower, math.sqrt(2))


class NatureCnn(Net):
    """Three convolutions and a linear layer (Mnih et al. 2015), shared by policy and value.

    Activations are in torch's default order, not channels_last: with bfloat16 on a CPU both take
    the same time, and this one keeps weights contiguous and needs no transposed copy of frames.
    """

    def __init__(self, shape: CnnShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype)
        channels = (shape.channels, *(filters for filters, _, _ in CONVS))
        self.convs = nn.ModuleList(
            _orthogonal(nn.Conv2d(before, filters, kernel, stride), math.sqrt(2))
            for before, (filters, kernel, stride) in zip(channels[:-1], CONVS, strict=True)
        )
        self.linear = _orthogonal(nn.Linear(shape.flat_features, FEATURES), math.sqrt(2))
        self._make_heads(FEATURES)

    def weights(self) -> list[Tensor]:
        return self._prepared(*self.convs.parameters(), *self.linear.parameters())

    def features(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        hidden = obs.to(self.dtype).reshape(-1, *obs.shape[-3:])
        for i, (_, _, stride) in enumerate(CONVS):
            hidden = F.conv2d(hidden, weights[2 * i], weights[2 * i + 1], stride).relu_()
        return F.linear(hidden.flatten(1), weights[-2], weights[-1]).relu_().float()[None]


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
    """Hyperbolic tangent, differentiable once."""
    if values.device.type != "cpu":
        return torch.tanh(values)
    return _Tanh.apply(values)  # type: ignore[no-untyped-call, no-any-return]


def _orthogonal(layer: Layer, gain: float) -> Layer:
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
