"""How far training has come, as the lines of metrics.jsonl arrive: what recovery is measured by."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

POLL_S = 0.02
COUNTERS = ("env_steps", "trained_steps", "learner_steps")


class Progress(threading.Thread):
    """Follows a run's metrics. `since` says when training went on after a moment."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._position = 0
        self._rest = b""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._times: list[float] = []
        self._lines: list[dict[str, Any]] = []
        self._generation_at = 0  # the first line since the last start

    def run(self) -> None:
        while not self._closed.wait(POLL_S):
            self._read()

    def close(self) -> None:
        self._closed.set()
        self.join()

    def begin(self) -> None:
        """A new start: counters may be those of a checkpoint from now on."""
        with self._lock:
            self._generation_at = len(self._lines)

    @property
    def last(self) -> dict[str, Any]:
        """The newest line since the last start; {} while there is none."""
        with self._lock:
            return self._lines[-1] if len(self._lines) > self._generation_at else {}

    @property
    def trained(self) -> int:
        return int(self.last.get("trained_steps", 0))

    def since(self, moment_s: float) -> float | None:
        """When training went on after ``moment_s``, on the monotonic clock; None while it has not.

        The first line after the moment may be of an interval that began before it, and the second
        may hold what another learner had reported late. So updates have to grow in two lines in a
        row, and new samples to come in."""
        with self._lock:
            at = max(bisect_right(self._times, moment_s), self._generation_at)
            times = self._times[at:]
            samples = [line["trained_steps"] for line in self._lines[at:]]
            updates = [line["learner_steps"] for line in self._lines[at:]]
        for i in range(1, len(times) - 1):
            if samples[i] > samples[0] and updates[i - 1] < updates[i] < updates[i + 1]:
                return times[i]
        return None

    def fallen(self) -> str | None:
        """A counter that has gone down since the last start, or is negative; None where all is
        sound."""
        with self._lock:
            lines = self._lines[self._generation_at :]
        before = dict.fromkeys(COUNTERS, 0)
        for line in lines:
            for name in COUNTERS:
                if line[name] < before[name]:
                    return f"{name} fell from {before[name]} to {line[name]}"
                before[name] = max(before[name], line[name])
            for name in ("dropped", "lost"):
                if any(value < 0 for value in line.get(name, {}).values()):
                    return f"{name} is {line[name]}"
        return None

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        if not data:
            return
        now_s = time.monotonic()
        self._position += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for text in whole:
            try:
                line = json.loads(text)
            except ValueError:  # torn by a full disk
                continue
            if isinstance(line, dict) and all(name in line for name in COUNTERS):
                with self._lock:
                    self._times.append(now_s)
                    self._lines.append(line)
