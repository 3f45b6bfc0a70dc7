"""A run as the page reads it: growth, aligned events, data flow and verdict."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.core import cgroup
from penstock.monitor import runs
from penstock.monitor.run_folder import lines, reader
from penstock.monitor.run_folder.columns import MetricColumns
from penstock.watch import views
from penstock.watch.catalog import RunCatalog
from penstock.watch.live import LiveStatus
from penstock.watch.pipeline import pipeline_figures
from penstock.watch.verdicts import (
    MetricWindow,
    judge,
    load_options,
    make_profile,
    process_names,
)
from penstock.watch.views import Views
from penstock.watch.watched_run import WatchedRun
from run_folders import STEPS, make_run


def add_event(run: Path, kind: str, uptime_s: float, **data: Any) -> None:
    event = {"kind": kind, "uptime_s": uptime_s, "time": 1e9 + uptime_s, "text": kind, "data": data}
    with (run / "logs/events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_growing_run_is_read_incrementally(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    run = WatchedRun(folder)
    assert run.read(10) == 1.0
    assert list(run.curve("env_steps", "episode_return_mean")[1]) == [1, 2]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 200, "time_s": 2, "episode_return_mean": 5.0}\n')
    run.read(10)
    assert list(run.curve("time_s", "episode_return_mean")[1]) == [1, 2, 5]
    assert run.last["env_steps"] == 200
    run.unload()
    assert run.columns.rows == 0
    run.read(10)
    assert run.columns.rows == 3


def test_stopping_run_is_marked_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    views = Views(RunCatalog(folder))
    add_event(folder, "stop", 3.0, reason="minutes")
    assert views.now(".")["stops"] is None, "it has ended"
    monkeypatch.setattr(WatchedRun, "state", "running")
    assert views.now(".")["stops"] == "minutes"
    add_event(folder, "start", 4.0)
    assert views.now(".")["stops"] is None


def test_messages_are_ordered_from_worst_to_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    data = {"delay_s": 0.1, "cause": "was killed by SIGKILL"}
    lost: dict[str, Any] = {"kind": "restart", "role": "actor-1", "time": 1e9, "data": data}
    lost["text"] = "actor-1: was killed by SIGKILL, possibly for lack of memory; it is restarted"
    with (folder / "logs/events.jsonl").open("a") as file:
        file.write(json.dumps(lost) + "\n")
    views = Views(RunCatalog(folder))
    found = views.now(".")
    first, last = found["troubles"]
    assert found["state"] == "died"
    assert (first["kind"], first["time"]) == ("bad", found["seen"])
    assert "no checkpoint" in first["text"]
    assert first["command"] == f"penstock train {folder} --resume auto"
    assert last == {
        "kind": "past", "time": 1e9, "command": None,
        "text": "actor-1 was killed by SIGKILL, restarted 0.1 s later.",
    }  # fmt: skip

    stopped = {"name": "learner-0", "pid": 7, "state": "stopped", "silent_s": 42.0}
    ended = {"name": "actor-1", "pid": None}
    status = {"live": True, "why": None, "processes": [stopped, ended]}
    monkeypatch.setattr(WatchedRun, "state", "running")
    monkeypatch.setattr(LiveStatus, "now", lambda self: status)
    found = views.now(".")
    assert found["stall"]["why"] == "learner-0 is stopped by a signal"
    assert found["stall"]["since"] == found["written"]
    texts = [each["text"].partition(".")[0] for each in found["troubles"]]
    assert texts == [
        "The run does not train: learner-0 is stopped by a signal",
        "actor-1: died, is restarted",
    ]
    add_event(folder, "stop", 9.0, reason="minutes")
    assert views.now(".")["stall"] is None, "it ends"


def test_run_ended_by_its_limit_has_no_message(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [1.0, 2.0])
    assert Views(RunCatalog(tmp_path)).now("run")["troubles"] == []


def test_run_without_new_lines_is_stalled_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], "run.interval_s=20", ends=False)
    monkeypatch.setattr(WatchedRun, "state", "running")
    for age_s, stalled in ((100.0, False), (250.0, True)):
        written_s = time.time() - age_s
        os.utime(folder / "metrics.jsonl", (written_s, written_s))
        [row] = RunCatalog(tmp_path).rows()
        assert row["stalled"] == stalled
    monkeypatch.setattr(WatchedRun, "state", "ended")
    assert not RunCatalog(tmp_path).rows()[0]["stalled"]


def test_list_checks_for_a_stopped_learner_when_lines_are_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], ends=False)
    status = {"live": True, "processes": [{"name": "learner-0", "pid": 7, "state": "stopped"}]}
    monkeypatch.setattr(WatchedRun, "state", "running")
    monkeypatch.setattr(LiveStatus, "now", lambda self: status)
    for age_s, stalled in ((1.0, False), (20.0, True)):
        written_s = time.time() - age_s
        os.utime(folder / "metrics.jsonl", (written_s, written_s))
        assert Views(RunCatalog(tmp_path)).runs()["runs"][0]["stalled"] == stalled


def test_best_evaluation_is_of_the_displayed_way_to_play(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    lines: list[tuple[str, float, float, dict[str, float]]] = [
        ("greedy", 9.0, 2.0, {}),
        ("sampled", 3.0, 4.0, {}),
        ("sampled", 1.0, 3.5, {}),
    ]
    lines.append(("sampled", 1.0, 5.0, {"lower": 2.0}))  # of few episodes
    with (folder / "evaluations.jsonl").open("w") as file:
        for play, greedy, sampled, lower in lines:
            ways = {"greedy": {"mean": greedy}, "sampled": {"mean": sampled, **lower}}
            file.write(json.dumps({"play": play, **ways}) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "eval_play": "sampled"}))
    assert Views(RunCatalog(folder)).now(".")["figures"]["eval_best_of_kind"] == 4.0


def test_a_run_that_ended_at_its_target_is_not_called_flat(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [200.0] * 40, "stop.return=200")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "exit_reason": "return"}))
    learning = Views(RunCatalog(folder)).now(".")["learning"]
    assert learning["text"] == "the target, stop.return = 200, was reached"


def test_the_newest_of_many_videos_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    (folder / "videos").mkdir()
    for i in range(20):
        for name in (f"{i}.mp4", f"{i}.mp4.json"):
            (folder / "videos" / name).touch()
        os.utime(folder / "videos" / f"{i}.mp4", (1e9 + i, 1e9 + i))
    monkeypatch.setattr(views, "MOST_FILES", 3)
    found = Views(RunCatalog(folder)).agent(".")["videos"]
    assert [video["file"] for video in found] == ["19.mp4", "18.mp4", "17.mp4"]


def test_sample_of_a_long_file_is_shown_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SAMPLE_NBYTES", 20_000)
    monkeypatch.setattr(lines, "CHUNK_NBYTES", 100_000)
    folder = make_run(tmp_path / "run", [float(i) for i in range(2000)], ends=False)
    run = WatchedRun(folder)
    assert run.read(10) == 0.0
    xs, ys = run.curve("env_steps", "episode_return_mean")
    assert 10 < len(xs) < 200
    assert (xs[0], xs[-1]) == (0, 1999 * STEPS)
    assert list(xs / STEPS) == list(ys)  # the lines are whole
    assert run.last["env_steps"] == 1999 * STEPS
    assert run.read(0.0) < 1.0  # one chunk, and the sample is still shown
    assert len(run.curve("env_steps", "episode_return_mean")[0]) == len(xs)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 200000, "time_s": 2000, "episode_return_mean": 5.0}\n')
    while run.read(10) < 1.0:
        pass
    assert list(run.curve("env_steps", "episode_return_mean")[1][-2:]) == [1999, 5]
    assert len(run.curve("env_steps", "episode_return_mean")[0]) == 2001
    assert run.last["env_steps"] == 200_000


def test_long_file_replaced_during_reading_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SAMPLE_NBYTES", 20_000)
    monkeypatch.setattr(lines, "CHUNK_NBYTES", 100_000)
    folder = make_run(tmp_path / "run", [float(i) for i in range(2000)], ends=False)
    run = WatchedRun(folder)
    run.read(10)
    run.read(0.0)
    (folder / "new").write_text('{"env_steps": 7, "time_s": 1, "episode_return_mean": 5.0}\n')
    (folder / "new").replace(folder / "metrics.jsonl")
    assert run.read(10) == 1.0
    assert list(run.curve("env_steps", "episode_return_mean")[0]) == [7]
    assert run.last["env_steps"] == 7


def test_events_are_placed_by_the_steps_of_checkpoints(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [float(i) for i in range(20)], ends=False)
    add_event(folder, "ready", 4.0)
    add_event(folder, "checkpoint", 14.0, trained_steps=10 * STEPS)  # at 10 s of training
    add_event(folder, "restart", 17.0)
    run = WatchedRun(folder)
    run.read(10)
    marks = {mark["kind"]: mark["x"] for mark in run.marks("time_s")}
    assert marks == {"checkpoint": pytest.approx(10.0), "restart": pytest.approx(13.0)}
    marks = {mark["kind"]: mark["x"] for mark in run.marks("env_steps")}
    assert marks["restart"] == pytest.approx(13 * STEPS)


def test_events_after_a_resume_are_aligned_separately(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [float(i) for i in range(20)], ends=False)
    add_event(folder, "checkpoint", 12.0, trained_steps=10 * STEPS)
    add_event(folder, "start", 0.0)
    add_event(folder, "checkpoint", 8.0, trained_steps=15 * STEPS)
    add_event(folder, "kill", 10.0)
    run = WatchedRun(folder)
    run.read(10)
    found = [(mark["kind"], mark["x"]) for mark in run.marks("time_s")]
    assert found == [
        ("checkpoint", pytest.approx(10.0)),
        ("checkpoint", pytest.approx(15.0)),
        ("kill", pytest.approx(17.0)),
    ]


def test_events_without_a_checkpoint_are_aligned_by_the_last_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [float(i) for i in range(10)], ends=False)
    written_s = (folder / "metrics.jsonl").stat().st_mtime
    event = {"kind": "restart", "uptime_s": 50.0, "time": written_s - 3.0, "text": "", "data": {}}
    (folder / "logs/events.jsonl").write_text(json.dumps(event) + "\n")
    run = WatchedRun(folder)
    run.read(10)
    assert run.marks("time_s")[0]["x"] == pytest.approx(9.0 - 3.0, abs=0.01)


def test_rotated_events_are_read_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0], ends=False)
    log = folder / "logs/events.jsonl"
    run = WatchedRun(folder)
    run.read(10)
    before = len(run.events)
    log.rename(folder / "logs/events.jsonl.1")
    add_event(folder, "note", 1.0)
    run.read(10)
    kinds = [event["kind"] for event in run.events]
    assert kinds.count("note") == 1
    assert len(kinds) == before + 1


def columns_of(ledger: dict[str, float], actor: dict[str, float], **more: float) -> MetricColumns:
    columns = MetricColumns()
    lines = [
        {
            "time_s": float(i),
            "interval_s": 1.0,
            "env_steps": 100 * i,
            "trained_steps": 100 * i,
            "learner_steps": i,
            "ledger": ledger,
            "ledgers": {"learner-0": {"wait": ledger["wait_data"]}, "actor-0": actor},
            "cpu": {"learner-0": 0.9, "actor-0": 0.5},
            **more,
        }
        for i in range(60)
    ]
    columns.extend(lines)
    return columns


def test_the_verdict_names_a_learner_that_waits_for_the_environment(tmp_path: Path) -> None:
    columns = columns_of({"compute": 0.3, "wait_data": 0.7}, {"step": 0.9, "wait": 0.05})
    options = load_options(make_run(tmp_path / "run", [1.0]), {})
    found = judge(columns, options, {}, live=True)
    assert found["seconds"] == 20.0
    assert found["verdict"]["kind"] == "slow_environment"
    assert found["verdict"]["next_step"]
    stages = pipeline_figures(columns, {}, options, found["verdict"], live=True)
    assert stages["limit"] == "environments"
    assert stages["environments"]["steps_per_s"] == pytest.approx(100.0)
    assert stages["actors"]["shares"]["step"] == pytest.approx(0.9)


def test_crowded_cores_mark_no_stage(tmp_path: Path) -> None:
    columns = columns_of({"compute": 0.95, "wait_data": 0.02}, {"step": 0.1, "wait": 0.9})
    cores = {"cpu": {"learner-0": 0.2, "actor-0": 0.1}, "ledger": {"compute": 0.95}}
    counters = ("time_s", "env_steps", "trained_steps", "learner_steps")
    columns.extend([{**dict.fromkeys(counters, 60.0 + i), **cores} for i in range(30)])
    options = load_options(make_run(tmp_path / "run", [1.0]), {})
    found = judge(columns, options, {}, live=True)
    assert found["verdict"]["kind"] == "crowded"
    assert "other programs and processes of this host" in found["verdict"]["finding"]
    stages = pipeline_figures(columns, {}, options, found["verdict"], live=True)
    assert stages["limit"] == "host"
    assert stages["seconds"] == found["seconds"] == 20.0


def test_verdict_names_a_learner_that_is_the_bottleneck(tmp_path: Path) -> None:
    columns = columns_of({"compute": 0.95, "wait_data": 0.02}, {"step": 0.1, "wait": 0.9})
    options = load_options(make_run(tmp_path / "run", [1.0]), {})
    found = judge(columns, options, {}, live=False)
    assert found["seconds"] == 59.0
    assert found["verdict"]["kind"] == "slow_learner"


def test_the_mean_of_a_long_run_counts_each_second_once() -> None:
    """The newest rows have no gaps, the others stand for many lines each."""
    columns = MetricColumns()
    for start in range(0, 100_000, 500):
        columns.extend(
            [
                {
                    "time_s": float(i),
                    "interval_s": 1.0,
                    "ledger": {"compute": float(i >= 97_000)},
                    "queue_fill": float(i >= 97_000),
                    "policy_lag_max": 50.0 if i == 40_001 else None,
                }
                for i in range(start, start + 500)
            ]
        )
    assert columns.stride > 1
    window = MetricWindow(columns, None)
    assert window.shares("ledger/")["compute"] == pytest.approx(0.03, abs=0.001)
    assert window.mean("queue_fill") == pytest.approx(0.03, abs=0.001)
    assert window.highest("policy_lag_max") == 50.0, "of a line that was thinned out"
    assert MetricWindow(columns, 20.0).mean("queue_fill") == 1.0


@pytest.mark.parametrize("how", ["pipe", "endless"])
@pytest.mark.parametrize(
    "part",
    ["config.yaml", "supervisor.json", "summary.json", "checkpoints/best/checkpoint.safetensors"],
)
def test_foreign_run_cannot_make_the_page_wait(tmp_path: Path, part: str, how: str) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0])
    path = folder / part
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    shown: list[dict[str, Any]] = []

    def look() -> None:
        found = Views(RunCatalog(tmp_path))
        shown.extend([*found.runs()["runs"], found.now("run")])

    with most_memory(1 << 30):
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(30)
    assert [row["env_steps"] for row in shown] == [STEPS, STEPS]
    assert {row["state"] for row in shown} <= {"ended", "died"}


@contextmanager
def most_memory(more_nbytes: int) -> Iterator[None]:
    """This process can take no more memory than so much beyond what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_verdict_uses_the_cores_that_the_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same: dict[str, Any] = {
        "interval_s": 1.0,
        "ledger": {"compute": 0.95, "wait_data": 0.02},
        "ledgers": {"learner-0": {"forward": 0.95}, "actor-0": {"step": 0.1, "wait": 0.9}}
        | {"evaluator-0": {"step": 1.0}},
        "cpu": {"learner-0": 0.2, "actor-0": 0.1, "evaluator-0": 0.5},
    }
    counters = ("time_s", "env_steps", "trained_steps", "learner_steps")
    lines = [{**dict.fromkeys(counters, float(i)), **same} for i in range(60)]
    columns = MetricColumns()
    columns.extend(lines)
    monkeypatch.setattr(cgroup, "cores", lambda: 0.8)  # the quota of a container
    found = judge(columns, {}, {}, live=True)["verdict"]
    assert found["kind"] == "crowded"
    assert "(0.8 cores)" in found["finding"]
    assert found["next_step"].startswith("move actors to other hosts"), "the evaluator counts, too"
    assert "the rest of the run 0.60" in found["reason"]

    folder = make_run(tmp_path / "run", [1.0])  # that another machine has trained
    start = {"starts": [{"time": 1.0, "cores": 64}]}
    (folder / "versions.json").write_text(json.dumps(start))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "(64 cores)" in Views(RunCatalog(folder)).now(".")["verdict"]["finding"]


