"""How much of the time a GPU ran kernels, by the trace that torch's profiler (CUPTI) left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
EXCHANGE = "nccl"  # begins the names of kernels that mostly wait for other learners


def busy(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Returns the share of the time in which a kernel that computes ran.

    That is of the time from the first thing that the GPU did to the end of the last; None where it
    did nothing. Kernels on several streams at once count once; copies, and the kernels of NCCL, are
    no computing.

    Args:
        events: those of a Chrome trace, with times in µs.
    """
    on_gpu = [event for event in events if event.get("cat") in GPU_KINDS]
    if not on_gpu:
        return None
    spans = sorted(
        _span(event)
        for event in on_gpu
        if event["cat"] == "kernel" and not str(event["name"]).startswith(EXCHANGE)
    )
    first = min(_span(event)[0] for event in on_gpu)
    last = max(_span(event)[1] for event in on_gpu)
    total, reached = 0.0, first
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total / (last - first) if last > first else None


def busy_in(path: Path) -> float | None:
    """Returns `busy` of the trace in a file; None if there is no file, or none that is whole."""
    try:
        return busy(json.loads(path.read_text())["traceEvents"])
    except (OSError, ValueError, KeyError):
        return None


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])
