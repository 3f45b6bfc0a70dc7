"""What a profile leaves in the folder of its run: data, trace, picture, page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.profiling.report import html, timeline, trace
from penstock.profiling.report.data import Profile, ProfileWindow
from penstock.profiling.report.readings import Thread

TRACE, TORCH_TRACE, KERNELS = "trace.json", "torch_trace.json", "kernels.json"
TIMELINE, PAGE, DATA = "timeline.png", "report.html", "profile.json"


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
    write_atomic(folder / PAGE, html.page(profile, png, notes))
    write_atomic(folder / DATA, json.dumps(profile, indent=2) + "\n")
    return notes
