"""The mean over runs and its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t, two-sided 95 %, by degrees of freedom from 1; beyond these the normal's.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_95 = 1.960


class ConfidenceInterval(NamedTuple):
    """``mean`` ± ``half``; ``half`` is None for a single value."""

    mean: float
    half: float | None


def t_95(count: int) -> float:
    """Factor on the standard error of ``count`` values, 2 or more, that gives the interval."""
    return T_95[count - 2] if count - 2 < len(T_95) else NORMAL_95


def interval(values: Sequence[float]) -> ConfidenceInterval:
    """The 95 % confidence interval of the mean of at least one independent value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return ConfidenceInterval(mean, None)
    return ConfidenceInterval(
        mean, t_95(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    )
