"""How much of the time a GPU ran kernels, by the trace that torch's profiler (CUPTI) left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# The categories of what a GPU does.
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
# Begins the names of kernels that mostly wait for other learners.
EXCHANGE = "nccl"


class GpuSpan(NamedTuple):
    """When something ran on a GPU, in µs."""

    begin: float
    end: float


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
    first_us = min(_span(event).begin for event in on_gpu)
    last_us = max(_span(event).end for event in on_gpu)

    kernels = [event for event in on_gpu if event["cat"] == "kernel"]
    computing = sorted(
        _span(event) for event in kernels if not str(event["name"]).startswith(EXCHANGE)
    )
    busy_us = 0.0
    counted_until_us = first_us
    for begin_us, end_us in computing:
        busy_us += max(0.0, end_us - max(begin_us, counted_until_us))
        counted_until_us = max(counted_until_us, end_us)
    return busy_us / (last_us - first_us) if last_us > first_us else None


def kernel_share_in(path: Path) -> float | None:
    """Returns `busy` of the trace in a file; None if there is no file, or none that is whole."""
    try:
        return busy(json.loads(path.read_text())["traceEvents"])
    except (OSError, ValueError, KeyError):
        return None


def _span(event: Mapping[str, Any]) -> GpuSpan:
    """Returns when the event of a trace took place."""
    begin = float(event["ts"])
    return GpuSpan(begin, begin + float(event["dur"]))
