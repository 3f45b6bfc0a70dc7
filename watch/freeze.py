"""`penstock report`: the page on a run frozen into one HTML file, which needs no other file, no
server and no network.

The file has the scripts of the page and, in place of the server, its answers for this run. What a
server computes for each request is embedded once: a column per metric, of which the scripts make
the curves of any range and smoothing.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.monitor.curves import is_evaluation, is_return
from penstock.monitor.intervals import Floats
from penstock.monitor.record import METRICS
from penstock.watch.bundle import bundle, document
from penstock.watch.catalog import ALONE, RunCatalog
from penstock.watch.files import Row, names_in, open_in, read_tail, stamp
from penstock.watch.page_files import STATIC, plotly_script
from penstock.watch.run_files import WatchedRun
from penstock.watch.series import as_json, full_intervals, reduced, short
from penstock.watch.verdicts import LEDGERS
from penstock.watch.views import (
    AXES,
    MOST_EVALUATED,
    MOST_NAMES,
    SHOWN_EVENTS,
    VIDEOS,
    Views,
)

PAGE = "report.html"
MOST_VALUES = 300_000  # of all metrics, some 3 MB
MOST_EVALUATIONS = 2000  # points of a curve
MOST_VIDEO_NBYTES = 64 << 20  # of all videos with their decisions, the newest first
LOG_NBYTES = 8 << 10  # the end of each log
MOST_LOGS = 40
LOGS_FIRST = ("learner", "connector", "relay", "evaluator")  # actors come last, being many
READ_S = 1.0  # at a time
EVALUATED = ("eval_return_greedy", "eval_return_sampled")


def write(run_dir: str, out: str | None = None) -> Path:
    """Write the page on the run, by default into its folder; returns the path. Raises UserError."""
    folder = Path(run_dir)
    if not (folder / METRICS).is_file():
        seeds = sorted(path.parent for path in folder.glob(f"seed-*/{METRICS}"))
        advice = f"name one of its runs, such as {seeds[0]}" if seeds else "name a run"
        raise UserError(f"{run_dir} has no {METRICS}, so it is not a run; {advice}")
    path = Path(out) if out else folder / PAGE
    text = page(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)  # it contains the config, so only this user may read it
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def page(folder: Path) -> str:
    """The page on the run in ``folder`` as HTML. Raises UserError, also if plotly is missing."""
    plotly = plotly_script().read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    modules = {name: text for name, text in files.items() if name.endswith(".js")}
    answers, videos = _answers(folder)
    return document(
        files["index.html"],
        files["style.css"],
        [plotly, bundle(modules, "app.js")],
        {"frozen": answers, **videos},
        files["icon.svg"],
    )


def _answers(folder: Path) -> tuple[Row, dict[str, str]]:
    """What `static/frozen.js` answers from, and the videos in base64 by the id of their block."""
    views = Views(RunCatalog(folder))
    run = views.catalog.run(ALONE)
    while run.read(READ_S) < 1.0:
        pass
    agent, events = views.agent(ALONE), views.events(ALONE)
    videos, shown, decisions, left_out = _videos(views, run.folder, agent["videos"])
    every = _rows_in_a_point(run)
    names = names_in(run.folder, "logs", MOST_NAMES)
    logs = sorted((n.removesuffix(".log") for n in names if n.endswith(".log")), key=_log_place)
    notes = [
        f"Each point of a curve is the mean of {every} of the {run.columns.rows:,} measurements."
        if every > 1
        else None,
        f"Of {events['matching']:,} events the newest {SHOWN_EVENTS} are part of this file."
        if events["matching"] > SHOWN_EVENTS
        else None,
        f"Of {agent['evaluated']:,} evaluations the newest {MOST_EVALUATED} are in the table."
        if agent["evaluated"] > MOST_EVALUATED
        else None,
        *left_out,
        f"Of {len(logs)} logs {MOST_LOGS} are part of this file: learners first, actors last."
        if len(logs) > MOST_LOGS
        else None,
    ]
    answers = {
        "version": penstock.__version__,
        "written": time.time(),
        "notes": [note for note in notes if note],
        "views": {
            "runs": views.runs(),
            "now": views.now(ALONE),
            "metrics": _metrics(views),
            "ledgers": views.ledgers(ALONE),
            "events": events,
            "about": views.about(ALONE),
            "agent": {**agent, "videos": shown},
            "profile": views.profile(ALONE),
            "recorded": views.recorded(ALONE),
            "timeline": views.timeline(ALONE),
        },
        "curves": _curves(run, every),
        "logs": {
            name: read_tail(run.folder, "logs", f"{name}.log", most=LOG_NBYTES)
            for name in logs[:MOST_LOGS]
        },
        "logs_left_out": logs[MOST_LOGS:],
        "decisions": decisions,
        "videos": {
            video["file"]: {"id": name, "kind": VIDEOS[Path(video["file"]).suffix]}
            for name, video in zip(videos, shown, strict=True)
        },
    }
    return answers, videos


def _log_place(name: str) -> tuple[int, str, int, str]:
    """Where the log of a process is in the order in which logs are embedded."""
    role, _, number = name.rpartition("-")
    i = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0
    if role == "actor":
        return len(LOGS_FIRST) + 1, role, i, name
    return LOGS_FIRST.index(role) if role in LOGS_FIRST else len(LOGS_FIRST), role, i, name


def _embedded(run: WatchedRun) -> list[str]:
    """The metrics that become columns. The shares of each process are in the ledgers."""
    names = run.columns.names
    return [name for name in names if not name.startswith(LEDGERS) and not is_evaluation(name)]


def _metrics(views: Views) -> Row:
    """The view of that name, without the shares of each process."""
    groups = views.metrics([ALONE])["groups"]
    kept = {
        group: [name for name in names if not name.startswith(LEDGERS)]
        for group, names in groups.items()
    }
    return {"groups": {group: names for group, names in kept.items() if names}}


def _rows_in_a_point(run: WatchedRun) -> int:
    """How many measurements each value of a column stands for, so that the file stays small."""
    return max(1, -(-run.columns.rows * len(_embedded(run)) // MOST_VALUES))


def _curves(run: WatchedRun, every: int) -> Row:
    """The columns of the metrics, and all else that is on their charts."""
    columns, names = run.columns, _embedded(run)
    full = full_intervals(columns.column("interval_s"))
    found: dict[str, list[float | int | None]] = {}
    for name in names:
        values = columns.column(name)
        if name in AXES:
            values = _in_buckets(values, every, np.nan)
            thinned = np.fmax.reduce(values, axis=1)
        else:
            if not is_return(name):
                values = np.where(full, values, np.nan)
            thinned = _means(_in_buckets(values, every, np.nan))
        found[name] = [None if np.isnan(value) else short(value) for value in thinned]
    evaluated = [*EVALUATED, *(name for name in columns.names if is_evaluation(name))]
    return {
        "every": every,
        "columns": found,
        "evaluations": {
            x: {
                name: as_json(reduced(*points, MOST_EVALUATIONS))
                for name in dict.fromkeys(evaluated)
                if len((points := run.curve(x, name))[0])
            }
            for x in AXES
        },
        "marks": {x: run.marks(x)[-SHOWN_EVENTS:] for x in AXES},
        "targets": {x: run.target(x) for x in AXES},
    }


def _in_buckets(values: Floats, every: int, rest: float) -> Floats:
    """Rows of ``every`` successive values; the last one is filled with ``rest``."""
    return np.pad(values, (0, -len(values) % every), constant_values=rest).reshape(-1, every)


def _means(buckets: Floats) -> Floats:
    """The mean of the known values of each row; NaN without one."""
    known = ~np.isnan(buckets)
    counts = known.sum(1)
    sums = np.where(known, buckets, 0.0).sum(1)
    found: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return found


def _videos(
    views: Views, folder: Path, videos: Sequence[Row]
) -> tuple[dict[str, str], list[Row], dict[str, Row | None], list[str]]:
    """The newest videos that fit together with their decisions: in base64 by the id of their block,
    their rows, and the decisions by the name of the video. Then a note on each that does not fit.

    A run in progress may replace or delete a video meanwhile.
    """
    found: dict[str, str] = {}
    shown: list[Row] = []
    decisions: dict[str, Row | None] = {}
    notes: list[str] = []
    left = MOST_VIDEO_NBYTES
    for video in videos:
        name = video["file"]
        before = stamp(folder, "videos", name)
        try:
            with open(open_in(folder, "videos", name), "rb") as file:
                data: Any = file.read(left + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"videos/{name} is not part of this file ({error.strerror or error}).")
            continue
        decided = None
        with suppress(UserError):  # deleted just now
            decided = views.decisions(ALONE, name)["decisions"]
        if stamp(folder, "videos", name) != before:
            decided = None  # perhaps that of another video
        nbytes = len(data) + (len(json.dumps(decided)) if decided else 0)
        if nbytes > left:
            notes.append(f"videos/{name} is too large to be part of this file.")
            continue
        left -= nbytes
        found[f"video-{len(found)}"] = base64.b64encode(data).decode()
        shown.append(video)
        decisions[name] = decided
    return found, shown, decisions, notes
