"""Ranks of a gloo group as threads of the test, and the layout that tests of codecs share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from penstock.configs.reduce import ReduceConfig
from penstock.core.interfaces import Codec, CodecContext, Collective
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.registry import make_codec
from penstock.learner.group.collective import GroupCollective

T = TypeVar("T")
Floats = npt.NDArray[Any]  # float32
Shapes = Sequence[tuple[str, tuple[int, ...]]]

SHAPES: Shapes = (
    ("first.weight", (40, 30)),
    ("first.bias", (40,)),
    ("second.weight", (7, 9, 3)),
    ("scale", (1,)),
    ("third.weight", (1, 1)),
    ("third.bias", (5,)),
    ("towers.weight", (2, 8, 12)),
    ("towers.bias", (2, 12)),
)
SIZE = sum(prod(shape) for _, shape in SHAPES)
CPU = torch.device("cpu")

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def codec_for(
    world: int,
    rank: int,
    shapes: Shapes = SHAPES,
    momentum: float = 0.9,
    device: torch.device = CPU,
    grad_clip: float | None = None,
    **options: Any,
) -> Codec:
    """Makes the codec of one rank for parameters of these shapes."""
    parts = parts_of((name, torch.empty(shape)) for name, shape in shapes)
    cfg = ReduceConfig(**({"bucket_mb": 0.003} | options))
    size = parts[-1].stop
    return make_codec(CodecContext(cfg, parts, size, device, world, rank, momentum, grad_clip))


def run_ranks(world: int, work: Callable[[GroupCollective], T]) -> list[T]:
    """Runs ``work`` on each rank of a real group of threads and returns the results by rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def one(rank: int) -> T:
        group: Any = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=20))
        return work(GroupCollective(group))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def reduce_all(codec: Codec, ring: Collective, update: int, grads: Floats) -> Floats:
    """Reduces a copy of ``grads`` (float32 ``[size]``) for one update and returns the sums."""
    work = torch.from_numpy(grads.copy())
    codec.begin(update)
    for bucket in codec.buckets:
        codec.reduce(bucket, work[bucket.start : bucket.stop], ring)
    result: Floats = work.numpy()
    return result


def gradients(world: int, updates: int, size: int = SIZE, seed: int = 0) -> Floats:
    """Gradients ``[updates, world, size]`` of very different scales; rank 1 is idle in update 2."""
    rng = np.random.default_rng(seed)
    scales = 10.0 ** rng.uniform(-3, 0, size)
    grads = (rng.standard_normal((updates, world, size)) * scales).astype(np.float32)
    if updates > 2 and world > 1:
        grads[2, 1] = 0.0
    return grads
