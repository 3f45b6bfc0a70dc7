"""What a trace must be for Perfetto and chrome://tracing to open it."""

from __future__ import annotations

from typing import Any


def check_schema(trace: dict[str, Any]) -> None:
    """The parts of the "Trace Event Format" that are used; written from that document."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert len(event["args"]) == 1
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert ("process_name", event["pid"], 0) in named
