"""How benchmarks/replay.py takes its rates: what is compared takes turns, and the best turn counts.

Whatever else the machine does slows turns down and never speeds one up, so the best of several
short ones is what a quiet machine gives, and what takes turns with it can be compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

TURN_S = 0.05
Calls = Sequence[Callable[[], object]]


def rates_of(operations: Mapping[str, Calls], rows: int, seconds: float) -> dict[str, float]:
    """Rows per second of each operation in its best turn of `TURN_S`, of ``seconds`` of them."""
    rates = dict.fromkeys(operations, 0.0)
    done = dict.fromkeys(operations, 0)
    for _ in range(max(1, round(seconds / TURN_S))):
        for name, calls in operations.items():
            first, began_s = done[name], time.perf_counter()
            while time.perf_counter() < began_s + TURN_S:
                calls[done[name] % len(calls)]()
                done[name] += 1
            rate = (done[name] - first) * rows / (time.perf_counter() - began_s)
            rates[name] = max(rates[name], rate)
    return rates


def rate_of(calls: Calls, rows: int, seconds: float) -> float:
    """The rate of one operation."""
    return rates_of({"": calls}, rows, seconds)[""]
