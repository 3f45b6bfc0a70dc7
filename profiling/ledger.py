"""Time ledger: one thread's wall clock, in disjoint parts that add up to all of it.

The thread is always in exactly one part; `switch` ends the one and begins the next. So nothing is
counted twice and nothing is left out, and what no part claims stands in "other".
"""

from __future__ import annotations

import time
from typing import Literal

LearnerPart = Literal["wait_data", "h2d_exposed", "compute", "reduce_exposed", "publish", "other"]


class TimeLedger:
    """Seconds spent in each part since it was made."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"other": 0.0}
        self._part = "other"
        self._since_s = time.perf_counter()

    def switch(self, part: str) -> None:
        """From now on the thread is in ``part``."""
        now_s = time.perf_counter()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now_s - self._since_s
        self._part = part
        self._since_s = now_s

    def snapshot(self) -> dict[str, float]:
        """Seconds by part up to this moment."""
        self.switch(self._part)
        return dict(self.seconds)


def fractions(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Share of each part in the time between two snapshots."""
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in now.items()}
    total = sum(spent.values())
    return {part: seconds / total if total else 0.0 for part, seconds in spent.items()}
