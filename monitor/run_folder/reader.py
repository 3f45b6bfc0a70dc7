"""Reads metrics, evaluations and events of a run as they grow: for the page of `penstock watch`,
and for the commands that plot and compare runs.

The page keeps a reader for each open run and asks it again and again, for a part of a second at a
time; a command makes one and reads all at once. Both see the same figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.formatting import finite
from penstock.monitor.run_folder.columns import MetricColumns, Points, rising_points
from penstock.monitor.run_folder.events import EVENTS, ROTATED
from penstock.monitor.run_folder.files import FORM_ERRORS, Row, stamp
from penstock.monitor.run_folder.folder import RunFolder
from penstock.monitor.run_folder.lines import LINES_NBYTES, JsonLines, Lines, read_sample
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS, evaluation_figures

# Of a longer file of metrics a sample is read before all of it.
SAMPLE_NBYTES = 4 << 20
# The end of a longer file of events or evaluations is read; the most of either take some megabytes.
TAILS_NBYTES = 32 << 20
MOST_EVENTS = 20_000
MOST_EVALUATIONS = 20_000

EVALUATION = "eval_"  # the beginning of the names of an evaluation's figures
# By axis, the field of an evaluation with the steps, or the time, of the evaluated weights.
EVALUATED = {"env_steps": "trained_steps", "time_s": "time_s"}
# The beginnings of the names of returns, whose scale depends on the task.
RETURNS = ("episode_return", "eval_return")


class RunReader(RunFolder):
    """The measurements of a run, beside what `RunFolder` has. Safe to use from several threads."""

    def __init__(
        self, folder: Path, *, only: Iterable[str] | None = None, follow_links: bool = False
    ) -> None:
        """Begin without measurements; `read` reads them.

        Args:
            folder: of the run.
            only: the metrics whose columns are kept, without gaps; None: all, as a screen needs
                them (`MetricColumns`).
            follow_links: as for `files.open_in`.
        """
        super().__init__(folder, follow_links=follow_links)

        # The axes of curves and the intervals are needed for any metric.
        self._only = None if only is None else {*only, *EVALUATED, "interval_s"}
        self.unload()

    def unload(self) -> None:
        """Forget what was read, to free memory; the next `read` reads it again."""
        with self.lock:
            self._metrics = self._lines_of(METRICS, LINES_NBYTES)
            self._evaluations = self._lines_of(EVALUATIONS, TAILS_NBYTES)
            self.columns = MetricColumns(self._only)
            """The metrics that are shown: until all are read for the first time, of a sample."""
            self.last: Row = {}
            """The last line of metrics that are shown."""
            self.evaluations: Lines = []

            # The columns and the last line of what was read so far, shown or not.
            self._columns_so_far = self.columns
            self._last_so_far = self.last

    def _lines_of(self, name: str, most_nbytes: int) -> JsonLines:
        return JsonLines(self.folder, name, most=most_nbytes, follow_links=self._follow_links)

    def read(self, budget_s: float = math.inf) -> float:
        """Read what is new.

        With a budget, the first call on a long file returns with a sample, without waiting for
        more.

        Args:
            budget_s: about as many seconds are used.

        Returns:
            The share of the metrics that has been read: below 1 there is more.
        """
        deadline_s = time.monotonic() + budget_s
        with self.lock:
            self._read_evaluations()
            is_first = not self._metrics.offset and self.columns is self._columns_so_far
            if is_first and budget_s < math.inf and self._show_sample():
                return 0.0

            for lines in self._metrics.chunks():
                if self._metrics.replaced:
                    self.columns = self._columns_so_far = MetricColumns(self._only)
                    self._last_so_far = {}
                self._columns_so_far.extend(lines)
                self._last_so_far = lines[-1] if lines else self._last_so_far
                if time.monotonic() > deadline_s:
                    break

            if self._metrics.offset < self._metrics.nbytes:
                return self._metrics.offset / self._metrics.nbytes
            self.columns = self._columns_so_far
            self.last = self._last_so_far
            return 1.0

    def _read_evaluations(self) -> None:
        """Read the new evaluations, and keep the newest `MOST_EVALUATIONS`."""
        for lines in self._evaluations.chunks():
            if self._evaluations.replaced:
                self.evaluations.clear()
            self.evaluations += lines
            del self.evaluations[:-MOST_EVALUATIONS]

    def _show_sample(self) -> bool:
        """Show lines at even distances of a long file; returns whether it is one."""
        if stamp(self.folder, METRICS)[1] <= SAMPLE_NBYTES:
            return False
        sample = read_sample(self.folder, METRICS, nbytes=SAMPLE_NBYTES)
        if not sample:
            return False

        self.columns = MetricColumns(self._only)
        self.columns.extend(sample)
        self.last = sample[-1]
        return True

    def curve(self, x: str, y: str) -> Points:
        """Returns the points of a metric, by rising ``x``.

        A figure of an evaluation is at the steps, or the time, of the evaluated weights. Points
        that a resume from an older checkpoint has repeated replace the earlier ones. Rates are
        taken of whole intervals only.

        Args:
            x: "env_steps" or "time_s".
            y: name of the metric.
        """
        with self.lock:
            if is_evaluation(y):
                return evaluation_curve(
                    self.evaluations, x, lambda line: finite(figures_of(line).get(y))
                )

            xs = self.columns.column(x)
            ys = self.columns.column(y)
            if not is_return(y):
                is_full = self.columns.full_intervals()
                xs, ys = xs[is_full], ys[is_full]
            return rising_points(xs, ys)

    def has(self, metric: str) -> bool:
        """Whether any line that was read has a number of this name."""
        with self.lock:
            if is_evaluation(metric):
                values = (figures_of(line).get(metric) for line in self.evaluations)
                return any(finite(value) is not None for value in values)
            return not np.isnan(self.columns.column(metric)).all()


class EventReader:
    """The newest events of a run, in their order, read as they are written."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the run."""
        self._folder = folder
        self._logs = [self._log(name) for name in (ROTATED, EVENTS)]  # the older file first
        self.events: Lines = []

    def read(self) -> None:
        """Read what is new, and keep the newest `MOST_EVENTS`.

        What was read before the file was rotated is not read again.
        """
        if self._logs[1].follow("logs", ROTATED):
            self._logs = [self._logs[1], self._log(EVENTS)]
        for log in self._logs:
            for lines in log.chunks():
                self.events += lines
                del self.events[:-MOST_EVENTS]

    def _log(self, name: str) -> JsonLines:
        return JsonLines(self._folder, "logs", name, most=TAILS_NBYTES)


