"""`penstock report`: one HTML page on a run, which needs no other file and no network."""

from __future__ import annotations

import base64
import io
import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve_target
from penstock.configs.transports import TRANSPORTS
from penstock.configs.yaml_text import parse
from penstock.core.files import write_atomic
from penstock.core.formatting import clock, count, finite, number
from penstock.core.machine import recorded_versions
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor import plot, runs, summary
from penstock.monitor.curves import RETURN, RunCurves, Setting, flat, load_run, run_curve
from penstock.monitor.events import EVENTS
from penstock.monitor.figures import figures
from penstock.monitor.metric_groups import FALLBACK, GROUPS, group, scalars
from penstock.monitor.record import METRICS, SUMMARY, Lines, lines

PAGE = "report.html"
PROFILE = "profile.json"  # beside a report.html of `penstock profile`
TEMPLATE = Path(__file__).with_name("run_report.html.jinja")
VIDEOS = {".mp4": "video/mp4", ".webm": "video/webm", ".gif": "image/gif"}
MOST_VIDEO_NBYTES = 64 << 20  # a larger one is named instead of embedded
MOST_EVALUATIONS = 100  # rows; of more, equally spaced ones are shown
COLUMNS = 3  # of charts
LEAST_SHARE = 0.01  # part of a ledger that is drawn
NO_CHART = {  # counters and the axes themselves
    "time_s", "interval_s", "env_steps", "env_frames", "trained_steps", "learner_steps",
    "episodes", "eval_trained_steps", "solved_at_s",
}  # fmt: skip
TITLES = {
    "return": "Episodes in training", "eval": "Evaluation", "loss": "Loss", "policy": "Policy",
    "value": "Value function", "optim": "Optimizer", "lag": "Lag and latency",
    "throughput": "Throughput", "samples": "Dropped and lost", "time": "Time",
    "system": "Processes", "other": "Other",
}  # fmt: skip


class Charts(NamedTuple):
    """The charts of a group of metrics as one picture, and its metrics that never changed."""

    title: str
    picture: str | None
    """An SVG as a data URI; None if all are constant."""
    constant: list[tuple[str, str]]


class ReportTable(NamedTuple):
    """A table as text."""

    columns: list[str]
    rows: list[list[str]]


class ReportOption(NamedTuple):
    """An option of a run, and whether its value differs from that of the preset."""

    name: str
    value: str
    preset: str
    differs: bool


class Video(NamedTuple):
    """A recorded video: its media type and data URI, None if it is too large to embed."""

    name: str
    kind: str
    data: str | None


def write(run_dir: str, out: str | None = None) -> Path:
    """Write the page on the run, by default into its folder; returns the path. Raises UserError."""
    folder = Path(run_dir)
    if not (folder / METRICS).is_file():
        seeds = sorted(path.parent for path in folder.glob(f"seed-*/{METRICS}"))
        advice = f"name one of its runs, such as {seeds[0]}" if seeds else "name a run"
        raise UserError(f"{run_dir} has no {METRICS}, so it is not a run; {advice}")
    if out is None and (folder / PROFILE).exists():
        raise UserError(
            f"{folder / PAGE} belongs to `penstock profile`; name another file with --out"
        )
    path = Path(out) if out else folder / PAGE
    text = page(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)  # it contains the config, so only this user may read it
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def page(folder: Path) -> str:
    """The page as HTML. Raises UserError if matplotlib is missing."""
    run = load_run(folder)
    ended = _ended(folder)
    options, base = config_options(run)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=str(folder),
        about=_about(folder),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        summary=_summary(run, ended, folder),
        charts=list(charts(run)) if run.metrics else [],
        evaluations=evaluations(run),
        why_none=why_no_evaluation(run, folder),
        running=runs.state(folder) == "running",
        shown=MOST_EVALUATIONS,
        played=len(run.evaluations),
        video=video(folder),
        record=f"penstock record {shlex.quote(str(folder))}",
        options=options,
        base=base,
        starts=[_start(start) for start in recorded_versions(folder)],
        accounting=accounting(ended),
        events=events(folder),
    )


