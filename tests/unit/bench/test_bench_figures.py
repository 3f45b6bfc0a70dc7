"""Options of `penstock bench`, and its figures against those worked out by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.bench import checkout, parts, rates, stages, whole
from penstock.bench.checkout import benchmark
from penstock.bench.compare import SHARING, RateChange, compare, elsewhere, ideal, spread
from penstock.bench.rates import ROUNDS, Round, Work, one_round, rounds_of
from penstock.bench.stages import NAMES, UNITS, WHOLE, StagePlan, make_plan, measure, predict
from penstock.bench.whole import rate_between, split
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core import cgroup
from penstock.core.machine import CHECKOUT, PACKAGES, commit_of, machine


def result(**rates: list[float]) -> dict[str, Any]:
    return {"stages": {name: {"rates": found} for name, found in rates.items()}}


# ------------------------------------------------------------------------------------- the ideal


def test_the_ideal_is_cores_over_the_core_seconds_of_a_step() -> None:
    # Pong's figures of one machine: 0.39 + 0.11 + 0.34 core-ms, and nothing to write.
    core_s = {"environment": 0.39e-3, "inference": 0.11e-3, "write": 0.0, "learner": 0.34e-3}
    assert ideal(core_s, 2, 1e9, on_gpu=False) == pytest.approx(2380.95, abs=0.01)
    # A GPU is driven by 0.06 core-ms of each step: 2 / 0.56 ms; unless it is slower than that.
    driven = {**core_s, "learner": 0.06e-3}
    assert ideal(driven, 2, 1e9, on_gpu=True) == pytest.approx(3571.43, abs=0.01)
    assert ideal(driven, 2, 900.0, on_gpu=True) == 900.0


def test_ideal_is_none_when_a_part_was_not_measured() -> None:
    core_s = {"environment": 1e-3, "inference": 1e-3, "write": 1e-3}
    assert ideal(core_s, 2, 0.0, on_gpu=False) is None
    assert predict({"encode": {"rate": 3.0, "core_ms": 1.0}}, 2) is None


def test_ideal_is_computed_from_the_stages_of_a_result() -> None:
    stages = {
        name: {"rate": 7.0, "core_ms": 0.25}
        for name in ("environment", "inference", "write", "encode")
    }
    stages["learner"] = {"rate": 7.0, "core_ms": 0.25, "on_gpu": False}
    assert predict(stages, 4) == pytest.approx(4000)
    stages["learner"]["on_gpu"] = True
    assert predict(stages, 4) == 7.0


def test_whole_run_has_as_many_environments_as_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, ...]] = []

    def train(target: str, *overrides: str) -> dict[str, Any]:
        runs.append(overrides)
        return {"intervals": [{"time_s": s, "trained_steps": 100 * s} for s in range(9)]}

    monkeypatch.setattr(whole, "train", train)
    (tmp_path / "auto.yaml").write_text("env: {id: CartPole-v1}\nactors: {envs: auto}\n")
    target = str(tmp_path / "auto.yaml")
    found = measure(StagePlan(target, 0.2, (WHOLE,), None, None), lambda text: None)
    assert found["achieved_steps_per_s"] == 100
    [overrides] = runs
    assert f"actors.envs={resolve(target, []).actor_envs}" in overrides


def test_ideal_uses_the_cpu_quota_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"rates": [7.0], "core_ms": 0.25, "on_gpu": False}
    measured = [(name, stage) for name in SHARING]
    monkeypatch.setattr(stages, "_measured", lambda config, plan: measured)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroup, "cores", lambda: 1.5)
    said: list[str] = []
    found = measure(StagePlan("cartpole", 0.2, SHARING, None, None), said.append)
    assert (found["cores"], found["ideal_steps_per_s"]) == (1.5, 1500.0)
    assert "1.5 cores, none ever idle" in said[-1]


# ------------------------------------------------------------------------------------ comparison


def test_spread_is_from_the_slowest_to_the_fastest_round() -> None:
    assert spread([90.0, 100.0, 120.0]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("old", "new", "noise", "verdict"),
    [
        ([100.0, 100.0, 100.0], [91.0, 91.0, 91.0], 0.1, "same"),  # 9 % of 100
        ([100.0, 100.0, 100.0], [89.0, 89.0, 89.0], 0.1, "slower"),  # 11 %
        ([89.0, 89.0, 89.0], [100.0, 100.0, 100.0], 0.1, "faster"),
        # The spreads are 20 of 100 and 16 of 80, so 40 % is noise, and a fall of 20 % none.
        ([90.0, 100.0, 110.0], [72.0, 80.0, 88.0], 0.4, "same"),
        ([90.0, 100.0, 110.0], [50.0, 55.0, 55.5], 0.3, "slower"),
        # Spreads of 140 % hide every fall, but all rounds are apart by more than a half.
        ([60.0, 100.0, 200.0], [9.0, 10.0, 11.0], 0.5, "slower"),
        ([60.0, 100.0, 200.0], [9.0, 10.0, 61.0], 6.6, "same"),
        # One slow round of a quiet stage is no change.
        ([100.0, 100.0, 100.0], [100.0, 100.0, 60.0], 0.4, "same"),
    ],
)
def test_change_counts_only_beyond_the_spread_of_the_rounds(
    old: list[float], new: list[float], noise: float, verdict: str
) -> None:
    [change] = compare(result(encode=old), result(encode=new))
    assert isinstance(change, RateChange)
    assert change[:3] == ("encode", old[1], sorted(new)[1])
    assert change.noise == pytest.approx(noise, 0.01)
    assert change.verdict == verdict


def test_stages_in_both_results_and_the_whole_are_compared() -> None:
    old = result(encode=[1.0], wire=[1.0]) | {"achieved_rates": [1000.0, 1010.0]}
    new = result(wire=[1.0], gather=[1.0]) | {"achieved_rates": [500.0, 510.0]}
    changes = {change.stage: change.verdict for change in compare(old, new)}
    assert changes == {"wire": "same", "whole": "slower"}
    assert [c.stage for c in compare(result(wire=[1.0]) | {"achieved_rates": []}, new)] == ["wire"]


def on(**changes: Any) -> dict[str, Any]:
    """A result of some machine."""
    known = {"cpu": "Epyc", "cores": 2, "packages": {"torch": "2.13"}, "commit": "a1"}
    return {"machine": known | changes}


def test_results_of_two_machines_are_compared_with_a_warning() -> None:
    assert elsewhere(on(), on(commit="b2", packages={"torch": "2.13", "numpy": "3"})) is None
    said = elsewhere(on(), on(cores=4, packages={"torch": "2.14"})) or ""
    assert "cores 2 then and 4 now, torch 2.13 then and 2.14 now; for the code's" in said
    assert "cpu" not in said
    said = elsewhere({}, on()) or ""  # one from before machines were told
    assert "cpu unknown then and Epyc now, cores unknown then and 2 now" in said


def test_machine_description_matches_the_system(tmp_path: Path) -> None:
    found = machine()
    assert f": {found['cpu']}\n" in Path("/proc/cpuinfo").read_text()
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["penstock"] == penstock.__version__
    assert found["packages"].keys() <= {*PACKAGES}
    assert commit_of(tmp_path) == "unknown"


def test_commit_is_that_of_the_checkout_and_not_of_an_outer_repository(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    head = (tmp_path / ".git" / "HEAD").read_text().split()[-1]
    sha = (tmp_path / ".git" / head).read_text().strip()
    assert sha.startswith(commit_of(tmp_path))
    (tmp_path / "site-packages").mkdir()
    assert commit_of(tmp_path / "site-packages") == "unknown"


# ----------------------------------------------------------------------------------------- rates


def test_round_makes_at_least_one_call() -> None:
    calls: list[int] = []
    waited: list[int] = []
    found = one_round(Work(lambda: calls.append(1), 10, lambda: waited.append(1)), 0.0)
    assert (len(calls), len(waited)) == (1, 1)
    assert found.rate > 0


def test_works_alternate_after_one_warm_up_call_each() -> None:
    calls: list[str] = []
    works = {name: Work(lambda name=name: calls.append(name), 1) for name in "ab"}  # type: ignore[misc]
    found = rounds_of(works, 0.0)
    assert "".join(calls) == "ab" + "ab" * ROUNDS
    assert {name: len(rounds) for name, rounds in found.items()} == {"a": ROUNDS, "b": ROUNDS}


def test_each_stage_takes_the_requested_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    spent_s: list[float] = []

    def one_round(work: Work, seconds: float) -> Round:
        spent_s.append(seconds)
        return Round(1.0, 1.0)

    monkeypatch.setattr(rates, "one_round", one_round)
    config = resolve("cartpole", ["actors.envs=2"]).model_dump(mode="json")
    found = parts.rounds(config, ["memory", "publish", "write"], 2.0)
    assert sum(spent_s) == pytest.approx(2.0 * len(found))


def test_run_is_split_into_parts_after_its_warm_up() -> None:
    # 10 steps a second at first, then 100, then 200.
    points = [(0.0, 0), (1.0, 10), (2.0, 110), (3.0, 210), (4.0, 410), (5.0, 610)]
    assert rate_between(points[0], points[1]) == 10
    assert split(points, 1.0, 2) == [100, 200]
    assert split(points, 1.0, 9) == [100, 100, 200, 200]
    assert split(points, 4.5, 2) == []
    assert split([], 0.0, 2) == []


# --------------------------------------------------------------------------------------- options


def plan(**changes: Any) -> StagePlan:
    options: dict[str, Any] = {
        "target": "cartpole", "seconds": 2.0, "only": None, "old": None, "peers": None,
    }  # fmt: skip
    return make_plan(**(options | changes))


def test_by_default_all_stages_and_the_whole_are_measured() -> None:
    assert plan().stages == (*UNITS, WHOLE) == NAMES
    assert plan(only="wire,learner,wire").stages == ("wire", "learner")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seconds": 0.0}, "--seconds 0: it must be above 0 and at most 600"),
        ({"seconds": math.nan}, "--seconds nan: it must be above 0"),
        ({"only": "wire,lerner"}, "--only wire,lerner: 'lerner' is not one of memory, environment"),
        (
            {"old": "nowhere.json"},
            "--compare nowhere.json: it must be what `penstock bench --json`",
        ),
        ({"peers": "/"}, "--peers: no peer is installed in /; run `make peers`"),
        (
            {"peers": "/", "target": "pendulum_sac"},
            "--peers measures cartpole, pong, pong_impala, not pend",
        ),
    ],
)
def test_invalid_bench_options_are_refused_in_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        plan(**changes)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"target": "pong", "stages": {}}',
        "{",
        '{"target": "cartpole", "stages": {}, "machine": {"packages": "torch"}}',
    ],
)
def test_compared_result_must_be_of_the_same_target(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UserError, match="--compare"):
        plan(old=str(tmp_path / "old.json"))


@pytest.mark.parametrize("target", ["pong", "cartpole"])
def test_committed_results_can_be_compared_with(target: str) -> None:
    path = CHECKOUT / f"benchmarks/results/bench_{target}.json"
    found = plan(target=target, old=str(path)).old
    assert found is not None
    assert [c.verdict for c in compare(found, found) if c.stage == "whole"] == ["same"]


def test_result_is_found_below_other_output(tmp_path: Path) -> None:
    old = {"target": "cartpole", "stages": {}}
    (tmp_path / "old.json").write_text("hello\n" + json.dumps(old) + "\n")
    assert plan(old=str(tmp_path / "old.json")).old == old


def test_stage_without_calls_is_not_compared() -> None:
    assert compare(result(wire=[0.0, 0.0]), result(wire=[1.0, 1.0])) == []


def test_options_that_need_a_checkout_are_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(UserError, match="penstock bench reduce needs a checkout of Penstock"):
        benchmark("reduce", "penstock bench reduce")
    with pytest.raises(UserError, match="--peers needs a checkout"):
        plan(peers=".")
