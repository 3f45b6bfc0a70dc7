"""Processes by a mark in their environment, their memory and descriptors, and trends of these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "PENSTOCK_CHAOS"
T_95 = 2.2  # standard errors either side of a slope: 95 % for a dozen points or more


@dataclass(frozen=True)
class Slope:
    """Least squares: growth per second, and its standard error."""

    per_s: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval."""
        return self.per_s - T_95 * self.error, self.per_s + T_95 * self.error


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The trend of ``values`` over ``times`` in seconds; needs three points or more."""
    n = len(times)
    mean_t, mean_v = sum(times) / n, sum(values) / n
    spread = sum((t - mean_t) ** 2 for t in times)
    if n < 3 or spread == 0:
        return Slope(0.0, math.inf)
    per_s = sum((t - mean_t) * (v - mean_v) for t, v in zip(times, values, strict=True)) / spread
    residual = sum(
        (v - mean_v - per_s * (t - mean_t)) ** 2 for t, v in zip(times, values, strict=True)
    )
    return Slope(per_s, math.sqrt(residual / (n - 2) / spread))


def marked(marker: str) -> list[int]:
    """Living processes that were started with ``MARKER=marker`` in their environment, and whatever
    these have started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get(MARKER) == marker:
                found.append(process.pid)
    return found


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return "ended"


def memory(pid: int) -> int | None:
    """Anonymous and shared memory in bytes, pages that others map by their share. Pages of files
    are left out: a library weighs less while other programs map it, too."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()  # psutil adds the pages of files
    except OSError:
        return None
    found = dict(line.split()[:2] for line in text.splitlines()[1:])
    return (int(found["Pss_Anon:"]) + int(found["Pss_Shmem:"])) * 1024


def descriptors(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).num_fds())
    except psutil.Error:
        return None


def alive(pid: int) -> bool:
    """Whether it runs: one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.NoSuchProcess:
        return False
