"""What a profile leaves in the folder of its run: data, trace, picture, and a page that needs no
network (`report.html.jinja`, filled)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined

from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.profiling.report import timeline, trace
from penstock.profiling.report.data import Profile, ProfileWindow
from penstock.profiling.report.readings import Thread
from penstock.profiling.report.tables import heading, tables
from penstock.profiling.report.timeline import COLOURS, LEARNER_COLOURS

TRACE, TORCH_TRACE, KERNELS = "trace.json", "torch_trace.json", "kernels.json"
TIMELINE, PAGE, DATA = "timeline.png", "report.html", "profile.json"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
LEAST = 0.001  # share that is drawn
WIDTH, HEIGHT = 900, 18  # of a bar


def write(
    folder: Path,
    profile: Profile,
    window: ProfileWindow,
    threads: Sequence[Thread],
    notes: list[str],
) -> list[str]:
    """Write all files; the trace's path goes into ``profile``, and what could not be written into
    the notes that are returned, behind those given."""
    profile["trace"] = str(folder / TRACE)
    kept = trace.cut(threads)
    held = trace.held(kept, window.seconds)
    trace.write(folder / TRACE, kept, window.begin_ns, held)
    notes = [*notes, held]
    png: bytes | None = None
    try:
        timeline.draw(folder / TIMELINE, threads, window.begin_ns, window.end_ns)
        png = (folder / TIMELINE).read_bytes()
    except UserError as error:
        notes.append(str(error))
    write_atomic(folder / PAGE, page(profile, png, notes))
    write_atomic(folder / DATA, json.dumps(profile, indent=2) + "\n")
    return notes


class Piece(NamedTuple):
    """Of a bar: a part of a ledger, and where it lies, both as shares of the bar."""

    part: str
    colour: str
    begin: float
    share: float


def page(profile: Mapping[str, Any], png: bytes | None, notes: list[str]) -> str:
    """HTML; ``png`` is the timeline, ``notes`` are sentences on what was written."""
    entries = [(entry, LEARNER_COLOURS) for entry in profile["learner"]]
    others = (*profile["actors"], *profile["connectors"], *profile["others"])
    entries += [(entry, COLOURS) for entry in others]
    used = {part for entry, _ in entries for part, share in entry["ledger"].items() if share}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=heading(profile),
        profile=profile,
        bars=[(entry["name"], list(_pieces(entry["ledger"], of))) for entry, of in entries],
        legend=[pair for pair in (COLOURS | LEARNER_COLOURS).items() if pair[0] in used],
        width=WIDTH,
        height=HEIGHT,
        tables=tables(profile),
        png=base64.b64encode(png).decode() if png else None,
        notes=notes,
    )


def _pieces(ledger: Mapping[str, float], colours: Mapping[str, str]) -> Iterator[Piece]:
    begin = 0.0
    for part, colour in colours.items():
        share = ledger.get(part, 0.0)
        if share >= LEAST:
            yield Piece(part, colour, begin, share)
        begin += share
