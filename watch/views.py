"""What each view of the page shows of a run, as JSON."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve_target
from penstock.configs.transports import TRANSPORTS
from penstock.configs.yaml_text import parse
from penstock.core.formatting import count as digits
from penstock.core.formatting import finite
from penstock.evaluation import decisions
from penstock.monitor.curves import RETURN
from penstock.monitor.intervals import Floats
from penstock.monitor.metric_groups import group
from penstock.monitor.run_folder.checkpoints import checkpoints
from penstock.monitor.run_folder.columns import Points, rising
from penstock.monitor.run_folder.files import (
    FORM_ERRORS,
    Row,
    names_in,
    read_tail,
    read_text,
    stamp,
)
from penstock.monitor.run_folder.folder import flat, versions
from penstock.monitor.run_folder.reader import best_evaluation, is_evaluation
from penstock.monitor.run_folder.record import METRICS
from penstock.monitor.student_t import half_95
from penstock.watch.catalog import RunCatalog
from penstock.watch.headline import (
    ReturnCurve,
    end,
    is_overdue,
    learning,
    listed,
    restart,
    stall,
    trouble,
    wrong,
)
from penstock.watch.live import LiveStatus
from penstock.watch.pipeline import counts, pipeline_figures
from penstock.watch.profiles import profile_of, recorded_of, timeline_of
from penstock.watch.series import as_json, clipped, means, reduced, smooth, spread
from penstock.watch.verdicts import (
    LEDGERS,
    WINDOW_S,
    MetricWindow,
    judge,
    load_options,
    process_names,
)
from penstock.watch.watched_run import WatchedRun, shown_event

# The list of runs asks no further supervisor after this time, as some may not reply.
LIST_S = 1.0
# Each request spends at most this time on reading new lines of metrics.
BUDGET_S = 0.1
MOST_COMPARED = 24  # runs in one chart
MOST_METRICS = 60  # metrics in one request
MOST_POINTS = 2000  # points of one curve
MOST_SMOOTH = 10_000  # measurements that one point averages
MOST_LEDGERS = 16  # processes in the view of time
LEDGER_POINTS = 160  # bars of one process in the view of time
SHOWN_EVENTS = 400  # newest events in one reply
MOST_EVALUATED = 100  # newest evaluations in the table
LOG_NBYTES = 1 << 16  # bytes at the end of a log
MOST_FILES = 500  # newest videos in the list
# So many names of a folder are listed before the newest files among them are chosen.
MOST_NAMES = 10 * MOST_FILES
# The media types of videos, by the suffix of the file.
VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
SEE_PROCESSES = "The view Processes shows logs and stacks."
AXES = ("env_steps", "time_s")
# The metrics and fields of the summary that the head of the page shows.
FIGURES = (
    "time_s", "env_steps", "trained_steps", "learner_steps", "episodes", "episode_return_mean",
    "episode_return_all_mean", "eval_return_mean", "eval_return_best", "eval_play", "eval_episodes",
    "actors_restarted", "learners_restarted", "updates_skipped", "rollbacks",
)  # fmt: skip


class CachedResult(NamedTuple):
    """A result that is valid as long as ``key``, the state of its sources, stays the same."""

    key: object
    result: dict[str, Any]


class Views:
    """Answers the page's requests about the runs of a catalog."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        # Each of these has one entry per run that was viewed, by the run's folder.
        self._status: dict[Path, LiveStatus] = {}
        self._options: dict[Path, CachedResult] = {}
        self._verdicts: dict[Path, CachedResult] = {}

    def runs(self) -> Row:
        """Returns the rows of the list of runs, and the folder that contains the runs.

        A run whose metrics are overdue is checked for a stopped learner, by asking its supervisor.
        """
        rows = self.catalog.rows()
        deadline_s = time.monotonic() + LIST_S

        for row in rows:
            is_training = row["state"] == "running" and not row["stalled"] and row["stops"] is None
            if not is_training or not is_overdue(time.time(), row):
                continue
            if time.monotonic() > deadline_s:
                break

            folder = self.catalog.path(row["name"])
            if folder is not None:  # else it was deleted just now
                processes = self._live(folder).now()["processes"]
                row["stalled"] = stall(processes, row["written"], silent=False) is not None

        return {"folder": str(self.catalog.folder), "runs": rows}

    def now(self, name: str) -> Row:
        """Returns the present of a run: its state, figures, stages, processes and verdict.

        Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        read_share = run.read(BUDGET_S)
        row = run.row()
        running = row["state"] == "running"

        # Ask the supervisor for the processes, and see whether they stand still.
        if running:
            live_status = self._live(run.folder).now()
        else:
            why = f"the run is not in progress: {row['state']}"
            live_status = {"live": False, "why": why, "processes": []}
        status = _with_states(live_status, run)
        stalled = None
        if running and row["stops"] is None:
            stalled = stall(
                status["processes"],
                row["written"],
                silent=bool(row["stalled"]),
                host=status.get("host"),
            )

        # Judge the metrics.
        options = self._load_options(run)
        with run.lock:
            judged = self._verdict(run, options, status, live=running)
            stages = pipeline_figures(
                run.columns,
                last=run.last,
                options=options,
                verdict=judged["verdict"],
                live=running,
            )
            learns = learning(_training(run), live=running)
        if not running and run.summary.get("exit_reason") == "return":
            goal = run.options.get("stop.return")
            learns = {
                "kind": "reached",
                "text": f"the target, stop.return = {digits(finite(goal))}, was reached",
            }

        figures = _figures(run)
        return {
            **row,
            "read": read_share,
            "now": time.time(),
            "figures": figures,
            "exit_reason": _plain(run.summary.get("exit_reason")),
            "status": status,
            "flow": stages,
            "stall": stalled,
            "seen": run.seen_s if row["state"] == "died" else None,
            "learning": learns,
            "troubles": _troubles(run, row=row, status=status, figures=figures, stalled=stalled),
            **judged,
        }

    def curves(
        self,
        names: Sequence[str],
        metrics: Sequence[str],
        x: str,
        count: int = 1,
        points: int = 600,
        low: float | None = None,
        high: float | None = None,
        known_version: str = "",
        *,
        by_seed: bool = True,
    ) -> Row:
        """Returns curves of metrics of several runs, reduced to a number of points.

        Args:
            names: 1 to `MOST_COMPARED` runs.
            metrics: at most `MOST_METRICS` names of metrics.
            x: the horizontal axis, one of `AXES`.
            count: measurements that each point of the smoothed curve averages.
            points: the greatest number of points of a curve.
            low, high: the range of ``x`` that is shown; None for all of it.
            known_version: the ``version`` of the last reply; the reply is short if nothing is new.
            by_seed: a curve per run. Otherwise runs `seed-N` of one folder are one curve: their
                mean, with the ``low`` and the ``high`` of them, over the range that all have.

        Raises UserError for an unknown run, or a number that is out of range.
        """
        _check_curves(names, metrics, x=x, count=count, points=points)
        runs = {name: self.catalog.run(name) for name in dict.fromkeys(names)}
        read_shares = {name: run.read(BUDGET_S / len(runs)) for name, run in runs.items()}

        # The request and the amounts of data identify the reply.
        request = f"{by_seed} {x} {count} {points} {low} {high} {' '.join(metrics)}"
        amounts = [
            (name, run.columns.lines, len(run.evaluations), len(run.events))
            for name, run in runs.items()
        ]
        version = format(hash((request, *amounts)) & (1 << 64) - 1, "x")
        if version == known_version:
            return {"version": version, "unchanged": True, "read": read_shares}

        groups = [[name] for name in runs] if by_seed else _by_folder(list(runs))
        lines: dict[str, list[Row]] = {}
        for metric in metrics:
            metric_count = 1 if is_evaluation(metric) else count  # evaluations are not smoothed
            for group_names in groups:
                curves = [runs[name].curve(x, metric) for name in group_names]
                make_line = _line if len(group_names) == 1 else _band
                line = make_line(curves, count=metric_count, points=points, low=low, high=high)
                if line:
                    lines.setdefault(metric, []).append({"run": group_names[0], **line})

        left_out = {name: run.columns.left_out for name, run in runs.items()}
        return {
            "version": version,
            "read": read_shares,
            "curves": lines,
            "marks": {name: run.marks(x)[-SHOWN_EVENTS:] for name, run in runs.items()},
            "targets": {name: run.target(x) for name, run in runs.items()},
            "left_out": {name: number for name, number in left_out.items() if number},
        }

    def metrics(self, names: Sequence[str]) -> Row:
        """Returns the metrics that runs have, by group, in the order of the groups.

        Raises UserError for an unknown run.
        """
        by_group: dict[str, list[str]] = {}
        for name in names[:MOST_COMPARED]:
            run = self.catalog.run(name)
            run.read(BUDGET_S / len(names))
            for metric in run.columns.names:
                section = metric.partition("/")[0]
                by_group.setdefault(group(section), []).append(metric)

        # Several runs have the same metrics, of which each is named once.
        return {"groups": {key: list(dict.fromkeys(value)) for key, value in by_group.items()}}

    def ledgers(self, name: str) -> Row:
        """Returns the shares of each process's main thread over time, and of the learner's parts.

        ``computes`` of a learner and ``works`` of another process are means of the last
        ``seconds``, as the flow and the verdict are.

        Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        read_share = run.read(BUDGET_S)
        live = run.state == "running"

        with run.lock:
            names = process_names(run.columns)
            shown_names = names[:MOST_LEDGERS]
            prefixes = {"learner, by part": "ledger/"}
            prefixes |= {process: f"{LEDGERS}{process}/" for process in shown_names}
            window = MetricWindow(run.columns, WINDOW_S if live else None)

            processes = []
            for title, prefix in prefixes.items():
                bars = _bars(run, prefix)
                if bars is not None:
                    processes.append({"name": title, **bars, **_at_work(window, title, prefix)})

        return {
            "read": read_share,
            "processes": processes,
            "left_out": len(names) - len(shown_names),
            "seconds": window.seconds,
        }

    def events(self, name: str, kind: str = "", role: str = "", text: str = "") -> Row:
        """Returns the newest events that match, newest first, and the kinds and roles of all.

        Args:
            kind: of the events; "" for every kind.
            role: the name of a process; "" for every one.
            text: is searched in the events, without regard to case.

        Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        run.read(BUDGET_S)
        events = [shown_event(event) for event in run.events]
        death = run.death()
        if death is not None:
            events.append(shown_event(death))

        matching = [
            event
            for event in reversed(events)
            if _matches(event, kind=kind, role=role, text=text.lower()[:200])
        ]

        # An event that repeats is one line with a count.
        kind_counts: dict[str, int] = {}
        for event in events:
            key = event["kind"] or "?"
            kind_counts[key] = kind_counts.get(key, 0) + int(event["count"] or 1)

        roles = dict.fromkeys(event["role"] for event in events if event["role"])
        return {
            "events": matching[:SHOWN_EVENTS],
            "matching": len(matching),
            "kinds": kind_counts,
            "roles": sorted(roles),
        }

    def log(self, name: str, role: str) -> Row:
        """Returns the end of what a process has printed; ``text`` is None without such a log.

        Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        file = f"{role}.log"
        if file not in names_in(run.folder, "logs", MOST_NAMES):
            return {"role": role[:80], "text": None}
        return {"role": role, "text": read_tail(run.folder, "logs", file, most=LOG_NBYTES)}

    def about(self, name: str) -> Row:
        """Returns the config with what differs from the preset, and the versions at each start.

        The accounting of samples and the list of checkpoints are part of it too. Raises UserError
        for an unknown run.
        """
        run = self.catalog.run(name)
        run.read(BUDGET_S)
        options, base = _differences(run.options)
        return {
            "options": options,
            "base": base,
            "starts": _starts(run),
            "accounting": _accounting(run),
            "checkpoints": checkpoints(run.folder),
            "folder": str(run.folder),
        }

    def agent(self, name: str) -> Row:
        """Returns the videos of a run and its evaluations, both newest first.

        ``record`` is the command that records a video, ``why_none`` a sentence for a run without
        evaluations. Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        run.read(BUDGET_S)

        videos: list[Row] = []
        for file in names_in(run.folder, "videos", MOST_NAMES):
            # The name of a video that is being recorded begins with a dot.
            if Path(file).suffix in VIDEOS and not file.startswith("."):
                _, nbytes, written_ns = stamp(run.folder, "videos", file)
                videos.append({"file": file, "nbytes": nbytes, "written": written_ns * 1e-9})

        evaluations = [_evaluation(line) for line in run.evaluations[-MOST_EVALUATED:]]
        return {
            "videos": sorted(videos, key=lambda video: -video["written"])[:MOST_FILES],
            "record": f"penstock record {shlex.quote(str(run.folder))}",
            "evaluations": evaluations[::-1],
            "evaluated": len(run.evaluations),
            "why_none": None if run.evaluations else _why_no_evaluation(run),
        }

    def profile(self, name: str) -> Row:
        """Returns the profile of a run by `penstock profile`, or null."""
        return {"profile": profile_of(self.catalog.run(name).folder)}

    def timeline(self, name: str) -> Row:
        """Returns the spans of each thread in a profiled run, at most `profiles.MOST_SPANS`."""
        return timeline_of(self.catalog.run(name).folder)

    def recorded(self, name: str) -> Row:
        """Returns the spans of the last minute before the order `timeline`."""
        return recorded_of(self.catalog.run(name).folder)

    def video(self, name: str, file: str) -> tuple[Path, str]:
        """Returns the path and the media type of a video.

        Raises UserError for an unknown run, or if the run has no video of that name.
        """
        run = self.catalog.run(name)
        media_type = VIDEOS.get(Path(file).suffix)
        if media_type is None or file not in names_in(run.folder, "videos", MOST_NAMES):
            raise UserError(f"the run has no video {file[:80]!r}")
        return run.folder / "videos" / file, media_type

    def decisions(self, name: str, file: str) -> Row:
        """Returns what the policy decided in each step of a video.

        "decisions" is None where the file of decisions beside the video is missing, too large or
        of another form. Raises UserError as `video`.
        """
        run = self.catalog.run(name)
        self.video(name, file)  # refuses a name that is no video

        decisions_file = file + decisions.SUFFIX
        nbytes = stamp(run.folder, "videos", decisions_file)[1]
        text = None
        if nbytes <= decisions.NBYTES:
            text = read_text(run.folder, "videos", decisions_file)
        return {"file": file, "decisions": decisions.parse_decisions(text)}

    def _live(self, folder: Path) -> LiveStatus:
        return self._status.setdefault(folder, LiveStatus(folder))

    def _load_options(self, run: WatchedRun) -> dict[str, Any]:
        """Returns the options as the verdict's rules read them; read anew if the config changes."""
        key = stamp(run.folder, "config.yaml")
        cached = self._options.get(run.folder)
        if cached is None or cached.key != key:
            cached = CachedResult(key, load_options(run.folder, run.config))
            self._options[run.folder] = cached
        return cached.result

    def _verdict(self, run: WatchedRun, options: dict[str, Any], status: Row, *, live: bool) -> Row:
        """Returns the result of `judge`, judged anew if there are new lines of metrics."""
        # The first answer of a supervisor has no shares of its threads.
        has_shares = bool(status.get("window_s"))
        key = (run.columns.lines, live, status["live"], has_shares)
        cached = self._verdicts.get(run.folder)
        if cached is not None and cached.key == key:
            return cached.result

        try:
            cores = None
            if not status["live"]:  # those where it was started last, maybe on another host
                cores = finite(next(reversed(run.starts), {}).get("cores")) or None
            verdict = judge(run.columns, options, status, live=live, cores=cores)
        except FORM_ERRORS:  # options of any kind
            verdict = {"verdict": None, "also": [], "seconds": 0.0}
        self._verdicts[run.folder] = CachedResult(key, verdict)
        return verdict


