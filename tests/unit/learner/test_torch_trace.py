"""torch.profiler in a learner: on request, for some turns, with a complete file or none."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.learner.torch_trace import TorchTrace
from penstock.profiling.report.kernels import kernel_share_in


def ask(path: Path, turns: int, seconds: float, *, host: bool = True) -> list[dict[str, Any]]:
    asked = {"path": str(path), "turns": turns, "seconds": seconds, "host": host}
    return [{"kind": "actor_ended"}, {"kind": "torch_profile", **asked}]


def multiply() -> None:
    (torch.ones(8, 8) @ torch.ones(8, 8)).sum()


def count(path: Path, name: str) -> int:
    return sum(event.get("name") == name for event in json.loads(path.read_text())["traceEvents"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "torch.json"


def test_trace_has_the_operators_of_its_turns_only(path: Path) -> None:
    trace = TorchTrace()
    for turn in range(6):
        if turn == 2:
            trace.handle_messages(ask(path, turns=3, seconds=60.0))
        multiply()
        assert not path.exists() or turn > 4
        trace.turn()
    assert count(path, "aten::mm") == 3
    assert list(path.parent.iterdir()) == [path]


def test_trace_ends_by_time_with_long_turns(path: Path) -> None:
    trace = TorchTrace()
    trace.handle_messages(ask(path, turns=1000, seconds=0.02))
    for _ in range(2):
        multiply()
        time.sleep(0.015)
        trace.turn()
    assert count(path, "aten::mm") == 2


def test_no_trace_is_written_without_a_request(path: Path) -> None:
    trace = TorchTrace()
    trace.handle_messages([{"kind": "actor_ended"}])
    trace.turn()
    assert not path.exists()


@pytest.mark.gpu
def test_gpu_kernels_are_traced_without_the_host(path: Path) -> None:
    values = torch.ones(2048, 2048, device="cuda")
    values = values @ values / 2048  # loads the kernels, for which the GPU would be idle
    torch.cuda.synchronize()
    trace = TorchTrace()
    trace.handle_messages(ask(path, turns=3, seconds=60.0, host=False))
    for _ in range(3):
        for _ in range(20):
            values = values @ values / 2048
        trace.turn()
    assert count(path, "aten::mm") == 0
    share = kernel_share_in(path)
    assert share is not None
    assert 0.5 < share <= 1.0
