"""The networks in torch, for training and for inference: trunks with heads.

Mlp, NatureCnn     policy and value, for actor-critics
Dense, QCnn        one head: Q-values (duelling or not), or a Gaussian policy
TwinCritics        two Q-values of an observation and an action; never published

These are the fused implementations; what they do not compute is `GeneralNet` and `GeneralCritics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.core.params import Float32
from penstock.models.fitting import AnyShape, HeadShape
from penstock.models.general import ActorCriticHeads, GeneralShape
from penstock.models.layout import (
    FEATURES,
    POLICY,
    TOWERS,
    VALUE,
    CnnShape,
    DenseShape,
    MlpShape,
    QCnnShape,
    SingleHead,
)
from penstock.models.normalizer import FrameNormalizer, Normalizer
from penstock.models.torch_general import GeneralActorCritic, GeneralCritics, general_net
from penstock.models.torch_heads import ActorCritic, HeadNet, PolicyNetwork
from penstock.models.torch_trunks import (
    CnnTrunk,
    MlpTrunk,
    Towers,
    Trunk,
    activate,
    climb,
    towers_in_turn,
)


@overload
def build_net(shape: MlpShape | CnnShape, dtype: torch.dtype = ...) -> Net: ...
@overload
def build_net(
    shape: GeneralShape[ActorCriticHeads], dtype: torch.dtype = ...
) -> GeneralActorCritic: ...
@overload
def build_net(shape: HeadShape, dtype: torch.dtype = ...) -> HeadNet: ...
def build_net(shape: AnyShape, dtype: torch.dtype = torch.float32) -> PolicyNetwork:
    """Makes a network of the given shape, initialised from torch's global random generator.

    ``dtype`` is the precision of the trunk; heads compute in float32.
    """
    match shape:
        case MlpShape():
            return Mlp(shape, dtype)
        case CnnShape():
            return NatureCnn(shape, dtype)
        case GeneralShape():
            return general_net(shape, dtype)
        case DenseShape():
            return Dense(shape, dtype)
        case QCnnShape():
            return QCnn(shape, dtype)


def filled_net(shape: AnyShape, weights: Float32) -> PolicyNetwork:
    """Returns a network that only computes, with a copy of the parameters in a flat vector."""
    # The initial weights are replaced, so they take no numbers of the caller's generator.
    with torch.random.fork_rng(devices=[]):
        net = build_net(shape).requires_grad_(False).eval()
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, source in shape.layout.views(weights).items():
        np.copyto(tensors[name].numpy(), source)
    return net


class Net(Trunk, ActorCritic):
    """A trunk with a policy head on its first tower and a value head on its last."""

    def forward(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs and values, as every `ActorCritic` without memory."""
        towers = self.features(obs, self.weights())
        values = torch.addmv(self.value.bias, towers[VALUE], self.value.weight[0])
        return self.logits(towers[POLICY]), values

    def acting_weights(self) -> list[Tensor]:
        return self.weights()

    def acting_outputs(self, obs: Tensor, weights: list[Tensor]) -> Tensor:
        return self.logits(self.features(obs, weights)[POLICY])


