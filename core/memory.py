"""How a process's memory goes back to the kernel: not between two messages, nor between two steps.

By default glibc gives blocks of a megabyte and more back as soon as they are free, and whoever asks
for the next one pays for every page again: up to a fifth of a training step, or of receiving.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGE = (1 << 30, 32 << 20)  # bytes; older glibc refuses more than 32 MiB


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next allocations; does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        any(mallopt(M_MMAP_THRESHOLD, nbytes) for nbytes in LARGE)
        mallopt(M_TRIM_THRESHOLD, LARGE[0])
