"""Parts of benchmarks/gpu.py: comparisons, and finding calls that make the host wait."""

from __future__ import annotations

import io
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_stages import ceilings, marked_tests, pong, set_up
from gpu_stages.batches import PASSES
from gpu_stages.expected import compared, line
from gpu_stages.finding import Finding, Options
from gpu_stages.updates import CASES, EPOCHS, LONG, MESSAGE, difference, waits_in
from penstock.configs.load import resolve
from penstock.configs.policy_lag import lag_of, updates_of_batch
from simulated_device import HazardError, simulated

CHECKOUT = Path(__file__).parents[3]
GPU = Options("cuda", 8.0)


@pytest.mark.parametrize(
    ("stage", "finding", "ratio", "met"),
    [
        ("pong", Finding("trained agent steps/s", 30_000.0), 1.5, True),
        ("pong", Finding("trained agent steps/s", 10_000.0), 0.5, False),
        ("pong", Finding("minutes to 18", 3.0), 0.5, True),
        ("pong", Finding("minutes to 18", 12.0), 2.0, False),
        ("pong", Finding("minutes to 18", None), None, False),
        ("tests", Finding("failed", 0), None, True),
        ("tests", Finding("failed", 2), None, False),
        ("group", Finding("two learners trained", False), None, False),
        ("set-up", Finding("torch", "2.13.0"), None, None),
        ("group", Finding("seconds", math.nan), None, None),
        ("group", Finding("seconds", math.inf), None, None),
    ],
)
def test_figures_are_compared_with_their_expected_values(
    stage: str, finding: Finding, ratio: float | None, met: bool | None
) -> None:
    found = compared(stage, finding, GPU)
    assert (found["ratio"], found["met"]) == (ratio, met)
    assert finding.name in line(found)
    assert ("MISSED" in line(found)) == (met is False)


def test_nan_gradient_misses_the_expectation() -> None:
    bad, good = torch.tensor([math.nan, 1.0]), torch.ones(2)
    found = difference({"actor": good, "critics": bad}, {"actor": good, "critics": good})
    assert math.isnan(found)
    finding = Finding("sac: gradient against the CPU's, relative difference", found)
    compare = compared("correctness", finding, GPU)
    assert compare["met"] is False
    assert "MISSED" in line(compare)


def test_figures_of_a_cpu_are_not_compared_but_answers_are() -> None:
    cpu = Options("cpu", 0.1)
    assert compared("pong", Finding("minutes to 18", 12.0), cpu)["met"] is None
    assert compared("group", Finding("two learners trained", False), cpu)["met"] is False


ORDERED = (  # the checks that need an order of streams
    "copy brings values there and back",
    "streams wait for events and streams",
    "record_use keeps memory",
    "synchronize waits",
)


@pytest.mark.parametrize("name", ORDERED)
def test_device_checks_pass_on_a_simulated_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "busy", lambda device: None)
    for seed in range(4):
        with simulated(seed) as device:
            found = set_up.CHECKS[name](device)
            assert found or name == "synchronize waits"  # passes at random


@pytest.mark.parametrize(
    ("method", "check"),
    [("wait_event", "_streams"), ("wait_stream", "_streams"), ("record_use", "_record_use")],
)
def test_device_check_fails_when_an_ordering_is_missing(
    method: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "busy", lambda device: None)
    with simulated(0, (method, check)) as device, pytest.raises(HazardError):
        getattr(set_up, check)(device)


def test_each_place_that_waits_is_found() -> None:
    def update() -> None:
        warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        warnings.warn(MESSAGE, stacklevel=1)

    first = update.__code__.co_firstlineno
    name = Path(__file__).relative_to(CHECKOUT)
    assert waits_in(update) == [f"{name}:{first + 1}", f"{name}:{first + 3}"]


def test_long_update_is_one_pass() -> None:
    target, *options = CASES["ppo"]
    config = resolve(target, [*options, *EPOCHS, *LONG])
    batch = config.actor_envs * config.actors.unroll * config.learner.batch_slots
    assert config.learner.micro_batch is not None
    assert batch // config.learner.updates_per_batch <= config.learner.micro_batch


def test_result_file_is_replaced_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "benchmarks")
    from gpu import Report

    path = tmp_path / "gpu.json"
    report = Report("a GPU", path, io.StringIO())
    report._write()
    before = path.read_text()

    def cut(written: Path, text: str) -> int:
        with written.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        report._write()
    assert path.read_text() == before


