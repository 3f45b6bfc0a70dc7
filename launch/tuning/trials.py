"""The trials of a sweep: their folders, the starts of each, and the table of their results.

A trial is an ordinary run in the folder ``trial-N``. Its file `STARTS` has a line for each start:
the options, and the trial whose checkpoint it begins from. In a sweep without checkpoints of other
trials that is one line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from penstock.core.files import open_private
from penstock.core.formatting import clock, count, finite, number
from penstock.launch.run_group import say_line
from penstock.launch.tuning.space import Options
from penstock.monitor.run_folder.files import read_json
from penstock.monitor.run_folder.lines import last_line, lines
from penstock.monitor.run_folder.reader import best_evaluation, mean_return
from penstock.monitor.run_folder.record import EVALUATIONS, METRICS, SUMMARY
from penstock.monitor.summary import INTERRUPTED

Metric = Literal["eval", "return"]
Figures = Mapping[str, Any]

PREFIX = "trial-"
STARTS = "starts.jsonl"
STOPPED = "scheduler"
"""Reason of the end of a trial that its scheduler has stopped."""
NOT_STARTED = "not started"
"""Reason of a trial whose run has no summary."""
METRIC_TEXTS: Mapping[Metric, str] = {
    "eval": "best evaluated return",
    "return": "return of the last 100 episodes in training",
}
"""What each metric is, for the user."""


class TrialsEnd(NamedTuple):
    """How the trials of a sweep have ended."""

    exit_code: int
    """128 + the number of the signal that has ended them, otherwise 1 if a trial has failed."""
    errors: Mapping[int, str]
    """Errors of the trials that have failed, by their numbers."""


@dataclass(frozen=True)
class TrialProgress:
    """What a trial has reached since its last start; None is a figure that is not known yet."""

    score: float | None = None
    """The value of the metric."""
    scored_steps: int = 0
    """Agent steps that the weights with this score were trained on."""
    trained_steps: int = 0
    env_steps: int = 0
    return_mean: float | None = None
    """Mean raw return of the last 100 episodes in training."""
    eval_return_mean: float | None = None
    """Mean raw return of the last evaluation."""
    time_s: float = 0.0
    learning_rate: float | None = None


class ProgressReader:
    """Reads the progress of a run from what its files have gained since this was made."""

    def __init__(self, path: Path, metric: Metric) -> None:
        """Begin at the present ends of the files in the run's folder ``path``."""
        self._path = path
        self._metric = metric
        self._begin_nbytes = {name: nbytes_of(path / name) for name in (METRICS, EVALUATIONS)}

    def read(self) -> TrialProgress:
        """Returns the present progress."""
        metrics = self._last_line(METRICS)
        evaluation = self._last_line(EVALUATIONS)
        return_mean = finite(metrics.get("episode_return_mean"))
        trained_steps = int(finite(metrics.get("trained_steps")) or 0)
        eval_return_mean = mean_return(evaluation)

        if self._metric == "eval":
            score = eval_return_mean
            scored_steps = int(finite(evaluation.get("trained_steps")) or 0)
        else:
            score = return_mean
            scored_steps = trained_steps

        return TrialProgress(
            score=score,
            scored_steps=scored_steps if score is not None else 0,
            trained_steps=trained_steps,
            env_steps=int(finite(metrics.get("env_steps")) or 0),
            return_mean=return_mean,
            eval_return_mean=eval_return_mean,
            time_s=finite(metrics.get("time_s")) or 0.0,
            learning_rate=finite(metrics.get("learning_rate")),
        )

    def _last_line(self, name: str) -> Figures:
        """Returns the last new line of a file; empty if there is none."""
        return last_line(self._path, name, since=self._begin_nbytes[name], follow_links=True)


def folder_of(folder: Path, number: int) -> Path:
    """Returns the folder of a trial, below that of the sweep."""
    return folder / f"{PREFIX}{number}"


