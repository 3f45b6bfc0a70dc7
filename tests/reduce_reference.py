"""What codecs compute, written down naively, for all ranks at once.

Each takes gradients float32 ``[updates, world, size]`` and cuts of the vector, and returns the sums
``[updates, size]`` that every rank must end with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np

from reduce_ring import Floats

Cuts = Sequence[tuple[int, int]]
Code = Callable[[Floats], Floats]  # of one block: what is read of it


def in_order(values: Floats) -> Floats:
    """The sum over ranks, added one after the other in float32."""
    total: Floats = values[0].copy()
    for more in values[1:]:
        total = total + more
    return total


def int8_block(x: Floats) -> Floats:
    scale = np.float32(np.abs(x).max()) / np.float32(127)
    if scale < np.finfo(np.float32).tiny:
        return np.zeros_like(x)
    codes = np.rint(x * (np.float32(1) / scale))
    return (codes * scale).astype(np.float32)


def onebit_block(x: Floats) -> Floats:
    """Returns a block with each value replaced by the mean of those with its sign."""
    positive, negative = x[x >= 0], x[x < 0]
    high = positive.astype(np.float64).mean() if len(positive) else 0.0
    low = negative.astype(np.float64).mean() if len(negative) else 0.0
    read = np.full_like(x, low)
    read[x >= 0] = high
    return read


def half(x: Floats, name: str) -> Floats:
    """Rounded to the nearest number of the format, of equally near ones to the even."""
    if name == "fp16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def two_phase(
    grads: Floats, cuts: Cuts, block: int, multiple: int, code: Code, feedback: bool
) -> Floats:
    """Blocks of about ``block`` values whose width is a ``multiple``, whole ones in each share."""
    updates, world, size = grads.shape
    error = np.zeros((world, size), np.float32)
    server_error = np.zeros(size, np.float32)
    sums = np.zeros((updates, size), np.float32)
    for u in range(updates):
        for start, stop in cuts:
            width = width_of(stop - start, world, block, multiple)
            for a in range(start, stop, width):
                b = min(a + width, stop)
                x = grads[u, :, a:b] + (error[:, a:b] if feedback else 0)
                read = np.stack([code(row) for row in x])
                error[:, a:b] = x - read
                total = in_order(read) + (server_error[a:b] if feedback else 0)
                sums[u, a:b] = code(total)
                server_error[a:b] = total - sums[u, a:b]
    return sums


def width_of(size: int, world: int, block: int, multiple: int) -> int:
    share = ceil(size / world)
    return ceil(share / ceil(share / block) / multiple) * multiple


def dropping(grads: Floats, cuts: Cuts, counts: Sequence[int]) -> Floats:
    """Aji & Heafield 2017, algorithm 1, with exactly ``counts`` values of each cut."""
    return dgc(grads, cuts, [counts] * len(grads), momentum=0.0, clip=None)


def dgc(
    grads: Floats,
    cuts: Cuts,
    counts: Sequence[Sequence[int]],
    momentum: float,
    clip: float | None,
) -> Floats:
    """Lin et al. 2018, algorithm 4 (vanilla momentum): per update and cut ``counts`` values.

    Each rank's whole gradient is clipped to ``clip`` / sqrt(ranks), before it is added up.
    """
    updates, world, size = grads.shape
    u = np.zeros((world, size), np.float32)
    v = np.zeros((world, size), np.float32)
    sums = np.zeros((updates, size), np.float32)
    for t in range(updates):
        for rank in range(world):
            bound = None if clip is None else clip * world**-0.5
            g = clipped(grads[t, rank].astype(np.float64), bound).astype(np.float32)
            for (start, stop), count in zip(cuts, counts[t], strict=True):
                for i in range(start, stop):
                    u[rank, i] = np.float32(momentum) * u[rank, i] + g[i]
                    v[rank, i] = v[rank, i] + u[rank, i]
                order = sorted(range(start, stop), key=lambda i: (-abs(v[rank, i]), i))
                for i in order[:count]:
                    sums[t, i] += v[rank, i]
                    v[rank, i] = u[rank, i] = 0.0
    return sums


def clipped(grads: Any, bound: float | None) -> Any:
    return grads if bound is None else grads * min(1.0, bound / (np.linalg.norm(grads) + 1e-6))


def coded(values: Any, error: Any, width: int) -> Any:
    """Returns what ranks read of ``values`` plus the residual, and updates the residual."""
    sent = values + error
    blocks = [sent[a : a + width] for a in range(0, len(sent), width)]
    read = np.concatenate([onebit_block(block) for block in blocks])
    error[:] = sent - read
    return read
