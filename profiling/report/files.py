"""What a profile leaves in the folder of its run: data, trace and picture.

The page on the run, of `penstock.watch`, shows them in its view of time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.profiling.report import timeline, trace
from penstock.profiling.report.profile import Profile
from penstock.profiling.report.readings import Thread
from penstock.profiling.report.window import ProfileWindow

TRACE, TORCH_TRACE, KERNELS = "trace.json", "torch_trace.json", "kernels.json"
TIMELINE, DATA = "timeline.png", "profile.json"


def write(
    folder: Path,
    profile: Profile,
    window: ProfileWindow,
    threads: Sequence[Thread],
    notes: list[str],
) -> list[str]:
    """Write all files. The trace's path and the notes go into ``profile``.

    Args:
        folder: of the run.
        profile: the data.
        window: that of the profile.
        threads: the spans of the trace and the picture.
        notes: sentences for the reader of the profile.

    Returns: the given notes, and then one for each file that could not be written. A full disk does
    not raise, so that the caller can still show the figures.
    """
    profile["trace"] = str(folder / TRACE)
    kept = trace.cut(threads)
    held = trace.held(kept, window.seconds)
    notes = [*notes]
    with _noted(TRACE, notes):
        trace.write(folder / TRACE, kept, window.begin_ns, held)
        notes.append(held)

    with _noted(TIMELINE, notes):
        timeline.draw(folder / TIMELINE, threads, window.begin_ns, window.end_ns)

    profile["notes"] = [*notes]
    with _noted(DATA, notes):
        write_atomic(folder / DATA, json.dumps(profile, indent=2) + "\n")
    return notes


@contextmanager
def _noted(name: str, notes: list[str]) -> Iterator[None]:
    """Context that adds a note if its block cannot write the file ``name``."""
    try:
        yield
    except UserError as error:
        notes.append(str(error))
    except OSError as error:
        notes.append(f"{name} cannot be written: {error.strerror or error}")
