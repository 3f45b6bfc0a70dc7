"""File descriptors of a process: their limit, whether they are nearly used up, waiting for one."""

from __future__ import annotations

import errno
import os
import resource
import select
from contextlib import suppress


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one; returns the resulting limit.

    The soft limit is often 1,024 for the sake of programs that use select(2). Penstock does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def limit() -> int:
    """Returns the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def nearly_used_up(reserve: int) -> bool:
    """Returns whether fewer than about ``reserve`` descriptors are free.

    It is cheap: the system gives the lowest free number, which tells about how many are open.
    """
    try:
        lowest = os.dup(0)
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    os.close(lowest)
    return lowest >= limit() - reserve


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Wait until ``fd`` is readable, at most ``timeout_s`` seconds; returns whether it is."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, round(timeout_s * 1000))))
