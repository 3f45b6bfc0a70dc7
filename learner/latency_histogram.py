"""The histogram of ages: how old the agent steps are that a learner trains on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.params import Floats
from penstock.profiling.histogram import FLOOR_S, GROWTH, Histogram, bin_of

# The ages of so many slots are counted together, as counting costs 15 us for one slot alone, and
# 0.1 us a slot for many.
UNCOUNTED = 1024


class TrainedSlots(NamedTuple):
    """Slots whose ages are counted later."""

    headers: npt.NDArray[np.void]
    """Their HEADER records, ``[slots]``."""
    at_s: float
    """When the training on them began (CLOCK_MONOTONIC, seconds)."""


class LatencyHistogram:
    """Agent steps by the time from an environment's step to its gradient.

    The steps of a slot were played evenly between its ``started_s`` and ``published_s``.
    """

    def __init__(self) -> None:
        self._counts: Histogram = {}
        self._uncounted: list[TrainedSlots] = []
        self._uncounted_slots = 0

    def add(self, headers: npt.NDArray[np.void], at_s: float) -> None:
        """Add slots that are trained on from ``at_s``, by their HEADER records ``[slots]``.

        They are counted later, with others; the records may not change until then.
        """
        self._uncounted.append(TrainedSlots(headers, at_s))
        self._uncounted_slots += len(headers)
        if self._uncounted_slots >= UNCOUNTED:
            self._count()

    @property
    def counts(self) -> Histogram:
        """Agent steps by age since the last `take`."""
        self._count()
        return self._counts

    def take(self) -> Histogram:
        """Returns `counts`, and begins anew."""
        counts = self.counts
        self._counts = {}
        return counts

    def _count(self) -> None:
        """Add the slots that wait to be counted."""
        if not self._uncounted:
            return

        headers = np.concatenate([slots.headers for slots in self._uncounted])
        times_s = [slots.at_s for slots in self._uncounted]
        at_s = np.repeat(times_s, [len(slots.headers) for slots in self._uncounted])
        self._uncounted.clear()
        self._uncounted_slots = 0

        add_spread(
            self._counts,
            least_s=np.maximum(0.0, at_s - headers["published_s"]),
            most_s=at_s - headers["started_s"],
            counts=headers["steps"],
        )


def add_spread(
    histogram: Histogram, least_s: Floats, most_s: Floats, counts: npt.NDArray[Any]
) -> None:
    """Add durations to a histogram; those of each range are evenly spread over it.

    Args:
        histogram: the histogram.
        least_s: shortest duration of each range, float64 ``[n]``, in seconds.
        most_s: longest duration of each range, in the same layout.
        counts: number of durations of each range, ``[n]``.
    """
    first = bin_of(float(least_s.min()))
    last = bin_of(float(most_s.max()))

    # How many durations are below the upper edge of each bin. A range without a width is on one
    # side of an edge.
    edges_s = FLOOR_S * GROWTH ** np.arange(first, last)
    widths_s = np.maximum(most_s - least_s, 1e-12)
    shares = np.clip((edges_s[:, None] - least_s) / widths_s, 0.0, 1.0)
    counts_below = [*(shares @ counts.astype(np.float64)).tolist(), float(counts.sum())]

    lower_count = 0.0
    for bin_, count_below in enumerate(counts_below, first):
        histogram[bin_] = histogram.get(bin_, 0.0) + count_below - lower_count
        lower_count = count_below