def add_start(path: Path, options: Options, trained_steps: int, from_trial: int | None) -> None:
    """Record a start of a trial in its file `STARTS`.

    Args:
        path: folder of the trial, which is made if there is none.
        options: its values of the space's parameters.
        trained_steps: agent steps of the checkpoint that it begins from; 0 without one.
        from_trial: number of the trial that this checkpoint is of; None for its own or none.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = {
        "time": time.time(),
        "options": options,
        "trained_steps": trained_steps,
        "from_trial": from_trial,
    }
    with open(path / STARTS, "a", opener=open_private) as file:
        file.write(json.dumps(line) + "\n")


def results(
    folder: Path, metric: Metric, interrupted: bool, errors: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Returns the results of all trials that have a folder, the best first.

    Args:
        folder: folder of the sweep.
        metric: the figure by which trials are compared.
        interrupted: whether a signal has ended the sweep.
        errors: errors of the trials that have failed, by their numbers.

    Returns: a row of `results.json` for each trial. Trials without a score come last.
    """
    suffixes = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    numbers = [int(suffix) for suffix in suffixes if suffix.isdecimal()]
    rows = [
        _result(folder, number, metric, interrupted=interrupted, failure=errors.get(number))
        for number in numbers
    ]
    return sorted(rows, key=lambda row: (row["score"] is None, -(row["score"] or 0), row["trial"]))


def _result(
    folder: Path, number: int, metric: Metric, *, interrupted: bool, failure: str | None
) -> dict[str, Any]:
    """Returns the result of one trial, whose error is ``failure`` if its run has none."""
    path = folder_of(folder, number)
    starts = [line for line in lines(path / STARTS) if isinstance(line.get("options"), dict)]
    options = starts[-1]["options"] if starts else {}
    sources = [start.get("from_trial") for start in starts]

    # A run that its scheduler has stopped says that it was interrupted.
    summary = read_json(path, SUMMARY, follow_links=True)
    reason = summary.get("exit_reason", NOT_STARTED)
    if failure is not None and reason == NOT_STARTED:
        reason = "user_error"
    if reason in INTERRUPTED and not interrupted:
        reason = STOPPED

    if metric == "eval":
        best = best_evaluation(lines(path / EVALUATIONS))
        score = None if best is None else mean_return(best)
    else:
        score = finite(summary.get("episode_return_mean"))

    return {
        "trial": number,
        "options": options,
        "score": score,
        "env_steps": finite(summary.get("env_steps")),
        "seconds": finite(summary.get("time_s")),
        "ended_by": str(reason),
        "error": summary.get("error") or failure,
        "taken_over_from": [source for source in sources if source is not None],
        "run_dir": str(path),
    }


def show(rows: Sequence[Figures], metric: Metric, folder: Path, stream: TextIO) -> None:
    """Print the table of the trials, and below it the errors.

    Args:
        rows: the results of the trials, in the order of the table.
        metric: the figure by which trials were compared.
        folder: folder of the sweep.
        stream: where to print.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    options = list(dict.fromkeys(name for row in rows for name in row["options"]))
    shows_sources = any(row["taken_over_from"] for row in rows)
    for column in ("trial", *options, "return", "steps", "time", "ended by"):
        table.add_column(column, justify="right", no_wrap=True)
    if shows_sources:
        table.add_column("weights from", justify="right")
    table.add_column("folder", overflow="fold")

    for row in rows:
        cells = [
            str(row["trial"]),
            *(_text(row["options"].get(name)) for name in options),
            number(row["score"]),
            count(row["env_steps"]),
            clock(row["seconds"]),
            row["ended_by"],
        ]
        if shows_sources:
            cells.append(", ".join(map(str, row["taken_over_from"])) or "-")
        table.add_row(*cells, row["run_dir"])

    width = None if stream.isatty() else 250
    Console(file=stream, width=width, markup=False, highlight=False).print(table)

    for row in rows:
        if row["error"] is not None:
            say_line(f"trial {row['trial']} failed: {row['error']}", stream)
    say_line(f"return: {METRIC_TEXTS[metric]}; the runs are in {folder}", stream)


def _text(value: Any) -> str:
    """Returns the value of an option as the table shows it."""
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value)


def nbytes_of(path: Path) -> int:
    """Returns the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