class Mlp(MlpTrunk, Net):
    """Two towers of the same widths, one for the policy and one for the value."""

    def __init__(self, shape: MlpShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype, towers=TOWERS)
        self.actions = shape.actions
        self._make_heads(shape.hidden[-1], shape.log_std_init)
        self.normalizer = Normalizer(shape.inputs) if shape.normalize else None

    def forward(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns what `Net.forward` does, on a CPU in float32 with the heads in the same pass."""
        rows = self._rows(obs)
        if not self._computes_in_turn(rows):
            return super().forward(obs)

        heads = [self.policy.weight, self.policy.bias, self.value.weight, self.value.bias]
        head_outputs, values = towers_in_turn(rows, self.weights(), self._activation, heads)
        return self.completed(head_outputs), values[0]

    def acting_weights(self) -> list[Tensor]:
        return [tensor[:1] for tensor in self.weights()]  # the policy's tower alone


class NatureCnn(CnnTrunk, Net):
    """The Nature CNN, shared by policy and value."""

    def __init__(self, shape: CnnShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype)
        self.actions = shape.actions
        self._make_heads(FEATURES, shape.log_std_init)
        self.normalizer = FrameNormalizer(shape.pixels) if shape.normalize else None


class FusedHead(HeadNet, Trunk):
    """A trunk of one tower with one head."""

    def _body_weights(self) -> list[Tensor]:
        return self.weights()

    def acting_outputs(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        *trunk, weight, bias = weights
        return linear(self.features(obs, trunk)[0], weight, bias)


class Dense(MlpTrunk, FusedHead):
    """One tower of layers with one head."""

    def __init__(self, shape: DenseShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype, towers=1, noisy=shape.head.noisy)
        self._make_head(shape.hidden[-1], shape.head)
        self.normalizer = Normalizer(shape.inputs) if shape.normalize else None


class QCnn(CnnTrunk, FusedHead):
    """The Nature CNN with Q-values."""

    def __init__(self, shape: QCnnShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype, noisy=shape.head.noisy)
        self._make_head(FEATURES, shape.head)
        self.normalizer = FrameNormalizer(shape.pixels) if shape.normalize else None


class TwinCritics(nn.Module):
    """Two separate Q-functions over observation and action, computed together.

    Args:
        actor: the shape of the policy whose actions they value. They have the same observations,
            layers and activation.
        normalizer: that of the policy.
        action_size: number of values in an action.
    """

    def __init__(
        self, actor: DenseShape, normalizer: Normalizer | None = None, *, action_size: int
    ) -> None:
        super().__init__()
        self._inputs = actor.inputs
        self._obs_scale = actor.obs_scale
        self._activate = activate(actor.activation)

        widths = (actor.inputs + action_size, *actor.hidden, 1)
        head = len(actor.hidden)
        self._layer_norm = actor.layer_norm
        self.layers = nn.ModuleList(
            Towers(2, fan_in, fan_out, layer_norm=actor.layer_norm and i != head)
            for i, (fan_in, fan_out) in enumerate(pairwise(widths))
        )
        self.normalizer = normalizer

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns Q-values ``[2, B]`` of observations ``[B, ...]`` and actions ``[B, ...]``, -1 to
        1."""
        return self._values(obs, action, list(self.layers.parameters()))

    def of_action(self, obs: Tensor, action: Tensor, count: int = 2) -> Tensor:
        """Returns the Q-values of the first ``count``, ``[count, B]``.

        The gradient reaches the action alone.
        """
        fixed = [weight.detach()[:count] for weight in self.layers.parameters()]
        return self._values(obs, action, fixed)

    def _values(self, obs: Tensor, action: Tensor, weights: list[Tensor]) -> Tensor:
        """Returns Q-values ``[critics, B]``, given their parameters of each layer in turn."""
        *hidden, head_weight, head_bias = weights
        rows = obs.float().reshape(-1, self._inputs)
        if self._obs_scale != 1:
            rows = rows * self._obs_scale
        if self.normalizer is not None:
            rows = self.normalizer(rows)

        inputs = torch.cat([rows, action.reshape(len(rows), -1)], 1)
        inputs = inputs.expand(len(head_weight), -1, -1)
        features = climb(inputs, hidden, self._activate, layer_norm=self._layer_norm)
        return torch.baddbmm(head_bias[:, None], features, head_weight)[..., 0]


def build_critics(
    actor: DenseShape | GeneralShape[SingleHead],
    normalizer: Normalizer | None,
    dtype: torch.dtype = torch.float32,
    *,
    action_size: int,
) -> TwinCritics | GeneralCritics:
    """Makes the critics of a policy's actions, initialised from torch's global random generator.

    Args:
        actor: the shape of the policy.
        normalizer: that of the policy, which the critics use.
        dtype: precision of bodies that read images.
        action_size: number of values in an action.
    """
    if isinstance(actor, DenseShape):
        return TwinCritics(actor, normalizer, action_size=action_size)
    return GeneralCritics(actor, normalizer, dtype, action_size=action_size)
