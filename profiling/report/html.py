"""The profile as one page that needs no network: verdict, bars, tables, the timeline."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from penstock.profiling.report.colours import COLOURS, LEARNER_COLOURS
from penstock.profiling.report.tables import TextTable, tables
from penstock.profiling.report.text import heading

LEAST = 0.001  # share that is drawn
WIDTH, HEIGHT = 900, 18  # of a bar

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
  color: #1c1c1c; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin: 1.6em 0 .4em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .15em .8em .15em 0; text-align: right; font-weight: normal }
th { color: #666 } td:first-child, th:first-child, .list td { text-align: left }
tr:hover { background: #f4f4f4 }
.verdict { border-left: .3em solid #2e8b57; background: #f4f8f5; padding: .6em 1em }
.verdict b { display: block } .note { color: #666 }
img { max-width: 100% } svg { display: block }
"""


def page(profile: Mapping[str, Any], png: bytes | None, notes: list[str]) -> str:
    """HTML; ``png`` is the timeline, ``notes`` are sentences on what was written."""
    verdict = profile["verdict"]
    title = escape(heading(profile))
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
        f'<p class="verdict"><b>{escape(verdict["finding"])}</b>{escape(verdict["reason"])}<br>'
        f"Next: {escape(verdict['next_step'])}</p>",
        *(f'<p class="note">Also: {escape(other["finding"])}</p>' for other in profile["also"]),
        "<h2>Where time went</h2>",
        *_bars(profile),
        *(_table(table) for table in tables(profile)),
    ]
    if png is not None:
        data = base64.b64encode(png).decode()
        parts.append(
            "<h2>Timeline</h2>"
            f'<img alt="What each thread did when" src="data:image/png;base64,{data}">'
        )
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    return "\n".join([*parts, "</body></html>\n"])


def _bars(profile: Mapping[str, Any]) -> Iterator[str]:
    """A bar for each process; the pointer over a piece of it says what it is."""
    entries = [(entry, LEARNER_COLOURS) for entry in profile["learner"]]
    entries += [(entry, COLOURS) for entry in (*profile["actors"], *profile["connectors"])]
    entries += [(entry, COLOURS) for entry in profile["others"]]
    yield "<table>"
    for entry, colours in entries:
        bar = _bar(entry["ledger"], colours)
        yield f"<tr><td>{escape(entry['name'])}</td><td>{bar}</td></tr>"
    yield "</table>"
    used = {name for entry, _ in entries for name in entry["ledger"] if entry["ledger"][name]}
    yield (
        '<p class="note">'
        + " &ensp; ".join(
            f'<span style="color:{colour}">■</span> {escape(name)}'
            for name, colour in {**COLOURS, **LEARNER_COLOURS}.items()
            if name in used
        )
        + "</p>"
    )


def _bar(ledger: Mapping[str, float], colours: Mapping[str, str]) -> str:
    pieces, x = [], 0.0
    for name in colours:
        share = ledger.get(name, 0.0)
        if share >= LEAST:
            pieces.append(
                f'<rect x="{x * WIDTH:.1f}" width="{share * WIDTH:.1f}" height="{HEIGHT}" '
                f'fill="{colours[name]}"><title>{escape(name)} {share:.1%}</title></rect>'
            )
        x += share
    return f'<svg width="{WIDTH}" height="{HEIGHT}">{"".join(pieces)}</svg>'


def _table(table: TextTable) -> str:
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    kind = ' class="list"' if len(table.columns) == 2 else ""
    head = f"<tr>{head}</tr>" if any(table.columns) else ""
    return f"<h2>{escape(table.title)}</h2><table{kind}>{head}{rows}</table>"
