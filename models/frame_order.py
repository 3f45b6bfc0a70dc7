"""The order in which frames lie in memory for convolutions.

cuDNN's kernels for tensor cores need channels_last, and transpose any other layout around each
convolution. On a CPU the backward pass of a few wide convolutions in float32 is faster in
channels_last too, by a quarter on a Zen 4 and by half on a Cascade Lake; without it, and in
bfloat16, torch's default order is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.device.choice import runs_behind


def in_order(frames: Tensor, dtype: torch.dtype) -> Tensor:
    """Frames ``[B, C, H, W]`` in ``dtype``, as the convolutions of their device take them."""
    if runs_behind(frames) or (dtype == torch.float32 and torch.is_grad_enabled()):
        return frames.to(dtype, memory_format=torch.channels_last)
    return frames.to(dtype)
