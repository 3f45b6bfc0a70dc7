"""Durations as a histogram whose bins grow by a constant factor: small, and easily added up.

Bin 0 holds what is at most `FLOOR_S`, bin i > 0 what is in (edge(i-1), edge(i)], where edge(i) is
FLOOR_S x GROWTH^i. A quantile is off by less than a bin, 19 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

FLOOR_S = 1e-4
MOST_S = 1e9  # the last bin holds what is longer, also what is not finite
GROWTH = 2**0.25
Histogram = dict[int, float]
LATENCIES = (50, 95, 99)  # per cent


def bin_of(seconds: float) -> int:
    """Returns the bin of a duration."""
    if seconds <= FLOOR_S:
        return 0
    return math.ceil(math.log(min(seconds, MOST_S) / FLOOR_S) / math.log(GROWTH) - 1e-9)


def edge(bin_: int) -> float:
    """Returns the longest duration that a bin holds, in seconds."""
    return FLOOR_S * float(GROWTH**bin_)


def spread(histogram: Histogram, least_s: float, most_s: float, count: float) -> None:
    """Add ``count`` durations that are evenly spread over ``least_s`` to ``most_s``."""
    first, last = bin_of(least_s), bin_of(most_s)
    low_s, per_s = least_s, count / max(most_s - least_s, 1e-12)
    for bin_ in range(first, last):
        histogram[bin_] = histogram.get(bin_, 0.0) + (edge(bin_) - low_s) * per_s
        low_s = edge(bin_)
    rest = count if first == last else (most_s - low_s) * per_s
    histogram[last] = histogram.get(last, 0.0) + rest


def quantile(histogram: Mapping[int, float], q: float) -> float | None:
    """Returns the duration in seconds that a share ``q`` of all does not exceed; None without any.

    Within a bin durations are taken as evenly spread.
    """
    total = sum(histogram.values())
    if not total:
        return None

    left = q * total
    for bin_ in sorted(histogram):
        count = histogram[bin_]
        if left <= count:
            low_s = edge(bin_ - 1) if bin_ else 0.0
            return low_s + (edge(bin_) - low_s) * left / count
        left -= count
    return edge(max(histogram))


def latencies(histogram: Mapping[int, float]) -> dict[str, Any]:
    """Returns the figures of the latency by their names in metrics.jsonl.

    These are quantiles, in seconds, of the time from an environment's step to its gradient, and the
    histogram of that time.
    """
    return {
        **{f"latency_p{p}_s": quantile(histogram, p / 100) for p in LATENCIES},
        "latency_histogram": {str(k): round(histogram[k], 1) for k in sorted(histogram)},
    }
