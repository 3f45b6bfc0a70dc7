"""The profile as tables of text, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.formatting import count, number, reasons

Entries = Sequence[Mapping[str, Any]]
KIB = 1024


@dataclass(frozen=True)
class TextTable:
    """Text cells by row and column; the first cell of a row is its label."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(profile: Mapping[str, Any]) -> list[TextTable]:
    """Returns all tables that have a row."""
    learners = profile["learner"]
    made = [
        _table("Learners", "% of wall clock", learners, _LEARNER),
        _table("Their main threads", "% of wall clock", learners, {}, "parts"),
        _table("Their other threads", "% of wall clock", list(_threads(learners)), {}),
        _table("Actors", "% of wall clock", profile["actors"], _ACTOR),
        _table("Connectors", "% of wall clock", profile["connectors"], _CONNECTOR),
        _table("Other processes", "% of wall clock", profile["others"], _OTHER),
        env_threads(profile.get("env_threads")),
        stages(profile["flow"]["stages"]),
        flow(profile["flow"]),
    ]
    return [table for table in made if table.rows]


def lines(profile: Mapping[str, Any]) -> list[str]:
    """Returns the profile for a terminal, line by line.

    Tables in plain text come first, then the verdict.
    """
    told = [heading(profile)]
    for table in tables(profile):
        told += ["", table.title, *_lines_of(table)]

    verdict = profile["verdict"]
    return [
        *told,
        "",
        f"Verdict: {verdict['finding']}",
        f"  because {verdict['reason']}",
        f"  next: {verdict['next_step']}",
        *(f"  also: {found['finding']}" for found in profile["also"]),
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
        "Trial of actors.env_threads, one actor alone", ("", "steps/s", "cpu/wall"), rows
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
    return TextTable("Flow by stage", ("", "steps/s", "bytes", "versions/s"), rows)


def flow(figures: Mapping[str, Any]) -> TextTable:
    """Returns what moved, and how long it took; ``figures`` are those of `FlowEvidence`."""
    latency, lag = figures["latency_s"], figures["policy_lag"]
    rows = (
        ("produced", f"{count(figures['produced_steps_per_s'])} steps/s"),
        ("trained", f"{count(figures['trained_steps_per_s'])} steps/s"),
        ("dropped", f"{reasons(figures['dropped'])} steps"),
        ("lost", f"{reasons(figures['lost'])} steps"),
        ("env step to gradient", ", ".join(f"{q} {duration(s)}" for q, s in latency.items())),
        ("policy lag", f"mean {number(lag['mean'])}, at most {number(lag['max'])} updates"),
        ("queue fill", _percent(figures["queue_fill"]) + " %"),
    )
    return TextTable("Flow", ("", ""), rows)


def duration(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms"."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def rate_of_bytes(nbytes_per_s: float | None) -> str:
    """1536.0 -> "1.5 KiB/s"."""
    if nbytes_per_s is None:
        return "-"
    unit = 0
    while nbytes_per_s >= KIB and unit < 3:
        nbytes_per_s, unit = nbytes_per_s / KIB, unit + 1
    return f"{nbytes_per_s:.1f} {('B', 'KiB', 'MiB', 'GiB')[unit]}/s"


def _table(
    title: str, unit: str, entries: Entries, figures: Mapping[str, Any], parts: str = "ledger"
) -> TextTable:
    """Returns a table with a row for each entry.

    Args:
        title: of the table.
        entries: processes or threads.
        figures: the columns after the shares, by their titles.
        shares_key: the key of the shares of time in an entry, whose parts become columns.
    """
    names = list(dict.fromkeys(name for entry in entries for name in entry[parts]))
    names.sort(key=lambda name: name == "other")
    rows = tuple(
        (
            entry["name"] + (" (ended)" if entry.get("ended") else ""),
            *(_percent(entry[parts].get(name, 0.0) if entry[parts] else None) for name in names),
            *(form(entry.get(key)) for key, form in figures.values()),
        )
        for entry in entries
    )
    return TextTable(f"{title}, {unit}", ("", *names, *figures), rows)


def _lines_of(table: TextTable) -> Iterator[str]:
    """Yields the lines of a table, with columns as wide as they must be.

    The first column is aligned to the left, figures to the right.
    """
    rows = [row for row in (table.columns, *table.rows) if any(row)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        if len(cells) == 1:  # a list of figures reads better along its left edge
            cells = [cell.strip() for cell in cells]
        yield "  " + "  ".join([f"{first:<{widths[0]}}", *cells])


def _threads(learners: Entries) -> Sequence[Mapping[str, Any]]:
    return [
        {"name": f"{entry['name']}/{thread}", "ledger": shares}
        for entry in learners
        for thread, shares in entry["threads"].items()
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:z.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _largest(shares: Mapping[str, float] | None) -> str:
    return _percent(max(shares.values(), key=abs)) if shares else "-"


_STAGES = {
    "actors": "actors play",
    "wire": "over the wire",
    "store": "into the store",
    "gather": "gathered",
    "h2d": "to the device",
    "learner": "trained on",
    "weights": "weights out",
}
# Columns after the parts: where their figure stands, and how it is written.
_OTHER = {
    "unmeasured": ("unmeasured", _largest),
    "cpu/wall": ("cpu", _ratio),
    "no core": ("coreless", _percent),
}
_LEARNER = {
    **_OTHER,
    "steps/s": ("steps_per_s", count),
    "ceiling": ("ceiling_steps_per_s", count),
    "of it": ("achieved_over_ceiling", _ratio),
    "updates/s": ("updates_per_s", number),
    "kernels": ("gpu_kernel_busy", _percent),
}
_ACTOR = _OTHER | {"steps/s": ("steps_per_s", count)}
_CONNECTOR = {
    **_OTHER,
    "slots/s": ("slots_per_s", number),
    "raw": ("raw_nbytes_per_s", rate_of_bytes),
    "on the wire": ("coded_nbytes_per_s", rate_of_bytes),
}
