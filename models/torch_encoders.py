"""From the arrays of an observation to one vector of features, in torch.

Frames go through convolutions, each array through its own; everything else is flattened, put side
by side and goes through layers. What they give is put side by side, too.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.configs.model import ModelConfig
from penstock.configs.value_types import MemoryFormat
from penstock.models.frame_order import in_order
from penstock.models.general import channels_last
from penstock.models.layout import CONVS, FEATURES, flat_features
from penstock.models.torch_heads import orthogonal
from penstock.models.torch_trunks import activate

IMPALA_CHANNELS = (16, 32, 32)
IMPALA_FEATURES = 256


class Encoder(nn.Module):
    """Features ``[B, width]`` of arrays by name, each ``[B, *shape]``, near 1."""

    def __init__(
        self,
        images: dict[str, tuple[int, ...]],
        numbers: dict[str, tuple[int, ...]],
        cfg: ModelConfig,
        memory_format: MemoryFormat = "auto",
    ) -> None:
        super().__init__()
        self._images, self._numbers = images, list(numbers)
        kind = ImpalaEncoder if cfg.kind == "impala_cnn" else NatureEncoder
        # By rule on a CPU, too: narrow convolutions and pooling take half of the time, or less.
        by_rule: MemoryFormat = "channels_last" if kind is ImpalaEncoder else "auto"
        self._memory_format = by_rule if memory_format == "auto" else memory_format
        self.images = nn.ModuleList(kind(*_channels_first(shape)) for shape in images.values())
        inputs = sum(math.prod(shape) for shape in numbers.values())
        self.layers = DenseLayers((inputs, *cfg.hidden), cfg) if inputs else None
        self.width = kind.width * len(images) + (cfg.hidden[-1] if inputs else 0)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        found = []
        for (name, shape), image in zip(self._images.items(), self.images, strict=True):
            frames = arrays[name].movedim(-1, 1) if channels_last(shape) else arrays[name]
            found.append(image(in_order(frames, frames.dtype, self._memory_format)))
        if self.layers is not None:
            numbers = [arrays[name].flatten(1) for name in self._numbers]
            found.append(self.layers(numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)))
        return found[0] if len(found) == 1 else torch.cat(found, 1)


class DenseLayers(nn.Module):
    """Linear layers of the widths given, each followed by `model.activation`."""

    def __init__(self, widths: tuple[int, ...], cfg: ModelConfig) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            orthogonal(nn.Linear(*fans), math.sqrt(2)) for fans in pairwise(widths)
        )
        self._activate = activate(cfg.activation)

    def forward(self, rows: Tensor) -> Tensor:
        for linear in self.linears:
            rows = self._activate(linear(rows).float())
        return rows


class NatureEncoder(nn.Module):
    """Three convolutions and a linear layer (Mnih et al. 2015)."""

    width = FEATURES

    def __init__(self, channels: int, height: int, pixels: int) -> None:
        super().__init__()
        before = (channels, *(filters for filters, _, _ in CONVS))
        self.convs = nn.ModuleList(
            orthogonal(nn.Conv2d(entering, *conv), math.sqrt(2))
            for entering, conv in zip(before, CONVS, strict=False)
        )
        self.linear = orthogonal(nn.Linear(flat_features(height, pixels), FEATURES), math.sqrt(2))

    def forward(self, frames: Tensor) -> Tensor:
        for conv in self.convs:
            frames = conv(frames).relu_()
        features: Tensor = self.linear(frames.flatten(1)).relu_()
        return features.float()


class ImpalaEncoder(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv 1802.01561, figure 3, right)."""

    width = IMPALA_FEATURES

    def __init__(self, channels: int, height: int, pixels: int) -> None:
        super().__init__()
        before = (channels, *IMPALA_CHANNELS)
        self.sections = nn.ModuleList(ConvSection(*pair) for pair in pairwise(before))
        for _ in IMPALA_CHANNELS:
            height, pixels = -(-height // 2), -(-pixels // 2)
        flat = IMPALA_CHANNELS[-1] * height * pixels
        self.linear = orthogonal(nn.Linear(flat, IMPALA_FEATURES), math.sqrt(2))

    def forward(self, frames: Tensor) -> Tensor:
        for section in self.sections:
            frames = section(frames)
        features: Tensor = self.linear(frames.relu_().flatten(1)).relu_()
        return features.float()


class ConvSection(nn.Module):
    """A convolution, a pooling that halves each direction, and two residual blocks."""

    def __init__(self, entering: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(entering, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(2))

    def forward(self, frames: Tensor) -> Tensor:
        frames = F.max_pool2d(self.conv(frames), 3, 2, 1)
        for block in self.blocks:
            frames = block(frames)
        return frames


class ResidualBlock(nn.Module):
    """``x + conv(relu(conv(relu(x))))``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        changed: Tensor = self.second(self.first(frames.relu()).relu_())
        return frames + changed


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[2], *shape[:2]) if channels_last(shape) else shape
