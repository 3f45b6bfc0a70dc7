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
# The bounds of a page, which its runs share:
MOST_VALUES = 300_000  # numbers of all metrics, some 3 MB
MOST_VIDEO_NBYTES = 64 << 20  # bytes of all videos with their decisions
MOST_LOGS = 40
# The bounds of each run:
MOST_EVALUATIONS = 2000  # points of a curve of evaluations
LOG_NBYTES = 8 << 10  # bytes at the end of each log
# The evaluations that have a curve also where no line has them as a metric.
EVALUATED = ("eval_return_greedy", "eval_return_sampled")


class FrozenRun(NamedTuple):
    """A run that becomes part of a page."""

    views: Views
    name: str
    """The name of the run in ``views``."""
    row: Row
    """The row of the list of runs."""


class EmbeddedVideos(NamedTuple):
    """The videos of a run that become part of a page, by the names of their files."""

    blocks: dict[str, Row]
    """The ``id`` of the block that has the video, and its media type as ``kind``."""
    decisions: dict[str, Row | None]
    """The decisions of the policy in the video; None without any."""
    notes: list[str]
    """A sentence on each video that is left out."""


def write_report(*targets: str, out: str | None = None) -> Path:
    """Writes the page on runs and returns its path.

    Args:
        targets: folders of runs, or folders that contain runs.
        out: by default `report.html`, in the folder if there is one target.

    Raises UserError.
    """
    text = report_page(*map(Path, targets))

    if out:
        path = Path(out)
    elif len(targets) == 1:
        path = Path(targets[0]) / PAGE
    else:
        path = Path(PAGE)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)  # it contains the config, so only this user may read it
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def report_page(*targets: Path) -> str:
    """Returns the page on the runs in ``targets`` as HTML.

    Raises UserError, also if plotly is missing.
    """
    folder, runs = _runs_in(targets)
    plotly = plotly_script().read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    modules = {name: text for name, text in files.items() if name.endswith(".js")}

    # Each run is read, answered for and unloaded, so that memory does not grow with their number.
    video_blocks: dict[str, str] = {}
    answers: Row = {}
    notes: list[str] = []
    for name, run in runs.items():
        answers[name], run_notes = _answers(run, run_count=len(runs), video_blocks=video_blocks)
        if len(runs) > 1:
            run_notes = [f"{run.row['title']}: {note}" for note in run_notes]
        notes += run_notes
        run.views.catalog.run(run.name).unload()

    frozen = {
        "version": penstock.__version__,
        "written": time.time(),
        "notes": notes,
        "runs": {"folder": str(folder), "runs": [run.row for run in runs.values()]},
        "answers": answers,
    }
    return document(
        files["index.html"],
        style=files["style.css"],
        scripts=[plotly, bundle(modules, "app.js")],
        data={"frozen": frozen, **video_blocks},
        icon=files["icon.svg"],
    )


def _runs_in(targets: Sequence[Path]) -> tuple[Path, dict[str, FrozenRun]]:
    """Finds the runs in ``targets``.

    Returns: the folder that contains the runs, and the runs by their names below it; of one target
    as `penstock watch` names them.

    Raises UserError if a target contains no run, or if there are too many.
    """
    absolute_targets = [Path(os.path.abspath(target)) for target in targets]
    folder = Path(os.path.commonpath([target.parent for target in absolute_targets]))

    runs: dict[str, FrozenRun] = {}
    for target, absolute in zip(targets, absolute_targets, strict=True):
        views = Views(RunCatalog(target))
        rows = {row["name"]: row for row in views.catalog.rows()}
        if not rows:
            raise UserError(
                f"{target} is not a run, as it has no {METRICS}, and contains none; name a run, or "
                "a folder of runs"
            )
        for inner_name in sorted(rows):
            name = inner_name
            row = rows[inner_name]
            if len(targets) > 1:
                name = os.path.relpath(absolute / inner_name, folder)
                row |= {"name": name, "title": name}
            runs[name] = FrozenRun(views, inner_name, row)

    if len(runs) > MOST_COMPARED:
        raise UserError(
            f"{len(runs)} runs are named; a page has at most {MOST_COMPARED}: name some of them"
        )
    return targets[0] if len(targets) == 1 else folder, runs


