"""Process-wide settings of torch, for actors and learners."""

from __future__ import annotations

import warnings

import torch

from penstock.core.memory import keep_freed_memory


def set_up_torch(threads: int) -> None:
    """Set torch's number of threads and its precision, and keep freed activations for reuse.

    On a GPU fp32 means IEEE 754 single precision: TF32, torch's default for convolutions, rounds
    inputs to 10 mantissa bits, and results would differ from a CPU's. Use bf16 for speed.

    cuDNN measures its algorithms for each shape once, as a run has few shapes. So runs on a GPU are
    not equal bit for bit; on a CPU they are.
    """
    torch.set_num_threads(threads)

    # torch 2.9 warns that these names are old; torch 2.6 has no others.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False

    torch.backends.cudnn.benchmark = True
    keep_freed_memory()
