"""Writes the files of a run: a line of `metrics.jsonl` per interval and of `evaluations.jsonl` per
evaluation, and `summary.json` at its end.

A run may last for months, so lines of metrics become less frequent: their distance is 1/`FINENESS`
of the run's duration, which is finer than the resolution of a plot.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.configs.secrets import redacted
from penstock.configs.sections import RECORD_MEANS, EnvConfig
from penstock.core.files import open_private, without_nan, write_atomic
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.run_dir import RunFolderGuard
from penstock.monitor.ranks import lags
from penstock.monitor.run_folder.files import FORM_ERRORS
from penstock.monitor.run_folder.lines import lines
from penstock.profiling.histogram import latency_figures

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
SUMMARY = "summary.json"
RESERVED = "summary.json.reserved"  # becomes `summary.json`
RESERVED_NBYTES = 1 << 16
FINENESS = 5000
NO_ACCOUNTING = {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0}
# Metrics of the run so far; the others are of one interval.
WHOLE = {
    "time_s", "env_steps", "env_frames", "trained_steps", "learner_steps", "episodes",
    "return_reached_at_s", "solved_at_s", "updates_skipped", "rollbacks",
    "episode_return_mean", "episode_return_all_mean", "episode_length_mean",
    "dropped", "lost", "rejected", "received", "replay_size", "samples_per_insert",
    "league_members", "league_games", "actors_restarted",
    "learners_restarted", "server",
    "eval_return_mean", "eval_return_best", "eval_length_mean", "eval_trained_steps",
    "eval_return_greedy", "eval_return_greedy_se", "eval_return_sampled", "eval_return_sampled_se",
    "eval_play", "eval_episodes", "eval_win_rate", "eval_win_rates", "closing_evaluation",
}  # fmt: skip
# Metrics of a moment, although they stand beside the last counts.
OF_A_MOMENT = {"actors_alive", "learners_alive"}
# Shares of an interval's time, of which the summary has those of the whole run.
SHARES = ("learner_wait_fraction", "learner_compute_fraction", "ledger")
LAG = "policy_lag_histogram"
LATENCY = "latency_histogram"


class Thinned(MetricSink):
    """Forwards only as many intervals as a plot can show, always including the first and the
    last."""

    def __init__(self, sink: MetricSink) -> None:
        """``sink``: the sink to which calls are forwarded."""
        self._sink = sink
        self._forwarded_s: float | None = None  # `time_s` of the last interval that was forwarded
        self._pending: Json | None = None  # the last interval, if it was not forwarded

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if final:
            return
        self._pending = metrics
        if self._is_due(metrics.get("time_s")):
            self._forward()

    def _is_due(self, time_s: float | None) -> bool:
        """Whether an interval that ends at ``time_s`` is to be forwarded at once."""
        if time_s is None or self._forwarded_s is None:
            return True
        distance_s = time_s - self._forwarded_s
        # After a resume from a checkpoint the time of the run is earlier.
        return not 0.0 <= distance_s <= time_s / FINENESS

    def _forward(self) -> None:
        """Forward the last interval, unless that was done."""
        metrics, self._pending = self._pending, None
        if metrics is not None:
            self._forwarded_s = metrics.get("time_s")
            self._sink.metrics(metrics)

    def event(self, event: RunEvent) -> bool:
        return self._sink.event(event)

    def note(self, text: str) -> None:
        self._sink.note(text)

    def tick(self) -> None:
        self._sink.tick()

    def close(self) -> None:
        """Forward the last interval, and close the sink."""
        with suppress(OSError):
            self._forward()
        self._sink.close()


class _MetricsFile(MetricSink):
    """A line of `metrics.jsonl` per interval."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A folder with this file is a run.
        open(path, "ab", opener=open_private).close()

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        _append(self._path, metrics)


