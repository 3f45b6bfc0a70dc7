"""From the arrays of an observation to one vector of features, in torch.

Each image goes through convolutions of its own. Numbers that stand for choices are replaced by
vectors that are learnt. Everything else is flattened, put side by side and goes through layers. The
results are put side by side, too. Features of small images go through the
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
from penstock.models.general import Input, channels_last, embedding_width, is_small
from penstock.models.layout import FEATURES, flat_features
from penstock.models.torch_heads import orthogonal
from penstock.models.torch_norm import conv_type, make_hidden
from penstock.models.torch_trunks import activate, nature_convs

IMPALA_CHANNELS = (16, 32, 32)
IMPALA_FEATURES = 256
# With 1, torch's default, a shop of 10,000 items is learnt in ten times as many steps.
EMBEDDING_STD = 0.01


class VectorReader(nn.Module):
    """Base of modules that read the arrays of an observation that are no images."""

    embeddings: nn.ModuleList
    """Of each array of choices."""

    def _add_vectors(self, arrays: Sequence[Input], cfg: ModelConfig) -> int:
        """Make the embeddings, and return the width of all `_vectors` of these arrays."""
        numbers = [array for array in arrays if not array.is_image and not array.choices]
        choices = [array for array in arrays if array.choices]
        self._numbers = [array.name for array in numbers]
        self._choices = [array.name for array in choices]

        embeddings = [Embeddings(array.choices, cfg) for array in choices]
        self.embeddings = nn.ModuleList(embeddings)
        numbers_width = sum(math.prod(array.shape) for array in numbers)
        return numbers_width + sum(embedding.width for embedding in embeddings)

    def _vectors(self, arrays: dict[str, Tensor]) -> list[Tensor]:
        """Returns the numbers, then the embeddings of choices, each ``[B, width]``."""
        vectors = [arrays[name].flatten(1) for name in self._numbers]
        for name, embeddings in zip(self._choices, self.embeddings, strict=True):
            vectors.append(embeddings(arrays[name]))
        return vectors


class Encoder(VectorReader):
    """Computes features of the arrays of an observation.

    Args:
        arrays: what it reads.
        cfg: the options of the network.
        memory_format: order of the images in memory; `auto` is by rule.
        noisy: whether the weights of linear layers have noise.
    """

    def __init__(
        self,
        arrays: Sequence[Input],
        cfg: ModelConfig,
        memory_format: MemoryFormat = "auto",
        *,
        noisy: bool = False,
    ) -> None:
        super().__init__()
        images = [array for array in arrays if array.is_image]
        self._images = [(image.name, channels_last(image.shape)) for image in images]

        # This rule holds on a CPU, too: narrow convolutions and pooling take at most half the time.
        rule: MemoryFormat = "channels_last" if cfg.kind == "impala_cnn" else "auto"
        self._memory_format = rule if memory_format == "auto" else memory_format

        encoders = [_image_encoder(image.shape, cfg, noisy=noisy) for image in images]
        self.images = nn.ModuleList(encoders)
        small_widths = [encoder.width for encoder in encoders if isinstance(encoder, SmallConvs)]
        large_widths = [
            encoder.width for encoder in encoders if not isinstance(encoder, SmallConvs)
        ]

        # The layers read the numbers, the embeddings and the features of small images.
        inputs = self._add_vectors(arrays, cfg) + sum(small_widths)
        widths = (inputs, *cfg.hidden)
        self.layers = DenseLayers(widths, cfg, noisy=noisy) if inputs else None
        layers_width = cfg.hidden[-1] if inputs else 0
        self.width = sum(large_widths) + layers_width

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        """Returns float32 ``[B, width]``; arrays are ``[B, *shape]``, with values near 1."""
        features: list[Tensor] = []
        layer_inputs = self._vectors(arrays)
        for (name, is_channels_last), encoder in zip(self._images, self.images, strict=True):
            frames = arrays[name].movedim(-1, 1) if is_channels_last else arrays[name]
            image_features = encoder(in_order(frames, frames.dtype, self._memory_format))
            if isinstance(encoder, SmallConvs):
                layer_inputs.append(image_features)
            else:
                features.append(image_features)

        if self.layers is not None:
            features.append(self.layers(_side_by_side(layer_inputs)))
        return _side_by_side(features)


class Embeddings(nn.Module):
    """A vector for each choice of the numbers of an array, learnt with the network.

    ``counts`` is the number of choices of each. The vectors begin near 0, as those of fastai, so
    that what is learnt of a choice in a few steps counts more than what they were.
    """

    def __init__(self, counts: tuple[int, ...], cfg: ModelConfig) -> None:
        super().__init__()
        tables = [nn.Embedding(count, embedding_width(count, cfg)) for count in counts]
        for table in tables:
            nn.init.normal_(table.weight, std=EMBEDDING_STD)
        self.tables = nn.ModuleList(tables)
        self.width: int = sum(table.embedding_dim for table in tables)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns the vectors side by side ``[B, width]``, of choices ``[B, numbers]``."""
        choices = numbers.long().unbind(1)
        return _side_by_side(
            [table(choice) for table, choice in zip(self.tables, choices, strict=True)]
        )


