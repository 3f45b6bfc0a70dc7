"""Time shares of every process of a run, read through its engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.interfaces import Handle
from penstock.profiling.ledger import fractions

Shares = Mapping[str, float]
MAIN = "main"


@dataclass(frozen=True)
class _Totals:
    """Totals of one process since its start."""

    pid: int
    seconds: Shares  # of each part of its main thread
    cpu_s: float
    at_s: float


class Ledgers:
    """Time shares of each process between two calls."""

    def __init__(self) -> None:
        self._before: dict[str, _Totals] = {}

    def interval(self, handles: Mapping[str, Handle]) -> dict[str, Any]:
        """Metrics by name of process.

        ``ledgers``: time shares of the parts of its main thread, since the last call or its start.
        ``cpu``: processor time of all its threads per second, for processes of the last call.
        """
        ledgers, cpu = {}, {}
        before, self._before = self._before, {}
        for name, handle in handles.items():
            now = _totals(handle)
            if now is None:
                continue
            last = before.get(name)
            known = last is not None and last.pid == now.pid
            ledgers[name] = fractions(now.seconds, last.seconds if last and known else {})
            if last is not None and known and now.at_s > last.at_s:
                cpu[name] = (now.cpu_s - last.cpu_s) / (now.at_s - last.at_s)
            self._before[name] = now
        return {"ledgers": ledgers, "cpu": cpu}


def _totals(handle: Handle) -> _Totals | None:
    """Totals of a process; None if it has no ledger yet, has ended, or cannot be read."""
    usage = handle.usage()
    seconds = next((thread.seconds for thread in usage.threads if thread.name == MAIN), None)
    if seconds is None or usage.cpu_s is None:
        return None
    return _Totals(usage.pid, seconds, usage.cpu_s, time.monotonic())
