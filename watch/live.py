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
from penstock.monitor.run_folder.files import FORM_ERRORS, is_trusted
from penstock.monitor.status import add_shares
from penstock.monitor.supervisor_client import Report, reach

EVERY_S = 1.0
AGAIN_S = 5.0  # after a run that did not answer


class LiveStatus:
    """The processes of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asks = threading.Lock()
        self._raw: Report | None = None  # the last reply, with seconds instead of shares
        self._shown: dict[str, Any] = {"live": False, "why": "not asked yet", "processes": []}
        self._next_s = float("-inf")

    def now(self) -> dict[str, Any]:
        """Returns `penstock status` with the memory of each process.

        ``live`` is false, and ``why`` a sentence, if there is no such status. While another thread
        asks, the previous answer is returned without waiting.
        """
        if time.monotonic() >= self._next_s and self._asks.acquire(blocking=False):
            try:
                self._shown = self._ask()
                replied = self._shown["live"] and not self._shown["why"]
                self._next_s = time.monotonic() + (EVERY_S if replied else AGAIN_S)
            finally:
                self._asks.release()
        return self._shown

    def _ask(self) -> dict[str, Any]:
        """Returns the answer of the supervisor, or why there is none that can be shown."""
        try:
            return self._reply()
        except UserError as error:
            why = str(error)
        except FORM_ERRORS as error:  # the reply of another release, or of another program
            why = f"the reply of the supervisor cannot be read ({type(error).__name__}: {error})"
        self._raw = None
        return {"live": False, "why": why, "processes": []}

    def _reply(self) -> dict[str, Any]:
        reached = reach(str(self._folder))
        if reached.report is None:
            why = f"the supervisor (pid {reached.pid}) did not reply: it is busy, or hangs"
            return {**self._shown, "live": True, "why": why}
        raw = reached.report

        # Shares are those of the time since the last reply.
        shown = copy.deepcopy(raw)
        add_shares(shown, self._raw or raw)
        self._raw = raw

        same = reached.pid == raw.get("pid")  # else its pids are of another container
        for process in shown["processes"]:
            pid = process.get("pid")
            if same and pid and process.get("host") == raw.get("host"):
                process["rss_nbytes"] = _rss(pid, process["name"])
        return {"live": True, "why": None, **shown}


def _rss(pid: int, name: str) -> int | None:
    """Resident memory of the process of a role; None if that pid is of something else."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if is_trusted(process.uids().real) and name in process.cmdline():
            return int(process.memory_info().rss)
    return None
