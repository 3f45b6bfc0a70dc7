"""`benchmarks/gpu.py` on a CPU: all of its stages, and stages that fail, die or hang."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_stages.expected import EXPECTED

CHECKOUT = Path(__file__).parents[2]
GPU = CHECKOUT / "benchmarks/gpu.py"
FAILING = CHECKOUT / "tests/failing_stages.py"

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def run(program: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the result, and the text for people."""
    command = [sys.executable, str(program), "--device", "cpu", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.slow
def test_stages_of_one_process_run_on_a_cpu(tmp_path: Path) -> None:
    names = ["set-up", "correctness", "copies", "ceilings", "synchronisations", "codecs"]
    file = tmp_path / "gpu.json"
    code, result, text = run(GPU, "--only", *names, "--out", str(file))
    assert code == 0, text
    assert list(result["stages"]) == names
    assert {stage["state"] for stage in result["stages"].values()} == {"done"}
    assert json.loads(file.read_text()) == result
    found = [one for stage in result["stages"].values() for one in stage["findings"]]
    assert [one for one in found if one["met"] is False] == []
    missing = {name for stage in names for name in EXPECTED.get(stage, {})} - {
        one["name"] for one in found
    }
    assert missing == set(), "nothing else is expected than what is measured"
    assert [one["value"] for one in found if "relative difference" in one["name"]] == [0.0] * 4
    assert "no GPU: these figures say nothing" in text


@pytest.mark.slow
def test_stages_that_start_runs_work_on_a_cpu() -> None:
    code, result, text = run(GPU, "--only", "utilization", "group", "pong", "tests")
    assert code == 0, text
    assert {stage["state"] for stage in result["stages"].values()} == {"done"}
    found = {one["name"]: one for s in result["stages"].values() for one in s["findings"]}
    assert 0 < found["nature_cnn, prefetch: utilization"]["value"] <= 1
    assert found["two learners trained"]["met"]
    assert found["skipped"]["value"] > 0


@pytest.mark.slow
def test_failed_killed_or_hanging_stage_does_not_cost_other_stages() -> None:
    code, result, text = run(FAILING)
    assert code == 1
    assert "ValueError: no such kernel" in text
    stages = result["stages"]
    states = {name: stage["state"] for name, stage in stages.items()}
    assert states == {"raises": "failed", "dies": "failed", "hangs": "failed", "works": "done"}
    assert stages["raises"]["error"][-1] == "ValueError: no such kernel"
    assert stages["dies"]["error"][0] == "ended with -11"
    assert stages["hangs"]["error"] == ["stopped after 5 s", "looks for a GPU"]
    assert [len(stage["findings"]) for stage in stages.values()] == [1, 1, 1, 1]
    assert stages["works"]["findings"][0]["data"] == [1, 2]


@pytest.mark.slow
def test_gpu_benchmark_terminated_within_a_stage_leaves_no_process() -> None:
    command = [sys.executable, str(FAILING), "--device", "cpu", "--only", "hangs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("before the hang" in line for line in process.stdout)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM  # and the fixture looks for what is left


def test_stages_beyond_the_time_limit_are_left_out() -> None:
    code, result, text = run(FAILING, "--minutes", "0")
    assert code == 0
    assert {stage["state"] for stage in result["stages"].values()} == {"left out"}
    assert text.count("left out: --minutes are over") == 4


def test_figures_of_a_cpu_are_not_saved() -> None:
    code, _, text = run(GPU, "--save")
    assert code == 2
    assert "figures of a CPU would replace those of a GPU" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_gpu_is_reported_in_one_sentence() -> None:
    done = subprocess.run([sys.executable, GPU], capture_output=True, text=True)
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("gpu.py: torch finds no CUDA device here; run it on")
