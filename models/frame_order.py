"""The order in which frames lie in memory for convolutions.

Tensor cores of a GPU take all channels of a pixel side by side (channels_last), and cudnn
transposes everything else around each convolution. On a CPU both orders take the same time in
bfloat16, and frames come as planes: nothing is transposed there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.device.choice import runs_behind


def in_order(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Frames ``[B, C, H, W]`` in ``dtype``, as the convolutions of their device take them."""
    if runs_behind(frames):
        return frames.to(dtype, memory_format=torch.channels_last)
    return frames.to(dtype)
