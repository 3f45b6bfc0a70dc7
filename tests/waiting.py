"""Waiting for other threads and processes, and ports for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], timeout_s: float = 20.0, every_s: float = 0.002
) -> None:
    """Waits for ``condition``; raises AssertionError if it stays false."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it did not come true in time"
        time.sleep(every_s)


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port without a listener."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def least_ms(call: Callable[[], object], tries: int = 5) -> float:
    """The processor time of the fastest of several calls, in milliseconds: other processes that
    take turns do not count."""
    spent_s = []
    for _ in range(tries):
        before_s = time.thread_time()
        call()
        spent_s.append(time.thread_time() - before_s)
    return 1e3 * min(spent_s)
