"""What a run writes down: a line of `metrics.jsonl` per interval and of `evaluations.jsonl` per
evaluation, `summary.json` at its end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.launch.writers import Writer

Lines = list[dict[str, Any]]

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
SUMMARY = "summary.json"
NO_ACCOUNTING = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}


class Record:
    """The last metrics of a run, on disk and at hand. A line is one write. ``writers`` get the
    same."""

    def __init__(self, run_dir: Path, writers: Sequence[Writer] = ()) -> None:
        self._run_dir = run_dir
        self._writers = writers
        for name in (METRICS, EVALUATIONS):
            _end_line(run_dir / name)
        evaluated = lines(run_dir / EVALUATIONS)  # before a resume
        self._evaluation = _figures(evaluated[-1]) if evaluated else {}
        self._time_s: float | None = None  # of the last interval
        self._span_s = self._busy_s = 0.0
        self._file = (run_dir / METRICS).open("ab", buffering=0)
        self.last: dict[str, Any] = {}

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Append one interval, or what the learner counted at its very end."""
        metrics = without_nan(metrics | self._evaluation)
        self._count_time(metrics)
        self.last = {**self.last, **metrics}
        self._file.write(json.dumps(metrics).encode() + b"\n")
        problem = None
        for writer in self._writers:
            try:
                writer.metrics(metrics)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem

    def evaluation(self, evaluation: dict[str, Any]) -> None:
        """Append one evaluation; its figures stand in the metrics from now on."""
        self._evaluation = _figures(evaluation)
        self.last = {**self.last, **without_nan(self._evaluation)}
        with (self._run_dir / EVALUATIONS).open("ab", buffering=0) as file:
            file.write(json.dumps(without_nan(evaluation)).encode() + b"\n")

    def _count_time(self, metrics: dict[str, Any]) -> None:
        """Add up what the learner spent in training, for the mean over all intervals."""
        time_s, share = metrics.get("time_s"), metrics.get("learner_compute_fraction")
        if time_s is None or share is None:
            return
        if self._time_s is not None:
            self._span_s += max(0.0, time_s - self._time_s)
            self._busy_s += max(0.0, time_s - self._time_s) * share
        self._time_s = time_s

    def final(self, metrics: dict[str, Any]) -> None:
        """What holds for the whole run: part of the summary, not of the intervals."""
        self.last = {**self.last, **without_nan(metrics)}

    def close(self, exit_reason: str, error: str | None) -> dict[str, Any]:
        """Write `summary.json` and return it; nothing may be recorded any more."""
        summary = {
            "solved_at_s": None,
            "accounting": NO_ACCOUNTING,
            **self.last,
            **({"utilization": self._busy_s / self._span_s} if self._span_s else {}),
            "exit_reason": exit_reason,
            "error": error,
        }
        self._file.close()
        with suppress(OSError):  # a full disk was told of when the last metrics did not fit
            write_atomic(self._run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        for writer in self._writers:
            writer.close()
        return summary


def _figures(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What metrics say of an evaluation."""
    return {
        "eval_return_mean": evaluation["return"]["mean"],
        "eval_return_best": evaluation["best_return_mean"],
        "eval_length_mean": evaluation["length"]["mean"],
        "eval_trained_steps": evaluation["trained_steps"],
    }


def lines(path: Path) -> Lines:
    """`objects` of a file; none where it cannot be read."""
    try:
        return objects(path.read_bytes())
    except OSError:
        return []


def objects(text: bytes) -> Lines:
    """The objects of whole lines of JSON. The last line may be being written, and where a machine
    died or a disk was full one may be broken: these are left out."""
    found = []
    for line in text.rpartition(b"\n")[0].splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _end_line(path: Path) -> None:
    """Keep apart what is appended from a line that was never finished."""
    with suppress(OSError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


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