def is_evaluation(name: str) -> bool:
    """Whether a metric is a figure of evaluations."""
    return name.startswith(EVALUATION)


def is_return(name: str) -> bool:
    """Whether a metric is a return, whose scale depends on the environment."""
    return name.startswith(RETURNS)


def evaluation_curve(evaluations: Lines, x: str, figure: Callable[[Row], float | None]) -> Points:
    """Returns the points of a figure of evaluations, by rising ``x``.

    Args:
        evaluations: lines of `evaluations.jsonl`.
        x: "env_steps" or "time_s": the steps, or the time, of the evaluated weights.
        figure: takes the figure of a line; None where there is none.
    """
    xs = np.array([finite(line.get(EVALUATED[x])) for line in evaluations], np.float64)
    ys = np.array([figure(line) for line in evaluations], np.float64)
    return rising_points(xs, ys)


def figures_of(evaluation: Row) -> Mapping[str, Any]:
    """Returns the metrics of an evaluation; empty for a line that was damaged."""
    try:
        return evaluation_figures(evaluation)
    except FORM_ERRORS:
        return {}


def lower_end(evaluation: Mapping[str, Any], way: Any = None) -> float | None:
    """Returns the figure by which evaluations are compared.

    It is the lower end of the interval of the mean return, or in lines of earlier versions the
    mean. None if the line has neither.

    Args:
        evaluation: a line of `evaluations.jsonl`.
        way: "greedy" or "sampled"; None: the better one.
    """
    interval = evaluation.get(str(way or evaluation.get("play")))
    if not isinstance(interval, dict):
        return mean_return(evaluation) if way is None else None
    return finite(interval.get("lower", interval.get("mean")))


def best_evaluation(evaluations: Iterable[Row], way: Any = None) -> Row | None:
    """Returns the line with the highest `lower_end`; None where no line has any.

    Args:
        evaluations: lines of `evaluations.jsonl`.
        way: as for `lower_end`.
    """
    lower_ends = [(lower_end(line, way), line) for line in evaluations]
    comparable = [(lower, line) for lower, line in lower_ends if lower is not None]
    return max(comparable, key=itemgetter(0))[1] if comparable else None


def mean_return(evaluation: Mapping[str, Any]) -> float | None:
    """Returns the mean return in a line of `evaluations.jsonl`, also of earlier versions; None for
    a line that was damaged."""
    returns = evaluation.get("return")
    return finite(returns.get("mean")) if isinstance(returns, dict) else None
