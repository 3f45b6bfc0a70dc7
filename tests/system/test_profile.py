"""`penstock profile` as a user runs it: every file, figures that add up, one clock."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.profile_watch import WARM_UP_S
from trace_schema import check_schema
from train_command import SMALL, Penstock, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

FILES = {"trace.json", "timeline.png", "report.html", "profile.json", "metrics.jsonl"}


def assert_adds_up(shares: Mapping[str, float]) -> None:
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
    assert min(shares.values()) >= 0.0


def assert_covers_the_clock(role: Mapping[str, Any], threads: set[str]) -> None:
    """The seconds of all parts of each thread are those of the clock: 98 % of them at least."""
    assert role["unmeasured"].keys() == threads
    for thread, share in role["unmeasured"].items():
        assert abs(share) <= 0.02, f"{role['name']}/{thread}"


def spans(trace: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[str, float, float]]]:
    """By process and thread: name, begin and length in µs."""
    processes, threads = {}, {}
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for event in trace["traceEvents"]:
        pid, tid = event["pid"], event["tid"]
        if event["name"] == "process_name":
            processes[pid] = event["args"]["name"]
        elif event["name"] == "thread_name":
            threads[pid, tid] = event["args"]["name"]
        elif event["ph"] == "X":
            lane = processes[pid], threads[pid, tid]
            found.setdefault(lane, []).append((event["name"], event["ts"], event["dur"]))
    return found


def test_a_profile_has_all_its_files_and_its_parts_add_up(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = ("run.dir=run", "learner.prefetch=1", "stop.learner_steps=2")  # it outlasts that
    code, told, err = penstock("profile", "cartpole", "--seconds", "3", "--json", *options).end()
    assert code == 0, err
    run_dir = tmp_path / "run"
    assert {path.name for path in run_dir.iterdir()} >= FILES
    assert json.loads((run_dir / "profile.json").read_text()) == told
    assert told["seconds"] == pytest.approx(3.0, abs=1.0)

    [learner], actors = told["learner"], told["actors"]
    assert [actor["name"] for actor in actors] == ["actor-0", "actor-1"]
    for ledger in (learner["ledger"], learner["parts"], learner["threads"]["feeder"],
                   *(actor["ledger"] for actor in actors)):  # fmt: skip
        assert_adds_up(ledger)
    assert_covers_the_clock(learner, {"main", "feeder"})
    for role in (*actors, *told["others"]):
        assert_covers_the_clock(role, {"main"})
    assert learner["ledger"]["other"] <= 0.02
    assert 0.0 < learner["utilization"] < 1.0
    assert learner["utilization"] == learner["ledger"]["compute"]
    assert learner["parts"]["forward"] > 0
    assert 0.0 < learner["cpu"] < 2.5
    assert learner["coreless"] is None or 0.0 <= learner["coreless"] < 1.0
    assert learner["ceiling_steps_per_s"] > 0
    assert learner["achieved_over_ceiling"] == pytest.approx(
        learner["steps_per_s"] / learner["ceiling_steps_per_s"]
    )
    assert all(actor["ledger"]["step"] > 0 < actor["steps_per_s"] for actor in actors)

    flow = told["flow"]
    assert flow["trained_steps_per_s"] > 0
    assert flow["produced_steps_per_s"] == pytest.approx(sum(a["steps_per_s"] for a in actors))
    # An observation is four floats; beside it there are action, reward and flags.
    assert 16 < flow["store_nbytes_per_s"] / flow["produced_steps_per_s"] < 100
    stages = {stage.pop("stage"): stage for stage in flow["stages"]}
    assert list(stages) == ["actors", "store", "gather", "learner", "weights"]
    assert all(rate > 0 for stage in stages.values() for rate in stage.values() if rate is not None)
    # The networks are 4-64-64-2 and 4-64-64-1, in float32.
    weights, floats = stages["weights"], 2 * (4 * 64 + 64 + 64 * 64 + 64) + 64 * 2 + 2 + 64 + 1
    assert weights["nbytes_per_s"] / weights["versions_per_s"] == pytest.approx(4 * floats)
    latency = flow["latency_s"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] < 10
    assert all(told["verdict"][key] for key in ("finding", "reason", "next_step"))

    trace = json.loads(Path(tmp_path / told["trace"]).read_text())
    check_schema(trace)
    found = spans(trace)
    processes = ("learner-0", "actor-0", "actor-1", "evaluator-0", "supervisor-0")
    roles = (("learner-0", "feeder"), *((name, "main") for name in processes))
    assert found.keys() == {*roles}
    for lane in roles:
        events = found[lane]
        _, last, length = events[-1]
        # One clock, from the begin of the window: all of them are read at its end.
        assert last + length == pytest.approx(told["seconds"] * 1e6, abs=0.5e6)
        ends = [begin + length for _, begin, length in events]
        assert all(
            end == pytest.approx(event[1], abs=0.01)
            for end, event in zip(ends, events[1:], strict=False)
        )
    assert {name for name, *_ in found["learner-0", "main"]} >= {"forward", "backward", "optimize"}
    assert {name for name, *_ in found["learner-0", "feeder"]} >= {"gather"}
    assert {name for name, *_ in found["actor-0", "main"]} >= {"step", "infer", "write"}


@pytest.mark.slow
def test_torch_profiler_writes_its_own_trace(penstock: Penstock, tmp_path: Path) -> None:
    command = ("profile", "cartpole", "--seconds", "1", "--torch", "--json", "run.dir=run")
    code, _, err = penstock(*command).end()
    assert code == 0, err
    events = json.loads((tmp_path / "run" / "torch_trace.json").read_text())["traceEvents"]
    assert any(event["name"].startswith("aten::") for event in events)


@pytest.mark.gpu
def test_gpu_learner_is_in_the_state_of_its_stream(penstock: Penstock, tmp_path: Path) -> None:
    options = ("learner.device=cuda", "model.hidden=[512,512]", "run.dir=run")
    code, told, err = penstock("profile", "cartpole", "--seconds", "5", "--json", *options).end()
    assert code == 0, err
    assert told["device"] == "cuda"
    [learner] = told["learner"]
    assert_adds_up(learner["ledger"])
    assert learner["utilization"] > 0.0  # its actors play on the host's cores
    assert all(learner["parts"][part] > 0 for part in ("forward", "backward", "optimize"))
    assert_adds_up(learner["threads"]["main"])
    assert 0.0 < learner["gpu_kernel_busy"] <= 1.0
    assert learner["gpu_kernel_busy"] < learner["utilization"] + 0.2
    assert (tmp_path / "run/kernels.json").exists()
    rows = metrics(tmp_path / "run")
    for before, at, after in zip(rows, rows[1:], rows[2:], strict=False):
        if at["learner_steps"] > before["learner_steps"]:
            assert "entropy" in at or "entropy" in after, "at the latest an interval later"
    assert "entropy" in rows[-1]


@pytest.mark.slow
def test_actor_killed_within_the_window_is_in_the_profile(
    penstock: Penstock, tmp_path: Path
) -> None:
    command = penstock("profile", "cartpole", "--seconds", "8", "--json", *SMALL, "run.dir=run")
    command.wait_until(lambda: any(m["learner_steps"] for m in metrics(tmp_path / "run")))
    time.sleep(WARM_UP_S + 2.0)
    pid = command.pid_of("actor-1")
    os.kill(pid, signal.SIGKILL)
    code, told, err = command.end()
    assert code == 0, err
    [dead] = [actor for actor in told["actors"] if actor["ended"]]
    assert dead["name"] == "actor-1"
    assert_adds_up(dead["ledger"])
    assert dead["steps_per_s"] > 0
    assert sorted(a["name"] for a in told["actors"] if not a["ended"]) == ["actor-0", "actor-1"]
    trace = json.loads(Path(tmp_path / told["trace"]).read_text())
    assert any(event["pid"] == pid and event["ph"] == "X" for event in trace["traceEvents"])


@pytest.mark.slow
def test_ctrl_c_within_the_window_reports_a_shortened_profile(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("profile", "cartpole", "--seconds", "600", "--json", *SMALL, "run.dir=run")
    # The window begins some seconds after training.
    run.wait_until(lambda: (m := metrics(tmp_path / "run")) and m[-1]["time_s"] > 6)
    run.process.send_signal(signal.SIGINT)
    code, told, err = run.end()
    assert (code, err.count("Traceback")) == (130, 0), err
    assert 0 < told["seconds"] < 300
    [learner] = told["learner"]
    assert learner["steps_per_s"] > 0
    assert learner["ceiling_steps_per_s"] is None
    assert "cut short" in err
    assert {path.name for path in (tmp_path / "run").iterdir()} >= FILES


@pytest.mark.slow
def test_ctrl_c_before_the_window_leaves_no_profile(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("profile", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: metrics(tmp_path / "run"))
    run.process.send_signal(signal.SIGINT)
    code, told, err = run.end()
    assert (code, told["exit_reason"], err.count("Traceback")) == (130, "interrupted", 0)
    assert "the run ended before the profiled window began" in err
    assert not (tmp_path / "run" / "profile.json").exists()


@pytest.mark.slow
def test_profile_reports_a_failed_run_as_train_does(penstock: Penstock, tmp_path: Path) -> None:
    options = ("env.kwargs.crash_at_step=3", "run.max_restarts=0", "run.dir=run")
    code, told, err = penstock("profile", "synthetic", "--json", *SMALL, *options).end()
    assert (code, told["exit_code"], told["exit_reason"]) == (1, 1, "fault")
    assert told["error"] in err
    assert not (tmp_path / "run" / "profile.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cartpole", "--seconds", "0"), "--seconds is 0; it must be a number above 0"),
        pytest.param(
            ("cartpole", "--seconds", "nan"),
            "--seconds is nan; it must be a number above 0",
            marks=pytest.mark.slow,
        ),
        (
            ("cartpole", "transport.kind=inproc"),
            "transport.kind=inproc plays and trains in one thread",
        ),
        pytest.param(
            ("cartpoel",),
            "'cartpoel' is not a target; the nearest preset is cartpole",
            marks=pytest.mark.slow,
        ),
        pytest.param(("cartpole", "learner.lr=-1"), "learner.lr is -1", marks=pytest.mark.slow),
    ],
)
def test_invalid_profile_options_are_refused_in_one_sentence(
    penstock: Penstock, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, told, err = penstock("profile", *arguments, "--json").end()
    assert (code, told["exit_code"], len(err.splitlines())) == (2, 2, 1)
    assert words in told["error"]
    assert list(tmp_path.iterdir()) == []
