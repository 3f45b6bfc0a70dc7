"""Histograms of durations: bins, and quantiles against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.profiling.histogram import (
    FLOOR_S,
    GROWTH,
    Histogram,
    bin_of,
    quantile,
    upper_edge_s,
)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, 0), (1e-4, 0), (1.01e-4, 1), (2e-4, 4), (2.01e-4, 5), (1.6e-3, 16)],
)
def test_bin_of_a_duration_is_computed(seconds: float, expected: int) -> None:
    assert bin_of(seconds) == expected
    assert seconds <= upper_edge_s(expected) * (1 + 1e-9)


def test_four_bins_double_a_duration() -> None:
    assert upper_edge_s(0) == FLOOR_S
    assert upper_edge_s(8) == pytest.approx(4 * FLOOR_S)


def test_quantiles_are_within_one_bin_of_numpys() -> None:
    samples = np.random.default_rng(3).lognormal(-4, 1, 10_000)
    histogram: Histogram = {}
    for sample in samples:
        histogram[bin_of(sample)] = histogram.get(bin_of(sample), 0.0) + 1
    for q in (0.05, 0.5, 0.95, 0.99):
        exact = float(np.quantile(samples, q))
        found = quantile(histogram, q)
        assert found is not None
        assert exact / GROWTH <= found <= exact * GROWTH
    assert quantile({}, 0.5) is None
