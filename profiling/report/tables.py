"""The profile as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.core.formatting import count, number, reasons

Entries = Sequence[Mapping[str, Any]]
KIB = 1024
BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


class FigureColumn(NamedTuple):
    """A column of figures: the key of the figure in an entry, and how it is written."""

    key: str
    write: Callable[[Any], str]


@dataclass(frozen=True)
class TextTable:
    """Text cells by row and column; the first cell of a row is its label."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(profile: Mapping[str, Any]) -> list[TextTable]:
    """Returns all tables that have a row."""
    learners = profile["learner"]
    every_table = [
        _table("Learners", learners, _LEARNER),
        _table("Their main threads", learners, {}, shares_key="parts"),
        _table("Their other threads", _threads(learners), {}),
        _table("Actors", profile["actors"], _ACTOR),
        _table("Connectors", profile["connectors"], _CONNECTOR),
        _table("Other processes", profile["others"], _OTHER),
        env_threads(profile.get("env_threads")),
        stages(profile["flow"]["stages"]),
        flow_table(profile["flow"]),
    ]
    return [table for table in every_table if table.rows]


def report_lines(profile: Mapping[str, Any]) -> list[str]:
    """Returns the profile for a terminal, line by line.

    Tables in plain text come first, then the verdict.
    """
    table_lines = []
    for table in tables(profile):
        table_lines += ["", table.title, *_lines_of(table)]

    verdict = profile["verdict"]
    return [
        heading(profile),
        *table_lines,
        "",
        f"Verdict: {verdict['finding']}",
        f"  because {verdict['reason']}",
        f"  next: {verdict['next_step']}",
        *(f"  also: {further['finding']}" for further in profile["also"]),
    ]


def heading(profile: Mapping[str, Any]) -> str:
    """Returns what was measured, and where."""
    return (
        f"{profile['target']}: {profile['seconds']:.1f} s on {profile['cores']:g} cores, "
        f"learner on {profile['device']}"
    )


def env_threads(trials: Entries | None) -> TextTable:
    """Returns what one actor did alone, by number of `actors.env_threads`; empty without trials."""
    rows = tuple(
        (f"{trial['threads']}", count(trial["steps_per_s"]), _ratio(trial["cpu"]))
        for trial in trials or ()
    )
    return TextTable(
        title="Trial of actors.env_threads, one actor alone",
        columns=("", "steps/s", "cpu/wall"),
        rows=rows,
    )


def stages(entries: Entries) -> TextTable:
    """Returns what moved through each stage; ``entries`` as `stage_rates` returns them."""
    rows = tuple(
        (
            _STAGES[entry["stage"]],
            count(entry["steps_per_s"]),
            rate_of_bytes(entry["nbytes_per_s"]),
            number(entry["versions_per_s"]) if "versions_per_s" in entry else "",
        )
        for entry in entries
    )
    return TextTable(
        title="Flow by stage", columns=("", "steps/s", "bytes", "versions/s"), rows=rows
    )


def flow_table(figures: Mapping[str, Any]) -> TextTable:
    """Returns what moved, and how long it took; ``figures`` are those of `FlowEvidence`."""
    latency = ", ".join(
        f"{quantile} {duration(seconds)}" for quantile, seconds in figures["latency_s"].items()
    )
    lag = figures["policy_lag"]
    rows = (
        ("produced", f"{count(figures['produced_steps_per_s'])} steps/s"),
        ("trained", f"{count(figures['trained_steps_per_s'])} steps/s"),
        ("dropped", f"{reasons(figures['dropped'])} steps"),
        ("lost", f"{reasons(figures['lost'])} steps"),
        ("env step to gradient", latency),
        ("policy lag", f"mean {number(lag['mean'])}, at most {number(lag['max'])} updates"),
        ("queue fill", f"{_percent(figures['queue_fill'])} %"),
    )
    return TextTable(title="Flow", columns=("", ""), rows=rows)


