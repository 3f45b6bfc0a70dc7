"""Student's t at 95 %: the confidence interval of the mean of a few values.

It needs no numpy, so that a run's view starts without it.
"""

from __future__ import annotations

# Student's t, two-sided 95 %, by degrees of freedom from 1; beyond these the normal's.
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_95 = 1.960


def t_95(count: int) -> float:
    """Returns the factor on the standard error of ``count`` values, 2 or more, that gives half the
    interval."""
    return T_95[count - 2] if count - 2 < len(T_95) else NORMAL_95


def half_95(se: float | None, count: float | None) -> float | None:
    """Returns half the 95 % confidence interval of a mean.

    Args:
        se: standard error of the mean; None if it is unknown.
        count: number of values; None if it is unknown.

    Returns:
        None where one of these is unknown, and for a single value.
    """
    if se is None or count is None or count < 2:
        return None
    return t_95(int(count)) * se
