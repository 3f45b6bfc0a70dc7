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
from typing import Any, Literal, TextIO

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
# Reason of the end of a trial that its scheduler has stopped.
STOPPED = "scheduler"
NOT_STARTED = "not started"
EXPLAINED: Mapping[Metric, str] = {
    "eval": "best evaluated return",
    "return": "return of the last 100 episodes in training",
}


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
        self._path, self._metric = path, metric
        self._begin = {name: nbytes_of(path / name) for name in (METRICS, EVALUATIONS)}

    def read(self) -> TrialProgress:
        """Returns the present progress."""
        m, e = self._last(METRICS), self._last(EVALUATIONS)
        return_mean = finite(m.get("episode_return_mean"))
        trained_steps = int(finite(m.get("trained_steps")) or 0)
        evaluated = mean_return(e)

        score, scored_steps = return_mean, trained_steps
        if self._metric == "eval":
            score, scored_steps = evaluated, int(finite(e.get("trained_steps")) or 0)

        return TrialProgress(
            score,
            scored_steps if score is not None else 0,
            trained_steps,
            int(finite(m.get("env_steps")) or 0),
            return_mean,
            evaluated,
            finite(m.get("time_s")) or 0.0,
            finite(m.get("learning_rate")),
        )

    def _last(self, name: str) -> Figures:
        """Returns the last new line of a file; empty if there is none."""
        return last_line(self._path, name, since=self._begin[name], follow_links=True)


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
    numbers = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*")]
    found = [
        _result(folder, int(n), metric, interrupted, errors.get(int(n)))
        for n in numbers
        if n.isdecimal()
    ]
    return sorted(found, key=lambda row: (row["score"] is None, -(row["score"] or 0), row["trial"]))


def _result(
    folder: Path, number: int, metric: Metric, interrupted: bool, failure: str | None
) -> dict[str, Any]:
    """Returns the result of one trial, whose error is ``failure`` if its run has none."""
    path = folder_of(folder, number)
    starts = [line for line in lines(path / STARTS) if isinstance(line.get("options"), dict)]

    # A run that its scheduler has stopped says that it was interrupted.
    summary = read_json(path, SUMMARY, follow_links=True)
    reason, error = summary.get("exit_reason", NOT_STARTED), summary.get("error") or failure
    if failure is not None and reason == NOT_STARTED:
        reason = "user_error"
    if reason in INTERRUPTED and not interrupted:
        reason = STOPPED

    best = best_evaluation(lines(path / EVALUATIONS))
    score = None if best is None else mean_return(best)
    return {
        "trial": number,
        "options": starts[-1]["options"] if starts else {},
        "score": score if metric == "eval" else finite(summary.get("episode_return_mean")),
        "env_steps": finite(summary.get("env_steps")),
        "seconds": finite(summary.get("time_s")),
        "ended_by": str(reason),
        "error": error,
        "taken_over_from": [s["from_trial"] for s in starts if s.get("from_trial") is not None],
        "run_dir": str(path),
    }


def show(found: Sequence[Figures], metric: Metric, folder: Path, stream: TextIO) -> None:
    """Print the table of the trials, and below it the errors.

    Args:
        found: the results of the trials, in the order of the table.
        metric: the figure by which trials were compared.
        folder: folder of the sweep.
        stream: where to print.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    names = list(dict.fromkeys(name for row in found for name in row["options"]))
    copies = any(row["taken_over_from"] for row in found)
    for name in ("trial", *names, "return", "steps", "time", "ended by"):
        table.add_column(name, justify="right", no_wrap=True)
    if copies:
        table.add_column("weights from", justify="right")
    table.add_column("folder", overflow="fold")

    for row in found:
        table.add_row(
            str(row["trial"]),
            *(_text(row["options"].get(name)) for name in names),
            number(row["score"]),
            count(row["env_steps"]),
            clock(row["seconds"]),
            row["ended_by"],
            *([", ".join(map(str, row["taken_over_from"])) or "-"] if copies else []),
            row["run_dir"],
        )

    width = None if stream.isatty() else 250
    Console(file=stream, width=width, markup=False, highlight=False).print(table)

    for row in found:
        if row["error"] is not None:
            say_line(f"trial {row['trial']} failed: {row['error']}", stream)
    say_line(f"return: {EXPLAINED[metric]}; the runs are in {folder}", stream)


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
