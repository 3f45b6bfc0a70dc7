"""Linear layers with noise in their weights, by which a network explores (`algo.noisy`).

Fortunato et al. 2017, arXiv 1706.10295: a weight is ``mean + sigma * noise``, and both mean and
sigma are learned. The noise is factorised (equations 10 and 11): a number for each input and one
for each output, whose products are that of the weights.

`Noisy` is what such layers share. A layer has no noise until `Noisy.draw_noise`, and computes the
means of its weights until then, as in evaluation. `penstock.models.acting.exploration` draws the
same noise for actors, in numpy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_SIGMA = 0.5
"""The initial sigma is this number over the root of a layer's inputs (section 3.2)."""


class Noisy(nn.Module):
    """A layer whose weight and bias may have noise."""

    weight: Tensor
    """Means ``[outputs, inputs]``; where towers lie side by side ``[towers, inputs, outputs]``."""
    bias: Tensor
    """Means ``[outputs]``, or ``[towers, outputs]``."""
    weight_sigma: nn.Parameter
    bias_sigma: nn.Parameter
    has_noise = False
    """Whether it is a noisy layer at all."""
    _noise: tuple[Tensor, Tensor] | None = None
    """The noise of the inputs and of the outputs, as drawn last."""

    def _add_noise(self, fan_in: int) -> None:
        """Make it a noisy layer."""
        self.has_noise = True
        sigma = INITIAL_SIGMA / math.sqrt(fan_in)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, sigma))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, sigma))

    def draw_noise(self) -> None:
        """Draw other noise from torch's generator of the device, if it is a noisy layer."""
        if not self.has_noise:
            return
        *towers, outputs = self.bias.shape
        inputs = self.weight.shape[1]
        new = self.bias.new_empty
        self._noise = (_scaled(new(*towers, inputs)), _scaled(new(*towers, outputs)))

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns weight and bias with the noise that was drawn last, if any was."""
        if self._noise is None:
            return self.weight, self.bias
        inputs, outputs = self._noise
        is_towers = self.bias.ndim == 2
        rows, columns = (inputs, outputs) if is_towers else (outputs, inputs)
        weight = torch.addcmul(
            self.weight, self.weight_sigma * rows[..., :, None], columns[..., None, :]
        )
        return weight, torch.addcmul(self.bias, self.bias_sigma, outputs)


class NoisyLinear(Noisy, nn.Linear):
    """A `torch.nn.Linear` with noise."""

    bias: nn.Parameter

    def __init__(self, fan_in: int, fan_out: int) -> None:
        nn.Linear.__init__(self, fan_in, fan_out)
        self._add_noise(fan_in)

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, *self.weights())


def make_linear(fan_in: int, fan_out: int, *, noisy: bool) -> nn.Linear:
    """Makes a linear layer, with noise if it is ``noisy``."""
    return NoisyLinear(fan_in, fan_out) if noisy else nn.Linear(fan_in, fan_out)


def weights_of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of a linear layer, with its noise if it has some."""
    return layer.weights() if isinstance(layer, NoisyLinear) else (layer.weight, layer.bias)


def _scaled(numbers: Tensor) -> Tensor:
    """Fill a tensor with normal numbers, of whose size the root is taken (equation 10's f)."""
    numbers.normal_()
    return numbers.sign() * numbers.abs().sqrt()
