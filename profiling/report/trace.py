"""The spans of all processes as a Chrome trace, which Perfetto and chrome://tracing open.

The format is the "Trace Event Format": complete events (``ph`` X) with ``ts`` and ``dur`` in µs,
named processes and threads (``ph`` M). One clock for all: CLOCK_MONOTONIC, from the begin of the
window.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.profiling.ledger import RING_SPANS, Part
from penstock.profiling.report.readings import Thread

# A browser still opens so many events at once, some 20 MB.
MOST_EVENTS = 200_000
# Spans of this share of a window are taken to be all of it.
WHOLE_WINDOW = 0.99
MOST_NAMED = 3  # threads in one sentence


def newest_spans(threads: Sequence[Thread], most: int = MOST_EVENTS) -> list[Thread]:
    """Returns the newest spans of each thread, at most ``most`` in total.

    A thread with few spans keeps all.
    """
    most_each = even_limit([len(thread.spans) for thread in threads], most)
    return [replace(thread, spans=thread.spans.newest(most_each)) for thread in threads]


def coverage(
    threads: Sequence[Thread],
    window_s: float,
    *,
    most: int = MOST_EVENTS,
    window: str = "the window",
) -> str:
    """Returns a sentence on how much of a window the spans cover.

    Args:
        threads: as `newest_spans` returns them.
        window_s: length of the window in seconds.
        most: how many spans the file may have.
        window: what the sentence calls the window.
    """
    span_count = sum(len(thread.spans) for thread in threads)
    short = [thread for thread in threads if thread.spans.seconds < WHOLE_WINDOW * window_s]
    if not short:
        return f"the trace has all {span_count:,} spans of {window}"

    parts = [
        f"of {thread.process}/{thread.name} it has the last {thread.spans.seconds:.2g} s"
        for thread in short[:MOST_NAMED]
    ]
    more = ""
    if len(short) > MOST_NAMED:
        more = f" and so of {len(short) - MOST_NAMED} more"
    return (
        f"the trace has {span_count:,} spans; {', '.join(parts)}{more} (a ring holds "
        f"{RING_SPANS:,} spans, the file {most:,})"
    )


def write(path: Path, threads: Sequence[Thread], origin_ns: int, note: str) -> None:
    """Write the trace of the threads.

    Args:
        path: the file.
        threads: as `newest_spans` returns them.
        origin_ns: the time 0 of the trace; CLOCK_MONOTONIC.
        note: a sentence for readers of the file.

    Raises OSError if it cannot be written.
    """
    metadata = {"clock": "CLOCK_MONOTONIC", "origin_ns": origin_ns, "holds": note}
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(metadata))
        file.write(',"traceEvents":[\n')
        file.write(",\n".join(json.dumps(event) for event in _name_events(threads)))
        for thread in threads:
            file.writelines(",\n" + line for line in _span_events(thread, origin_ns))
        file.write("\n]}\n")


def _name_events(threads: Sequence[Thread]) -> Iterator[dict[str, Any]]:
    """Yields the events that name processes and threads and order them."""
    process_names = {thread.pid: thread.process for thread in threads}
    for number, (pid, name) in enumerate(process_names.items()):
        yield _metadata_event("process_name", pid, 0, {"name": name})
        yield _metadata_event("process_sort_index", pid, 0, {"sort_index": number})
    for thread in threads:
        yield _metadata_event("thread_name", thread.pid, thread.lane, {"name": thread.name})


def _metadata_event(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """Returns an event on a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _span_events(thread: Thread, origin_ns: int) -> Iterator[str]:
    """Yields the spans as lines of JSON, formatted here: there may be 200,000."""
    names = {int(part): part.name.lower() for part in Part}
    category = thread.process.rpartition("-")[0]
    fields = f'"cat":"{category}","pid":{thread.pid},"tid":{thread.lane}'

    spans = thread.spans
    begins_us = ((spans.begin_ns - origin_ns) / 1e3).tolist()
    lengths_us = ((spans.end_ns - spans.begin_ns) / 1e3).tolist()
    for part, begin_us, us in zip(spans.part.tolist(), begins_us, lengths_us, strict=True):
        yield f'{{"ph":"X","name":"{names[part]}",{fields},"ts":{begin_us:.3f},"dur":{us:.3f}}}'


def even_limit(lengths: Sequence[int], most: int) -> int:
    """Returns how many items each list may keep, so that all together keep no more than ``most``.

    Lists that are shorter leave the rest of their share to the others.
    """
    available = most
    for i, length in enumerate(sorted(lengths)):
        share = available // (len(lengths) - i)
        if length > share:
            return share
        available -= length
    return max(lengths, default=0)
