"""The first convolution of the Nature CNN over blocks of pixels instead of pixels.

A kernel of 8 x 8 with stride 4 over frames is, number by number, a kernel of 2 x 2 with stride 1
over blocks of 4 x 4 pixels, each of which is one place with all of its pixels as channels. A CPU's
units for products of bfloat16 want many channels, and frames have few: with blocks, forward and
backward pass of this convolution take half of the time. In float32 nothing is gained.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4  # pixels: the stride of the convolution


def divides(height: int, width: int) -> bool:
    """Whether frames consist of whole blocks."""
    return height % BLOCK == 0 and width % BLOCK == 0


def space_to_depth(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Frames ``[B, C, H, W]`` as ``[B, C * 16, H / 4, W / 4]`` in ``dtype``, channels_last."""
    count, channels, height, width = frames.shape
    rows, columns = height // BLOCK, width // BLOCK
    if frames.dtype == torch.uint8:  # four pixels of a row are copied as one number
        words = frames.contiguous().view(torch.int32)
        blocks = words.view(count, channels, rows, BLOCK, columns).permute(0, 2, 4, 1, 3)
        pixels = blocks.contiguous().view(torch.uint8)
    else:
        split = frames.reshape(count, channels, rows, BLOCK, columns, BLOCK)
        pixels = split.permute(0, 2, 4, 1, 3, 5)
    flat = pixels.reshape(count, rows, columns, channels * BLOCK * BLOCK)
    return flat.to(dtype).permute(0, 3, 1, 2)


def kernel_over_depth(kernel: Tensor) -> Tensor:
    """The kernel ``[F, C, K, K]`` of a stride of 4 as ``[F, C * 16, K / 4, K / 4]``, for
    `space_to_depth`."""
    filters, channels, size, _ = kernel.shape
    places = size // BLOCK
    split = kernel.reshape(filters, channels, places, BLOCK, places, BLOCK)
    return split.permute(0, 1, 3, 5, 2, 4).reshape(filters, -1, places, places)