def test_verdict_includes_live_threads_once_their_window_is_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of a long run are minutes apart."""
    folder = make_run(tmp_path / "run", [1.0], ends=False)
    ledgers = {"learner-0": {"wait": 0.7, "forward": 0.3}, "actor-0": {"step": 0.9}}
    counters = ("time_s", "env_steps", "trained_steps", "learner_steps")
    same = {"interval_s": 1.0, "ledger": {"compute": 0.3, "wait_data": 0.7}, "ledgers": ledgers}
    lines = [{**dict.fromkeys(counters, i), **same} for i in range(30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    views, kinds = Views(RunCatalog(folder)), []
    monkeypatch.setattr(WatchedRun, "state", "running")
    for window_s, gather in ((0.0, 0.0), (1.0, 0.95)):
        thread = {"name": "feeder", "ledger": {"gather": gather}}
        learner = {"name": "learner-0", "pid": 7, "threads": [thread]}
        status = {"live": True, "why": None, "processes": [learner], "window_s": window_s}
        monkeypatch.setattr(LiveStatus, "now", lambda self, status=status: status)
        kinds.append(views.now(".")["verdict"]["kind"])
    assert kinds == ["slow_environment", "slow_gather"]


def test_the_list_has_the_figures_of_a_run_of_many_processes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0], ends=False)
    parts = dict.fromkeys(("other", "wait", "step", "infer", "write", "process"), 1 / 6)
    line = {"env_steps": 5e9, "time_s": 5e5, "ledgers": {f"actor-{i}": parts for i in range(900)}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write((json.dumps(line) + "\n") * 2)
    [row] = RunCatalog(tmp_path).rows()
    assert (row["env_steps"], row["seconds"]) == (5e9, 5e5)
    assert runs.row(folder)["env_steps"] == 5e9


def test_shares_add_up_where_a_part_appears_late() -> None:
    columns = MetricColumns()
    ledgers = [{"step": 1.0}, {"step": 0.5, "save": 0.5}]
    lines = [{"time_s": float(i), "ledgers": {"actor-0": ledgers[i >= 30]}} for i in range(60)]
    columns.extend(lines)
    for seconds in (None, 40.0):
        shares = MetricWindow(columns, seconds).shares("ledgers/actor-0/")
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["save"] == pytest.approx(0.25 if seconds is None else 0.5 * 30 / 41)


def resumed(*, back_to: int) -> list[dict[str, Any]]:
    """A hundred seconds, and twenty more from a checkpoint at ``back_to`` s; 100 steps/s."""
    return [
        {
            "time_s": float(i),
            "interval_s": 1.0,
            "env_steps": 100 * i,
            "learner_steps": i,
            "dropped": {"lag": 2 * passed},
            "ledgers": {"actor-0": {"wait": 0.25, "step": 0.75}},
        }
        for times in (range(100), range(back_to, back_to + 20))
        for passed, i in enumerate(times)
    ]


def test_rates_include_repeated_steps_of_a_resume_once() -> None:
    columns = MetricColumns()
    columns.extend(resumed(back_to=90))
    for seconds, length in ((None, 99.0 + 19.0), (25.0, 25.0)):
        window = MetricWindow(columns, seconds)
        assert window.seconds == length
        assert window.rate("env_steps") == pytest.approx(100.0)
        assert window.rate("learner_steps") == pytest.approx(1.0)
    assert MetricWindow(columns, None).counts("dropped") == {"lag": 2.0 * (99 + 19)}


def test_repeated_time_of_a_resume_is_drawn_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0], ends=False)
    text = "".join(json.dumps(line) + "\n" for line in resumed(back_to=90))
    (folder / "metrics.jsonl").write_text(text)
    [bars] = Views(RunCatalog(folder)).ledgers(".")["processes"]
    assert bars["x"] == [float(i) for i in range(110)]
    assert len(bars["parts"]["wait"]) == 110


def test_processes_ended_before_the_window_are_not_its_actors() -> None:
    columns = MetricColumns()
    compute, wait = {"compute": 0.9, "wait_data": 0.1}, {"compute": 0.2, "wait_data": 0.8}
    for first, names in ((0, ("0", "1")), (60, ("1",))):
        columns.extend(
            [
                {
                    "time_s": float(i),
                    "interval_s": 1.0,
                    "env_steps": 100 * i,
                    "trained_steps": 100 * i,
                    "learner_steps": i,
                    "ledger": compute,
                    "ranks": [
                        {
                            "rank": int(n),
                            "trained_steps_per_s": 50.0,
                            "ledger": (wait, compute)[int(n)],
                        }
                        for n in names
                    ],
                    "ledgers": {f"learner-{n}": {"wait": 0.1, "forward": 0.9} for n in names}
                    | {f"actor-{n}": {"step": 0.4, "wait": 0.6} for n in names},
                }
                for i in range(first, first + 60)
            ]
        )
    window = MetricWindow(columns, 20.0)
    options = {"learner": {"most_count": 2}}
    found = make_profile(columns, window, options, {})
    assert found is not None
    assert [(a["name"], a["learner"], a["steps_per_s"]) for a in found["actors"]] == [
        ("actor-1", 1, pytest.approx(100.0))
    ]
    [learner] = found["learner"]
    assert (learner["name"], learner["rank"]) == ("learner-1", 1)
    assert learner["ledger"] == pytest.approx(compute)
    shares = pipeline_figures(columns, {}, options, None, live=True)["actors"]["shares"]
    assert shares["step"] == pytest.approx(0.4)


def test_actors_belong_to_the_learner_that_they_play_for(tmp_path: Path) -> None:
    """The verdict is on the learner that the others wait for, and its actors."""
    columns = MetricColumns()
    columns.extend(
        [
            {
                "time_s": float(i),
                "interval_s": 1.0,
                "env_steps": 400 * i,
                "trained_steps": 400 * i,
                "learner_steps": i,
                "ledger": {"compute": 0.35, "wait_data": 0.45, "reduce_exposed": 0.2},
                "ranks": [
                    {
                        "trained_steps_per_s": 200.0,
                        "ledger": {"compute": 0.6, "reduce_exposed": 0.4},
                    },
                    {"trained_steps_per_s": 200.0, "ledger": {"compute": 0.1, "wait_data": 0.9}},
                ],
                "ledgers": {"learner-0": {"forward": 0.6}, "learner-1": {"wait": 0.9}}
                | {f"actor-{k}": {"step": 0.95} if k % 2 else {"wait": 1.0} for k in range(4)},
            }
            for i in range(60)
        ]
    )
    folder = make_run(tmp_path / "run", [1.0], "learner.count=2", "actors.count=4")
    found = judge(columns, load_options(folder, {}), {}, live=True)["verdict"]
    assert found["kind"] == "slow_environment"
    assert "2 actors spend 95 % in env.step" in found["reason"]


def test_profile_from_metrics_has_the_device_and_connector_rates() -> None:
    columns = columns_of({"compute": 0.9, "wait_data": 0.05}, {"step": 0.9})
    lines = [
        {
            "time_s": 60.0 + i,
            "ledger": {"compute": 0.9},
            "ledgers": {"learner-0": {"device": 0.8}, "connector-0": {"wait": 0.9}},
            "received": {"slots": 5 * i, "coded_nbytes": 1000 * i},
        }
        for i in range(30)
    ]
    columns.extend(lines)
    found = make_profile(columns, MetricWindow(columns, 20.0), {"learner": {"device": "auto"}}, {})
    assert found is not None
    assert found["device"] == "cuda"
    assert found["connectors"][0]["slots_per_s"] == pytest.approx(5.0)
    assert found["connectors"][0]["coded_nbytes_per_s"] == pytest.approx(1000.0)


def test_no_verdict_before_two_lines() -> None:
    columns = MetricColumns()
    assert judge(columns, {}, {}, live=True)["verdict"] is None
    columns.extend([{"time_s": 1.0, "ledger": {"compute": 1.0}}])
    assert judge(columns, {}, {}, live=True)["verdict"] is None


def test_window_counts_the_growth_within_it() -> None:
    columns = columns_of({"compute": 0.5, "wait_data": 0.5}, {"wait": 1.0})
    columns.extend(
        [
            {"time_s": 60.0, "dropped": {"lag": 10}, "queue_fill": 1.0},
            {"time_s": 61.0, "dropped": {"lag": 25}, "queue_fill": 0.5},
        ]
    )
    window = MetricWindow(columns, 5.0)
    assert window.seconds == 5.0
    assert window.counts("dropped") == {"lag": 15.0}
    assert window.mean("queue_fill") == 0.75
    assert window.rate("env_steps") == pytest.approx(60.0)  # known in three seconds of the five
    assert window.mean("nothing") is None


def test_a_mean_counts_the_seconds_of_each_row() -> None:
    columns = MetricColumns()
    columns.extend(
        [
            {"time_s": 9.0, "interval_s": 9.0, "ledger": {"compute": 0.9}, "policy_lag_max": 3},
            {"time_s": 10.0, "interval_s": 1.0, "ledger": {"compute": 0.4}, "policy_lag_max": 8},
        ]
    )
    window = MetricWindow(columns, 20.0)
    assert window.shares("ledger/")["compute"] == pytest.approx(0.85)
    assert window.highest("policy_lag_max") == 8


def test_target_is_marked_where_it_was_reached(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0, 2.0], "stop.return=1.5", ends=False)
    run = WatchedRun(folder)
    run.read(10)
    assert run.target("time_s") == {"value": 1.5, "reached": None}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 300, "time_s": 2.0, "return_reached_at_s": 1.5}\n')
    run.read(10)
    assert run.target("time_s") == {"value": 1.5, "reached": 1.5}
    assert run.target("env_steps") == {"value": 1.5, "reached": 2 * STEPS}
    other = make_run(tmp_path / "other", [1.0], "stop.return=null")
    assert WatchedRun(other).target("time_s") is None


def test_reason_why_processes_do_not_run_is_given(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0], ends=False)
    events: list[dict[str, Any]] = [
        {"kind": "restart", "role": "actor-0", "incarnation": 0},
        {"kind": "exit", "role": "actor-0", "incarnation": 0, "data": {"expected": False}},
        {"kind": "exit", "role": "actor-1", "incarnation": 0, "data": {"expected": False}},
        {"kind": "exit", "role": "evaluator-0", "incarnation": 0, "data": {"expected": True}},
        {"kind": "hosts", "role": None, "data": {"lost": ["actor-2", "actor-3"]}},
        {"kind": "hosts", "role": None, "data": {"found": ["actor-3"]}},
        {"kind": "hosts", "data": {"lost": 3}},
        {"kind": "exit", "role": 4, "data": []},
    ]
    (folder / "logs/events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    run = WatchedRun(folder)
    run.read(10)
    assert run.ends() == {
        "actor-0": "died, is restarted",
        "actor-1": "died",
        "evaluator-0": "ended",
        "actor-2": "waits for a host",
        "actor-3": "starts",
    }


def test_processes_are_listed_in_the_order_of_the_data_flow() -> None:
    columns = MetricColumns()
    names = ("evaluator-0", "actor-10", "actor-2", "learner-0", "connector-0", "other")
    columns.extend([{"ledgers": {name: {"wait": 1.0} for name in names}}])
    assert process_names(columns) == [
        *("learner-0", "connector-0", "actor-2", "actor-10", "evaluator-0", "other"),
    ]


@pytest.mark.parametrize("reply", [b"{}", b'{"processes": 1}', b"[]", b"x", b'{"running_s": []}'])
def test_malformed_reply_of_a_supervisor_is_tolerated(tmp_path: Path, reply: bytes) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        about = {"pid": os.getpid(), "began": 1, "host": socket.gethostname()}
        text = json.dumps({**about, "socket": str(tmp_path / "s")})
        (tmp_path / "run/supervisor.json").write_text(text)

        def answer() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        found = LiveStatus(tmp_path / "run").now()
        thread.join(10)
    assert found["processes"] == []
    assert "repl" in found["why"]


@pytest.mark.parametrize("name", ["logs/events.jsonl", "evaluations.jsonl"])
@pytest.mark.timeout(60)
def test_huge_file_does_not_delay_the_page(tmp_path: Path, name: str) -> None:
    """A sparse file takes no room on the disk, and would be read for hours."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"time_s": 1.0}\n')
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 43)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"kind": "note", "trained_steps": 5}\n')
    run = WatchedRun(tmp_path)
    assert run.read(0.1) == 1.0
    assert len(run.events) + len(run.evaluations) == 1


@pytest.mark.timeout(60)
def test_config_that_would_take_minutes_to_parse_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"time_s": 1.0}\n')
    text = "env: {id: CartPole-v1}\n" + "".join(f"a{i}: 1\n" for i in range(250_000))
    (tmp_path / "config.yaml").write_text(text)
    assert WatchedRun(tmp_path).config == {}
    assert runs.row(tmp_path)["env"] is None
    load_options(tmp_path, {})


def test_environment_with_a_name_too_long_for_a_path_has_no_preset(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0], ends=True)
    (folder / "config.yaml").write_text(f"env: {{id: {'x' * 5000}}}\nalgo: {{name: ppo}}\n")
    assert Views(RunCatalog(tmp_path)).about("run")["base"] is None
