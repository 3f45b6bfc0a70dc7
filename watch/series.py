"""Curves that fit a screen: smoothed and reduced to some hundred points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.monitor.curves import smoothed
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.columns import Points


def clipped(xs: Floats, ys: Floats, low: float | None, high: float | None) -> Points:
    """The points within a range of ``xs``, and one beyond either end, so that lines reach it."""
    first = 0 if low is None else max(0, int(np.searchsorted(xs, low)) - 1)
    last = len(xs) if high is None else int(np.searchsorted(xs, high, "right")) + 1
    return xs[first:last], ys[first:last]


def reduced(xs: Floats, ys: Floats, most: int) -> Points:
    """At most about ``most`` points: the lowest and the highest of each bucket, in their order, so
    that no outlier is lost; and the last point."""
    if len(xs) <= most:
        return xs, ys
    size = -(-2 * len(xs) // most)
    starts = np.arange(0, len(xs), size)
    buckets = np.pad(ys, (0, len(starts) * size - len(ys)), "edge").reshape(-1, size)
    found = [starts + buckets.argmin(1), starts + buckets.argmax(1), [len(xs) - 1]]
    chosen = np.unique(np.minimum(np.concatenate(found), len(xs) - 1))
    return xs[chosen], ys[chosen]


def means(xs: Floats, ys: Floats, most: int) -> Points:
    """At most ``most`` points, each the mean of a bucket, at its last place: for shares, which add
    up in each bucket."""
    if len(xs) <= most:
        return xs, ys
    edges = np.linspace(0, len(xs), most + 1).astype(np.intp)
    sums = np.add.reduceat(ys, edges[:-1])
    return xs[edges[1:] - 1], sums / np.diff(edges)


def spread(curves: Sequence[Points], most: int) -> tuple[Points, Points, Points] | None:
    """The mean of several curves at ``most`` places, the lowest and the highest, over the range
    that all of them have; None without one."""
    if not curves:
        return None
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    if start > end:
        return None
    places = np.linspace(start, end, most if end > start else 1)
    values = np.stack([np.interp(places, xs, ys) for xs, ys in curves])
    return (places, values.mean(0)), (places, values.min(0)), (places, values.max(0))


def as_json(points: Points) -> dict[str, Any]:
    """Lists for JSON, with seven significant digits."""
    xs, ys = points
    return {"x": [short(x) for x in xs], "y": [short(y) for y in ys]}


def smooth(points: Points, count: int, low: float | None, high: float | None) -> Points:
    """Each value's mean with the ``count`` - 1 values before it, as far as `clipped` shows it."""
    xs, ys = points
    shown, _ = clipped(xs, ys, low, high)
    if not len(shown):
        return shown, shown
    first = int(np.searchsorted(xs, shown[0]))
    before = max(0, first - count + 1)
    return shown, smoothed(ys[before : first + len(shown)], count)[first - before :]


def short(value: float) -> float | int:
    """A number for JSON with seven significant digits, or a whole one with all."""
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.7g}")
