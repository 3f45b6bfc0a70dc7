"""Where the time of every process of a run goes, read from the memory that each shares."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.launch.process import Child
from penstock.profiling.ledger import fractions, seconds_of

Shares = dict[str, float]
MAIN = "main"


class Ledgers:
    """Shares of the parts of each process' main thread, from one call to the next."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, Shares]] = {}  # by name: pid, seconds

    def interval(self, children: Mapping[str, Child]) -> dict[str, Shares]:
        """By name of process; one that was started meanwhile counts from its start."""
        shares: dict[str, Shares] = {}
        before, self._before = self._before, {}
        for name, child in children.items():
            lane = child.status.lanes.get(MAIN)
            if lane is None:
                continue
            seconds = seconds_of(lane)
            pid, last = before.get(name, (0, {}))
            shares[name] = fractions(seconds, last if pid == child.pid else {})
            self._before[name] = (child.pid, seconds)
        return shares
