"""The spans of the last minute of a living run, in a file that its supervisor writes on request.

The spans are already in the memory that the processes share with the supervisor, so it asks them
for nothing. As its loop waits until the file is written, that has the spans as base64 of their
arrays, and the reader does the rest.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import open_private
from penstock.core.interfaces import Handle
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.report import trace
from penstock.profiling.report.readings import MAIN, SUPERVISOR, Thread, read_spans

FILE = "timeline.json"
LAST_S = 60.0
MOST_SPANS = 100_000
# The latest time that is read, in µs from the first span: 11 days.
MOST_US = 1e12
TimelineSpan = tuple[str, float, float]
"""Part, begin in µs and length in µs. Plain tuples, as a file has up to `MOST_SPANS`."""


def write_last_minute(folder: Path, handles: Iterable[Handle], ledger: TimeLedger) -> None:
    """Write the file into the folder of a run.

    Args:
        folder: of the run.
        handles: processes that share memory with this one.
        ledger: that of the main thread of this process.

    Raises OSError if it cannot be written.
    """
    since_ns = time.perf_counter_ns() - int(LAST_S * 1e9)
    threads = [thread for handle in handles for thread in handle.spans(since_ns) or ()]
    threads.append(
        Thread(
            process=SUPERVISOR.name,
            pid=os.getpid(),
            name=MAIN,
            lane=0,
            spans=read_spans(ledger.lane, since_ns),
        )
    )

    temporary = folder / f"{FILE}.tmp"
    with open(temporary, "w", encoding="utf-8", opener=open_private) as file:
        file.write(encode_spans(threads, time.time()))
    temporary.replace(folder / FILE)


def encode_spans(threads: Iterable[Thread], at_s: float) -> str:
    """Returns the content of the file; ``at_s`` is the wall-clock time."""
    threads_with_spans = [thread for thread in threads if len(thread.spans)]
    newest = trace.newest_spans(threads_with_spans, MOST_SPANS)
    origin_ns = min((int(thread.spans.begin_ns[0]) for thread in threads_with_spans), default=0)
    window_s = max((thread.spans.seconds for thread in threads_with_spans), default=0.0)
    note = trace.coverage(newest, window_s, most=MOST_SPANS, window="the last minute")
    return json.dumps(
        {
            "time": at_s,
            "note": note,
            "parts": {int(part): part.name.lower() for part in Part},
            "threads": [
                {
                    "name": f"{thread.process}/{thread.name}",
                    "edges_ns": _base64(thread.spans.edges_ns - origin_ns),
                    "part": _base64(thread.spans.part),
                }
                for thread in newest
            ],
        }
    )


def decode_spans(content: Mapping[str, Any]) -> dict[str, list[TimelineSpan]]:
    """Returns the spans of each thread, by its name.

    Raises ValueError, LookupError or TypeError if ``content`` is not that of such a file.
    """
    part_names = {int(number): str(name) for number, name in content["parts"].items()}
    threads: dict[str, list[TimelineSpan]] = {}

    for thread in content["threads"]:
        edges_us = np.frombuffer(base64.b64decode(thread["edges_ns"]), "<i8") / 1e3
        numbers = np.frombuffer(base64.b64decode(thread["part"]), np.uint8).tolist()
        lengths_us = np.diff(edges_us)
        fits = len(lengths_us) == len(numbers)
        if not fits or (lengths_us < 0).any() or np.abs(edges_us).max() > MOST_US:
            raise ValueError("the times of a thread do not rise, or it has too few of them")

        parts = [part_names[number] for number in numbers]
        begins_us = edges_us[:-1].tolist()
        spans = list(zip(parts, begins_us, lengths_us.tolist(), strict=True))
        threads[str(thread["name"])] = spans
    return threads


def _base64(values: np.ndarray[Any, Any]) -> str:
    """Returns an array, in the byte order of little-endian machines, as base64."""
    little_endian = values.dtype.newbyteorder("<")
    return base64.b64encode(values.astype(little_endian).tobytes()).decode()