RUN_VIEWS: dict[str, Callable[[Views, str], Row]] = {
    "now": Views.now,
    "ledgers": Views.ledgers,
    "about": Views.about,
    "agent": Views.agent,
    "profile": Views.profile,
    "recorded": Views.recorded,
    "timeline": Views.timeline,
}
"""The views of one run that the server and a frozen page answer, by the names of the requests."""


def _matches(event: Row, *, kind: str, role: str, text: str) -> bool:
    """Whether an event is of a kind and a role, and has a text, in lower case; "" for any."""
    if kind and event["kind"] != kind:
        return False
    if role and event["role"] != role:
        return False
    return not text or text in (event["text"] or "").lower()


def _check_curves(
    names: Sequence[str], metrics: Sequence[str], *, x: str, count: int, points: int
) -> None:
    """Raise UserError for arguments of `Views.curves` that are out of range."""
    if x not in AXES:
        raise UserError(f"x is {x[:40]!r}; it must be env_steps or time_s")
    if not 0 < len(names) <= MOST_COMPARED:
        raise UserError(f"{len(names)} runs are named; compare 1 to {MOST_COMPARED}")
    if len(metrics) > MOST_METRICS:
        raise UserError(f"{len(metrics)} metrics are named; at most {MOST_METRICS} are served")
    if not 1 <= count <= MOST_SMOOTH or not 10 <= points <= MOST_POINTS:
        raise UserError(f"smooth must be 1 to {MOST_SMOOTH}, and points 10 to {MOST_POINTS}")


