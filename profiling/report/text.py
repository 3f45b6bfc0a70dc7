"""The profile for a terminal: tables in plain text, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.profiling.report.tables import TextTable, tables


def lines(profile: Mapping[str, Any]) -> list[str]:
    """All of it, line by line."""
    told = [heading(profile)]
    for table in tables(profile):
        told += ["", table.title, *_rows(table)]
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
    """What was measured, where."""
    return (
        f"{profile['target']}: {profile['seconds']:.1f} s on {profile['cores']:g} cores, "
        f"learner on {profile['device']}"
    )


def _rows(table: TextTable) -> Iterator[str]:
    """Columns as wide as they must be; the first to the left, figures to the right."""
    rows = [row for row in (table.columns, *table.rows) if any(row)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        if len(cells) == 1:  # a list of figures reads better along its left edge
            cells = [cell.strip() for cell in cells]
        yield "  " + "  ".join([f"{first:<{widths[0]}}", *cells])
