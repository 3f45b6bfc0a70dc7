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

from penstock.device.choice import runs_behind
from penstock.models.frame_order import (
    divides,
    in_order,
    kernel_over_depth,
    space_to_depth,
)
from penstock.models.layout import (
    CONVS,
    Activation,
    CnnShape,
    DenseShape,
    MlpShape,
    QCnnShape,
    flat_features,
)
from penstock.models.normalizer import FrameNormalizer
from penstock.models.torch_heads import PolicyNetwork, orthogonal
from penstock.models.torch_noise import Noisy, weights_of
from penstock.models.torch_norm import (
    LayerNorm,
    conv_type,
    make_hidden,
    normalized_layer,
    normalized_towers,
)


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
        """Returns the trunk's weights and biases as `features` uses them.

        With layer normalisation a layer also has the weight and the bias of its `LayerNorm`.
        """

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

    def _prepared(self, first_weight: Tensor, *other_tensors: Tensor) -> list[Tensor]:
        """Returns parameters with the observation scale folded in, in the trunk's precision."""
        if self.obs_scale != 1:
            first_weight = first_weight * self.obs_scale
        return [tensor.to(self.dtype) for tensor in (first_weight, *other_tensors)]


class MlpTrunk(Trunk):
    """Networks of the same widths side by side, the towers.

    On a CPU in float32 they are computed one after the other, else by batched products.

    Args:
        shape: of the network.
        dtype: precision of the products.
        towers: number of towers.
        noisy: whether weights have noise.
    """

    def __init__(
        self, shape: MlpShape | DenseShape, dtype: torch.dtype, *, towers: int, noisy: bool = False
    ) -> None:
        super().__init__(shape.obs_scale, dtype)
        self._inputs = shape.inputs
        self._activation = shape.activation
        self._activate = activate(shape.activation)
        self._layer_norm = shape.layer_norm

        self.hidden = nn.ModuleList(
            Towers(towers, fan_in, fan_out, noisy=noisy, layer_norm=shape.layer_norm)
            for fan_in, fan_out in pairwise(shape.widths)
        )

    def weights(self) -> list[Tensor]:
        # `parameters` would search all modules at each call.
        tensors: list[Tensor] = []
        for layer in self.hidden:
            assert isinstance(layer, Towers)
            tensors += layer.weights() if layer.has_noise else (layer.weight, layer.bias)
            if layer.norm is not None:
                tensors += (layer.norm.weight, layer.norm.bias)
        return self._prepared(*tensors)

    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        rows = self._rows(obs)
        if self._computes_in_turn(rows):
            return towers_in_turn(rows, weights, self._activation)

        if self.dtype == torch.bfloat16 and not self._layer_norm:
            hidden = self._activate(linear_of_all(rows, *weights[:2]))
            return climb(hidden, weights[2:], self._activate).float().unbind(0)

        hidden = rows.expand(len(weights[0]), -1, -1)
        hidden = climb(hidden, weights, self._activate, layer_norm=self._layer_norm)
        return hidden.float().unbind(0)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, self._inputs)

    def _rows(self, obs: Tensor) -> Tensor:
        """Returns the inputs of the first layer, ``[B, in]``."""
        if self.normalizer is not None:
            obs = self.normalizer(self.numbers(obs))
        return obs.to(self.dtype).reshape(-1, self._inputs)

    def _computes_in_turn(self, rows: Tensor) -> bool:
        """Returns whether towers are computed one after the other."""
        is_cpu = rows.device.type == "cpu" and self.dtype == torch.float32 and not self._layer_norm
        # `towers_in_turn` has no derivatives by the rows; torch computes these.
        return is_cpu and not rows.requires_grad and not torch.compiler.is_compiling()


class Towers(Noisy):
    """One layer of every tower: ``weight [towers, in, out]``, ``bias [towers, out]``.

    With ``layer_norm``, ``norm`` has the gains and biases ``[towers, out]`` of its outputs.
    """

    def __init__(
        self,
        towers: int,
        fan_in: int,
        fan_out: int,
        *,
        noisy: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(towers, fan_in, fan_out))
        self.bias = nn.Parameter(torch.zeros(towers, fan_out))
        self.norm = LayerNorm(towers, fan_out) if layer_norm else None
        with torch.no_grad():
            for tower in self.weight:
                nn.init.orthogonal_(tower, math.sqrt(2))
        if noisy:
            self._add_noise(fan_in)


