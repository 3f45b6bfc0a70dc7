"""The order in which frames lie in memory for convolutions.

cuDNN's kernels for tensor cores need channels_last, and transpose any other layout around each
convolution. On a CPU both layouts are equally fast in bfloat16, so frames keep theirs.
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
