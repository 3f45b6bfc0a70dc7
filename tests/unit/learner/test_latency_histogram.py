"""Ages of trained steps: ranges that are spread over bins, against single durations."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.specs import HEADER
from penstock.learner.latency_histogram import UNCOUNTED, LatencyHistogram, add_spread
from penstock.profiling.histogram import Histogram, bin_of, upper_edge_s


def test_a_range_is_divided_at_the_edges_of_its_bins() -> None:
    histogram: Histogram = {}
    add_spread(histogram, np.array([2e-4]), np.array([4e-4]), np.array([100]))
    by_hand = {  # bin 4 has its edge alone
        4: 0.0,
        5: upper_edge_s(5) - 2e-4,
        6: upper_edge_s(6) - upper_edge_s(5),
        7: upper_edge_s(7) - upper_edge_s(6),
        8: 4e-4 - upper_edge_s(7),
    }
    assert histogram == pytest.approx({bin_: 5e5 * width for bin_, width in by_hand.items()})


def test_several_ranges_are_divided_as_their_single_durations() -> None:
    least_s = np.array([0.0, 1.1e-3, 3e-2, 7e-4, 3e-3])
    most_s = np.array([5e-5, 4e-3, 0.5, 7e-4, 0.02])  # one of them has no width
    counts = np.array([5, 16, 32, 7, 1], np.uint64)
    histogram: Histogram = {}
    add_spread(histogram, least_s, most_s, counts)

    pieces = 20_000
    expected: Histogram = {}
    for least, most, count in zip(least_s, most_s, counts.tolist(), strict=True):
        for duration_s in least + (most - least) * (np.arange(pieces) + 0.5) / pieces:
            bin_ = bin_of(duration_s)
            expected[bin_] = expected.get(bin_, 0.0) + count / pieces
    assert sum(histogram.values()) == pytest.approx(61)
    assert {bin_: n for bin_, n in histogram.items() if n} == pytest.approx(expected, abs=2e-3)


def test_slots_of_many_batches_are_counted_each_once() -> None:
    latency = LatencyHistogram()
    for batch in range(3):
        headers = np.zeros(UNCOUNTED // 2 + 1, HEADER)
        headers["started_s"] = headers["published_s"] = 10.0
        headers["steps"] = 2
        latency.add(headers, at_s=10.5 + batch)

    steps = float(2 * (UNCOUNTED // 2 + 1))
    counts = {bin_: count for bin_, count in latency.take().items() if count}
    assert counts == {bin_of(0.5): steps, bin_of(1.5): steps, bin_of(2.5): steps}
    assert latency.counts == {}
