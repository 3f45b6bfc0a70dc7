"""How a process's memory goes back to the kernel: not between two messages, nor between two steps.

By default glibc gives blocks of a megabyte and more back as soon as they are free, and whoever asks
for the next one pays for every page again: up to a fifth of a training step, or of receiving.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LIBC = ctypes.CDLL(None)
TRIM_S = 60.0  # between two times that a process of a run gives back what it has freed
LARGE = (1 << 30, 32 << 20)  # bytes; older glibc refuses more than 32 MiB


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next allocations; does nothing without glibc."""
    mallopt = getattr(LIBC, "mallopt", None)
    if mallopt is not None:
        any(mallopt(M_MMAP_THRESHOLD, nbytes) for nbytes in LARGE)
        mallopt(M_TRIM_THRESHOLD, LARGE[0])


def give_back_memory() -> None:
    """Give what was freed back to the kernel, once; does nothing without glibc.

    A process that keeps freed memory, and whose peers come and go, otherwise keeps what it needed
    at its busiest, and more where blocks that are in use lie among those that are free. It takes
    some milliseconds for a hundred megabytes: call it once a minute, not between two messages.
    """
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
