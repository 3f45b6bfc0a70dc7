"""Buckets: which parts of the flat gradient are reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, GradientPart
from penstock.device.choice import device_of

VALUE_NBYTES = 4  # of float32
# On a GPU the backward pass is short and each bucket costs kernel launches, so buckets are larger;
# 25 MB is also the default of torch's DistributedDataParallel.
CPU_MB, GPU_MB = 1.0, 25.0


def parts_of(parameters: Iterable[tuple[str, Tensor]]) -> tuple[GradientPart, ...]:
    """The position of each named parameter when they follow one another."""
    parts, start = [], 0
    for name, parameter in parameters:
        stop = start + parameter.numel()
        is_bias = parameter.ndim < 2
        parts.append(GradientPart(name, start, stop, is_bias, 1 if is_bias else parameter.shape[0]))
        start = stop
    return tuple(parts)


def bucket_nbytes(bucket_mb: float | None, device: torch.device) -> int:
    """Most bytes of a bucket by `learner.reduce.bucket_mb`, whose default depends on the device."""
    if bucket_mb is None:
        bucket_mb = GPU_MB if device_of(device).runs_behind else CPU_MB
    return round(bucket_mb * 1e6)


def buckets_of(parts: Sequence[GradientPart], nbytes: int) -> tuple[Bucket, ...]:
    """Cut ``parts`` into buckets of at most ``nbytes`` of float32, the last parameters first.

    So the first bucket is the first to be ready in a backward pass. A parameter is never cut: a
    larger one is a bucket of its own.

    Raises ValueError if the parts leave gaps.
    """
    for before, after in pairwise(parts):
        if before.stop != after.start:
            raise ValueError(f"{after.name} starts at {after.start}, not at {before.stop}")
    buckets: list[Bucket] = []
    held: list[GradientPart] = []
    for part in reversed(parts):
        if held and (held[0].stop - part.start) * VALUE_NBYTES > nbytes:
            buckets.append(_bucket(held))
            held = []
        held.append(part)
    return (*buckets, _bucket(held)) if held else ()


def _bucket(reverse: Sequence[GradientPart]) -> Bucket:
    return Bucket(reverse[-1].start, reverse[0].stop, tuple(reversed(reverse)))
