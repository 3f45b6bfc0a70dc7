"""What a run writes down: a line of `metrics.jsonl` per interval, `summary.json` at its end."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.launch.tensorboard import Board

NO_ACCOUNTING = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}


class Record:
    """The last metrics of a run, on disk and at hand. A line is one write."""

    def __init__(self, run_dir: Path, board: Board | None = None) -> None:
        self._run_dir = run_dir
        self._board = board
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)
        self.last: dict[str, Any] = {}

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Append one interval, or what the learner counted at its very end."""
        self.last = {**self.last, **without_nan(metrics)}
        self._file.write(json.dumps(without_nan(metrics)).encode() + b"\n")
        if self._board is not None:
            self._board.metrics(metrics)

    def final(self, metrics: dict[str, Any]) -> None:
        """What holds for the whole run: part of the summary, not of the intervals."""
        self.last = {**self.last, **without_nan(metrics)}

    def close(self, exit_reason: str, error: str | None) -> dict[str, Any]:
        """Write `summary.json` and return it; nothing may be recorded any more."""
        summary = {
            "solved_at_s": None,
            "accounting": NO_ACCOUNTING,
            **self.last,
            "exit_reason": exit_reason,
            "error": error,
        }
        self._file.close()
        if self._board is not None:
            self._board.close()
        with suppress(OSError):  # a full disk was told of when the last metrics did not fit
            write_atomic(self._run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: a reader finds the old or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def without_nan(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
