"""Curves that fit a screen: smoothed and reduced to some hundred points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.monitor.curves import smoothed
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.columns import Points


def clipped(xs: Floats, ys: Floats, low: float | None, high: float | None) -> Points:
    """Returns the points whose ``xs`` are in a range, and one beyond either end.

    The further points let the lines reach the ends of the range.

    Args:
        xs, ys: [N] float64, ``xs`` rising.
        low, high: the ends of the range; None for the first and the last point.
    """
    first = 0
    if low is not None:
        first = max(0, int(np.searchsorted(xs, low)) - 1)
    last = len(xs)
    if high is not None:
        last = int(np.searchsorted(xs, high, "right")) + 1
    return xs[first:last], ys[first:last]


def reduced(xs: Floats, ys: Floats, most: int) -> Points:
    """Returns at most about ``most`` of the points, without losing an outlier.

    These are the lowest and the highest point of each bucket, in their order, and the last point.
    """
    if len(xs) <= most:
        return xs, ys

    # The last bucket is filled up with its last value.
    size = -(-2 * len(xs) // most)
    starts = np.arange(0, len(xs), size)
    missing = len(starts) * size - len(ys)
    buckets = np.pad(ys, (0, missing), "edge").reshape(-1, size)

    last = len(xs) - 1
    places = np.concatenate([starts + buckets.argmin(1), starts + buckets.argmax(1), [last]])
    chosen = np.unique(np.minimum(places, last))
    return xs[chosen], ys[chosen]


def means(xs: Floats, ys: Floats, most: int) -> Points:
    """Returns at most ``most`` points: the mean of each bucket, at its last place.

    That is for shares, which add up in each bucket.
    """
    if len(xs) <= most:
        return xs, ys
    edges = np.linspace(0, len(xs), most + 1).astype(np.intp)
    sums = np.add.reduceat(ys, edges[:-1])
    return xs[edges[1:] - 1], sums / np.diff(edges)


def spread(curves: Sequence[Points], most: int) -> tuple[Points, Points, Points] | None:
    """Returns the mean of several curves, their lowest and their highest values.

    All three are at ``most`` places over the range that all curves have; None without such a range.
    """
    if not curves:
        return None
    start = max(xs[0] for xs, _ in curves)
    end = min(xs[-1] for xs, _ in curves)
    if start > end:
        return None

    places = np.linspace(start, end, most if end > start else 1)
    values = np.stack([np.interp(places, xs, ys) for xs, ys in curves])
    return (places, values.mean(0)), (places, values.min(0)), (places, values.max(0))


def as_json(points: Points) -> dict[str, Any]:
    """Returns the points as lists for JSON, with seven significant digits."""
    xs, ys = points
    return {"x": [short(x) for x in xs], "y": [short(y) for y in ys]}


def smooth(points: Points, count: int, low: float | None, high: float | None) -> Points:
    """Returns the mean of each value with the ``count`` - 1 values before it.

    Only the points that `clipped` shows are returned; values before them count in the means.
    """
    xs, ys = points
    shown, _ = clipped(xs, ys, low=low, high=high)
    if not len(shown):
        return shown, shown

    first = int(np.searchsorted(xs, shown[0]))
    averaged_from = max(0, first - count + 1)
    averages = smoothed(ys[averaged_from : first + len(shown)], count)
    return shown, averages[first - averaged_from :]


def short(value: float) -> float | int:
    """Returns a number for JSON: with seven significant digits, or a whole one with all."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.7g}")
