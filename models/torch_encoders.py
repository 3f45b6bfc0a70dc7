"""From the arrays of an observation to one vector of features, in torch.

Each image goes through convolutions of its own. Everything else is flattened, put side by side and
goes through layers. The results are put side by side, too. Features of small images go through the
layers, beside the numbers, so that a number may decide how an image is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.configs.model import ModelConfig
from penstock.configs.value_types import MemoryFormat
from penstock.models.frame_order import in_order
from penstock.models.general import channels_last, is_small
from penstock.models.layout import CONVS, FEATURES, flat_features
from penstock.models.torch_heads import orthogonal
from penstock.models.torch_trunks import activate

IMPALA_CHANNELS = (16, 32, 32)
IMPALA_FEATURES = 256


class Encoder(nn.Module):
    """Computes features of the arrays of an observation.

    Args:
        images: shapes of the images, by name.
        numbers: shapes of the other arrays, by name.
        cfg: the options of the network.
        memory_format: order of the images in memory; `auto` is by rule.
    """

    def __init__(
        self,
        images: dict[str, tuple[int, ...]],
        numbers: dict[str, tuple[int, ...]],
        cfg: ModelConfig,
        memory_format: MemoryFormat = "auto",
    ) -> None:
        super().__init__()
        self._images, self._numbers = images, list(numbers)
        # By rule on a CPU, too: narrow convolutions and pooling take half of the time, or less.
        by_rule: MemoryFormat = "channels_last" if cfg.kind == "impala_cnn" else "auto"
        self._memory_format = by_rule if memory_format == "auto" else memory_format
        encoders = [_image_encoder(shape, cfg) for shape in images.values()]
        self.images = nn.ModuleList(encoders)
        inputs = sum(math.prod(shape) for shape in numbers.values())
        inputs += sum(each.width for each in encoders if isinstance(each, SmallConvs))
        self.layers = DenseLayers((inputs, *cfg.hidden), cfg) if inputs else None
        large = sum(each.width for each in encoders if not isinstance(each, SmallConvs))
        self.width = large + (cfg.hidden[-1] if inputs else 0)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        found: list[Tensor] = []
        numbers = [arrays[name].flatten(1) for name in self._numbers]
        for (name, shape), image in zip(self._images.items(), self.images, strict=True):
            frames = arrays[name].movedim(-1, 1) if channels_last(shape) else arrays[name]
            features = image(in_order(frames, frames.dtype, self._memory_format))
            (numbers if isinstance(image, SmallConvs) else found).append(features)
        if self.layers is not None:
            found.append(self.layers(numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)))
        return found[0] if len(found) == 1 else torch.cat(found, 1)


class DenseLayers(nn.Module):
    """Linear layers, each followed by `model.activation`.

    ``widths`` are those of the inputs and of each layer.
    """

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


class SmallConvs(nn.Module):
    """Convolutions of 3 x 3 for images of few pixels, of which each may matter (`model.filters`).

    The first keeps every pixel, each further one takes every second. Their outputs are the
    features; the layers of `Encoder` follow.
    """

    def __init__(self, filters: Sequence[int], channels: int, height: int, pixels: int) -> None:
        super().__init__()
        strides = [1 if i == 0 else 2 for i in range(len(filters))]
        self.convs = nn.ModuleList(
            orthogonal(nn.Conv2d(*pair, 3, stride, padding=1), math.sqrt(2))
            for pair, stride in zip(pairwise((channels, *filters)), strides, strict=True)
        )
        for stride in strides:
            height, pixels = -(-height // stride), -(-pixels // stride)
        self.width: int = [channels, *filters][-1] * height * pixels

    def forward(self, frames: Tensor) -> Tensor:
        for conv in self.convs:
            frames = conv(frames).relu_()
        return frames.flatten(1).float()


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


def _image_encoder(
    shape: tuple[int, ...], cfg: ModelConfig
) -> SmallConvs | NatureEncoder | ImpalaEncoder:
    """Makes the convolutions that read an image."""
    channels, height, pixels = _channels_first(shape)
    if is_small(cfg, shape):
        return SmallConvs(cfg.filters, channels, height, pixels)
    kind = ImpalaEncoder if cfg.kind == "impala_cnn" else NatureEncoder
    return kind(channels, height, pixels)


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[2], *shape[:2]) if channels_last(shape) else shape
