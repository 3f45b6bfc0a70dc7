"""Decides when a process returns freed memory to the kernel: not between two messages or steps.

By default glibc returns blocks of a megabyte and more as soon as they are freed. The next
allocation pays for every page again: up to a fifth of a training step, or of receiving.
"""

from __future__ import annotations

import ctypes

# Parameters of `mallopt`, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LIBC = ctypes.CDLL(None)
# The period in which a process of a run returns freed memory.
TRIM_S = 60.0
# Blocks of up to so many bytes are kept. Older glibc refuses more than 32 MiB.
LARGE = (1 << 30, 32 << 20)


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next allocations; does nothing without glibc."""
    mallopt = getattr(LIBC, "mallopt", None)
    if mallopt is None:
        return

    # The first size that glibc accepts.
    for nbytes in LARGE:
        if mallopt(M_MMAP_THRESHOLD, nbytes):
            break
    mallopt(M_TRIM_THRESHOLD, LARGE[0])


def give_back_memory() -> None:
    """Return freed memory to the kernel, once; does nothing without glibc.

    A process that keeps freed memory, and whose peers come and go, otherwise keeps its peak, and
    more where used blocks lie among free ones. It takes some milliseconds for a hundred megabytes:
    call it once a minute, not between two messages.
    """
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