def _line(
    curves: Sequence[Points], *, count: int, points: int, low: float | None, high: float | None
) -> Row | None:
    """Returns one curve, and the smoothed one as ``smooth``; None without points.

    The arguments are those of `Views.curves`; ``curves`` has one element.
    """
    [curve] = curves
    if not len(curve[0]):
        return None

    shown_curve = clipped(*curve, low=low, high=high)
    line = as_json(reduced(*shown_curve, points))
    if count > 1:
        smooth_curve = smooth(curve, count, low=low, high=high)
        line["smooth"] = as_json(reduced(*smooth_curve, points))
    return line


def _band(
    curves: Sequence[Points], *, count: int, points: int, low: float | None, high: float | None
) -> Row | None:
    """Returns the mean of several curves, each smoothed, with their lowest and highest values.

    None without points. The arguments are those of `Views.curves`.
    """
    curves = [curve for curve in curves if len(curve[0])]
    smooth_curves = [smooth(curve, count, low=low, high=high) for curve in curves]
    band = spread(smooth_curves, points // 2)
    if band is None:
        return None

    mean, lowest, highest = map(as_json, band)
    return {**mean, "low": lowest["y"], "high": highest["y"], "count": len(curves)}


def _by_folder(names: Sequence[str]) -> list[list[str]]:
    """Divides names into groups: the runs `seed-N` of one folder, and each of the others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        # A key that begins with a slash is no folder of a catalog, so it is that run's alone.
        key = folder if last.startswith("seed-") else f"/{name}"
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _at_work(window: MetricWindow, title: str, prefix: str) -> Row:
    """Returns the share of time in which a process works.

    That is ``computes`` of a learner, and the time without waiting, ``works``, of another process;
    an empty dictionary for a process that did not run in the window.
    """
    shares = window.shares(prefix)
    if not shares:
        return {}
    if not title.startswith("learner"):
        return {"works": max(0.0, 1.0 - shares.get("wait", 0.0) - shares.get("other", 0.0))}

    # The learner's own ledger, which the other views show too, not the supervisor's of it: their
    # intervals differ a little.
    computes = window.mean(f"ranks/{title.removeprefix('learner-')}/ledger/compute")
    if computes is None:
        computes = window.mean("ledger/compute")
    return {"computes": computes}


def _with_states(status: Mapping[str, Any], run: WatchedRun) -> Row:
    """Returns the status with ``now`` of each process: whether it runs, and if not, why."""
    processes = status["processes"]
    has_ended = any(process.get("pid") is None for process in processes)
    end_reasons = run.ends() if has_ended else {}

    processes_with_state = []
    for process in processes:
        if process.get("pid") is None:
            state = end_reasons.get(str(process.get("name")), "not started")
        elif process.get("state") == "stopped":
            state = "stopped by a signal"
        else:
            state = "runs"
        processes_with_state.append({**process, "now": state})
    return {**status, "processes": processes_with_state}


def _figures(run: WatchedRun) -> Row:
    """Returns the figures of the page's head, those of the summary before those of the last line.

    ``eval_best_of_kind`` is the best evaluation that was played as the last one was (greedy or
    sampled), ``eval_half`` half the 95 % confidence interval of the last one; None if unknown.
    """
    summary = run.summary
    values = {**run.last, **{key: summary[key] for key in FIGURES if key in summary}}
    if run.evaluations:
        values |= {key: value for key, value in summary.items() if is_evaluation(key)}

    play = values.get("eval_play")
    standard_error = finite(values.get(f"eval_return_{play}_se"))
    return {
        **{key: _plain(values.get(key)) for key in FIGURES},
        "eval_best_of_kind": _best_of_kind(run, play),
        "eval_half": half_95(standard_error, finite(values.get("eval_episodes"))),
    }


def _best_of_kind(run: WatchedRun, play: Any) -> float | None:
    """Returns the mean of the best evaluation of a kind of play; None without one.

    ``play`` is "greedy" or "sampled", or another value for an unknown kind.
    """
    with run.lock:
        best = best_evaluation(run.evaluations, play) if play else None
    return None if best is None else _evaluation(best)[str(play)]["mean"]


def _troubles(
    run: WatchedRun,
    *,
    row: Mapping[str, Any],
    status: Mapping[str, Any],
    figures: Mapping[str, Any],
    stalled: Mapping[str, Any] | None,
) -> list[Row]:
    """Returns messages on what went wrong with a run, the worst first.

    Args:
        row: of the list of runs.
        status: as `_with_states` returns it.
        figures: as `_figures` returns them.
        stalled: as `stall` returns it.
    """
    running = row["state"] == "running"
    troubles = []
    if row["state"] in ("died", "stopped") or row["error"]:
        troubles.append(_early_end(run, row))

    named: Sequence[Any] = ()
    if stalled is not None:
        named = stalled["names"]
        text = f"The run does not train: {stalled['why']}. {SEE_PROCESSES}"
        troubles.append(trouble("bad", text, command=stalled["command"]))

    # What is wrong with processes that the message above does not name.
    problems: dict[Any, str] = {}
    if running:
        problems = _problems(status["processes"], but=named)
    if problems:
        sentences = listed([f"{name}: {problem}" for name, problem in problems.items()], "; ")
        troubles.append(trouble("bad", f"{sentences}. {SEE_PROCESSES}"))
    if running and status.get("why"):
        troubles.append(trouble("warn", status["why"]))

    if skipped := figures.get("updates_skipped"):
        text = "updates were skipped, because a loss or gradient was not finite"
        troubles.append(trouble("bad", f"{digits(skipped)} {text}."))
    if rollbacks := figures.get("rollbacks"):
        rollback = _last_event(run, "rollback")
        time_s = None if rollback is None else finite(rollback.get("time"))
        text = f"{digits(rollbacks)} times training was rolled back to a checkpoint."
        troubles.append(trouble("bad", text, time_s))

    # A process that was restarted and has no problem now.
    last_restart = _last_event(run, "restart")
    if last_restart is not None and last_restart.get("role") not in problems:
        counts = (figures.get("learners_restarted"), figures.get("actors_restarted"))
        troubles.append(restart(last_restart, sum(count for count in counts if count)))
    return troubles


def _early_end(run: WatchedRun, row: Mapping[str, Any]) -> Row:
    """Returns the message on a run that ended before a limit; ``row`` of the list of runs."""
    saved_steps = [checkpoint.get("trained_steps") for checkpoint in checkpoints(run.folder)]
    return end(
        row["state"],
        row["error"],
        seen_s=run.seen_s,
        trained_steps=max((steps for steps in saved_steps if steps is not None), default=None),
        folder=run.folder,
        games_play=run.options.get("actors.games") is True,
    )


def _problems(processes: Sequence[Mapping[str, Any]], *, but: Sequence[Any]) -> dict[Any, str]:
    """Returns what is wrong with processes, by their names, except those named in ``but``."""
    problems = {}
    for process in processes:
        problem = wrong(process)
        if problem and process["name"] not in but:
            problems[process["name"]] = problem
    return problems


def _last_event(run: WatchedRun, kind: str) -> Row | None:
    """Returns the last event of a kind; None without one."""
    with run.lock:
        return next((event for event in reversed(run.events) if event.get("kind") == kind), None)


class Preset(NamedTuple):
    """The options that an environment and an algorithm have without further ones.

    ``options`` are texts by the option's name, ``origin`` is where they are from; empty and None
    where there is no preset.
    """

    options: Mapping[str, str]
    origin: str | None


def _differences(options: Mapping[str, Any]) -> tuple[list[Row], str | None]:
    """Compares the options of a run with those of its preset.

    Returns: a row for every option, with its value, that of the preset and whether they differ;
    and where the preset is from, None without one.
    """
    env = options.get("env.id")
    algorithm = options.get("algo.name")
    preset = Preset({}, None)
    if isinstance(env, str) and isinstance(algorithm, str):
        preset = _preset(env, algorithm)

    rows = []
    for option, value in options.items():
        text = _as_text(value)
        preset_text = preset.options.get(option)
        differs = preset.origin is not None and preset_text != text
        rows.append({"name": option, "value": text, "preset": preset_text, "differs": differs})
    return rows, preset.origin


@lru_cache
def _preset(env: str, algorithm: str) -> Preset:
    """Returns the preset of an environment and an algorithm."""
    with suppress(UserError, OSError, ValueError):
        # A target of such a name would be a file.
        if not env.endswith((".yaml", ".yml", ".py")) and not Path(env).exists():
            resolved = resolve_target(env, [f"algo.name={algorithm}"])
            options = flat(parse(dump(resolved.config), "")[0])
            texts = {name: _as_text(value) for name, value in options}
            return Preset(texts, resolved.origin)
    return Preset({}, None)


def _bars(run: WatchedRun, prefix: str) -> Row | None:
    """Returns the shares below a prefix over time, in buckets; None if no line has them.

    Returns: ``x``, the ends of the buckets in seconds of training, and ``parts``: by part, its
    share in each bucket.
    """
    columns = run.columns
    names = columns.below(prefix)
    if not names:
        return None
    times = columns.column("time_s")
    parts = {name.removeprefix(prefix): columns.column(name) for name in names}

    # Only lines with a time and some share count. Lines of the time that a resumed run repeats
    # replace the earlier ones.
    unknown = np.all([np.isnan(values) for values in parts.values()], axis=0)
    chosen = ~np.isnan(times) & ~unknown
    if not chosen.any():
        return None
    chosen[chosen] = rising(times[chosen])

    bars: dict[str, list[float]] = {}
    ends: Any = None
    for part, values in parts.items():
        ends, shares = means(times[chosen], np.nan_to_num(values[chosen]), LEDGER_POINTS)
        bars[part] = [round(float(share), 4) for share in shares]
    return {"x": [round(float(end_s), 3) for end_s in ends], "parts": bars}


def _training(run: WatchedRun) -> ReturnCurve:
    """Returns the measurements of the return in training.

    Episodes and seconds are interpolated at the measurements' steps, and 0 where the lines lack
    them.
    """
    steps, returns = run.curve("env_steps", RETURN)

    def at_steps(name: str) -> Floats:
        """Returns the values of a counter at the measurements' steps."""
        counter_steps, values = run.columns.points("env_steps", name)
        if not len(counter_steps):
            return np.zeros(len(steps))
        return np.maximum.accumulate(np.interp(steps, counter_steps, values))

    return ReturnCurve(
        steps=steps, returns=returns, episodes=at_steps("episodes"), seconds=at_steps("time_s")
    )


def _accounting(run: WatchedRun) -> Row:
    """Returns the terms of the balance of samples: of the summary, or of the last line so far.

    ``complete`` tells whether all of the run is counted, ``at`` is the time of the last line in
    seconds since the epoch.
    """
    final = run.summary.get("accounting")
    if isinstance(final, Mapping):
        terms = {key: finite(final.get(key)) for key in ("produced", "trained", "in_flight")}
        reasons = {key: counts(final, key) for key in ("dropped", "lost")}
    else:
        last = run.last
        terms = {
            "produced": finite(last.get("env_steps")),
            "in_flight": None,
            "trained": finite(last.get("trained_steps")),
        }
        reasons = {key: counts(last, key) for key in ("dropped", "lost")}

    return {
        **terms,
        **reasons,
        "complete": bool(final) and bool(run.summary.get("accounting_complete", True)),
        "resumed": bool(final) and run.summary.get("resumed") is True,
        "at": stamp(run.folder, METRICS)[2] * 1e-9,
    }


def _starts(run: WatchedRun) -> list[Row]:
    """Returns versions and machine at each start, newest first, as texts."""
    starts = []
    for start in reversed(run.starts):
        texts = {name: _as_text(value) for name, value in versions(start).items()}
        starts.append({"time": finite(start.get("time")), "shown": texts})
    return starts


def _evaluation(line: Mapping[str, Any]) -> Row:
    """Returns one line of evaluations as the page shows it.

    For each kind of play that the line has, its figures include ``half``, half the 95 % confidence
    interval of the mean.
    """
    row: Row = {key: _plain(line.get(key)) for key in ("trained_steps", "time_s", "play", "best")}
    row["episodes"] = finite(line.get("episodes"))
    row["win_rate"] = finite(line.get("win_rate"))

    for play in ("greedy", "sampled", "return"):
        result = line.get(play)
        if isinstance(result, Mapping):
            figures = {key: finite(result.get(key)) for key in ("mean", "se", "std", "min", "max")}
            row[play] = {**figures, "half": half_95(figures["se"], row["episodes"])}
    return row


def _why_no_evaluation(run: WatchedRun) -> str:
    """Returns why a run has no evaluation, by its options and the evaluator's last note."""
    options = run.options
    every_steps = options.get("eval.every_steps")
    every_s = options.get("eval.every_s")
    share = options.get("eval.share")
    transport = options.get("transport.kind")

    if every_s is not None:
        reason = f"They are due every eval.every_s = {every_s} seconds."
    elif every_steps is None:
        reason = "eval.every_steps=100000 evaluates the weights at every 100,000 trained steps."
    elif TRANSPORTS.one_process(str(transport)):
        reason = f"With transport.kind={transport} only eval.every_s enables them."
    else:
        reason = (
            "The first is due after 45 seconds of training, and the next every eval.every_steps = "
            f"{every_steps} trained steps, or further apart where they would take more than "
            f"eval.share = {share} of a core; the run has "
            f"{digits(finite(run.last.get('trained_steps')))}. eval.share=null sets no limit."
        )

    with run.lock:
        notes = [
            str(event.get("text"))[:2000]
            for event in run.events
            if event.get("kind") == "note" and str(event.get("role")).startswith("evaluator")
        ]
    return " ".join(["None.", reason, *(f"Note: {text}." for text in notes[-1:])])


def _plain(value: Any) -> Any:
    """Returns a text, a truth value or a finite number as it is; None for anything else."""
    if isinstance(value, str):
        return value[:2000]
    return value if isinstance(value, bool) else finite(value)


def _as_text(value: Any) -> str:
    """Returns a text as it is, and anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:2000]
