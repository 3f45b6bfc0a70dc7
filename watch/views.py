"""What each view of the page shows of a run, as JSON."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

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
from penstock.watch.flow import counts, flow
from penstock.watch.headline import (
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

LIST_S = 1.0  # in which the list asks supervisors, of which some may not reply
BUDGET_S = 0.1  # to read new lines, per request
MOST_COMPARED = 24  # runs in one chart
MOST_METRICS = 60  # per request
MOST_POINTS = 2000
MOST_SMOOTH = 10_000
MOST_LEDGERS = 16  # processes in the view of time
LEDGER_POINTS = 160
SHOWN_EVENTS = 400
MOST_EVALUATED = 100  # of the newest evaluations
LOG_NBYTES = 1 << 16
MOST_FILES = 500
MOST_NAMES = 10 * MOST_FILES  # in a folder, of which those above are the newest or the first
VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
SEE_PROCESSES = "The view Processes shows logs and stacks."
AXES = ("env_steps", "time_s")
FIGURES = (
    "time_s", "env_steps", "trained_steps", "learner_steps", "episodes", "episode_return_mean",
    "eval_return_mean", "eval_return_best", "eval_play", "eval_episodes", "actors_restarted",
    "learners_restarted", "updates_skipped", "rollbacks",
)  # fmt: skip


class Views:
    """Answers the page's requests about the runs of a catalog."""

    def __init__(self, catalog: RunCatalog) -> None:
        self.catalog = catalog
        # Each of these has one entry per run that was viewed, by the run's folder.
        self._status: dict[Path, LiveStatus] = {}
        self._options: dict[Path, tuple[object, dict[str, Any]]] = {}
        self._verdicts: dict[Path, tuple[object, Row]] = {}

    def runs(self) -> Row:
        """Returns the rows of the list of runs, and the folder that contains the runs.

        A run whose metrics are overdue is checked for a stopped learner, by asking its supervisor.
        """
        rows = self.catalog.rows()
        ends_s = time.monotonic() + LIST_S

        for row in rows:
            is_asked = row["state"] == "running" and not row["stalled"] and row["stops"] is None
            if not is_asked or not is_overdue(time.time(), row) or time.monotonic() > ends_s:
                continue

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
        read = run.read(BUDGET_S)
        row = run.row()
        running = row["state"] == "running"
        why = f"the run is not in progress: {row['state']}"
        ended = {"live": False, "why": why, "processes": []}
        status = _with_states(self._live(run.folder).now() if running else ended, run)
        stalled = None
        if running and row["stops"] is None:
            silent = bool(row["stalled"])
            on = status.get("host")
            stalled = stall(status["processes"], row["written"], silent=silent, host=on)

        # Judge the metrics.
        options = self._load_options(run)
        with run.lock:
            judged = self._verdict(run, options, status, live=running)
            stages = flow(run.columns, run.last, options, judged["verdict"], live=running)
            learns = learning(*_training(run), live=running)
        summary = run.summary
        shown = {**run.last, **{key: summary[key] for key in FIGURES if key in summary}}
        if run.evaluations:
            shown |= {k: v for k, v in summary.items() if is_evaluation(k)}
        best = _best_of_its_kind(run, shown.get("eval_play"))
        se = finite(shown.get(f"eval_return_{shown.get('eval_play')}_se"))
        half = half_95(se, finite(shown.get("eval_episodes")))
        figures = {key: _plain(shown.get(key)) for key in FIGURES}
        return {
            **row,
            "read": read,
            "now": time.time(),
            "figures": {**figures, "eval_best_of_kind": best, "eval_half": half},
            "exit_reason": _plain(summary.get("exit_reason")),
            "status": status,
            "flow": stages,
            "stall": stalled,
            "seen": run.seen_s if row["state"] == "died" else None,
            "learning": learns,
            "troubles": _troubles(run, row, status, figures, stalled),
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
        known: str = "",
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
        if x not in AXES:
            raise UserError(f"x is {x[:40]!r}; it must be env_steps or time_s")
        if not 0 < len(names) <= MOST_COMPARED:
            raise UserError(f"{len(names)} runs are named; compare 1 to {MOST_COMPARED}")
        if len(metrics) > MOST_METRICS:
            raise UserError(f"{len(metrics)} metrics are named; at most {MOST_METRICS} are served")
        if not 1 <= count <= MOST_SMOOTH or not 10 <= points <= MOST_POINTS:
            raise UserError(f"smooth must be 1 to {MOST_SMOOTH}, and points 10 to {MOST_POINTS}")

        # The request and the amounts of data identify the reply.
        opened = {name: self.catalog.run(name) for name in dict.fromkeys(names)}
        read = {name: run.read(BUDGET_S / len(opened)) for name, run in opened.items()}
        asked = f"{by_seed} {x} {count} {points} {low} {high} {' '.join(metrics)}"
        found = [(n, r.columns.lines, len(r.evaluations), len(r.events)) for n, r in opened.items()]
        version = format(hash((asked, *found)) & (1 << 64) - 1, "x")
        if version == known:
            return {"version": version, "unchanged": True, "read": read}
        drawn: dict[str, list[Row]] = {}

        groups = [[name] for name in opened] if by_seed else _by_folder(list(opened))
        for metric in metrics:
            for group_of in groups:
                curves = [opened[name].curve(x, metric) for name in group_of]
                softened = count if count > 1 and not is_evaluation(metric) else 1
                made = _line if len(group_of) == 1 else _band
                if line := made(curves, softened, points, low, high):
                    drawn.setdefault(metric, []).append({"run": group_of[0], **line})
        return {
            "version": version,
            "read": read,
            "curves": drawn,
            "marks": {name: run.marks(x)[-SHOWN_EVENTS:] for name, run in opened.items()},
            "targets": {name: run.target(x) for name, run in opened.items()},
            "left_out": {n: r.columns.left_out for n, r in opened.items() if r.columns.left_out},
        }

    def metrics(self, names: Sequence[str]) -> Row:
        """Returns the metrics that runs have, by group, in the order of the groups.

        Raises UserError for an unknown run.
        """
        found: dict[str, list[str]] = {}
        for name in names[:MOST_COMPARED]:
            run = self.catalog.run(name)
            run.read(BUDGET_S / len(names))
            for metric in run.columns.names:
                found.setdefault(group(metric.partition("/")[0]), []).append(metric)

        # Several runs have the same metrics, of which each is named once.
        return {"groups": {key: list(dict.fromkeys(value)) for key, value in found.items()}}

    def ledgers(self, name: str) -> Row:
        """Returns the shares of each process's main thread over time, and of the learner's parts.

        ``computes`` of a learner and ``works`` of another process are means of the last
        ``seconds``, as the flow and the verdict are.

        Raises UserError for an unknown run.
        """
        run = self.catalog.run(name)
        read = run.read(BUDGET_S)
        live = run.state == "running"

        with run.lock:
            names = process_names(run.columns)
            shown = names[:MOST_LEDGERS]
            prefixes = {"learner, by part": "ledger/", **{n: f"{LEDGERS}{n}/" for n in shown}}
            window = MetricWindow(run.columns, WINDOW_S if live else None)
            found = [
                {"name": title, **bars, **_at_work(window, title, prefix)}
                for title, prefix in prefixes.items()
                if (bars := _bars(run, prefix)) is not None
            ]

        return {
            "read": read,
            "processes": found,
            "left_out": len(names) - len(shown),
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
        death = run.death()
        events = [shown_event(event) for event in (*run.events, *([death] if death else []))]

        wanted = text.lower()[:200]
        matching = [
            event
            for event in reversed(events)
            if (not kind or event["kind"] == kind)
            and (not role or event["role"] == role)
            and (not wanted or wanted in (event["text"] or "").lower())
        ]

        # An event that repeats is one line with a count.
        kinds: dict[str, int] = {}
        for event in events:
            key = event["kind"] or "?"
            kinds[key] = kinds.get(key, 0) + int(event["count"] or 1)

        roles = dict.fromkeys(event["role"] for event in events if event["role"])
        return {
            "events": matching[:SHOWN_EVENTS],
            "matching": len(matching),
            "kinds": kinds,
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
                _, nbytes, ns = stamp(run.folder, "videos", file)
                videos.append({"file": file, "nbytes": nbytes, "written": ns * 1e-9})
        return {
            "videos": sorted(videos, key=lambda video: -video["written"])[:MOST_FILES],
            "record": f"penstock record {shlex.quote(str(run.folder))}",
            "evaluations": [_evaluation(line) for line in run.evaluations[-MOST_EVALUATED:]][::-1],
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
        kind = VIDEOS.get(Path(file).suffix)
        if kind is None or file not in names_in(run.folder, "videos", MOST_NAMES):
            raise UserError(f"the run has no video {file[:80]!r}")
        return run.folder / "videos" / file, kind

    def decisions(self, name: str, file: str) -> Row:
        """Returns what the policy decided in each step of a video.

        "decisions" is None where the file of decisions beside the video is missing, too large or
        of another form. Raises UserError as `video`.
        """
        run = self.catalog.run(name)
        self.video(name, file)

        beside = file + decisions.SUFFIX
        nbytes = stamp(run.folder, "videos", beside)[1]
        small = nbytes <= decisions.NBYTES
        text = read_text(run.folder, "videos", beside) if small else None
        return {"file": file, "decisions": decisions.checked(text)}

    def _live(self, folder: Path) -> LiveStatus:
        return self._status.setdefault(folder, LiveStatus(folder))

    def _load_options(self, run: WatchedRun) -> dict[str, Any]:
        key = stamp(run.folder, "config.yaml")
        known = self._options.get(run.folder)
        if known is None or known[0] != key:
            known = self._options[run.folder] = key, load_options(run.folder, run.config)
        return known[1]

    def _verdict(self, run: WatchedRun, options: dict[str, Any], status: Row, *, live: bool) -> Row:
        key = (run.columns.lines, live, status["live"], bool(status.get("window_s")))
        known = self._verdicts.get(run.folder)
        if known is None or known[0] != key:
            try:
                cores = None
                if not status["live"]:  # those where it was started last, maybe on another host
                    cores = finite(next(reversed(run.starts), {}).get("cores")) or None
                found = judge(run.columns, options, status, live=live, cores=cores)
            except FORM_ERRORS:  # options of any kind
                found = {"verdict": None, "also": [], "seconds": 0.0}
            known = self._verdicts[run.folder] = key, found
        return known[1]


RUN_VIEWS: dict[str, Callable[[Views, str], Row]] = {
    "now": Views.now,
    "ledgers": Views.ledgers,
    "about": Views.about,
    "agent": Views.agent,
    "profile": Views.profile,
    "recorded": Views.recorded,
    "timeline": Views.timeline,
}
"""What the server, and a frozen page, answer of one run, by the names of the requests."""


def _line(
    curves: Sequence[Points], count: int, points: int, low: float | None, high: float | None
) -> Row | None:
    """Returns one curve, and the smoothed one as ``smooth``; None without points.

    The arguments are those of `Views.curves`; ``curves`` has one element.
    """
    [curve] = curves
    if not len(curve[0]):
        return None
    found = as_json(reduced(*clipped(*curve, low, high), points))
    if count > 1:
        found["smooth"] = as_json(reduced(*smooth(curve, count, low, high), points))
    return found


def _band(
    curves: Sequence[Points], count: int, points: int, low: float | None, high: float | None
) -> Row | None:
    """Returns the mean of several curves, each smoothed, with their lowest and highest values.

    None without points. The arguments are those of `Views.curves`.
    """
    curves = [curve for curve in curves if len(curve[0])]
    shown = [smooth(curve, count, low, high) for curve in curves]
    found = spread(shown, points // 2)
    if found is None:
        return None

    mean, lowest, highest = map(as_json, found)
    return {**mean, "low": lowest["y"], "high": highest["y"], "count": len(curves)}


def _by_folder(names: Sequence[str]) -> list[list[str]]:
    """Divides names into groups: the runs `seed-N` of one folder, and each of the others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        groups.setdefault(folder if last.startswith("seed-") else f"/{name}", []).append(name)
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
    return {"computes": window.mean("ledger/compute") if computes is None else computes}


def _with_states(status: Mapping[str, Any], run: WatchedRun) -> Row:
    """Returns the status with ``now`` of each process: whether it runs, and if not, why."""
    processes = status["processes"]
    ends = run.ends() if any(each.get("pid") is None for each in processes) else {}
    shown = []
    for each in processes:
        state = ends.get(str(each.get("name")), "not started")
        if each.get("pid") is not None:
            stopped = each.get("state") == "stopped"
            state = "stopped by a signal" if stopped else "runs"
        shown.append({**each, "now": state})
    return {**status, "processes": shown}


def _best_of_its_kind(run: WatchedRun, way: Any) -> float | None:
    """The best evaluation that was played in this ``way``, greedy or sampled; None without one."""
    with run.lock:
        best = best_evaluation(run.evaluations, way) if way else None
    return None if best is None else _evaluation(best)[str(way)]["mean"]


def _troubles(
    run: WatchedRun,
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
    running, found = row["state"] == "running", []

    # The run ended before a limit.
    error = row["error"]
    if row["state"] in ("died", "stopped") or error:
        steps = [each.get("trained_steps") for each in checkpoints(run.folder)]
        trained = max((each for each in steps if each is not None), default=None)
        found.append(end(row["state"], error, run.seen_s, trained, run.folder))
    if stalled is not None:
        why_not = f"The run does not train: {stalled['why']}. {SEE_PROCESSES}"
        found.append(trouble("bad", why_not, command=stalled["command"]))
    why = str(stalled["why"]) if stalled else ""
    processes = status["processes"] if running else []
    bad = [
        (each["name"], text)
        for each in processes
        if (text := wrong(each)) and not re.search(rf"\b{re.escape(str(each['name']))}\b", why)
    ]
    if bad:
        named = listed([f"{name}: {text}" for name, text in bad], "; ")
        found.append(trouble("bad", f"{named}. {SEE_PROCESSES}"))
    if running and status.get("why"):
        found.append(trouble("warn", status["why"]))
    counted = (
        ("updates_skipped", "updates were skipped, because a loss or gradient was not finite", ""),
        ("rollbacks", "times training was rolled back to a checkpoint", "rollback"),
    )
    for key, text, kind in counted:
        if number := figures.get(key):
            event = _last_event(run, kind)
            at = None if event is None else finite(event.get("time"))
            found.append(trouble("bad", f"{digits(number)} {text}.", at))

    # A process was restarted and has no problem now.
    event = _last_event(run, "restart")
    if event is not None and event.get("role") not in {name for name, _ in bad}:
        restarts = (figures.get("learners_restarted"), figures.get("actors_restarted"))
        found.append(restart(event, sum(n for n in restarts if n)))
    return found


def _last_event(run: WatchedRun, kind: str) -> Row | None:
    """Returns the last event of a kind; None without one."""
    with run.lock:
        return next((event for event in reversed(run.events) if event.get("kind") == kind), None)


def _differences(options: Mapping[str, Any]) -> tuple[list[Row], str | None]:
    """Compares the options of a run with those of its preset.

    Returns: a row for every option, with its value, that of the preset and whether they differ;
    and where the preset is from, None without one.
    """
    env, algorithm = options.get("env.id"), options.get("algo.name")
    presets: Mapping[str, str] = {}
    origin: str | None = None
    if isinstance(env, str) and isinstance(algorithm, str):
        presets, origin = _preset(env, algorithm)

    found = []
    for option, value in options.items():
        shown, preset = _shown(value), presets.get(option)
        differs = origin is not None and preset != shown
        found.append({"name": option, "value": shown, "preset": preset, "differs": differs})
    return found, origin


@lru_cache
def _preset(env: str, algorithm: str) -> tuple[Mapping[str, str], str | None]:
    """Returns the preset of an environment and an algorithm."""
    with suppress(UserError, OSError, ValueError):
        # A target of such a name would be a file.
        if not env.endswith((".yaml", ".yml", ".py")) and not Path(env).exists():
            resolved = resolve_target(env, [f"algo.name={algorithm}"])
            options = flat(parse(dump(resolved.config), "")[0])
            return {name: _shown(value) for name, value in options}, resolved.origin
    return {}, None


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
    have = ~np.isnan(times) & ~np.all([np.isnan(values) for values in parts.values()], axis=0)
    if not have.any():
        return None
    have[have] = rising(times[have])

    bars: dict[str, list[float]] = {}
    ends: Any = None
    for part, values in parts.items():
        xs, ys = means(times[have], np.nan_to_num(values[have]), LEDGER_POINTS)
        ends, bars[part] = xs, [round(float(y), 4) for y in ys]
    return {"x": [round(float(x), 3) for x in ends], "parts": bars}


def _training(run: WatchedRun) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns the measurements of the return in training.

    Episodes and seconds are interpolated at the measurements' steps, and 0 where the lines lack
    them.
    """
    steps, returns = run.curve("env_steps", RETURN)

    def beside(name: str) -> Floats:
        at, values = run.columns.points("env_steps", name)
        known = np.interp(steps, at, values) if len(at) else np.zeros(len(steps))
        return np.maximum.accumulate(known)

    return steps, returns, beside("episodes"), beside("time_s")


def _accounting(run: WatchedRun) -> Row:
    """Returns the terms of the balance of samples: of the summary, or of the last line so far.

    ``complete`` tells whether all of the run is counted, ``at`` is the time of the last line in
    seconds since the epoch.
    """
    found = run.summary.get("accounting")
    if isinstance(found, Mapping):
        terms = {key: finite(found.get(key)) for key in ("produced", "trained", "in_flight")}
        reasons = {key: counts(found, key) for key in ("dropped", "lost")}
    else:
        last = run.last
        terms = {"produced": finite(last.get("env_steps")), "in_flight": None}
        terms["trained"] = finite(last.get("trained_steps"))
        reasons = {key: counts(last, key) for key in ("dropped", "lost")}

    return {
        **terms,
        **reasons,
        "complete": bool(found) and bool(run.summary.get("accounting_complete", True)),
        "resumed": bool(found) and run.summary.get("resumed") is True,
        "at": stamp(run.folder, METRICS)[2] * 1e-9,
    }


def _starts(run: WatchedRun) -> list[Row]:
    """Returns versions and machine at each start, newest first, as texts."""
    found = []
    for start in reversed(run.starts):
        shown = {name: _shown(value) for name, value in versions(start).items()}
        found.append({"time": finite(start.get("time")), "shown": shown})
    return found


def _evaluation(line: Mapping[str, Any]) -> Row:
    found: Row = {key: _plain(line.get(key)) for key in ("trained_steps", "time_s", "play", "best")}
    found["episodes"] = finite(line.get("episodes"))

    for way in ("greedy", "sampled", "return"):
        about = line.get(way)
        if isinstance(about, Mapping):
            row = {key: finite(about.get(key)) for key in ("mean", "se", "std", "min", "max")}
            found[way] = {**row, "half": half_95(row["se"], found["episodes"])}
    return found


def _why_no_evaluation(run: WatchedRun) -> str:
    """Returns why a run has no evaluation, by its options and the evaluator's last note."""
    every_steps, every_s, share, transport = (
        run.options.get(name)
        for name in ("eval.every_steps", "eval.every_s", "eval.share", "transport.kind")
    )

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


def _shown(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:2000]
