"""Shifts and scales the numbers of an update to mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from penstock.device.choice import runs_behind

SMALL = 1e-8  # is added to the deviation, which may be 0


def normalized(
    values: Tensor, mask: Tensor, add_others: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Returns values shifted and scaled to mean 0 and standard deviation 1 over the alive rows.

    Args:
        values: float32 ``[B]``, 0 on rows that are not alive.
        mask: float32 ``[B]``, 1 on alive rows and 0 on others.
        add_others: adds to a tensor, in place, those of other learners, so that mean and deviation
            are over the rows of all of them.

    Returns:
        Float32 ``[B]``, 0 on rows that are not alive.
    """
    # Float64 is exact enough for one pass: the variance is the mean square minus the squared mean.
    exact = values.double()
    sums = torch.stack((mask.sum().double(), exact.sum(), exact.dot(exact)))
    if add_others is not None:
        add_others(sums)

    # On a CPU the same numbers are computed without a call of torch for each operation.
    if not runs_behind(sums):
        count, total, square = map(float, sums.tolist())
        count = max(count, 1.0)
        mean = total / count
        variance = max(square / count - mean * mean, 0.0)
        divisor = float(np.float32(sqrt(variance)) + np.float32(SMALL))
        return (values - mean) * mask / divisor

    counts = sums[0].clamp(min=1)
    means = sums[1] / counts
    deviations = (sums[2] / counts - means.square()).clamp_(min=0).sqrt_()
    return (values - means.float()) * mask / (deviations.float() + SMALL)
