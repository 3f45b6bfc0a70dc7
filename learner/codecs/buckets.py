"""Buckets: which parts of the flat gradient are reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, GradientPart
from penstock.device.choice import device_of

VALUE_NBYTES = 4  # size of a float32

# Names of a layer's parameters.
WEIGHT = "weight"
BIAS = "bias"

# Default sizes of a bucket, in MB. On a GPU the backward pass is short and each bucket costs kernel
# launches, so buckets are larger; 25 MB is also the default of torch's DistributedDataParallel.
CPU_MB = 1.0
GPU_MB = 25.0


def parts_of(parameters: Iterable[tuple[str, Tensor]]) -> tuple[GradientPart, ...]:
    """Returns the layers in the flat vector of named parameters, which follow one another there.

    A weight ``[towers, in, out]`` whose bias is ``[towers, out]`` is the same layer of several
    towers side by side (`models.torch_trunks.Towers`): each tower's is a part of its own.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters}
    parts: list[GradientPart] = []
    start = 0
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        towers = _towers(shapes, module) if kind in (WEIGHT, BIAS) else None
        layer_shape = shape if towers is None else shape[1:]
        is_bias = kind == BIAS or len(layer_shape) < 2
        rows = 1 if is_bias else layer_shape[0]

        for tower in range(towers or 1):
            stop = start + prod(layer_shape)
            parts.append(GradientPart(name, start, stop, is_bias=is_bias, rows=rows, tower=tower))
            start = stop
    return tuple(parts)


def _towers(shapes: Mapping[str, tuple[int, ...]], module: str) -> int | None:
    """Returns the number of towers that a module's weight and bias hold; None for an ordinary
    layer.

    ``shapes`` are those of all parameters, by name.
    """
    prefix = f"{module}." if module else ""
    weight = shapes.get(prefix + WEIGHT, ())
    bias = shapes.get(prefix + BIAS, ())
    is_stacked = len(weight) == 3 and bias == (weight[0], weight[2])
    return weight[0] if is_stacked else None


def bucket_nbytes(bucket_mb: float | None, device: torch.device) -> int:
    """Returns the most bytes of a bucket by `learner.reduce.bucket_mb`.

    Its default, for None, depends on the device.
    """
    if bucket_mb is None:
        bucket_mb = GPU_MB if device_of(device).runs_behind else CPU_MB
    return round(bucket_mb * 1e6)


def buckets_of(parts: Sequence[GradientPart], nbytes: int) -> tuple[Bucket, ...]:
    """Cut ``parts`` into buckets of at most ``nbytes`` of float32, the last parameters first.

    So the first bucket is the first to be ready in a backward pass. A parameter is never cut, as
    its gradient is complete at once: a larger one is a bucket of its own.
    """
    buckets: list[Bucket] = []
    collected: list[GradientPart] = []  # parts of the next bucket, in order
    for parameter_parts in reversed(_parts_by_parameter(parts)):
        if collected:
            values = collected[-1].stop - parameter_parts[0].start
            if values * VALUE_NBYTES > nbytes:
                buckets.append(_bucket(collected))
                collected = []
        collected = [*parameter_parts, *collected]

    if collected:
        buckets.append(_bucket(collected))
    return tuple(buckets)


def _parts_by_parameter(parts: Sequence[GradientPart]) -> list[list[GradientPart]]:
    """Returns the parts of each parameter: one, or one for each tower."""
    parameters: list[list[GradientPart]] = []
    for part in parts:
        if part.tower:
            parameters[-1].append(part)
        else:
            parameters.append([part])
    return parameters


def _bucket(parts: Sequence[GradientPart]) -> Bucket:
    """Returns the bucket of ``parts`` that follow one another."""
    return Bucket(parts[0].start, parts[-1].stop, tuple(parts))
