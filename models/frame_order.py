"""The order in which frames lie in memory for convolutions.

cuDNN's kernels for tensor cores need channels_last, and transpose any other layout around each
convolution. On a CPU the processor and the network decide, so a run times both
(`penstock.autotune.forms`). By rule, where nothing was timed, training in float32 takes
channels_last, which is faster by a quarter on a Zen 4 and by half on a Cascade Lake; inference, and
bfloat16, take torch's default order.

The first convolution of the Nature CNN may go over blocks of pixels instead of pixels
(`space_to_depth`). A kernel of 8 x 8 with stride 4 over frames is, number by number, a kernel of 2
x 2 with stride 1 over blocks of 4 x 4 pixels, each of which is one place with all of its pixels as
channels. A CPU's units for products of bfloat16 need many channels, and frames have few: with
blocks, forward and backward pass of this convolution take half of the time. In float32 nothing is
gained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.configs.value_types import MemoryFormat
from penstock.device.choice import runs_behind

FEW_CHANNELS = 4  # frames of at most so many channels are copied one channel at a time
BLOCK = 4  # pixels: the stride of the first convolution


def in_order(frames: Tensor, dtype: torch.dtype, memory_format: MemoryFormat = "auto") -> Tensor:
    """Returns frames ``[B, C, H, W]`` in a dtype and in an order in memory; `auto` is by rule."""
    if memory_format == "contiguous":
        return frames.to(dtype, memory_format=torch.contiguous_format)

    trains_in_float32 = dtype == torch.float32 and torch.is_grad_enabled()
    is_last_by_rule = runs_behind(frames) or trains_in_float32
    if memory_format == "channels_last" or is_last_by_rule:
        return _in_channels_last(frames, dtype)
    return frames.to(dtype)


def _in_channels_last(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns frames in a dtype and channels_last.

    On a CPU torch's one call for both goes through the numbers one by one, without vectors: for
    four channels of bytes it takes two to three times as long as the copies here.
    """
    if runs_behind(frames):
        return frames.to(dtype, memory_format=torch.channels_last)
    if frames.dtype != torch.uint8 or frames.shape[1] > FEW_CHANNELS:
        return frames.to(dtype).contiguous(memory_format=torch.channels_last)

    ordered = torch.empty(
        frames.shape, dtype=dtype, device=frames.device, memory_format=torch.channels_last
    )
    for channel in range(frames.shape[1]):
        ordered[:, channel].copy_(frames[:, channel])
    return ordered


def divides(height: int, width: int) -> bool:
    """Returns whether frames consist of whole blocks."""
    return height % BLOCK == 0 and width % BLOCK == 0


def space_to_depth(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns frames with the pixels of each block as channels of one place.

    Frames ``[B, C, H, W]`` become ``[B, C * 16, H / 4, W / 4]`` in ``dtype``, channels_last.
    """
    count, channels, height, width = frames.shape
    rows = height // BLOCK
    columns = width // BLOCK

    # The axes of `pixels` are batch, row of blocks, column of blocks, channel, and row and column
    # within a block.
    if frames.dtype == torch.uint8:
        # Bytes are copied as words, four pixels of a row at a time.
        words = frames.contiguous().view(torch.int32)
        blocks = words.view(count, channels, rows, BLOCK, columns).permute(0, 2, 4, 1, 3)
        pixels = blocks.contiguous().view(torch.uint8)
    else:
        split = frames.reshape(count, channels, rows, BLOCK, columns, BLOCK)
        pixels = split.permute(0, 2, 4, 1, 3, 5)

    flat = pixels.reshape(count, rows, columns, channels * BLOCK * BLOCK)
    return flat.to(dtype).permute(0, 3, 1, 2)


def kernel_over_depth(kernel: Tensor) -> Tensor:
    """Returns the kernel of a convolution with stride 4 for frames of `space_to_depth`.

    ``[F, C, K, K]`` becomes ``[F, C * 16, K / 4, K / 4]``.
    """
    filters, channels, size, _ = kernel.shape
    places = size // BLOCK
    split = kernel.reshape(filters, channels, places, BLOCK, places, BLOCK)
    return split.permute(0, 1, 3, 5, 2, 4).reshape(filters, -1, places, places)