def test_ceiling_is_measured_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def learner(network: str, options: Options, *further: str) -> float:
        if further:
            raise RuntimeError
        return 8.0

    monkeypatch.setattr(ceilings, "learner", learner)
    monkeypatch.setattr(ceilings, "one_pass", lambda *_: None)
    monkeypatch.setattr(ceilings, "rate", lambda *_: 10.0)
    monkeypatch.setattr(ceilings, "FORMS", {"eager": lambda made: made})
    found = {finding.name: finding for finding in ceilings.run(GPU)}
    for network in PASSES:
        assert found[f"{network}: learner / plain torch"].value == 0.8
        compiled = found[f"{network}: learner, compiled, rows/s"]
        assert (compiled.value, compiled.note) == (None, "RuntimeError: ")


def test_cuda_graphs_are_measured_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails may leave torch unable to measure the rest."""
    monkeypatch.setattr(ceilings, "learner", lambda *_: 8.0)
    monkeypatch.setattr(ceilings, "one_pass", lambda *_: None)
    monkeypatch.setattr(ceilings, "rate", lambda *_: 10.0)
    forms = {name: lambda made: made for name in ceilings.FORMS}
    monkeypatch.setattr(ceilings, "FORMS", forms)
    names = [found.name for found in ceilings.run(GPU) if "learner /" not in found.name]
    captured = ["graph" in name for name in names]
    assert captured == sorted(captured)
    assert sum(captured) == 2 * len(PASSES)


def test_the_page_of_results_names_the_gpu_of_its_record() -> None:
    record = json.loads((CHECKOUT / "benchmarks/results/gpu.json").read_text())
    assert record["gpu"] in (CHECKOUT / "docs/results/README.md").read_text()


@pytest.mark.parametrize(
    ("code", "failed", "is_an_error"),
    [
        pytest.param("def test_it(): pass", 0, False, marks=pytest.mark.slow),
        pytest.param("def test_it(): assert False", 1, True, marks=pytest.mark.slow),
        ("import pytest\n@pytest.fixture\ndef it(): 1 / 0\ndef test_it(it): pass", 1, True),
    ],
)
def test_missing_package_skips_only_its_test_file_and_other_errors_count(
    tmp_path: Path, code: str, failed: int, is_an_error: bool
) -> None:
    (tmp_path / "test_missing.py").write_text("import a_package_that_is_not_installed")
    (tmp_path / "test_it.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-v", "-rf", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "--rootdir", ".", "."]
    found = {}

    def read() -> None:
        for finding in marked_tests.outcomes(command, tmp_path):
            found[finding.name] = finding

    if is_an_error:
        with pytest.raises(RuntimeError, match="pytest ended with 1"):
            read()
    else:
        read()
    assert next(iter(found)) == "test_it.py::test_it", "a run that is cut keeps its answers"
    assert found["test_it.py::test_it"].value is not is_an_error
    assert (found["failed"].value, found["files left out"].value) == (failed, 1)
    assert (found["failed"].data is None) is not is_an_error
    assert found["files left out"].note == "test_missing.py"


def test_all_marked_tests_are_found_by_their_files() -> None:
    files = marked_tests.marked()
    assert "tests/system/test_profile.py" in files
    assert marked_tests.FEW in files


@pytest.mark.parametrize("cores", [2, 16, 64])
def test_pong_on_many_cores_has_large_minibatches_and_little_lag(cores: int) -> None:
    config = resolve("pong", [*pong.on_cores(cores), "learner.device=cpu"])
    assert config.first_actors == max(2, cores - 1)
    lag = lag_of(config, config.first_actors * config.transport.slots)
    assert lag == 2 * updates_of_batch(config) == 16
    steps = config.actor_envs * config.actors.unroll * config.learner.batch_slots
    assert steps // config.learner.updates_per_batch == 64 * config.first_actors


def test_pong_stage_trains_with_two_actors_within_the_call_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, ...]] = []

    def train(*options: str) -> dict[str, Any]:
        calls.append(options)
        intervals = [{"time_s": float(s), "trained_steps": 20_000 * s} for s in range(23)]
        return {"intervals": intervals, "return_reached_at_s": 180.0, "trained_steps": 1,
                "episode_return_mean": 18.1}  # fmt: skip

    monkeypatch.setattr(pong, "train", train)
    found = {finding.name: finding.value for finding in pong.run(Options("cuda", 4.0, True))}
    assert found == {"trained agent steps/s": 20_000.0, "minutes to 18": 3.0}
    assert {"actors.count=2", "stop.minutes=8.0"} <= {*calls[1]}
