"""Time shares of every process of a run, read through its engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.interfaces import Handle, RoleUsage
from penstock.profiling.ledger import shares_between

MAIN = "main"


class Ledgers:
    """Time shares of each process between two calls of `interval`."""

    def __init__(self) -> None:
        self._previous: dict[str, RoleUsage] = {}  # of the last call, by role

    def interval(self, handles: Mapping[str, Handle]) -> dict[str, Any]:
        """Measure the processes since the last call.

        Args:
            handles: the roles that run, by name.

        Returns:
            Two metrics, each by the name of the role. A role whose process has ended, cannot be
            read or keeps no ledger yet is missing.

            ``ledgers``: time shares of the parts of the main thread, since the last call or the
            start of the process.
            ``cpu``: processor time of all threads per second, for processes of the last call.
        """
        ledgers: dict[str, dict[str, float]] = {}
        cpu: dict[str, float] = {}
        usages: dict[str, RoleUsage] = {}
        for name, handle in handles.items():
            usage = handle.usage()
            seconds = _main_thread_seconds(usage)
            if seconds is None or usage.cpu_s is None:
                continue
            usages[name] = usage

            previous = self._previous.get(name)
            if previous is None or previous.cpu_s is None or previous.pid != usage.pid:
                ledgers[name] = shares_between(seconds, {})
                continue
            ledgers[name] = shares_between(seconds, _main_thread_seconds(previous) or {})
            elapsed_s = (usage.at_ns - previous.at_ns) * 1e-9
            if elapsed_s > 0:
                cpu[name] = (usage.cpu_s - previous.cpu_s) / elapsed_s
        self._previous = usages
        return {"ledgers": ledgers, "cpu": cpu}


def _main_thread_seconds(usage: RoleUsage) -> Mapping[str, float] | None:
    """Seconds of each part of the main thread; None before it keeps a ledger."""
    return next((thread.seconds for thread in usage.threads if thread.name == MAIN), None)