class DenseLayers(nn.Module):
    """Linear layers, normalised if `model.layer_norm`, each followed by `model.activation`.

    ``widths`` are those of the inputs and of each layer. If ``noisy``, weights have noise.
    """

    def __init__(self, widths: tuple[int, ...], cfg: ModelConfig, *, noisy: bool = False) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            orthogonal(
                make_hidden(fan_in, fan_out, noisy=noisy, layer_norm=cfg.layer_norm), math.sqrt(2)
            )
            for fan_in, fan_out in pairwise(widths)
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

    def __init__(self, cfg: ModelConfig, channels: int, height: int, pixels: int) -> None:
        super().__init__()
        all_channels = (channels, *cfg.filters)
        strides = [1 if i == 0 else 2 for i in range(len(cfg.filters))]
        conv = conv_type(cfg.layer_norm)
        self.convs = nn.ModuleList(
            orthogonal(conv(entering, leaving, 3, stride, padding=1), math.sqrt(2))
            for (entering, leaving), stride in zip(pairwise(all_channels), strides, strict=True)
        )

        for stride in strides:
            height = _strided(height, stride)
            pixels = _strided(pixels, stride)
        self.width: int = all_channels[-1] * height * pixels

    def forward(self, frames: Tensor) -> Tensor:
        for conv in self.convs:
            frames = conv(frames).relu_()
        return frames.flatten(1).float()


class NatureEncoder(nn.Module):
    """Three convolutions and a linear layer (Mnih et al. 2015)."""

    width = FEATURES

    def __init__(
        self,
        channels: int,
        height: int,
        pixels: int,
        *,
        noisy: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.convs = nature_convs(channels, layer_norm=layer_norm)
        flat = flat_features(height, pixels)
        linear = make_hidden(flat, FEATURES, noisy=noisy, layer_norm=layer_norm)
        self.linear = orthogonal(linear, math.sqrt(2))

    def forward(self, frames: Tensor) -> Tensor:
        for conv in self.convs:
            frames = conv(frames).relu_()
        features: Tensor = self.linear(frames.flatten(1)).relu_()
        return features.float()


class ImpalaEncoder(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv 1802.01561, figure 3, right)."""

    width = IMPALA_FEATURES

    def __init__(
        self,
        channels: int,
        height: int,
        pixels: int,
        *,
        noisy: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        all_channels = (channels, *IMPALA_CHANNELS)
        self.sections = nn.ModuleList(
            ConvSection(entering, leaving, layer_norm=layer_norm)
            for entering, leaving in pairwise(all_channels)
        )

        for _ in IMPALA_CHANNELS:
            height = _strided(height, 2)
            pixels = _strided(pixels, 2)
        flat = IMPALA_CHANNELS[-1] * height * pixels
        linear = make_hidden(flat, IMPALA_FEATURES, noisy=noisy, layer_norm=layer_norm)
        self.linear = orthogonal(linear, math.sqrt(2))

    def forward(self, frames: Tensor) -> Tensor:
        for section in self.sections:
            frames = section(frames)
        features: Tensor = self.linear(frames.relu_().flatten(1)).relu_()
        return features.float()


class ConvSection(nn.Module):
    """A convolution, a pooling that halves each direction, and two residual blocks."""

    def __init__(self, entering: int, channels: int, *, layer_norm: bool = False) -> None:
        super().__init__()
        self.conv = conv_type(layer_norm)(entering, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            ResidualBlock(channels, layer_norm=layer_norm) for _ in range(2)
        )

    def forward(self, frames: Tensor) -> Tensor:
        frames = F.max_pool2d(self.conv(frames), kernel_size=3, stride=2, padding=1)
        for block in self.blocks:
            frames = block(frames)
        return frames


class ResidualBlock(nn.Module):
    """``x + conv(relu(conv(relu(x))))``."""

    def __init__(self, channels: int, *, layer_norm: bool = False) -> None:
        super().__init__()
        conv = conv_type(layer_norm)
        self.first = conv(channels, channels, 3, padding=1)
        self.second = conv(channels, channels, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        residual: Tensor = self.second(self.first(frames.relu()).relu_())
        return frames + residual


def _image_encoder(
    shape: tuple[int, ...], cfg: ModelConfig, *, noisy: bool
) -> SmallConvs | NatureEncoder | ImpalaEncoder:
    """Makes the convolutions that read an image."""
    channels, height, pixels = _channels_first(shape)
    if is_small(cfg, shape):
        return SmallConvs(cfg, channels, height, pixels)
    kind = ImpalaEncoder if cfg.kind == "impala_cnn" else NatureEncoder
    return kind(channels, height, pixels, noisy=noisy, layer_norm=cfg.layer_norm)


def _side_by_side(rows: list[Tensor]) -> Tensor:
    """Returns rows ``[B, width]`` put side by side; a single tensor is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def _strided(extent: int, stride: int) -> int:
    """Returns the extent after a convolution that keeps the size of images but for its stride."""
    return -(-extent // stride)


def _channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[2], *shape[:2]) if channels_last(shape) else shape