def _answers(
    frozen_run: FrozenRun, *, run_count: int, video_blocks: dict[str, str]
) -> tuple[Row, list[str]]:
    """Returns the answers about one run, and notes on what is left out.

    Args:
        frozen_run: the run, which is read.
        run_count: how many runs share the room of the page.
        video_blocks: gets the videos of the run in base64, by the id of their block.

    Returns: what `static/frozen.js` answers from, and the notes as sentences.
    """
    views = frozen_run.views
    name = frozen_run.name
    run = views.catalog.run(name)
    run.read()
    agent = views.agent(name)
    events = views.events(name)

    # So many measurements are one value of a column that the columns have room.
    values = run.columns.rows * len(_embedded(run))
    every = max(1, _divided_up(values, MOST_VALUES // run_count))
    notes = _notes_on_numbers(run, every, events=events["matching"], evaluated=agent["evaluated"])

    videos = _videos(
        views,
        name,
        agent["videos"],
        most_nbytes=MOST_VIDEO_NBYTES // run_count,
        video_blocks=video_blocks,
    )
    embedded_videos = [video for video in agent["videos"] if video["file"] in videos.blocks]
    notes += videos.notes

    logs = _log_names(run)
    most_logs = _divided_up(MOST_LOGS, run_count)
    if len(logs) > most_logs:
        notes.append(
            f"Of {len(logs)} logs {most_logs} are part of this file: learners first, actors last."
        )

    answers = {
        "views": {
            **{key: view(views, name) for key, view in RUN_VIEWS.items()},
            "metrics": _metrics(views, name),
            "events": events,
            "agent": {**agent, "videos": embedded_videos},
        },
        "curves": _curves(run, every),
        "logs": {
            log: read_tail(run.folder, "logs", f"{log}.log", most=LOG_NBYTES)
            for log in logs[:most_logs]
        },
        "logs_left_out": logs[most_logs:],
        "decisions": videos.decisions,
        "videos": videos.blocks,
    }
    return answers, notes


def _divided_up(total: int, parts: int) -> int:
    """Returns ``total`` divided by ``parts``, rounded up."""
    return -(-total // parts)


def _notes_on_numbers(run: WatchedRun, every: int, *, events: int, evaluated: int) -> list[str]:
    """Returns sentences on the measurements, events and evaluations that are left out.

    Args:
        run: the run.
        every: measurements that are one value of a column.
        events: how many there are.
        evaluated: how many evaluations there are.
    """
    columns = run.columns
    notes = []

    if columns.stride > 1:
        notes.append(
            f"Of {columns.lines:,} measurements every {columns.stride}th is part of this file."
        )
    if every > 1:
        notes.append(
            f"Each point of a curve is the mean of {every} of the {columns.rows:,} measurements."
        )
    if events > SHOWN_EVENTS:
        notes.append(f"Of {events:,} events the newest {SHOWN_EVENTS} are part of this file.")
    if evaluated > MOST_EVALUATED:
        notes.append(f"Of {evaluated:,} evaluations the newest {MOST_EVALUATED} are in the table.")
    return notes


def _log_names(run: WatchedRun) -> list[str]:
    """Returns the processes that have a log, in the order in which logs are embedded.

    Actors come last, being many.
    """
    files = names_in(run.folder, "logs", MOST_NAMES)
    names = [file.removesuffix(".log") for file in files if file.endswith(".log")]
    names.sort(key=process_place)
    actors = [name for name in names if name.startswith("actor-")]
    return [name for name in names if not name.startswith("actor-")] + actors


def _embedded(run: WatchedRun) -> list[str]:
    """Returns the metrics that become columns. The shares of each process are in the ledgers."""
    names = run.columns.names
    return [name for name in names if not name.startswith(LEDGERS) and not is_evaluation(name)]


def _metrics(views: Views, name: str) -> Row:
    """Returns the view of that name, without the shares of each process."""
    groups: dict[str, list[str]] = {}
    for group, metrics in views.metrics([name])["groups"].items():
        embedded = [metric for metric in metrics if not metric.startswith(LEDGERS)]
        if embedded:
            groups[group] = embedded
    return {"groups": groups}


def _curves(run: WatchedRun, every: int) -> Row:
    """Returns the columns of the metrics, and all else that is on their charts.

    ``every`` measurements become one value of a column: the highest on an axis, else their mean.
    """
    columns = run.columns
    full_intervals = columns.full_intervals()

    thinned_columns: dict[str, list[float | int | None]] = {}
    for name in _embedded(run):
        values = columns.column(name)
        if name in AXES:
            thinned = np.fmax.reduce(_in_buckets(values, every), axis=1)
        else:
            if not is_return(name):
                values = np.where(full_intervals, values, np.nan)
            thinned = _means(_in_buckets(values, every))
        thinned_columns[name] = [None if np.isnan(value) else short(value) for value in thinned]

    return {
        "every": every,
        "columns": thinned_columns,
        "evaluations": {x: _evaluations(run, x) for x in AXES},
        "marks": {x: run.marks(x)[-SHOWN_EVENTS:] for x in AXES},
        "targets": {x: run.target(x) for x in AXES},
    }


def _evaluations(run: WatchedRun, x: str) -> Row:
    """Returns the curves of the evaluations on the axis ``x``, by metric, if they have points."""
    names = dict.fromkeys([*EVALUATED, *filter(is_evaluation, run.columns.names)])
    curves = {}
    for name in names:
        points = run.curve(x, name)
        if len(points[0]):
            curves[name] = as_json(reduced(*points, MOST_EVALUATIONS))
    return curves


def _in_buckets(values: Floats, every: int) -> Floats:
    """Returns rows of ``every`` successive values; the last row is filled up with NaN."""
    return np.pad(values, (0, -len(values) % every), constant_values=np.nan).reshape(-1, every)


def _means(buckets: Floats) -> Floats:
    """Returns the mean of the known values of each row; NaN without one."""
    is_known = ~np.isnan(buckets)
    counts = is_known.sum(1)
    sums = np.where(is_known, buckets, 0.0).sum(1)
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def _videos(
    views: Views,
    name: str,
    videos: Sequence[Row],
    *,
    most_nbytes: int,
    video_blocks: dict[str, str],
) -> EmbeddedVideos:
    """Embeds the newest videos that fit together with their decisions.

    A run in progress may replace or delete a video meanwhile.

    Args:
        views, name: the run.
        videos: as the view of the agent lists them, newest first.
        most_nbytes: of all of them, before they are coded in base64.
        video_blocks: gets the videos in base64, by the id of their block.
    """
    folder = views.catalog.run(name).folder
    embedded = EmbeddedVideos({}, {}, [])
    free_nbytes = most_nbytes

    for video in videos:
        file_name = video["file"]
        stamp_before = stamp(folder, "videos", file_name)
        try:
            with open_in(folder, "videos", file_name) as file:
                data: Any = file.read(free_nbytes + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            reason = error.strerror or error
            embedded.notes.append(f"videos/{file_name} is not part of this file ({reason}).")
            continue

        decisions = None
        with suppress(UserError):  # deleted just now
            decisions = views.decisions(name, file_name)["decisions"]
        if stamp(folder, "videos", file_name) != stamp_before:
            decisions = None  # perhaps that of another video

        nbytes = len(data)
        if decisions:
            nbytes += len(json.dumps(decisions))
        if nbytes > free_nbytes:
            embedded.notes.append(f"videos/{file_name} is too large to be part of this file.")
            continue

        free_nbytes -= nbytes
        block_id = f"video-{len(video_blocks)}"
        video_blocks[block_id] = base64.b64encode(data).decode()
        media_type = VIDEOS[Path(file_name).suffix]
        embedded.blocks[file_name] = {"id": block_id, "kind": media_type}
        embedded.decisions[file_name] = decisions
    return embedded
