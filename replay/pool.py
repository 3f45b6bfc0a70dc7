"""Big output arrays that are reused once nobody refers to them any more.

Fresh memory costs a page fault for every 4 KiB, more than copying the bytes. An array of the pool
is taken again when the pool holds its only reference: views and tensors made from it hold one too.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

BIG_NBYTES = 1 << 16  # malloc reuses smaller ones itself
MOST_KEPT = 8  # of one shape and dtype: prefetching holds a few


def _references_of_unused() -> int:
    """What getrefcount says in the loop below of an array that the pool alone has: it differs
    between versions of Python."""
    kept = [np.empty(0)]
    for array in kept:
        return sys.getrefcount(array)
    raise AssertionError


_UNUSED = _references_of_unused()


class Pool:
    """Arrays by shape and dtype. Used under the buffer's lock."""

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[int, ...], np.dtype[Any]], list[npt.NDArray[Any]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An array with whatever was in it."""
        if math.prod(shape) * dtype.itemsize < BIG_NBYTES:
            return np.empty(shape, dtype)
        kept = self._kept.setdefault((shape, dtype), [])
        for array in kept:
            if sys.getrefcount(array) == _UNUSED:
                return array
        made = np.empty(shape, dtype)
        if len(kept) < MOST_KEPT:
            kept.append(made)
        return made
