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
from penstock.profiling.report.readings import MAIN, SUPERVISOR, Thread, spans

FILE = "timeline.json"
LAST_S = 60.0
MOST_SPANS = 100_000


def record(folder: Path, handles: Iterable[Handle], ledger: TimeLedger) -> None:
    """Write the file into the folder of a run.

    Args:
        folder: of the run.
        handles: processes that share memory with this one.
        ledger: that of the main thread of this process.

    Raises OSError if it cannot be written.
    """
    since_ns = time.perf_counter_ns() - int(LAST_S * 1e9)
    threads = [thread for handle in handles for thread in handle.spans(since_ns) or ()]
    own = spans(ledger.lane, since_ns)
    threads.append(Thread(SUPERVISOR.name, os.getpid(), MAIN, 0, own))

    part = folder / f"{FILE}.tmp"
    with open(part, "w", encoding="utf-8", opener=open_private) as file:
        file.write(encoded(threads, time.time()))
    part.replace(folder / FILE)


def encoded(threads: Iterable[Thread], at_s: float) -> str:
    """Returns the content of the file; ``at_s`` is the wall-clock time."""
    known = [thread for thread in threads if len(thread.spans)]
    kept = trace.cut(known, MOST_SPANS)
    origin_ns = min((int(thread.spans.begin_ns[0]) for thread in known), default=0)
    window_s = max((thread.spans.seconds for thread in known), default=0.0)
    return json.dumps(
        {
            "time": at_s,
            "note": trace.held(kept, window_s, MOST_SPANS).replace("the window", "the last minute"),
            "parts": {int(part): part.name.lower() for part in Part},
            "threads": [
                {
                    "name": f"{thread.process}/{thread.name}",
                    "edges_ns": _text(thread.spans.edges_ns - origin_ns),
                    "part": _text(thread.spans.part),
                }
                for thread in kept
            ],
        }
    )


def decoded(found: Mapping[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Returns the spans of each thread, by its name.

    Raises ValueError, LookupError or TypeError if ``content`` is not that of such a file.
    """
    parts = {int(number): str(name) for number, name in found["parts"].items()}
    threads: dict[str, list[tuple[str, float, float]]] = {}

    for thread in found["threads"]:
        edges = np.frombuffer(base64.b64decode(thread["edges_ns"]), "<i8") / 1e3
        numbers = np.frombuffer(base64.b64decode(thread["part"]), np.uint8).tolist()
        lengths = np.diff(edges)
        if len(lengths) != len(numbers) or (lengths < 0).any() or np.abs(edges).max() > 1e12:
            raise ValueError("the times of a thread do not rise, or it has too few of them")

        names = [parts[number] for number in numbers]
        begins = edges[:-1].tolist()
        threads[str(thread["name"])] = list(zip(names, begins, lengths.tolist(), strict=True))
    return threads


def _text(values: np.ndarray[Any, Any]) -> str:
    little = values.dtype.newbyteorder("<")
    return base64.b64encode(values.astype(little).tobytes()).decode()
