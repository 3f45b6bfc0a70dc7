"""Layer normalisation in torch (`model.layer_norm`), and the layers that it is part of.

Ba et al. 2016, arXiv 1607.06450. Each observation's outputs of a layer are shifted and scaled to
mean 0 and variance 1, over all units, or over all channels and pixels of a convolution; then each
unit or channel has a gain and a bias of its own. It comes before the activation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.layout import NORM_EPSILON
from penstock.models.torch_noise import NoisyLinear, make_linear


class LayerNorm(nn.Module):
    """Normalises the outputs ``[B, units]`` or ``[B, channels, height, width]`` of a layer."""

    def __init__(self, *shape: int) -> None:
        """``shape`` is that of the gains: ``[units]`` or ``[channels]``."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))
        self.bias = nn.Parameter(torch.zeros(*shape))

    def forward(self, outputs: Tensor) -> Tensor:
        return normalized_layer(outputs, self.weight, self.bias)


class Normalized(nn.Module):
    """Base of a layer whose outputs are normalised; it comes before the class of the layer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """The arguments are those of the layer."""
        super().__init__(*args, **options)
        self.norm = LayerNorm(len(self.get_parameter("bias")))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(super().forward(inputs))
        return outputs


class NormalizedLinear(Normalized, nn.Linear):
    """A linear layer whose outputs are normalised."""


class NormalizedNoisyLinear(Normalized, NoisyLinear):
    """A linear layer with noise in its weights, whose outputs are normalised."""


class NormalizedConv(Normalized, nn.Conv2d):
    """A convolution whose outputs are normalised."""


def make_hidden(fan_in: int, fan_out: int, *, noisy: bool, layer_norm: bool) -> nn.Linear:
    """Makes a hidden linear layer, with noise in its weights and with normalisation if asked."""
    if not layer_norm:
        return make_linear(fan_in, fan_out, noisy=noisy)
    linear_type: type[nn.Linear] = NormalizedNoisyLinear if noisy else NormalizedLinear
    return linear_type(fan_in, fan_out)


def conv_type(layer_norm: bool) -> type[nn.Conv2d]:
    """Returns the class of convolutions, with or without normalisation."""
    return NormalizedConv if layer_norm else nn.Conv2d


def normalized_layer(outputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns a layer's outputs ``[B, units]`` or ``[B, channels, height, width]``, normalised.

    ``weight`` and ``bias`` are the gains and biases of its units or channels.
    """
    if outputs.ndim == 2:
        return F.layer_norm(outputs, weight.shape, weight, bias, NORM_EPSILON)
    return F.group_norm(outputs, 1, weight, bias, NORM_EPSILON)  # one group: all channels


def normalized_towers(outputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the outputs ``[towers, B, units]`` of a layer of several towers, normalised.

    ``weight`` and ``bias`` are ``[towers, units]``.
    """
    # With the gains and biases within, the gradient takes a third of the time.
    if len(outputs) == 1:
        return normalized_layer(outputs[0], weight[0], bias[0])[None]
    centred = F.layer_norm(outputs, outputs.shape[-1:], eps=NORM_EPSILON)
    return torch.addcmul(bias[:, None], centred, weight[:, None])
