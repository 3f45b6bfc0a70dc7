"""Traces for Perfetto and chrome://tracing: one schema, one clock, a bounded size."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.profiling.ledger import LANE_WORDS, Part, TimeLedger
from penstock.profiling.report.readings import Spans, Thread, read_spans
from penstock.profiling.report.trace import coverage, newest_spans, write
from trace_schema import check_schema


def thread(process: str, pid: int, count: int, *, name: str = "main", lane: int = 0) -> Thread:
    """``count`` spans of a millisecond each, from 5 ms on."""
    begin = 5_000_000 + 1_000_000 * np.arange(count, dtype=np.int64)
    part = np.where(np.arange(count) % 2, Part.STEP, Part.INFER).astype(np.uint8)
    return Thread(process, pid, name, lane, Spans(begin, begin + 1_000_000, part))


def written(path: Path, threads: list[Thread], origin_ns: int) -> dict[str, Any]:
    write(path, threads, origin_ns, "a note")
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def test_trace_has_names_times_and_lanes(tmp_path: Path) -> None:
    threads = [
        thread("learner-0", 40, 2),
        thread("learner-0", 40, 1, name="feeder", lane=1),
        thread("actor-1", 41, 1),
    ]
    trace = written(tmp_path / "trace.json", threads, origin_ns=4_000_000)
    check_schema(trace)
    events = trace["traceEvents"]
    assert [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"] == [
        (40, "learner-0"),
        (41, "actor-1"),
    ]
    assert [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"] \
        == [(40, 0, "main"), (40, 1, "feeder"), (41, 0, "main")]  # fmt: skip
    spans = [tuple(e[k] for k in ("name", "cat", "pid", "tid", "ts", "dur"))
             for e in events if e["ph"] == "X"]  # fmt: skip
    assert spans == [
        ("infer", "learner", 40, 0, 1000.0, 1000.0),
        ("step", "learner", 40, 0, 2000.0, 1000.0),
        ("infer", "learner", 40, 1, 1000.0, 1000.0),
        ("infer", "actor", 41, 0, 1000.0, 1000.0),
    ]
    assert trace["otherData"]["holds"] == "a note"


def test_spans_of_two_ledgers_are_in_chronological_order(tmp_path: Path) -> None:
    since_ns = time.perf_counter_ns()
    lanes = [memoryview(bytearray(8 * LANE_WORDS)).cast("q") for _ in range(2)]
    first, second = (TimeLedger(lane) for lane in lanes)
    for ledger, part in ((first, Part.STEP), (second, Part.GATHER), (first, Part.SEND)):
        time.sleep(0.003)
        ledger.switch(part)
    threads = [
        Thread("actor-0", 1, "main", 0, read_spans(lanes[0], since_ns)),
        Thread("learner-0", 2, "feeder", 0, read_spans(lanes[1], since_ns)),
    ]
    trace = written(tmp_path / "trace.json", threads, since_ns)
    check_schema(trace)
    begins = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert begins["gather"] - begins["step"] >= 2500
    assert begins["send"] - begins["gather"] >= 2500


def test_cut_shortens_the_longest_threads_and_reports_it() -> None:
    threads = [thread("actor-0", 1, 100), thread("actor-1", 2, 80), thread("learner-0", 3, 10)]
    kept = newest_spans(threads, most=70)
    assert [len(t.spans) for t in kept] == [30, 30, 10]
    assert kept[0].spans.end_ns[-1] == threads[0].spans.end_ns[-1]  # the newest stay
    said = coverage(kept, window_s=0.1, most=70)
    assert said.startswith("the trace has 70 spans; of actor-0/main it has the last 0.03 s, of ")
    many = coverage([thread(f"actor-{i}", i, 1) for i in range(9)], window_s=0.1)
    assert many.count("it has the last") == 3
    assert "and so of 6 more (" in many
    assert [len(t.spans) for t in newest_spans(threads, most=190)] == [100, 80, 10]
    assert coverage(threads[:1], window_s=0.1) == "the trace has all 100 spans of the window"


def test_trace_without_threads_is_empty(tmp_path: Path) -> None:
    assert newest_spans([]) == []
    trace = written(tmp_path / "trace.json", [], 0)
    check_schema(trace)
    assert trace["traceEvents"] == []
