"""Shares, rates and totals of a window, against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from made_profiles import judge
from penstock.configs.load import resolve
from penstock.core.role_spec import RoleSpec, Stage
from penstock.profiling.report.readings import Reading
from penstock.profiling.report.window import ProfileWindow, make_profile

SECOND = 10**9
LEARNER = RoleSpec("learner", 0, "", Stage.LEARNER)
ACTOR = RoleSpec("actor", 1, "", Stage.ACTORS)
CONNECTOR = RoleSpec("connector", 0, "", Stage.CARRIERS)


def reading(
    spec: RoleSpec,
    at_s: float,
    lanes: dict[str, dict[str, float]],
    cpu_s: float = 0.0,
    coreless_s: float = math.nan,
    *,
    pid: int = 9,
    played: int = 0,
    trained: int = 0,
    slots: int = 0,
) -> Reading:
    return Reading(spec, pid, int(at_s * SECOND), lanes, cpu_s, coreless_s, played, trained, slots)


def profile(
    begin: list[Reading],
    end: list[Reading],
    metrics: list[tuple[float, dict[str, Any]]],
    *overrides: str,
    ceiling: float | None = None,
    slot_nbytes: int | None = None,
    weights_nbytes: int | None = None,
    kernel_busy: float | None = None,
    ended: Sequence[Reading] = (),
) -> dict[str, Any]:
    """Of a window from 100 s to 110 s."""
    window = ProfileWindow(
        {r.spec.name: r for r in begin},
        {r.spec.name: r for r in end},
        100 * SECOND,
        110 * SECOND,
        [(int(at_s * SECOND), message) for at_s, message in metrics],
        ended,
    )
    config = resolve("cartpole", overrides)
    known = {"ceiling": ceiling, "slot_nbytes": slot_nbytes, "weights_nbytes": weights_nbytes,
             "kernel_busy": kernel_busy}  # fmt: skip
    return make_profile("x", config, window, cores=2.0, device="cpu", **known)  # type: ignore[arg-type]


def test_figures_of_a_learner_and_an_actor_match_those_by_hand() -> None:
    begin = [
        reading(LEARNER, 100, {"main": {"wait": 5, "other": 1}, "feeder": {"wait": 6}}, 3,
                trained=1000),
        reading(ACTOR, 100, {"main": {"step": 4, "wait": 2}}, 5, played=500, slots=10),
    ]  # fmt: skip
    end = [
        reading(LEARNER, 110,
                {"main": {"wait": 7, "forward": 3, "backward": 4, "other": 2},
                 "feeder": {"wait": 12, "gather": 4}}, 12, trained=3000),
        reading(ACTOR, 110, {"main": {"step": 13, "wait": 3}}, 14, played=3500, slots=60),
    ]  # fmt: skip
    metrics: list[tuple[float, dict[str, Any]]] = [
        (99.0, {"learner_steps": 5, "dropped": {"lag": 3}, "lost": {}, "queue_fill": 0.9}),
        (104.0, {"learner_steps": 50, "queue_fill": 0.25, "policy_lag_histogram": {"1": 30},
                 "latency_histogram": {"4": 50.0}}),
        (109.0, {"learner_steps": 105, "dropped": {"lag": 3, "stale": 64}, "lost": {"learner": 8},
                 "queue_fill": 0.75, "policy_lag_histogram": {"1": 10, "4": 10},
                 "latency_histogram": {"4": 50.0}}),
        (111.0, {"learner_steps": 999, "queue_fill": 1.0}),
    ]  # fmt: skip
    found = profile(begin, end, metrics, ceiling=400.0, slot_nbytes=1000, weights_nbytes=4000)
    [learner], [actor] = found["learner"], found["actors"]
    ledger = {part: share for part, share in learner["ledger"].items() if share}
    assert ledger == pytest.approx({"wait_data": 0.2, "compute": 0.7, "other": 0.1})
    assert learner["parts"] == pytest.approx(
        {"wait": 0.2, "forward": 0.3, "backward": 0.4, "other": 0.1}
    )
    assert learner["threads"] == {"feeder": pytest.approx({"wait": 0.6, "gather": 0.4})}
    assert learner["utilization"] == pytest.approx(0.7)
    assert learner["cpu"] == pytest.approx(0.9)
    assert learner["steps_per_s"] == pytest.approx(200)
    assert learner["achieved_over_ceiling"] == pytest.approx(0.5)
    assert learner["updates_per_s"] == pytest.approx(10)  # 100 between 99 s and 109 s
    assert learner["queue_fill"] == pytest.approx(0.5)
    assert actor["ledger"] == pytest.approx({"step": 0.9, "wait": 0.1})
    assert (actor["learner"], actor["cpu"], actor["steps_per_s"]) == (0, 0.9, 300)
    flow = found["flow"]
    assert flow["produced_steps_per_s"] == pytest.approx(300)
    assert flow["trained_steps_per_s"] == pytest.approx(200)
    assert flow["store_nbytes_per_s"] == pytest.approx(5000)
    # 5 slots of 1000 bytes and 300 steps; 200 of these are trained. The preset publishes each of
    # 10 updates.
    assert flow["stages"] == [
        {"stage": "actors", "steps_per_s": 300.0, "nbytes_per_s": 5000.0},
        {"stage": "store", "steps_per_s": 300.0, "nbytes_per_s": 5000.0},
        {"stage": "gather", "steps_per_s": 200.0, "nbytes_per_s": pytest.approx(10000 / 3)},
        {"stage": "learner", "steps_per_s": 200.0, "nbytes_per_s": pytest.approx(10000 / 3)},
        {"stage": "weights", "steps_per_s": None, "nbytes_per_s": 40000.0, "versions_per_s": 10.0},
    ]
    assert flow["dropped"] == {"stale": 64}
    assert flow["lost"] == {"learner": 8}
    assert flow["policy_lag"] == {"mean": pytest.approx(1.6), "max": 4}
    assert flow["queue_fill"] == pytest.approx(0.5)
    # All in the bin that ends at 1e-4 x 2 s and begins a factor of 2 ** 0.25 below.
    assert flow["latency_s"]["p50"] == pytest.approx(1e-4 * (2 + 2**0.75) / 2)
    assert flow["latency_s"]["p99"] < 2e-4
    assert (found["seconds"], found["cores"], found["device"]) == (10.0, 2.0, "cpu")


@pytest.mark.parametrize(("samples_per_insert", "share"), [("8", 0.5), ("null", None)])
def test_replay_without_a_rate_limit_has_no_ceiling(
    samples_per_insert: str, share: float | None
) -> None:
    """Steps that arrive are not those that are drawn, of which the ceiling is."""
    lanes = {"main": {"forward": 10.0}}
    found = profile(
        [reading(LEARNER, 100, {"main": {}})],
        [reading(LEARNER, 110, lanes, trained=2000)],
        [],
        *("algo.name=dqn", f"replay.samples_per_insert={samples_per_insert}"),
        ceiling=400.0,
    )
    [learner] = found["learner"]
    assert learner["achieved_over_ceiling"] == share
    assert (learner["ceiling_steps_per_s"] is None) == (share is None)


def test_unmeasured_time_is_reported_per_thread() -> None:
    """Of 10 s the main thread's parts have 9 and the feeder's 10.5, and both had begun before; the
    thread that reduces has begun in the window, so that its clock is not known."""
    begin = [reading(LEARNER, 100, {"main": {"wait": 5, "step": 2}, "feeder": {"wait": 1}})]
    end = [reading(LEARNER, 110, {"main": {"wait": 6, "step": 2, "forward": 8},
                                  "feeder": {"wait": 11.5}, "reduce": {"wait": 3}})]  # fmt: skip
    [learner] = profile(begin, end, [])["learner"]
    assert learner["unmeasured"] == pytest.approx({"main": 0.1, "feeder": -0.05})


def test_a_process_that_was_started_in_the_window_counts_from_its_start() -> None:
    begin = [reading(ACTOR, 100, {"main": {"step": 50}}, 50, pid=1, played=9000)]
    end = [reading(ACTOR, 110, {"main": {"step": 1, "wait": 3}}, 2, 3, pid=2, played=40)]
    [actor] = profile(begin, end, [])["actors"]
    assert actor["ledger"] == {"step": 0.25, "wait": 0.75}
    assert (actor["cpu"], actor["coreless"], actor["steps_per_s"]) == (0.2, 0.3, 4.0)


def test_late_gpu_spans_are_attributed_correctly() -> None:
    """At the begin its wait seemed to have lasted 2 s; it had ended, as was known later."""
    begin = [reading(LEARNER, 100, {"main": {}, "gpu": {"wait": 2.0, "forward": 1.0}})]
    end = [reading(LEARNER, 110, {"main": {}, "gpu": {"wait": 1.5, "forward": 8.0, "other": 1.0}})]
    [learner] = profile(begin, end, [])["learner"]
    assert learner["parts"] == {"wait": 0.0, "forward": 0.875, "other": 0.125}
    assert learner["utilization"] == 0.875


def test_gpu_learner_has_the_ledger_of_its_stream() -> None:
    """The host waits most of the time; the GPU computes."""
    host = {"wait": 8.0, "device": 1.5, "gather": 0.5}
    stream = {"forward": 3.0, "backward": 5.5, "h2d": 1.0, "wait": 0.5}
    end = [reading(LEARNER, 110, {"main": host, "gpu": stream, "feeder": {"gather": 10.0}})]
    [learner] = profile([], end, [], kernel_busy=0.6)["learner"]
    ledger = {part: share for part, share in learner["ledger"].items() if share}
    assert ledger == pytest.approx({"compute": 0.85, "h2d_exposed": 0.1, "wait_data": 0.05})
    assert learner["threads"] == {
        "main": {"wait": 0.8, "device": 0.15, "gather": 0.05}, "feeder": {"gather": 1.0}
    }  # fmt: skip
    assert (learner["utilization"], learner["gpu_kernel_busy"]) == (pytest.approx(0.85), 0.6)


def test_a_process_that_ended_in_the_window_counts_until_its_end() -> None:
    """It died after 4 s, with 200 steps, and the one in its place has played 300 since."""
    begin = [reading(ACTOR, 100, {"main": {"step": 7.0}}, 5, pid=1, played=800)]
    ended = [reading(ACTOR, 104, {"main": {"step": 10.0, "wait": 1.0}}, 7, pid=1, played=1000)]
    end = [reading(ACTOR, 110, {"main": {"step": 5.0}}, 5, pid=2, played=300)]
    found = profile(begin, end, [], ended=ended)
    second, first = found["actors"]
    assert (second["ended"], first["ended"]) == (False, True)
    assert first["ledger"] == {"step": 0.75, "wait": 0.25}
    assert (first["steps_per_s"], second["steps_per_s"]) == (20.0, 30.0)
    assert first["cpu"] == pytest.approx(0.2)
    assert found["flow"]["produced_steps_per_s"] == pytest.approx(50.0)


def test_figures_of_two_learners_are_kept_separate() -> None:
    second = RoleSpec("learner", 1, "", Stage.LEARNER, learner=1)
    lanes = {"main": {"reduce": 1.0}}
    metrics = [
        (105.0, {"queue_fill": 0.5, "ranks": [
            {"rank": 0, "queue_fill": 0.2}, {"rank": 1, "queue_fill": 0.8}]}),
    ]  # fmt: skip
    end = [reading(spec, 110, lanes, trained=n) for spec, n in ((LEARNER, 50), (second, 70))]
    found = profile([], end, metrics)
    assert [r["queue_fill"] for r in found["learner"]] == [0.2, 0.8]
    assert [r["ledger"]["reduce_exposed"] for r in found["learner"]] == [1.0, 1.0]
    assert found["flow"]["trained_steps_per_s"] == pytest.approx(12.0)


def test_connector_reports_bytes_before_and_after_the_codec() -> None:
    counts = [{"slots": 10, "steps": 1, "raw_nbytes": 4000, "coded_nbytes": 1000},
              {"slots": 30, "steps": 9, "raw_nbytes": 12000, "coded_nbytes": 3000}]  # fmt: skip
    metrics = [(95.0 + 10 * i, {"received": received}) for i, received in enumerate(counts)]
    end = [reading(CONNECTOR, 110, {"main": {"decompress": 2.0, "wait": 8.0}})]
    found = profile([], end, metrics)
    [connector] = found["connectors"]
    assert connector["slots_per_s"] == pytest.approx(2.0)
    assert connector["raw_nbytes_per_s"] == pytest.approx(800)
    assert connector["coded_nbytes_per_s"] == pytest.approx(200)
    stages = {stage.pop("stage"): stage for stage in found["flow"]["stages"]}
    assert list(stages) == ["actors", "wire", "store", "gather", "learner", "weights"]
    assert stages["wire"] == {"steps_per_s": pytest.approx(0.8), "nbytes_per_s": pytest.approx(200)}
    assert stages["store"]["nbytes_per_s"] == pytest.approx(800)
    assert connector["ledger"] == {"decompress": 0.2, "wait": 0.8}


def test_other_roles_are_listed_separately() -> None:
    relay = RoleSpec("relay", 0, "", Stage.CARRIERS)
    found = profile([], [reading(relay, 110, {"main": {"wait": 8.0, "send": 2.0}}, 5.0)], [])
    [other] = found["others"]
    assert math.isnan(other.pop("coreless"))  # null in JSON
    ledger = {"wait": 0.8, "send": 0.2}
    assert other == {
        "name": "relay-0", "ended": False, "ledger": ledger, "unmeasured": {}, "cpu": 0.5
    }  # fmt: skip
    assert found["learner"] == found["actors"] == found["connectors"] == []


def test_a_counter_that_went_back_to_a_checkpoint_has_no_rate() -> None:
    begin, end = ([reading(LEARNER, at_s, {"main": {"wait": at_s}})] for at_s in (100.0, 110.0))
    found = profile(begin, end, [(99.0, {"learner_steps": 50}), (109.0, {"learner_steps": 20})])
    assert found["learner"][0]["updates_per_s"] is None


def test_run_without_training_gets_a_verdict() -> None:
    """One actor in a step that does not end, while the learner waits for its first batch."""
    begin = [reading(LEARNER, 100, {"main": {"wait": 60.0}, "feeder": {"wait": 60.0}}),
             reading(ACTOR, 100, {"main": {"step": 60.0}})]  # fmt: skip
    end = [reading(LEARNER, 110, {"main": {"wait": 70.0}, "feeder": {"wait": 70.0}}, 0.1),
           reading(ACTOR, 110, {"main": {"step": 70.0}})]  # fmt: skip
    nothing = {"learner_steps": 0, "env_steps": 0, "dropped": {}, "lost": {}, "queue_fill": 0.0}
    found = profile(begin, end, [(99.0, nothing), (109.0, nothing)], ceiling=1e5)
    [learner] = found["learner"]
    assert (learner["steps_per_s"], learner["achieved_over_ceiling"]) == (0.0, 0.0)
    assert {part: share for part, share in learner["ledger"].items() if share} == {"wait_data": 1.0}
    verdict = judge(found)
    assert verdict.kind == "slow_environment"
    assert "no unroll was finished in the window" in verdict.next_step


def test_filling_replay_is_judged_by_its_size() -> None:
    begin = [reading(LEARNER, 100, {"main": {"wait": 60.0}}, trained=600),
             reading(ACTOR, 100, {"main": {"step": 60.0}}, played=600)]  # fmt: skip
    end = [reading(LEARNER, 110, {"main": {"wait": 70.0}}, trained=700),
           reading(ACTOR, 110, {"main": {"step": 70.0}}, played=700)]  # fmt: skip
    sizes = [(at_s, {"learner_steps": 0, "replay_size": size})
             for at_s, size in ((99.0, 590), (109.0, 690))]  # fmt: skip
    options = (
        "algo={name: dqn}",
        "learner.prefetch=1",
        "replay.min_size=5000",
        "replay.batch_size=32",
    )
    verdict = judge(profile(begin, end, sizes, *options))
    assert verdict.kind == "filling"
    assert "begins 4,310 steps from now" in verdict.finding
    assert "10 a second, which takes 431 s more" in verdict.reason


def test_unreported_figures_are_null_and_not_zero() -> None:
    end = [reading(LEARNER, 110, {"main": {"wait": 1.0}})]
    found = profile([], end, [], "transport.slots=3", "learner.prefetch=2")
    [learner] = found["learner"]
    for name in (
        "gpu_kernel_busy",
        "updates_per_s",
        "ceiling_steps_per_s",
        "achieved_over_ceiling",
        "queue_fill",
    ):
        assert learner[name] is None
    flow = found["flow"]
    assert flow["produced_steps_per_s"] is None
    assert flow["store_nbytes_per_s"] is None
    assert flow["latency_s"] == {"p50": None, "p95": None, "p99": None}
    assert flow["policy_lag"] == {"mean": None, "max": None}
    assert found["config"]["transport"]["slots"] == 3
    assert found["config"]["learner"]["prefetch"] == 2


def test_batches_ahead_are_resolved_when_the_option_is_null() -> None:
    begin, end = [reading(LEARNER, 100, {"main": {}})], [reading(LEARNER, 110, {"main": {}})]
    assert profile(begin, end, [], "learner.prefetch=null")["config"]["learner"]["prefetch"] == 1
