"""Shifts and scales the numbers of an update to mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from penstock.device.choice import runs_behind

SMALL = 1e-8  # added to a deviation that may be 0


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
    exact = values.double()  # so that one pass is enough
    sums = torch.stack((mask.sum().double(), exact.sum(), exact.dot(exact)))
    if add_others is not None:
        add_others(sums)
    if not runs_behind(sums):  # the same numbers, without a call of torch for each operation
        number, total, square = map(float, sums.tolist())
        number = max(number, 1.0)
        average = total / number
        spread = np.float32(sqrt(max(square / number - average * average, 0.0)))
        divisor = float(spread + np.float32(SMALL))
        return (values - average) * mask / divisor
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    deviation = (sums[2] / count - mean.square()).clamp_(min=0).sqrt_()
    return (values - mean.float()) * mask / (deviation.float() + SMALL)
