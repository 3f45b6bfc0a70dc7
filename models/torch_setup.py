"""Process-wide settings of torch, for actors and learners."""

from __future__ import annotations

import warnings

import torch

from penstock.core.memory import keep_freed_memory


def set_up_torch(threads: int) -> None:
    """Fix torch's threads, and keep freed activations for the next step.

    On a GPU fp32 means IEEE 754 single precision: TF32, torch's default for convolutions, rounds
    inputs to 10 mantissa bits, and results would differ from a CPU's. Use bf16 for speed.

    cuDNN measures its algorithms for each shape once, as a run has few shapes. So runs on a GPU are
    not equal bit for bit; on a CPU they are.
    """
    torch.set_num_threads(threads)
    with warnings.catch_warnings():  # torch 2.9 calls these names old; torch 2.6 has no others
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
