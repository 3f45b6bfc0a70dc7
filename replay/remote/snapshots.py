"""Snapshots that a replay server writes by itself, and begins from when it is started again.

A thread writes each while the server goes on. A snapshot holds the buffer and, for each client's
stream, how much of it the buffer had at that instant; so a client that comes back after a restart
goes on there, and knows how many rows of its own are lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError

STREAMS = "streams"
Marks = Callable[[], dict[str, Any]]


class Snapshots:
    """Of ``replay`` in ``folder``, one every ``every_s``; ``log`` takes lines for a person."""

    def __init__(
        self, replay: Replay, folder: Path, every_s: float, log: Callable[[str], None]
    ) -> None:
        if not every_s > 0:
            raise ReplayError(f"snapshot-every {every_s:g} must be above 0 seconds")
        self._replay, self._folder, self._every_s, self._log = replay, folder, every_s, log
        self._due_s = time.monotonic() + every_s
        self._thread: threading.Thread | None = None
        self._failure = ""
        self.marks: dict[str, Any] = {}  # of streams, in the snapshot that was restored
        self._saved = self._failed = 0

    def restore(self) -> None:
        """Fill the buffer, which must be new, with what the folder holds.

        Raises `DamagedError` for a snapshot that is not whole, ReplayError for one that was made
        with other options; use the buffer no more then.
        """
        kept = self._replay.restore(self._folder)
        self.marks = kept.get(STREAMS, {})

    def tend(self, marks: Marks) -> None:
        """Begin a snapshot if one is due and none is being written."""
        if time.monotonic() >= self._due_s and not self.saving:
            self._due_s = time.monotonic() + self._every_s
            self._thread = threading.Thread(
                target=self._save, args=(marks,), name="replay-save", daemon=True
            )
            self._thread.start()

    @property
    def saving(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, marks: Marks) -> None:
        """Write a snapshot of now, and wait for it."""
        if self._thread is not None:
            self._thread.join()
        self._save(marks)

    def figures(self) -> dict[str, int]:
        return {"saved": self._saved, "failed": self._failed}

    def _save(self, marks: Marks) -> None:
        try:
            self._replay.save(self._folder, more=lambda: {STREAMS: marks()})
        except (ReplayError, MemoryError) as error:
            self._failed += 1
            text = str(error) or "a snapshot needs more memory than is left"
            if text != self._failure:  # one line, until another cause
                self._log(f"warning: {text}; the server goes on")
            self._failure = text
        else:
            self._saved += 1
            self._failure = ""
