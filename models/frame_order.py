"""The order in which frames lie in memory for convolutions.

cuDNN's kernels for tensor cores need channels_last, and transpose any other layout around each
convolution. On a CPU the processor and the network decide, so a run times both
(`penstock.autotune.forms`). By rule, where nothing was timed, training in float32 takes
channels_last, which is faster by a quarter on a Zen 4 and by half on a Cascade Lake; inference, and
bfloat16, take torch's default order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.configs.value_types import MemoryFormat
from penstock.device.choice import runs_behind

FEW_CHANNELS = 4  # up to so many are copied one at a time


def in_order(frames: Tensor, dtype: torch.dtype, wanted: MemoryFormat = "auto") -> Tensor:
    """Frames ``[B, C, H, W]`` in ``dtype``, in the order that is ``wanted``; `auto` by rule."""
    if wanted == "contiguous":
        return frames.to(dtype, memory_format=torch.contiguous_format)
    by_rule = runs_behind(frames) or (dtype == torch.float32 and torch.is_grad_enabled())
    if wanted == "channels_last" or by_rule:
        return _in_channels_last(frames, dtype)
    return frames.to(dtype)


def _in_channels_last(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Frames in ``dtype`` and channels_last.

    On a CPU torch's one call for both goes through the numbers one by one, without vectors: for
    four channels of bytes it takes two to three times as long as this.
    """
    if runs_behind(frames):
        return frames.to(dtype, memory_format=torch.channels_last)
    if frames.dtype != torch.uint8 or frames.shape[1] > FEW_CHANNELS:
        return frames.to(dtype).contiguous(memory_format=torch.channels_last)
    found = torch.empty(
        frames.shape, dtype=dtype, device=frames.device, memory_format=torch.channels_last
    )
    for channel in range(frames.shape[1]):
        found[:, channel].copy_(frames[:, channel])
    return found
