"""Durations as a histogram whose bins grow by a constant factor: small, and easily added up.

Bin 0 holds what is at most `FLOOR_S`, bin i > 0 what is in (edge(i-1), edge(i)], where edge(i) is
FLOOR_S x GROWTH^i. A quantile is off by less than a bin, 19 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FLOOR_S = 1e-4
# The last bin holds what is longer, also what is not finite.
MOST_S = 1e9
GROWTH = 2**0.25
LATENCIES = (50, 95, 99)  # the quantiles in metrics, in per cent

Histogram = dict[int, float]
"""The number of durations by bin, which may be a fraction."""


def bin_of(seconds: float) -> int:
    """Returns the bin of a duration."""
    if seconds <= FLOOR_S:
        return 0
    growths = math.log(min(seconds, MOST_S) / FLOOR_S) / math.log(GROWTH)
    return math.ceil(growths - 1e-9)  # an edge belongs to the bin below, in spite of rounding


def upper_edge_s(bin_: int, floor_s: float = FLOOR_S) -> float:
    """Returns the longest duration that a bin holds, in seconds, if bin 0 holds ``floor_s``."""
    return floor_s * float(GROWTH**bin_)


def quantile(histogram: Mapping[int, float], q: float, floor_s: float = FLOOR_S) -> float | None:
    """Returns the duration in seconds that a share ``q`` of all does not exceed; None without any.

    Bin 0 holds what is at most ``floor_s``. Within a bin durations are taken as evenly spread.
    """
    total = sum(histogram.values())
    if not total:
        return None

    remaining = q * total
    for bin_ in sorted(histogram):
        count = histogram[bin_]
        if remaining <= count:
            low_s = upper_edge_s(bin_ - 1, floor_s) if bin_ else 0.0
            return low_s + (upper_edge_s(bin_, floor_s) - low_s) * remaining / count
        remaining -= count
    return upper_edge_s(max(histogram), floor_s)  # rounding has left a rest


def latency_figures(histogram: Mapping[int, float]) -> dict[str, Any]:
    """Returns the figures of the latency by their names in metrics.jsonl.

    These are quantiles, in seconds, of the time from an environment's step to its gradient, and the
    histogram of that time.
    """
    return {
        **{f"latency_p{percent}_s": quantile(histogram, percent / 100) for percent in LATENCIES},
        "latency_histogram": {str(bin_): round(histogram[bin_], 1) for bin_ in sorted(histogram)},
    }
