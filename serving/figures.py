"""What a service counts: decisions, batches, faults, and how long games waited for an answer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.profiling.histogram import GROWTH, quantile

# Latencies from this one on are told apart; the last bin holds what is longer than the last edge.
FLOOR_S = 1e-6
BINS = 120  # up to about 1,000 s
# The rate is a mean over as many full seconds.
WINDOW_S = 5


class ServiceFigures:
    """Counts since the service began."""

    def __init__(self) -> None:
        self.decisions = 0
        self.batches = 0
        self.faults: Counter[str] = Counter()
        """By the field at fault."""
        self._edges_s = FLOOR_S * GROWTH ** np.arange(BINS)
        self._latencies = np.zeros(BINS + 1, np.int64)
        self._seconds: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)
        """The last seconds in which something was decided, and the decisions until then."""

    def count_batch(self, decisions: int) -> None:
        """Count the rows that were decided at once."""
        self.decisions += decisions
        self.batches += 1

    def count_answers(
        self, arrived_s: Sequence[float], rows: npt.NDArray[np.int64], now_s: float
    ) -> None:
        """Count answers that were written.

        Args:
            arrived_s: when the rows of each answer arrived.
            rows: the number of them, int64 [answers].
            now_s: when the answers were written, by the same clock.
        """
        bins = np.searchsorted(self._edges_s, now_s - np.array(arrived_s))
        np.add.at(self._latencies, bins, rows)

        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, self.decisions - int(rows.sum())))

    def latency_s(self, q: float) -> float | None:
        """Returns the time that a share ``q`` of all rows waited at most; None without any."""
        histogram = {bin_: float(count) for bin_, count in enumerate(self._latencies) if count}
        return quantile(histogram, q, FLOOR_S)

    def rate(self, now_s: float) -> float:
        """Returns the decisions a second, over the last `WINDOW_S` seconds."""
        recent = [entry for entry in self._seconds if entry[0] >= int(now_s) - WINDOW_S]
        if not recent:
            return 0.0
        since, decisions = recent[0]
        return (self.decisions - decisions) / max(now_s - since, 1.0)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            "decisions": self.decisions,
            "decisions_per_s": round(self.rate(now_s), 1),
            "batches": self.batches,
            "mean_batch": round(self.decisions / self.batches, 2) if self.batches else None,
            "latency_p50_s": self.latency_s(0.5),
            "latency_p99_s": self.latency_s(0.99),
            "faults": dict(self.faults),
        }
