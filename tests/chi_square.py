"""Pearson's chi-square test, as far as tests with fixed seeds need it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Z = 3.719  # normal quantile of 1 - 1e-4: one in ten thousand right samplers would fail


def critical_value(degrees: int) -> float:
    """Exceeded with probability 1e-4; Wilson and Hilferty 1931: 4 % too high at 3 degrees."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + Z * math.sqrt(part)) ** 3


def assert_drawn_as(rows: npt.NDArray[Any], probabilities: npt.NDArray[np.float64]) -> None:
    """`rows` are independent draws of 0..len(probabilities) with these probabilities.

    Impossible rows were never drawn. Cells that expect fewer than 8 draws are taken together.
    """
    observed = np.bincount(rows, minlength=len(probabilities)).astype(np.float64)
    assert len(observed) == len(probabilities)
    assert not observed[probabilities == 0].any()
    expected = len(rows) * probabilities
    rare = expected < 8
    if expected[rare].sum() >= 8:
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    else:
        observed, expected = observed[~rare], expected[~rare]
    assert len(expected) > 3
    statistic = float((((observed - expected) ** 2) / expected).sum())
    assert statistic < critical_value(len(expected) - 1)
