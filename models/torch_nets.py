"""The networks in torch, for training and for inference: trunks with heads.

Mlp, NatureCnn     policy and value, for actor-critics; the rest of them is `GeneralNet`
Dense, QCnn        one head: Q-values (duelling or not), or a Gaussian policy
TwinCritics        two Q-values of an observation and an action; never published
"""

from __future__ import annotations

from itertools import pairwise
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.models.general import GeneralShape
from penstock.models.layout import (
    FEATURES,
    POLICY,
    TOWERS,
    VALUE,
    CnnShape,
    DenseShape,
    HeadShape,
    MlpShape,
    NetShape,
    QCnnShape,
)
from penstock.models.torch_actor_critic import ActorCritic
from penstock.models.torch_general import GeneralNet
from penstock.models.torch_trunks import (
    CnnTrunk,
    MlpTrunk,
    Towers,
    Trunk,
    activate,
    climb,
    orthogonal,
)


@overload
def build_net(shape: MlpShape | CnnShape, dtype: torch.dtype = ...) -> Net: ...
@overload
def build_net(shape: GeneralShape, dtype: torch.dtype = ...) -> GeneralNet: ...
@overload
def build_net(shape: HeadShape, dtype: torch.dtype = ...) -> HeadNet: ...
def build_net(
    shape: NetShape | GeneralShape, dtype: torch.dtype = torch.float32
) -> Net | GeneralNet | HeadNet:
    """A network of the given shape, whose trunk computes in ``dtype``; initialised from torch's
    global random generator."""
    match shape:
        case MlpShape():
            return Mlp(shape, dtype)
        case CnnShape():
            return NatureCnn(shape, dtype)
        case GeneralShape():
            return GeneralNet(shape, dtype)
        case DenseShape():
            return Dense(shape, dtype)
        case QCnnShape():
            return QCnn(shape, dtype)


class Net(Trunk, ActorCritic):
    """A trunk with a policy head on its first tower and a value head on its last."""

    def forward(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As of every `ActorCritic`, without memory."""
        towers = self.features(obs, self.weights()).unbind(0)
        value = torch.addmv(self.value.bias, towers[VALUE], self.value.weight[0])
        return self.logits(towers[POLICY]), value

    def acting_weights(self) -> list[Tensor]:
        return self.weights()

    def acting_outputs(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        return self.logits(self.features(obs, weights)[POLICY])


class Mlp(MlpTrunk, Net):
    """Two towers of the same widths."""

    def __init__(self, shape: MlpShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(TOWERS, shape.widths, shape.activation, shape.obs_scale, dtype)
        self._inputs, self.actions = shape.inputs, shape.actions
        self._make_heads(shape.hidden[-1], shape.log_std_init)
        self._make_buffers(shape.inputs if shape.normalize else 0)

    def features(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        if self.normalizer is not None:
            obs = self.normalizer(self.numbers(obs))
        return super().features(obs, weights)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, self._inputs)

    def acting_weights(self) -> list[Tensor]:
        return [tensor[:1] for tensor in self.weights()]


class NatureCnn(CnnTrunk, Net):
    """The Nature CNN, shared by policy and value."""

    def __init__(self, shape: CnnShape, dtype: torch.dtype = torch.float32) -> None:
        frames = shape.channels, shape.height, shape.width
        super().__init__(frames, FEATURES, shape.obs_scale, dtype)
        self.actions = shape.actions
        self._make_heads(FEATURES, shape.log_std_init)
        self._make_buffers(0)


class HeadNet(Trunk):
    """A trunk of one tower with one head; duelling, with a value head on the features' first half.

    Both heads are linear, so that ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv 1511.06581,
    equation 9) is one product: weights are combined, not outputs.
    """

    head: nn.Linear
    value: nn.Linear | None

    def forward(self, obs: Tensor) -> Tensor:
        """Outputs float32 ``[B, outputs]`` of observations ``[..., *shape]``."""
        return self.acting_outputs(obs, self.acting_weights())

    def acting_weights(self) -> list[Tensor]:
        return [*self.weights(), *self._head_weights()]

    def acting_outputs(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        *trunk, weight, bias = weights
        return linear(self.features(obs, trunk)[0], weight, bias)

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.head.weight, self.head.bias
        if self.value is None:
            return weight, bias
        value = self.value.weight.expand(weight.shape)
        combined = torch.cat([value, weight - weight.mean(0)], 1)
        return combined, self.value.bias + bias - bias.mean()

    def _make_heads(self, width: int, outputs: int, duelling: bool) -> None:
        self.head = orthogonal(nn.Linear(width, outputs), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 0.01) if duelling else None


class Dense(MlpTrunk, HeadNet):
    """One tower of layers."""

    def __init__(self, shape: DenseShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(1, shape.widths, shape.activation, shape.obs_scale, dtype)
        self._make_heads(shape.hidden[-1], shape.outputs, shape.duelling)


class QCnn(CnnTrunk, HeadNet):
    """The Nature CNN with Q-values."""

    def __init__(self, shape: QCnnShape, dtype: torch.dtype = torch.float32) -> None:
        frames = shape.channels, shape.height, shape.width
        super().__init__(frames, shape.features, shape.obs_scale, dtype)
        self._make_heads(FEATURES, shape.outputs, shape.duelling)


class TwinCritics(nn.Module):
    """Two separate Q-functions over observation and action, computed together.

    ``actor`` is the shape of the policy whose actions they value: the same observations, layers
    and activation.
    """

    def __init__(self, actor: DenseShape) -> None:
        super().__init__()
        widths = (actor.inputs + actor.outputs // 2, *actor.hidden, 1)
        self._inputs, self._obs_scale = actor.inputs, actor.obs_scale
        self._activate = activate(actor.activation)
        self.layers = nn.ModuleList(Towers(2, *fans) for fans in pairwise(widths))

    def weights(self) -> list[Tensor]:
        """What `values` needs."""
        return list(self.layers.parameters())

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """`values` by the network's own weights."""
        return self.values(obs, action, self.weights())

    def values(self, obs: Tensor, action: Tensor, weights: list[Tensor]) -> Tensor:
        """Q-values ``[2, B]`` of observations ``[B, ...]`` and actions ``[B, ...]``, -1 to 1.

        Detached ``weights`` let a gradient through to the action alone.
        """
        *hidden, weight, bias = weights
        rows = obs.float().reshape(-1, self._inputs)
        if self._obs_scale != 1:
            rows = rows * self._obs_scale
        both = torch.cat([rows, action.reshape(len(rows), -1)], 1)
        features = climb(both.expand(2, -1, -1), hidden, self._activate)
        return torch.baddbmm(bias[:, None], features, weight)[..., 0]
