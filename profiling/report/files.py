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

DATA = "profile.json"
TRACE = "trace.json"
TIMELINE = "timeline.png"
# The files of torch's profiler: of all that the learner did, and of its kernels alone.
TORCH_TRACE = "torch_trace.json"
KERNELS = "kernels.json"


def write_profile_files(
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
    notes = [*notes]
    profile["trace"] = str(folder / TRACE)
    newest = trace.newest_spans(threads)
    coverage = trace.coverage(newest, window.seconds)
    with _noted(TRACE, notes):
        trace.write(folder / TRACE, newest, origin_ns=window.begin_ns, note=coverage)
        notes.append(coverage)

    with _noted(TIMELINE, notes):
        timeline.draw(folder / TIMELINE, threads, from_ns=window.begin_ns, to_ns=window.end_ns)

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
