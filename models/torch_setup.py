"""Process-wide settings of torch, for actors and learners."""

from __future__ import annotations

import torch

from penstock.core.memory import keep_freed_memory


def set_up_torch(threads: int) -> None:
    """Fix torch's threads, and keep freed activations for the next step.

    On a GPU fp32 is what IEEE 754 says: by default convolutions round their inputs to 10 bits
    (TF32), and a GPU would learn other weights than a CPU. Where speed matters there is bf16.
    cudnn tries its algorithms for each shape once, as a run has few shapes.
    """
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
