"""`penstock bench reduce` as a whole, with few and small gradients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from reduce import ReducePlan, measure

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

LEARNERS = 3
SIZE = 178_599  # of a Nature CNN with 32 units
# What each learner sends by hand: all-reduce 2 (N-1)/N values of 4 bytes; two phases the same of 2
# bytes, or of 1 byte and 4 for every 512 values.
BY_HAND = {
    "none": 2 * 2 / 3 * 4 * SIZE,
    "bf16": 2 * 2 / 3 * 2 * SIZE,
    "int8": 2 * 2 / 3 * (1 + 4 / 512) * SIZE,
}


def plan(codecs: tuple[str, ...], links: tuple[str, ...] | None) -> ReducePlan:
    return ReducePlan(LEARNERS, SIZE, codecs, links, 0.2)


def check(figures: dict[str, Any], links: list[str]) -> None:
    assert figures["code_ms"] >= 0
    assert list(figures["step_ms"]) == links
    assert all(ms > 0 for ms in figures["step_ms"].values())
    for link in links:  # the backward pass alone takes 50 ms
        assert figures["step_with_backward_ms"][link] > 50


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.slow
def test_bytes_at_sockets_and_interfaces_are_those_worked_out_by_hand() -> None:
    result = measure(plan(tuple(BY_HAND), ("unlimited",)), print)
    if result["links"] != ["unlimited"]:
        pytest.skip(result["where"])
    assert (result["learners"], result["parameters"]) == (LEARNERS, SIZE)
    for codec, nbytes in BY_HAND.items():
        figures = result["codecs"][codec]
        check(figures, ["unlimited"])
        for counted in ("bytes_per_step", "bytes_theory", "interface_payload_per_step"):
            assert figures[counted] == pytest.approx(nbytes, rel=0.02), (codec, counted)
        # 66 bytes of headers for each packet of up to 64 kB, and for each acknowledgement.
        assert 1.0 < figures["interface_bytes_per_step"] / nbytes < 1.1
        plain = result["codecs"]["none"]["bytes_per_step"]
        assert figures["bytes_ratio"] == pytest.approx(plain / figures["bytes_per_step"])
    errors = {name: figures["relative_error"] for name, figures in result["codecs"].items()}
    assert errors["none"] < 1e-6 < errors["bf16"] < 2**-8 < errors["int8"] < 0.1


@pytest.mark.slow
def test_bench_reduce_without_root_measures_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said: list[str] = []
    result = measure(plan(("none", "dgc", "auto"), None), said.append)
    assert (
        said[0]
        == result["where"]
        == ("3 learners on loopback, at no limited rate, because network namespaces need root.")
    )
    assert result["links"] == ["loopback"]
    for figures in result["codecs"].values():
        check(figures, ["loopback"])
        assert "interface_bytes_per_step" not in figures
    dgc, auto = result["codecs"]["dgc"], result["codecs"]["auto"]
    # 3 ranks' (N-1) entries of 8 bytes for a thousandth of the values; gloo's own headers beside.
    assert dgc["bytes_theory"] == pytest.approx(2 * 8 * SIZE / 1000, rel=0.02)
    assert dgc["bytes_theory"] < dgc["bytes_per_step"] < dgc["bytes_theory"] + 5_000
    chosen = auto["chosen"]["loopback"]
    assert auto["why"]["loopback"].startswith(f"{chosen}: ")
    assert auto["step_ms"] == result["codecs"][chosen]["step_ms"]


@pytest.mark.slow
def test_bench_reduce_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "penstock", "bench", "reduce", "--learners", "2",
               "--parameters", "150k", "--codecs", "fp16", "--seconds", "0.05"]  # fmt: skip
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    result = json.loads(line)
    assert list(result["codecs"]) == ["none", "fp16"]
    assert "fp16 over " in done.stderr
    assert "relative_error" in result["codecs"]["fp16"]


def test_terminated_bench_reduce_leaves_no_process_or_namespace() -> None:
    command = [sys.executable, "-m", "penstock", "bench", "reduce", "--learners", "2",
               "--parameters", "150k", "--codecs", "int8"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout
        assert bench.stdout.readline().startswith("2 learners")
        assert bench.stdout.readline().startswith("none: ")
        bench.terminate()
        assert bench.wait(20) == 128 + signal.SIGTERM  # and the fixture looks for what is left
