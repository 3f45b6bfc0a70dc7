"""Waiting for a descriptor without spinning."""

from __future__ import annotations

import select


def wait_readable(fd: int, timeout_s: float) -> bool:
    """True when ``fd`` became readable within ``timeout_s``."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, round(timeout_s * 1000))))
