"""Copies of many arrays, by several threads: numpy releases the interpreter lock for a large one,
and one core alone reaches only a part of a machine's memory bandwidth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Copies = Sequence[tuple[Array, Array]]  # targets and sources of one shape

LARGE_NBYTES = 1 << 18  # a copy of less is over before another thread has woken up
MOST_THREADS = 4
CORES_PER_THREAD = 4


class Copier:
    """Use `close` at the end; the threads start with the first large copy."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "copier") if threads > 1 else None

    def __call__(self, copies: Copies) -> None:
        """Copy all, of large arrays an equal share of the rows by each thread."""
        if self._pool is None:
            _copy(copies)
            return
        large = [pair for pair in copies if pair[0].nbytes >= LARGE_NBYTES]
        shares = [self._share(large, number) for number in range(self._threads)]
        others = [self._pool.submit(_copy, share) for share in shares[1:] if share]
        try:
            _copy(shares[0])
            _copy([pair for pair in copies if pair[0].nbytes < LARGE_NBYTES])
        finally:
            for other in others:  # the memory may not be used before they are done
                other.exception()
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _share(self, copies: Copies, number: int) -> list[tuple[Array, Array]]:
        parts = []
        for target, source in copies:
            first, stop = (len(target) * n // self._threads for n in (number, number + 1))
            parts.append((target[first:stop], source[first:stop]))
        return parts


def gather_threads(wanted: int | None, device: torch.device) -> int:
    """What `learner.gather_threads` means for a learner on a device."""
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return 1
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_THREADS, cores // CORES_PER_THREAD))


def _copy(copies: Copies) -> None:
    for target, source in copies:
        np.copyto(target, source)
