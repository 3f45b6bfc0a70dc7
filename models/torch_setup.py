"""Process-wide settings of torch, for actors and learners that compute on the CPU."""

from __future__ import annotations

import ctypes

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGE = (1 << 30, 32 << 20)  # bytes; older glibc refuses more than 32 MiB


def set_up_torch(threads: int) -> None:
    """Fix torch's threads, and let the process keep freed memory for the next activations.

    By default glibc hands activations of a megabyte and more back to the kernel after each step,
    and the next step pays for every page again: up to a fifth of a training step.
    """
    torch.set_num_threads(threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        any(mallopt(M_MMAP_THRESHOLD, nbytes) for nbytes in LARGE)
        mallopt(M_TRIM_THRESHOLD, LARGE[0])