class CnnTrunk(Trunk):
    """Three convolutions and a linear layer (Mnih et al. 2015).

    Args:
        shape: of the network.
        dtype: precision of the products.
        noisy: whether the weights of the linear layer have noise.
    """

    def __init__(
        self, shape: CnnShape | QCnnShape, dtype: torch.dtype, *, noisy: bool = False
    ) -> None:
        super().__init__(shape.obs_scale, dtype)
        self._frames = (shape.channels, shape.height, shape.width)
        self._layer_norm = shape.layer_norm
        self._memory_format = shape.memory_format
        self._gains_by_depth = dtype == torch.bfloat16 and shape.memory_format == "channels_last"

        self.convs = nature_convs(shape.channels, layer_norm=shape.layer_norm)
        flat = flat_features(shape.height, shape.width)
        linear = make_hidden(flat, shape.features, noisy=noisy, layer_norm=shape.layer_norm)
        self.linear = orthogonal(linear, math.sqrt(2))

    def weights(self) -> list[Tensor]:
        tensors: list[Tensor] = [*self.convs.parameters(), *weights_of(self.linear)]
        if self._layer_norm:
            tensors += self.linear.get_submodule("norm").parameters()
        first_kernel = tensors[0]
        if self._is_over_depth(first_kernel):
            tensors[0] = kernel_over_depth(first_kernel)
        return self._prepared(*tensors)

    def features(self, obs: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden = obs.reshape(-1, *self._frames)
        strides = [stride for _, _, stride in CONVS]
        if isinstance(self.normalizer, FrameNormalizer):
            hidden = self.normalizer.frames(
                hidden, self.dtype, first=0, memory_format=self._memory_format
            )
        elif self._is_over_depth(weights[0]):
            hidden = space_to_depth(hidden, self.dtype)
            strides[0] = 1
        else:
            hidden = in_order(hidden, self.dtype, self._memory_format)

        # The tensors of three convolutions, then those of the linear layer.
        *convs, (linear_weight, linear_bias, *linear_norm) = layers_of(weights, self._layer_norm)
        for (weight, bias, *norm), stride in zip(convs, strides, strict=True):
            hidden = F.conv2d(hidden, weight, bias, stride)
            if norm:
                hidden = normalized_layer(hidden, *norm)
            hidden = hidden.relu_()

        features = F.linear(hidden.flatten(1), linear_weight, linear_bias)
        if linear_norm:
            features = normalized_layer(features, *linear_norm)
        return (features.relu_().float(),)

    def numbers(self, obs: Tensor) -> Tensor:
        return obs.reshape(-1, math.prod(self._frames))

    def _is_over_depth(self, weight: Tensor) -> bool:
        """Returns whether the first convolution is computed over blocks of pixels."""
        if not self._gains_by_depth or isinstance(self.normalizer, FrameNormalizer):
            return False
        return divides(*self._frames[1:]) and not runs_behind(weight)


def nature_convs(channels: int, *, layer_norm: bool) -> nn.ModuleList:
    """Makes the convolutions of the Nature CNN over frames of so many channels."""
    convs: list[nn.Module] = []
    for filters, kernel, stride in CONVS:
        conv = conv_type(layer_norm)(channels, filters, kernel, stride)
        convs.append(orthogonal(conv, math.sqrt(2)))
        channels = filters
    return nn.ModuleList(convs)


def climb(
    hidden: Tensor,
    weights: list[Tensor],
    activation: Callable[[Tensor], Tensor],
    *,
    layer_norm: bool = False,
) -> Tensor:
    """Returns the features ``[towers, B, width]`` after the layers of all towers.

    Args:
        hidden: the inputs, ``[towers, B, in]``.
        weights: of each layer in turn the weight ``[towers, in, out]`` and the bias ``[towers,
            out]``; with ``layer_norm`` also the gains and biases of its normalisation.
        activation: after each layer.
        layer_norm: whether the outputs of each layer are normalised.
    """
    for weight, bias, *norm in layers_of(weights, layer_norm):
        outputs = torch.baddbmm(bias[:, None], hidden.to(weight.dtype), weight)
        hidden = activation(normalized_towers(outputs, *norm) if norm else outputs)
    return hidden


def layers_of(weights: Sequence[Tensor], layer_norm: bool) -> list[Sequence[Tensor]]:
    """Returns the tensors of each layer: weight and bias, and those of its normalisation if any."""
    count = 4 if layer_norm else 2
    return [weights[first : first + count] for first in range(0, len(weights), count)]


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
    """The computation of `towers_in_turn`, whose parameters are ``weights``, then ``heads``."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, depth: int, rows: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights = parameters[: 2 * depth]
        heads = parameters[2 * depth :]
        towers = len(weights[0])

        # The activations of all layers of the first tower, then those of the second.
        all_activations = []
        outputs = []
        for tower in range(towers):
            layer_input = rows
            for layer in range(depth):
                weight, bias = weights[2 * layer : 2 * layer + 2]
                activations = torch.addmm(bias[tower], layer_input, weight[tower])
                if activation == "tanh":  # numpy's takes half of the time of torch's
                    array = activations.numpy()
                    np.tanh(array, out=array)
                else:
                    activations.relu_()
                all_activations.append(activations)
                layer_input = activations

            if heads:
                head_weight, head_bias = heads[2 * tower : 2 * tower + 2]
                outputs.append(_head(layer_input, head_weight, head_bias))
            else:
                outputs.append(layer_input)

        ctx.activation = activation
        ctx.depth = depth
        ctx.save_for_backward(rows, *parameters, *all_activations)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        depth = ctx.depth
        towers = len(d_outputs)
        rows, *saved = ctx.saved_tensors
        parameter_count = len(saved) - depth * towers
        parameters = saved[:parameter_count]
        all_activations = saved[parameter_count:]
        weights = parameters[: 2 * depth]
        heads = parameters[2 * depth :]

        d_parameters = [torch.empty_like(parameter) for parameter in parameters]
        # Gradients before the activations of each layer, of one tower at a time.
        slopes = [torch.empty_like(activations) for activations in all_activations[:depth]]

        # The last tower comes first, since it may still be in the cache.
        for tower in reversed(range(towers)):
            gradient = d_outputs[tower]
            tower_activations = all_activations[tower * depth : (tower + 1) * depth]
            if heads:
                head = 2 * depth + 2 * tower
                torch.mm(gradient, tower_activations[-1], out=d_parameters[head])
                torch.sum(gradient, 1, out=d_parameters[head + 1])
                gradient = torch.mm(gradient.t(), heads[2 * tower], out=slopes[-1])

            for layer in reversed(range(depth)):
                slope = slopes[layer]
                _multiply_by_slope(gradient, tower_activations[layer], ctx.activation, out=slope)

                layer_input = tower_activations[layer - 1] if layer else rows
                torch.mm(layer_input.t(), slope, out=d_parameters[2 * layer][tower])
                torch.sum(slope, 0, out=d_parameters[2 * layer + 1][tower])
                if layer:
                    weight = weights[2 * layer][tower]
                    gradient = torch.mm(slope, weight.t(), out=slopes[layer - 1])
        return None, None, None, *d_parameters


def _multiply_by_slope(
    gradient: Tensor, activations: Tensor, activation: Activation, *, out: Tensor
) -> None:
    """Write the gradient before an activation into ``out``, given the gradient after it.

    ``out`` may be ``gradient`` itself. ``activations`` are the results of the activation.
    """
    if activation == "tanh":
        torch.ops.aten.tanh_backward.grad_input(gradient, activations, grad_input=out)
    else:
        torch.ops.aten.threshold_backward.grad_input(gradient, activations, 0, grad_input=out)


def _head(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the outputs ``[outputs, B]`` of a head for features ``[B, width]``."""
    if len(weight) == 1:
        return torch.addmv(bias, features, weight[0])[None]
    return torch.addmm(bias[:, None], weight, features.t())


class _Tanh(torch.autograd.Function):
    """numpy's tanh, which takes a seventh of the time of torch's on a CPU."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        result = torch.empty_like(values)
        np.tanh(values.numpy(), out=result.numpy())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, result)  # type: ignore[no-any-return]


def tanh(values: Tensor) -> Tensor:
    """Returns the hyperbolic tangent in float32, differentiable once, of values of any dtype."""
    values = values.float()
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.tanh(values)
    return _Tanh.apply(values)  # type: ignore[no-untyped-call, no-any-return]


def activate(name: Activation) -> Callable[[Tensor], Tensor]:
    """Returns the function of `model.activation`."""
    return tanh if name == "tanh" else torch.relu
