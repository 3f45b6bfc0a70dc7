"""Means over runs, and their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.monitor.student_t import t_95

Floats = npt.NDArray[np.float64]

# Values that are resampled together, which bounds the memory.
AT_ONCE = 1 << 21


class ConfidenceInterval(NamedTuple):
    """``mean`` ± ``half``; ``half`` is None for a single value."""

    mean: float
    half: float | None


def interval(values: Sequence[float]) -> ConfidenceInterval:
    """Returns the 95 % confidence interval of the mean of at least one independent value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return ConfidenceInterval(mean, None)

    half = t_95(len(values)) * statistics.stdev(values) / math.sqrt(len(values))
    return ConfidenceInterval(mean, half)


def iqm(values: Floats, axis: int = 0) -> Floats:
    """Returns the interquartile mean along an axis, without that axis.

    It is the mean without the lowest and the highest quarter of the values, each rounded down to
    whole values, so that up to three values give the plain mean.
    """
    count = values.shape[axis]
    cut = count // 4
    middle = np.sort(values, axis).take(range(cut, count - cut), axis)
    return np.asarray(middle.mean(axis))


def mean(values: Floats, axis: int = 0) -> Floats:
    """Returns the plain mean along an axis, without that axis."""
    return np.asarray(values.mean(axis))


STATISTICS: Mapping[str, Callable[[Floats, int], Floats]] = {"mean": mean, "iqm": iqm}


def bootstrap(
    strata: Sequence[Floats],
    statistic: Callable[[Floats, int], Floats],
    *,
    share: float = 0.95,
    resamples: int = 2000,
) -> tuple[Floats, Floats]:
    """Computes the stratified bootstrap interval of a statistic of all runs.

    Its ends are percentiles of the statistic's values on resamples, each of which draws as many
    runs of every task as there are, with replacement. With few runs the interval is too narrow:
    that of two runs reaches from one to the other.

    Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    2021.

    Args:
        strata: by task, float64 ``[runs, ...]``.
        statistic: of values along an axis, such as `iqm`.
        share: of the distribution that lies within the interval.
        resamples: number of resamples; they are the same in every call.

    Returns:
        The lower and the upper end, float64 ``[...]``.
    """
    rng = np.random.default_rng(0)
    values = np.concatenate(strata)

    # Each resample is a row of indices into `values`, [resamples, runs]; the runs of a task are
    # drawn from those of this task alone.
    begins = np.cumsum([0, *(len(stratum) for stratum in strata)])
    resampled_runs = np.concatenate(
        [
            begin + rng.integers(0, len(stratum), (resamples, len(stratum)))
            for begin, stratum in zip(begins, strata, strict=False)
        ],
        axis=1,
    )

    at_once = max(1, AT_ONCE // values.size)
    parts = [
        statistic(values[resampled_runs[first : first + at_once]], 1)
        for first in range(0, resamples, at_once)
    ]
    low, high = np.quantile(np.concatenate(parts), [(1 - share) / 2, (1 + share) / 2], axis=0)
    return low, high
