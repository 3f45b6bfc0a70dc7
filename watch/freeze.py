"""`penstock report`: the page on one or several runs frozen into one HTML file, which needs no
other file, no server and no network.

The file has the scripts of the page and, in place of the server, its answers for each run. What a
server computes for each request is embedded once: a column per metric, of which the scripts make
the curves of any range and smoothing, also where runs are compared.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import penstock
from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.files import Row, names_in, open_in, read_tail, stamp
from penstock.monitor.run_folder.reader import is_evaluation, is_return
from penstock.monitor.run_folder.record import METRICS
from penstock.watch.catalog import RunCatalog
from penstock.watch.page_files import STATIC, bundle, document, plotly_script
from penstock.watch.series import as_json, reduced, short
from penstock.watch.verdicts import LEDGERS, process_place
from penstock.watch.views import (
    AXES,
    MOST_COMPARED,
    MOST_EVALUATED,
    MOST_NAMES,
    RUN_VIEWS,
    SHOWN_EVENTS,
    VIDEOS,
    Views,
)
from penstock.watch.watched_run import WatchedRun

PAGE = "report.html"
MOST_VALUES = 300_000  # of all metrics, some 3 MB
MOST_EVALUATIONS = 2000  # points of a curve
MOST_VIDEO_NBYTES = 64 << 20  # of all videos with their decisions, the newest first
LOG_NBYTES = 8 << 10  # the end of each log
MOST_LOGS = 40
EVALUATED = ("eval_return_greedy", "eval_return_sampled")


class FrozenRun(NamedTuple):
    """A run that becomes part of a page."""

    views: Views
    name: str
    row: Row


def write(*targets: str, out: str | None = None) -> Path:
    """Writes the page on runs and returns its path.

    Args:
        targets: folders of runs, or folders that contain runs.
        out: by default `report.html`, in the folder if there is one target.

    Raises UserError.
    """
    text = page(*map(Path, targets))
    path = Path(out) if out else (Path(targets[0]) if len(targets) == 1 else Path()) / PAGE

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)  # it contains the config, so only this user may read it
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def page(*targets: Path) -> str:
    """Returns the page on the runs in ``targets`` as HTML.

    Raises UserError, also if plotly is missing.
    """
    folder, runs = _found(targets)
    plotly = plotly_script().read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    modules = {name: text for name, text in files.items() if name.endswith(".js")}

    # Each run is read, answered for and unloaded, so that memory does not grow with their number.
    videos: dict[str, str] = {}
    answers: Row = {}
    notes: list[str] = []
    for name, (views, inner, row) in runs.items():
        answers[name], left_out = _answers(views, inner, len(runs), videos)
        notes += left_out if len(runs) == 1 else [f"{row['title']}: {note}" for note in left_out]
        views.catalog.run(inner).unload()

    frozen = {
        "version": penstock.__version__,
        "written": time.time(),
        "notes": notes,
        "runs": {"folder": str(folder), "runs": [run.row for run in runs.values()]},
        "answers": answers,
    }
    return document(
        files["index.html"],
        files["style.css"],
        [plotly, bundle(modules, "app.js")],
        {"frozen": frozen, **videos},
        files["icon.svg"],
    )


def _found(targets: Sequence[Path]) -> tuple[Path, dict[str, FrozenRun]]:
    """The folder that contains the runs of ``targets``, and the runs by their names below it; of
    one target as `penstock watch` names them. Raises UserError."""
    whole = [Path(os.path.abspath(target)) for target in targets]
    folder = Path(os.path.commonpath([each.parent for each in whole]))
    runs: dict[str, FrozenRun] = {}
    for target, absolute in zip(targets, whole, strict=True):
        views = Views(RunCatalog(target))
        rows = {row["name"]: row for row in views.catalog.rows()}
        if not rows:
            raise UserError(
                f"{target} is not a run, as it has no {METRICS}, and contains none; name a run, or "
                "a folder of runs"
            )
        for inner in sorted(rows):
            name = inner
            if len(targets) > 1:
                name = os.path.relpath(absolute / inner, folder)
                rows[inner] |= {"name": name, "title": name}
            runs[name] = FrozenRun(views, inner, rows[inner])
    if len(runs) > MOST_COMPARED:
        raise UserError(
            f"{len(runs)} runs are named; a page has at most {MOST_COMPARED}: name some of them"
        )
    return targets[0] if len(targets) == 1 else folder, runs


def _answers(views: Views, name: str, count: int, videos: dict[str, str]) -> tuple[Row, list[str]]:
    """Returns the answers about one run, and notes on what is left out.

    Args:
        frozen_run: the run, which is read.
        run_count: how many runs share the room of the page.
        video_blocks: gets the videos of the run in base64, by the id of their block.

    Returns: what `static/frozen.js` answers from, and the notes as sentences.
    """
    run = views.catalog.run(name)
    run.read()
    agent, events = views.agent(name), views.events(name)
    embedded, decisions, left_out = _videos(
        views, name, agent["videos"], MOST_VIDEO_NBYTES // count, videos
    )
    every = max(1, -(-run.columns.rows * len(_embedded(run)) // (MOST_VALUES // count)))

    # Of the logs those of learners come first.
    most_logs = -(-MOST_LOGS // count)
    names = names_in(run.folder, "logs", MOST_NAMES)
    logs = sorted((n.removesuffix(".log") for n in names if n.endswith(".log")), key=_log_place)
    notes = [
        f"Of {run.columns.lines:,} measurements every {run.columns.stride}th is part of this file."
        if run.columns.stride > 1
        else None,
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
        f"Of {len(logs)} logs {most_logs} are part of this file: learners first, actors last."
        if len(logs) > most_logs
        else None,
    ]
    shown = [video for video in agent["videos"] if video["file"] in embedded]

    answers = {
        "views": {
            **{key: view(views, name) for key, view in RUN_VIEWS.items()},
            "metrics": _metrics(views, name),
            "events": events,
            "agent": {**agent, "videos": shown},
        },
        "curves": _curves(run, every),
        "logs": {
            name: read_tail(run.folder, "logs", f"{name}.log", most=LOG_NBYTES)
            for name in logs[:most_logs]
        },
        "logs_left_out": logs[most_logs:],
        "decisions": decisions,
        "videos": embedded,
    }
    return answers, [note for note in notes if note]


def _log_place(name: str) -> tuple[bool, tuple[int, str, int]]:
    """Returns a key that sorts the logs of processes as they are embedded.

    Actors come last, being many.
    """
    return name.startswith("actor-"), process_place(name)


def _embedded(run: WatchedRun) -> list[str]:
    """Returns the metrics that become columns. The shares of each process are in the ledgers."""
    names = run.columns.names
    return [name for name in names if not name.startswith(LEDGERS) and not is_evaluation(name)]


def _metrics(views: Views, name: str) -> Row:
    """Returns the view of that name, without the shares of each process."""
    groups = views.metrics([name])["groups"]
    kept = {
        group: [metric for metric in names if not metric.startswith(LEDGERS)]
        for group, names in groups.items()
    }
    return {"groups": {group: names for group, names in kept.items() if names}}


def _curves(run: WatchedRun, every: int) -> Row:
    """Returns the columns of the metrics, and all else that is on their charts.

    ``every`` measurements become one value of a column: the highest on an axis, else their mean.
    """
    columns, names = run.columns, _embedded(run)
    full = columns.full_intervals()

    found: dict[str, list[float | int | None]] = {}
    for name in names:
        values = columns.column(name)
        if name in AXES:
            thinned = np.fmax.reduce(_in_buckets(values, every), axis=1)
        else:
            if not is_return(name):
                values = np.where(full, values, np.nan)
            thinned = _means(_in_buckets(values, every))
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


def _in_buckets(values: Floats, every: int) -> Floats:
    """Returns rows of ``every`` successive values; the last row is filled up with NaN."""
    return np.pad(values, (0, -len(values) % every), constant_values=np.nan).reshape(-1, every)


def _means(buckets: Floats) -> Floats:
    """Returns the mean of the known values of each row; NaN without one."""
    known = ~np.isnan(buckets)
    counts = known.sum(1)
    sums = np.where(known, buckets, 0.0).sum(1)
    found: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return found


def _videos(
    views: Views, run: str, videos: Sequence[Row], most_nbytes: int, blocks: dict[str, str]
) -> tuple[dict[str, Row], dict[str, Row | None], list[str]]:
    """Embeds the newest videos that fit together with their decisions.

    A run in progress may replace or delete a video meanwhile.

    Args:
        views, name: the run.
        videos: as the view of the agent lists them, newest first.
        most_nbytes: of all of them, before they are coded in base64.
        video_blocks: gets the videos in base64, by the id of their block.
    """
    folder = views.catalog.run(run).folder
    found: dict[str, Row] = {}
    decisions: dict[str, Row | None] = {}
    notes: list[str] = []
    left = most_nbytes

    for video in videos:
        name = video["file"]
        before = stamp(folder, "videos", name)
        try:
            with open_in(folder, "videos", name) as file:
                data: Any = file.read(left + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(f"videos/{name} is not part of this file ({error.strerror or error}).")
            continue

        decided = None
        with suppress(UserError):  # deleted just now
            decided = views.decisions(run, name)["decisions"]
        if stamp(folder, "videos", name) != before:
            decided = None  # perhaps that of another video
        nbytes = len(data) + (len(json.dumps(decided)) if decided else 0)
        if nbytes > left:
            notes.append(f"videos/{name} is too large to be part of this file.")
            continue

        left -= nbytes
        block = f"video-{len(blocks)}"
        blocks[block] = base64.b64encode(data).decode()
        found[name] = {"id": block, "kind": VIDEOS[Path(name).suffix]}
        decisions[name] = decided
    return found, decisions, notes
