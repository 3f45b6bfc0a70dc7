"""What a run writes down: a line of `metrics.jsonl` per interval and of `evaluations.jsonl` per
evaluation, `summary.json` at its end.

A run may last for months, so lines of metrics become rarer as it goes on: they are `FINENESS`th
parts of its time apart, which is finer than a plot shows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.configs.game import same_game
from penstock.configs.schema import EnvConfig
from penstock.launch.writers import Writer

Lines = list[dict[str, Any]]

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
SUMMARY = "summary.json"
FINENESS = 5000
NO_ACCOUNTING = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}


class Record:
    """The last metrics of a run, at hand, and on disk those that are due. ``writers`` get what is
    written."""

    def __init__(
        self, run_dir: Path, writers: Sequence[Writer] = (), env: EnvConfig | None = None
    ) -> None:
        """What was evaluated before a resume still stands in the metrics, unless that was in
        another game than ``env``."""
        self._run_dir = run_dir
        self._writers = writers
        self._evaluation: dict[str, Any] = {}
        for line in lines(run_dir / EVALUATIONS)[-1:]:
            if env is None or same_game(line.get("env", {}), env):
                self._evaluation = _figures(line)
        self._written_s: float | None = None  # `time_s` of the last line
        self._unwritten: dict[str, Any] | None = None
        self._time_s: float | None = None  # of the last interval
        self._span_s = self._busy_s = 0.0
        (run_dir / METRICS).open("ab").close()  # a folder with this file is a run
        self.last: dict[str, Any] = {}

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Take in one interval, or what the learner counted at its very end; append it if due."""
        metrics = without_nan(metrics | self._evaluation)
        self._count_time(metrics)
        self.last = {**self.last, **metrics}
        self._unwritten = metrics
        if self._due(metrics.get("time_s")):
            self._write()

    def _due(self, time_s: float | None) -> bool:
        before_s = self._written_s
        if time_s is None or before_s is None:
            return True
        return not 0.0 <= time_s - before_s <= time_s / FINENESS  # it goes back in a resume

    def _write(self) -> None:
        metrics, self._unwritten = self._unwritten, None
        if metrics is None:
            return
        self._written_s = metrics.get("time_s")
        problem = None
        try:
            _append(self._run_dir / METRICS, metrics)
        except OSError as error:
            problem = error
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
        _append(self._run_dir / EVALUATIONS, without_nan(evaluation))

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
        with suppress(OSError):
            self._write()  # the end, due or not
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
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def _append(path: Path, value: dict[str, Any]) -> None:
    """Add a line, apart from one that was never finished. Raises OSError where it does not fit."""
    data = json.dumps(value).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                data = b"\n" + data
        while data:  # a disk that has room for a part of it takes that first
            data = data[file.write(data) :]


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