class Record(MetricSink):
    """Writes the files of a run's figures, and has the newest value of each figure."""

    def __init__(
        self,
        run_dir: Path,
        env: EnvConfig | None = None,
        goal: float | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """Begin or continue the files in ``run_dir``.

        Args:
            run_dir: the folder of the run.
            env: its environment; evaluations of another one do not count. None: all count.
            goal: `stop.return`; closing evaluations for another one do not count.
            resumed: whether the run continues from a checkpoint.
        """
        self._run_dir = run_dir
        self._resumed = resumed
        self._folder = RunFolderGuard(run_dir)
        self.evaluation: Json = {}
        """Figures of the last evaluation before a resume, unless its environment was not
        ``env``."""
        self.last: dict[str, Any] = {}
        """The newest value of each figure."""
        self._read_evaluations(env, goal)

        self._lines = Thinned(_MetricsFile(run_dir / METRICS))
        self._summary: Json | None = None  # once the run has ended

        # What is added up over the intervals, for the summary.
        self._time_s: float | None = None  # `time_s` of the last interval
        self._span_s = 0.0  # duration of the intervals whose shares were added up
        self._seconds: dict[tuple[str, str], float] = {}  # by figure of `SHARES` and its part
        self._lag: Counter[int] = Counter()
        self._latency: Counter[int] = Counter()

        # Names of the metrics that are of the whole run.
        recorded_columns = () if env is None else env.record
        recorded_means = (name.format(key) for key in recorded_columns for name in RECORD_MEANS)
        self._whole = {*WHOLE, *recorded_means}
        self._is_reserved = _reserve(run_dir / RESERVED)

    def _read_evaluations(self, env: EnvConfig | None, goal: float | None) -> None:
        """Read the last evaluation, and the last closing one, of earlier processes of the run."""
        evaluations = lines(self._run_dir / EVALUATIONS)
        for line in evaluations[-1:]:
            with suppress(*FORM_ERRORS):
                if env is None or env.is_same(line.get("env", {})):
                    self.evaluation = evaluation_figures(line)

        # A resume of a run that is solved does not evaluate again.
        for line in evaluations:
            with suppress(*FORM_ERRORS):
                if goal is None or line.get("closing", {}).get("goal") != goal:
                    continue
                if env is None or env.is_same(line.get("env", {})):
                    self.last |= _closing_figures(line)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Append an interval if it is due. Final figures are written to the summary only."""
        self.last |= metrics
        if final:
            self._whole.update(metrics.keys() - OF_A_MOMENT)
            return

        self._add_up(metrics)
        if self._folder.is_in_place():
            self._lines.metrics(metrics)

    def event(self, event: RunEvent) -> bool:
        """Append an evaluation; keep the summary for the end.

        Raises:
            OSError: if the evaluation cannot be written.
        """
        if event.kind == "end":
            self._summary = event.result
        elif event.kind == "evaluation" and event.result is not None:
            evaluation = without_nan({**event.result})
            self.last |= evaluation_figures(evaluation)
            if "closing" in evaluation:
                self.last |= _closing_figures(evaluation)

            if not self._folder.is_in_place():
                return False
            try:
                _append(self._run_dir / EVALUATIONS, evaluation)
            except OSError as error:
                raise OSError(error.errno, error.strerror, EVALUATIONS) from error
        return False

    def _add_up(self, metrics: Json) -> None:
        """Add up histograms and time shares for the whole run."""
        for name, total in ((LAG, self._lag), (LATENCY, self._latency)):
            for bin_, steps in (metrics.get(name) or {}).items():
                total[int(bin_)] += steps

        time_s = metrics.get("time_s")
        if time_s is None or metrics.get("learner_compute_fraction") is None:
            return

        # A line may be missing, so the time since the last one counts, not the interval.
        if self._time_s is None:
            span_s = metrics.get("interval_s") or 0.0
        else:
            span_s = max(0.0, time_s - self._time_s)
        self._time_s = time_s
        self._span_s += span_s

        for name in SHARES:
            value = metrics.get(name)
            shares = value if isinstance(value, dict) else {"": value}
            for part, share in shares.items():
                seconds = self._seconds.get((name, part), 0.0)
                self._seconds[name, part] = seconds + (share or 0.0) * span_s

    def _of_the_run(self) -> dict[str, Any]:
        """Returns the metrics of the whole run; those of one interval are under
        `last_interval`."""
        last = self.last
        whole = {name: value for name, value in last.items() if name in self._whole}
        interval = {name: value for name, value in last.items() if name not in self._whole}

        seconds = last.get("time_s")
        for name, steps in (("steps_per_s", "env_steps"), ("trained_steps_per_s", "trained_steps")):
            if name in last:
                is_known = seconds and last.get(steps) is not None
                whole[name] = last[steps] / seconds if is_known else None

        if self._span_s:
            shares: dict[str, dict[str, float]] = {}
            for (name, part), part_s in self._seconds.items():
                shares.setdefault(name, {})[part] = part_s / self._span_s
            # A figure that is a single number has one part, without a name.
            whole |= {name: by_part.get("", by_part) for name, by_part in shares.items()}
            whole["utilization"] = whole["learner_compute_fraction"]
        if self._lag:
            whole |= lags(self._lag)
        if self._latency:
            whole |= latency_figures(self._latency)

        if interval:
            whole["last_interval"] = interval
        return whole

    def summary(self, exit_reason: str, error: str | None) -> dict[str, Any]:
        """Returns the contents of `summary.json` of a run that has ended.

        Args:
            exit_reason: why the run has ended.
            error: the sentence of a failure.
        """
        return {
            "solved_at_s": None,
            "resumed": self._resumed,
            "accounting": NO_ACCOUNTING,
            "accounting_complete": True,
            **self._of_the_run(),
            "exit_reason": exit_reason,
            "error": error and redacted(error),
        }

    def close(self) -> None:
        """Write the last interval, due or not, and `summary.json`."""
        if not self._folder.is_in_place():
            return
        self._lines.close()
        summary, self._summary = self._summary, None
        if summary is not None:
            self._write_summary(summary)

    def _write_summary(self, summary: Json) -> None:
        """Write the summary into space that was reserved at the start, so that it is written on a
        full disk too. If it is too long, the last interval is left out.

        Raises:
            OSError: if it cannot be written.
        """
        text = json.dumps(summary, indent=2) + "\n"
        if self._is_reserved and len(text) > RESERVED_NBYTES:
            text = self._fitting_text(text, summary)

        try:
            if self._is_reserved:
                _write_in_place(self._run_dir / RESERVED, text)
                (self._run_dir / RESERVED).replace(self._run_dir / SUMMARY)
            else:
                write_atomic(self._run_dir / SUMMARY, text)
        except OSError as error:
            raise OSError(error.errno, error.strerror, SUMMARY) from error

    def _fitting_text(self, text: str, summary: Json) -> str:
        """Returns a text of the summary for which there is room: ``text`` if the disk has more
        than was reserved, otherwise one without the last interval."""
        try:
            write_atomic(self._run_dir / RESERVED, text)
            return text
        except OSError:
            short = {key: value for key, value in summary.items() if key != "last_interval"}
            return json.dumps(short, indent=2) + "\n"


def _closing_figures(evaluation: Json) -> dict[str, Any]:
    """Returns the metrics of an evaluation that decides whether the run is solved."""
    details = {name: evaluation[name] for name in ("play", "trained_steps")}
    return {"closing_evaluation": evaluation["closing"] | details}


def _reserve(path: Path) -> bool:
    """Reserves `RESERVED_NBYTES` on the disk for a file; returns whether there is room."""
    with suppress(OSError), open(path, "ab", opener=open_private) as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_NBYTES)
        return True
    return False


def _write_in_place(path: Path, text: str) -> None:
    """Replaces the contents of a file without giving its space back before."""
    with path.open("r+b") as file:
        file.write(text.encode())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def evaluation_figures(evaluation: Json) -> Json:
    """Returns the metrics of an evaluation, with None for NaN.

    Args:
        evaluation: a line of `evaluations.jsonl`.

    Raises:
        LookupError, TypeError: for a line that was damaged.
    """
    figures = {
        "eval_return_mean": evaluation["return"]["mean"],
        "eval_return_best": evaluation["best_return_mean"],
        "eval_length_mean": evaluation["length"]["mean"],
        "eval_trained_steps": evaluation["trained_steps"],
    }

    if "play" in evaluation:  # absent in lines of earlier versions
        figures["eval_play"] = evaluation["play"]
        figures["eval_episodes"] = evaluation["episodes"]
        for play in ("greedy", "sampled"):
            figures[f"eval_return_{play}"] = evaluation[play]["mean"]
            figures[f"eval_return_{play}_se"] = evaluation[play]["se"]
    if "against" in evaluation:  # an evaluation in a game of several sides
        figures["eval_win_rate"] = evaluation["win_rate"]
        figures["eval_win_rates"] = {
            each["opponent"]: each["win_rate"] and each["win_rate"]["mean"]
            for each in evaluation["against"]
        }
    return without_nan(figures)  # type: ignore[no-any-return]


def _append(path: Path, value: Json) -> None:
    """Appends a line, on a line of its own behind an incomplete one.

    Raises:
        OSError: if it does not fit.
    """
    data = json.dumps(value).encode() + b"\n"
    with open(path, "ab+", buffering=0, opener=open_private) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                data = b"\n" + data

        # A disk with little room takes a part of the data at a time.
        while data:
            data = data[file.write(data) :]