def duration(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms"."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def rate_of_bytes(nbytes_per_s: float | None) -> str:
    """1536.0 -> "1.5 KiB/s"."""
    if nbytes_per_s is None:
        return "-"
    *smaller_units, largest_unit = BYTE_UNITS
    value = nbytes_per_s
    for unit in smaller_units:
        if value < KIB:
            return f"{value:.1f} {unit}/s"
        value /= KIB
    return f"{value:.1f} {largest_unit}/s"


def _table(
    title: str,
    entries: Entries,
    figures: Mapping[str, FigureColumn],
    *,
    shares_key: str = "ledger",
) -> TextTable:
    """Returns a table with a row for each entry.

    Args:
        title: of the table.
        entries: processes or threads.
        figures: the columns after the shares, by their titles.
        shares_key: the key of the shares of time in an entry, whose parts become columns.
    """
    parts = list(dict.fromkeys(part for entry in entries for part in entry[shares_key]))
    if "other" in parts:  # comes last
        parts.remove("other")
        parts.append("other")

    rows = []
    for entry in entries:
        shares = entry[shares_key]
        name = f"{entry['name']} (ended)" if entry.get("ended") else entry["name"]
        rows.append(
            (
                name,
                *(_percent(shares.get(part, 0.0) if shares else None) for part in parts),
                *(column.write(entry.get(column.key)) for column in figures.values()),
            )
        )
    return TextTable(
        title=f"{title}, % of wall clock", columns=("", *parts, *figures), rows=tuple(rows)
    )


def _lines_of(table: TextTable) -> Iterator[str]:
    """Yields the lines of a table, with columns as wide as they must be.

    The first column is aligned to the left, figures to the right.
    """
    rows = [row for row in (table.columns, *table.rows) if any(row)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    label_width, *figure_widths = widths
    for label, *figures in rows:
        cells = [f"{figure:>{width}}" for figure, width in zip(figures, figure_widths, strict=True)]
        if len(cells) == 1:  # a list of figures reads better along its left edge
            cells = [cell.strip() for cell in cells]
        yield "  " + "  ".join([f"{label:<{label_width}}", *cells])


def _threads(learners: Entries) -> Entries:
    """Returns an entry for each thread of the learners but their main threads."""
    return [
        {"name": f"{learner['name']}/{thread}", "ledger": shares}
        for learner in learners
        for thread, shares in learner["threads"].items()
    ]


def _percent(share: float | None) -> str:
    """0.414 -> "41.4"."""
    return "-" if share is None else f"{100 * share:z.1f}"


def _ratio(value: float | None) -> str:
    """0.414 -> "0.41"."""
    return "-" if value is None else f"{value:.2f}"


def _largest(shares: Mapping[str, float] | None) -> str:
    """Returns the share that is farthest from 0, in per cent."""
    if not shares:
        return "-"
    return _percent(max(shares.values(), key=abs))


_STAGES = {
    "actors": "actors play",
    "wire": "over the wire",
    "store": "into the store",
    "gather": "gathered",
    "h2d": "to the device",
    "learner": "trained on",
    "weights": "weights out",
}
# The columns after the parts, by their titles.
_OTHER = {
    "unmeasured": FigureColumn("unmeasured", _largest),
    "cpu/wall": FigureColumn("cpu", _ratio),
    "no core": FigureColumn("coreless", _percent),
}
_LEARNER = {
    **_OTHER,
    "steps/s": FigureColumn("steps_per_s", count),
    "ceiling": FigureColumn("ceiling_steps_per_s", count),
    "of it": FigureColumn("achieved_over_ceiling", _ratio),
    "updates/s": FigureColumn("updates_per_s", number),
    "kernels": FigureColumn("gpu_kernel_busy", _percent),
}
_ACTOR = {**_OTHER, "steps/s": FigureColumn("steps_per_s", count)}
_CONNECTOR = {
    **_OTHER,
    "slots/s": FigureColumn("slots_per_s", number),
    "raw": FigureColumn("raw_nbytes_per_s", rate_of_bytes),
    "on the wire": FigureColumn("coded_nbytes_per_s", rate_of_bytes),
}
