"""What the supervisor of a live run says of its processes, asked at most once a second.

All viewers of a run share one answer, so that many open pages ask no more often than one.
"""

from __future__ import annotations

import copy
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from penstock.configs.errors import UserError
from penstock.core.files import is_trusted
from penstock.monitor.run_folder.files import FORM_ERRORS
from penstock.monitor.status import add_shares
from penstock.monitor.supervisor_client import Report, reach

# The supervisor is asked at most so often, and less often if it did not answer.
EVERY_S = 1.0
AGAIN_S = 5.0


class LiveStatus:
    """The processes of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        """Held by the thread that asks."""
        self._report: Report | None = None
        """The last reply, which has seconds in place of shares."""
        self._status: dict[str, Any] = {"live": False, "why": "not asked yet", "processes": []}
        """What `now` returns until the next reply."""
        self._next_s = float("-inf")
        """When the supervisor may be asked again."""

    def now(self) -> dict[str, Any]:
        """Returns `penstock status` with the memory of each process.

        ``live`` is false, and ``why`` a sentence, if there is no such status. While another thread
        asks, the previous answer is returned without waiting.
        """
        if time.monotonic() >= self._next_s and self._lock.acquire(blocking=False):
            try:
                self._status = self._ask()
                replied = self._status["live"] and not self._status["why"]
                self._next_s = time.monotonic() + (EVERY_S if replied else AGAIN_S)
            finally:
                self._lock.release()
        return self._status

    def _ask(self) -> dict[str, Any]:
        """Returns the answer of the supervisor, or why there is none that can be shown."""
        try:
            return self._reply()
        except UserError as error:
            why = str(error)
        except FORM_ERRORS as error:  # the reply of another release, or of another program
            why = f"the reply of the supervisor cannot be read ({type(error).__name__}: {error})"
        self._report = None
        return {"live": False, "why": why, "processes": []}

    def _reply(self) -> dict[str, Any]:
        """Returns the answer of the supervisor with shares and memory.

        Raises UserError if it cannot be reached, or one of `FORM_ERRORS`.
        """
        reached = reach(str(self._folder))
        report = reached.report
        if report is None:
            why = f"the supervisor (pid {reached.pid}) did not reply: it is busy, or hangs"
            return {**self._status, "live": True, "why": why}

        # Shares are those of the time since the last reply.
        status = copy.deepcopy(report)
        add_shares(status, self._report or report)
        self._report = report

        shares_pids = reached.pid == report.get("pid")  # else its pids are of another container
        for process in status["processes"]:
            pid = process.get("pid")
            if shares_pids and pid and process.get("host") == report.get("host"):
                process["rss_nbytes"] = _rss_nbytes(pid, process["name"])
        return {"live": True, "why": None, **status}


def _rss_nbytes(pid: int, name: str) -> int | None:
    """Returns the resident memory of the process of a role; None if that pid is of another one."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if is_trusted(process.uids().real) and name in process.cmdline():
            return int(process.memory_info().rss)
    return None
