"""How benchmarks/replay.py takes its rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np


def rate_of(calls: Sequence[Callable[[], object]], rows: int, seconds: float) -> float:
    """Rows per second: the median of five turns through ``calls``."""
    rates = []
    for _ in range(5):
        done, began_s = 0, time.perf_counter()
        while time.perf_counter() < began_s + seconds / 5:
            calls[done % len(calls)]()
            done += 1
        rates.append(done * rows / (time.perf_counter() - began_s))
    return float(np.median(rates))