def _ended(folder: Path) -> dict[str, Any]:
    """`summary.json`; empty while the run is in progress, or if it cannot be read."""
    if (folder / SUPERVISOR_FILE).exists():
        return {}
    try:
        found = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _about(folder: Path) -> str:
    row = runs.row(folder) if (folder / "config.yaml").is_file() else {}
    return ", ".join(str(row[name]) for name in ("game", "algorithm", "state") if row.get(name))


def _summary(run: RunCurves, ended: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The rows of the summary at the end of a run; before, the figures of the last interval."""
    try:
        if not ended:
            return list(figures(run.metrics[-1], None).items())
        rows = summary.rows(ended, folder)
    except (LookupError, TypeError, ValueError, AttributeError):  # no line, or a damaged file
        return []
    names = [name for name, _ in rows]
    return rows[: names.index("next")] if "next" in names else rows


def charts(run: RunCurves) -> Iterator[Charts]:
    """The charts of each group of metrics, over agent steps."""
    known = dict.fromkeys(name for line in run.metrics for name, _ in scalars(line))
    by_group: dict[str, list[str]] = {}
    for name in known:
        if "/" not in name and name not in NO_CHART:
            by_group.setdefault(group(name), []).append(name)
    ledger = [name for name in known if name.startswith("ledger/")]
    for found in ("return", *(name for name in (*GROUPS, FALLBACK) if name != "return")):
        names = by_group.get(found, [])
        values = {name: {finite(line.get(name)) for line in run.metrics} - {None} for name in names}
        constant = [name for name in names if len(values[name]) == 1 and name != RETURN]
        drawn = [name for name in names if name not in constant]
        parts = ledger if found == "time" else []
        if drawn or constant or parts:
            shown = [(name, number(*values[name])) for name in constant]
            picture = _picture(run, drawn, parts) if drawn or parts else None
            yield Charts(TITLES.get(found, found), picture, shown)


def _picture(run: RunCurves, names: Sequence[str], ledger: Sequence[str]) -> str:
    """An SVG of the metrics, and of the learner's time by its parts, as a data URI."""
    make = plot.figure_class()
    from matplotlib import rc_context

    panels = [*names, *(["ledger"] if ledger else [])]
    rows = -(-len(panels) // COLUMNS)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = make(figsize=(4.2 * COLUMNS, 2.5 * rows), layout="constrained")
        cells = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        for cell, name in zip(cells, panels, strict=False):
            if name == "ledger":
                _draw_ledger(cell, run, ledger)
                title = "learner's time, by part"
            else:
                plot.draw(cell, [Setting(str(run.folder), [run])], "env_steps", name)
                title = plot.y_label(name)
            cell.set_title(title, fontsize=9)
            plot.label_x(cell, "env_steps")
        for cell in cells[len(panels) :]:
            cell.set_visible(False)
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
    return _data_uri("image/svg+xml", data.getvalue())


def _draw_ledger(cell: Any, run: RunCurves, parts: Sequence[str]) -> None:
    alone = Setting(str(run.folder), [run])
    for part in parts:
        xs, ys = run_curve(run, "env_steps", part)
        if len(ys) and ys.max() >= LEAST_SHARE:
            name = part.partition("/")[2]
            colour = plot.colour(len(cell.lines))
            cell.plot(*plot.thinned(xs, ys), color=colour, lw=1.4, label=plot.text(name))
    plot.draw(cell, [], "env_steps", alone.name)
    cell.legend(fontsize=7, frameon=False)


def evaluations(run: RunCurves) -> ReportTable | None:
    """Every figure of the evaluations, by its path; None if the run has none."""
    found = run.evaluations
    if not found:
        return None
    if len(found) > MOST_EVALUATIONS:
        step = (len(found) - 1) / (MOST_EVALUATIONS - 1)
        found = [found[round(i * step)] for i in range(MOST_EVALUATIONS)]
    flattened = []
    for line in found:
        figures = {key: value for key, value in line.items() if key != "env"}
        row = {}
        for name, value in flat(figures):
            path = name.replace(".", "/")
            if isinstance(value, bool):
                row[path] = "yes" if value else "no"
            elif isinstance(value, str):
                row[path] = value
            elif (known := finite(value)) is not None:
                row[path] = number(known)
        if (seconds := finite(line.get("time_s"))) is not None:
            row["time_s"] = f"{seconds:.1f}" if seconds < 60 else clock(seconds)
        flattened.append(row)
    columns = list(dict.fromkeys(name for row in flattened for name in row))
    return ReportTable(columns, [[row.get(name, "-") for name in columns] for row in flattened])


def why_no_evaluation(run: RunCurves, folder: Path) -> str:
    """The reason why a run has no evaluation, by its options and the evaluator's last note."""
    every_steps, every_s, share, transport = (
        run.options.get(name)
        for name in ("eval.every_steps", "eval.every_s", "eval.share", "transport.kind")
    )
    trained = next((finite(line.get("trained_steps")) for line in reversed(run.metrics)), None)
    if every_s is not None:
        reason = f"They are due every eval.every_s = {every_s} seconds."
    elif every_steps is None:
        reason = "eval.every_steps=100000 evaluates the weights at every 100,000 trained steps."
    elif TRANSPORTS.one_process(str(transport)):
        reason = f"With transport.kind={transport} only eval.every_s enables them."
    else:
        reason = (
            f"They are due every eval.every_steps = {every_steps} trained steps, or further apart "
            f"where they would take more than eval.share = {share} of a core; the run has "
            f"{count(trained)}. eval.share=null sets no limit."
        )
    found = [line for line in _events(folder) if line.get("kind") == "note"]
    notes = [line.get("text") for line in found if str(line.get("role")).startswith("evaluator")]
    return " ".join(["None.", reason, *(f"Note: {text}." for text in notes[-1:])])


def video(folder: Path) -> Video | None:
    """The newest video of `penstock record`."""
    found = [path for path in folder.glob("videos/*") if path.suffix in VIDEOS and path.is_file()]
    if not found:
        return None
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    kind = VIDEOS[newest.suffix]
    small = newest.stat().st_size <= MOST_VIDEO_NBYTES
    return Video(newest.name, kind, _data_uri(kind, newest.read_bytes()) if small else None)


def config_options(run: RunCurves) -> tuple[list[ReportOption], str | None]:
    """The options of the run, marked where they differ from what its environment and algorithm have
    without overrides, and the name of that base; None if it cannot be determined."""
    base, known = None, None
    try:
        algorithm = run.options["algo.name"]
        resolved = resolve_target(run.options["env.id"], [f"algo.name={algorithm}"])
        base, known = resolved.origin, dict(flat(parse(dump(resolved.config), "")[0]))
    except (UserError, KeyError, TypeError):
        pass
    found = []
    for name, value in run.options.items():
        preset = _shown(known[name]) if known is not None and name in known else "-"
        differs = known is not None and preset != _shown(value)
        found.append(ReportOption(name, _shown(value), preset if differs else "", differs))
    return found, base


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _start(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The versions and the machine at one start of the run."""
    shown = {"since": "-"}
    if (at_s := finite(start.get("time"))) is not None:
        with suppress(OverflowError, ValueError, OSError):
            shown["since"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
    for name in ("penstock", "commit", "python", "cpu", "cores", "gpus", "system"):
        value = start.get(name)
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        shown[name] = "none" if text == "" else "-" if text is None else str(text)
    packages = start.get("packages")
    return [*shown.items(), *(packages.items() if isinstance(packages, dict) else ())]


def accounting(ended: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The terms of the accounting of samples, with reasons."""
    found: list[tuple[str, str]] = []
    terms = ended.get("accounting")
    for term, value in terms.items() if isinstance(terms, dict) else ():
        name = term.replace("_", " ")
        if isinstance(value, dict):
            reasons = {reason: finite(steps) or 0 for reason, steps in value.items()}
            found.append((name, count(sum(reasons.values()))))
            found += [(f"{name}: {reason}", count(steps)) for reason, steps in reasons.items()]
        else:
            found.append((name, "unknown" if finite(value) is None else count(finite(value))))
    return found


def events(folder: Path) -> list[tuple[str, str]]:
    """How many events of each kind a run has had."""
    totals: Counter[str] = Counter()
    for line in _events(folder):
        totals[str(line.get("kind"))] += int(finite(line.get("count")) or 1)
    return [(kind, count(number_of)) for kind, number_of in totals.most_common()]


def _events(folder: Path) -> Lines:
    return [line for name in (f"{EVENTS}.1", EVENTS) for line in lines(folder / "logs" / name)]


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
