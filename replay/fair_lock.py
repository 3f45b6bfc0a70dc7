"""A lock that lets those who wait go first.

Whoever holds a plain `threading.Lock` most of the time, as a loop that adds does, gets it again
before a thread that waits for it has woken: a snapshot beside such a loop took a minute.
"""

from __future__ import annotations

import threading


class FairLock:
    """For `with`. Who waits for ``inner`` holds ``turn``, and there everyone else waits."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.inner = threading.Lock()

    def __enter__(self) -> None:
        with self.turn:
            self.inner.acquire()

    def __exit__(self, *error: object) -> None:
        self.inner.release()
