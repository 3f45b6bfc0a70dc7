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

MOST_EVENTS = 200_000  # what a browser still opens at once, some 20 MB
ALL_OF_IT = 0.99  # of the window
MOST_TOLD = 3  # threads, by name


def cut(threads: Sequence[Thread], most: int = MOST_EVENTS) -> list[Thread]:
    """The newest spans of each thread, at most ``most`` in total; a thread with few keeps all."""
    each = limit([len(thread.spans) for thread in threads], most)
    return [replace(thread, spans=thread.spans.newest(each)) for thread in threads]


def held(threads: Sequence[Thread], window_s: float, most: int = MOST_EVENTS) -> str:
    """A sentence on how much of the window the spans cover."""
    count = sum(len(thread.spans) for thread in threads)
    short = [thread for thread in threads if thread.spans.seconds < ALL_OF_IT * window_s]
    if not short:
        return f"the trace has all {count:,} spans of the window"
    parts = [
        f"of {t.process}/{t.name} it has the last {t.spans.seconds:.2g} s"
        for t in short[:MOST_TOLD]
    ]
    more = f" and so of {len(short) - MOST_TOLD} more" if len(short) > MOST_TOLD else ""
    return (
        f"the trace has {count:,} spans; {', '.join(parts)}{more} (a ring holds {RING_SPANS:,} "
        f"spans, the file {most:,})"
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
    about = {"clock": "CLOCK_MONOTONIC", "origin_ns": origin_ns, "holds": note}
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about))
        file.write(',"traceEvents":[\n')
        file.write(",\n".join(json.dumps(event) for event in _names(threads)))
        for thread in threads:
            file.writelines(",\n" + line for line in _events(thread, origin_ns))
        file.write("\n]}\n")


def _names(threads: Sequence[Thread]) -> Iterator[dict[str, Any]]:
    """What processes and threads are called, and their order."""
    for number, (pid, process) in enumerate({t.pid: t.process for t in threads}.items()):
        yield _name("process_name", pid, 0, {"name": process})
        yield _name("process_sort_index", pid, 0, {"sort_index": number})
    for thread in threads:
        yield _name("thread_name", thread.pid, thread.lane, {"name": thread.name})


def _name(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _events(thread: Thread, origin_ns: int) -> Iterator[str]:
    """Lines of JSON, made by hand: there may be 200,000."""
    names = {int(part): part.name.lower() for part in Part}
    category = thread.process.rpartition("-")[0]
    head = f'"cat":"{category}","pid":{thread.pid},"tid":{thread.lane}'
    spans = thread.spans
    begins = ((spans.begin_ns - origin_ns) / 1e3).tolist()
    lengths = ((spans.end_ns - spans.begin_ns) / 1e3).tolist()
    for part, begin, length in zip(spans.part.tolist(), begins, lengths, strict=True):
        yield f'{{"ph":"X","name":"{names[part]}",{head},"ts":{begin:.3f},"dur":{length:.3f}}}'


def limit(lengths: Sequence[int], most: int) -> int:
    """How many each may keep, so that all together keep no more than ``most``."""
    left = most
    for i, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - i)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)
