"""How long a GPU ran kernels, from traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.profiling.report.kernels import busy, kernel_share_in


def event(kind: str, begin_us: float, length_us: float, name: str = "gemm") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin_us, "dur": length_us}


def test_kernels_on_several_streams_count_once() -> None:
    events = [
        event("kernel", 100, 20),
        event("kernel", 110, 30),  # until 140: 40 us with the one before
        event("kernel", 112, 3),  # within it
        event("kernel", 180, 20),
    ]
    assert busy(events) == pytest.approx(60 / 100)


def test_copies_and_collectives_do_not_count_as_computing() -> None:
    events = [
        event("cpu_op", 0, 1000, "aten::mm"),
        event("gpu_memcpy", 100, 50, "Memcpy HtoD"),
        event("kernel", 150, 25),
        event("kernel", 170, 80, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        event("gpu_memset", 290, 10, "Memset"),
        {"ph": "M", "name": "process_name"},
    ]
    assert busy(events) == pytest.approx(25 / 200)


def test_idle_gpu_has_no_busy_share() -> None:
    assert busy([event("cpu_op", 0, 10)]) is None


def test_missing_or_incomplete_trace_has_no_busy_share(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert kernel_share_in(path) is None
    path.write_text('{"traceEvents": [')
    assert kernel_share_in(path) is None
    path.write_text(json.dumps({"traceEvents": [event("kernel", 0, 5), event("kernel", 15, 5)]}))
    assert kernel_share_in(path) == pytest.approx(0.5)
