"""The files that a run's record writes: metrics, evaluations and the summary."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.core.files import write_atomic
from penstock.core.interfaces import Json, RunEvent
from penstock.launch.run_summary import history
from penstock.monitor.run_folder import lines as lines_file
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import RESERVED_NBYTES, Record, evaluation_figures
from penstock.monitor.sinks import FanOut


def close(record: Record, reason: str, error: str | None) -> dict[str, Any]:
    """End the run and return its summary."""
    summary = record.summary(reason, error)
    record.event(RunEvent("end", reason, result=summary))
    record.close()
    return summary


def evaluation(result: Json) -> RunEvent:
    return RunEvent("evaluation", "", "evaluator-0", 0, result=result)


def test_metrics_are_json_lines_and_the_summary_has_the_last_with_the_end(tmp_path: Path) -> None:
    record = Record(tmp_path)
    sinks = FanOut([record])
    sinks.metrics({"time_s": 1.0, "episodes": 3})
    sinks.metrics({"time_s": 2.0, "episodes": 5, "episode_return_mean": float("nan")})
    accounting = {"produced": 9, "trained": 8, "dropped": {"stale": 1}, "lost": {}, "in_flight": 0}
    record.metrics({"solved_at_s": 1.5, "accounting": accounting}, final=True)
    summary = close(record, "return", None)
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"time_s": 1.0, "episodes": 3},
        {"time_s": 2.0, "episodes": 5, "episode_return_mean": None},
    ]
    assert summary == {
        "time_s": 2.0,
        "episodes": 5,
        "episode_return_mean": None,
        "solved_at_s": 1.5,
        "accounting": accounting,
        "accounting_complete": True,
        "resumed": False,
        "exit_reason": "return",
        "error": None,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_record_whose_folder_was_replaced_writes_nothing_to_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record = Record(run_dir)
    run_dir.rename(tmp_path / "moved")
    run_dir.mkdir()
    record.metrics({"time_s": 1.0})
    assert close(record, "fault", "it was taken")["time_s"] == 1.0
    assert not [*run_dir.iterdir()]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for time_s in (1.0, 2.0):
        record = Record(tmp_path)
        record.metrics({"time_s": time_s})
        close(record, "interrupted", None)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"time_s": 1.0}\n{"time_s": 2.0}\n'


def test_appended_line_is_separated_from_a_broken_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"time_s": 1.0}\n[2]\n\xff\n{"time_s": 2')
    assert lines(path) == [{"time_s": 1.0}]
    record = Record(tmp_path)
    record.metrics({"time_s": 3.0})
    close(record, "return", None)
    assert lines(path) == [{"time_s": 1.0}, {"time_s": 3.0}]
    assert lines(tmp_path / "evaluations.jsonl") == []


def test_a_hole_of_many_gigabytes_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_file, "LINES_NBYTES", 64 << 20)
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(40 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"time_s": 1.0}\n')
        file.write(json.dumps({"x": "y" * (1 << 20)}).encode())
        file.write(b'\n{"time_s": 2.0}\n{"time_s": 3')
    tracemalloc.start()
    assert lines(path) == history(tmp_path) == [{"time_s": 1.0}, {"time_s": 2.0}]
    _, most_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_nbytes < 16 << 20


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_line_after_a_full_disk_is_separated_from_a_broken_one(tmp_path: Path, name: str) -> None:
    """The file may not grow beyond the midst of the second line, and then it may."""
    record = Record(tmp_path)
    line = {"return": {"mean": 5.0}, "length": {"mean": 9.0}, "best_return_mean": 6.0}

    def write(number: int) -> None:
        about = {**line, "trained_steps": number, "time_s": float(number)}
        record.metrics(about) if name == "metrics.jsonl" else record.event(evaluation(about))

    write(1)
    size = (tmp_path / name).stat().st_size
    with full_disk(size * 3 // 2), pytest.raises(OSError, match="File too large"):
        write(2)
    write(3)
    assert [found["trained_steps"] for found in lines(tmp_path / name)] == [1, 3]


def test_lines_of_a_month_long_run_are_thinned_over_its_whole_time(tmp_path: Path) -> None:
    """A report each minute, as if of 60 in one, so that the test is short: 43,200 of them."""
    record, month_s = Record(tmp_path), 30 * 86400
    for time_s in range(60, month_s + 1, 60):
        record.metrics({"time_s": float(time_s), "learner_compute_fraction": 0.5})
    assert record.last["time_s"] == month_s  # what is shown keeps its pace
    assert close(record, "interrupted", None)["utilization"] == 0.5
    times = [line["time_s"] for line in lines(tmp_path / "metrics.jsonl")]
    # One each minute until these are a 5000th of the time, then 5000 whenever it grows e-fold.
    assert len(times) <= 5000 * (1 + math.log(month_s / 60 / 5000)) < 16_000
    assert times[:3] == [60.0, 120.0, 180.0]
    assert times[-1] == month_s
    assert all(b - a <= b / 5000 + 60 for a, b in pairwise(times))


def test_pending_line_is_written_at_the_end_and_when_time_goes_back(tmp_path: Path) -> None:
    record = Record(tmp_path)
    for time_s in (0.0, 0.0, 9000.0, 9001.0, 8000.0, 8001.0, 8001.5):
        record.metrics({"time_s": time_s})
    close(record, "interrupted", None)
    record = Record(tmp_path)
    record.metrics({"time_s": 8001.6})
    close(record, "interrupted", None)
    times = [line["time_s"] for line in lines(tmp_path / "metrics.jsonl")]
    assert times == [0.0, 9000.0, 8000.0, 8001.5, 8001.6]


def test_evaluations_of_another_environment_are_not_in_the_metrics(tmp_path: Path) -> None:
    env = resolve("cartpole").env
    found = {"return": {"mean": 5.0}, "length": {"mean": 9.0}, "best_return_mean": 6.0}
    other = {"env": {"id": "Acrobot-v1"}}
    for known, carried in [({}, True), ({"env": env.identity()}, True), (other, False)]:
        record = Record(tmp_path, env=env)
        record.event(evaluation({**found, **known, "trained_steps": 640}))
        close(record, "interrupted", None)
        assert ("eval_return_best" in _after_resume(tmp_path, env)) == carried


def _after_resume(run_dir: Path, env: EnvConfig) -> dict[str, Any]:
    record = Record(run_dir, env=env)
    FanOut([record], record.evaluation).metrics({"time_s": 1.0})
    return close(record, "interrupted", None)


def test_a_run_resumes_where_its_last_evaluation_is_damaged(tmp_path: Path) -> None:
    for line in ("{}", '{"env": 5}', '{"env": {}, "return": 1}', '{"env": {"id": [1]}}'):
        (tmp_path / "evaluations.jsonl").write_text(line + "\n")
        record = Record(tmp_path, EnvConfig(id="CartPole-v1"))
        assert record.evaluation == {}
        Record(tmp_path).close()


def test_a_resumed_run_knows_its_evaluations(tmp_path: Path) -> None:
    before = {"return": {"mean": 5.0}, "length": {"mean": 9.0}, "trained_steps": 640}
    record = Record(tmp_path)
    record.event(evaluation({**before, "best_return_mean": 6.0}))
    close(record, "interrupted", None)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"return": {"me')
    record = Record(tmp_path)
    FanOut([record], record.evaluation).metrics({"time_s": 2.0})
    known = {"eval_return_mean": 5.0, "eval_return_best": 6.0}
    known |= {"eval_length_mean": 9.0, "eval_trained_steps": 640}
    assert lines(tmp_path / "metrics.jsonl") == [{"time_s": 2.0, **known}]
    record.event(evaluation({**before, "best_return_mean": 7.0}))
    assert close(record, "return", None)["eval_return_best"] == 7.0
    assert len(lines(tmp_path / "evaluations.jsonl")) == 2


def test_summary_of_a_run_that_never_began_has_the_same_keys(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert close(record, "user_error", "no such game") == {
        "solved_at_s": None,
        "accounting": {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0},
        "accounting_complete": True,
        "resumed": False,
        "exit_reason": "user_error",
        "error": "no such game",
    }


def test_infinity_is_null_at_any_depth(tmp_path: Path) -> None:
    record = Record(tmp_path)
    FanOut([record]).metrics({"a": {"b": [1.0, float("inf")]}})
    assert record.last == {"a": {"b": [1.0, None]}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    (tmp_path / "config.yaml.tmp").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def an_interval(time_s: float, rate: float, lag: int) -> dict[str, Any]:
    return {
        "time_s": time_s,
        "interval_s": 1.0,
        "env_steps": 100 * int(time_s),
        "trained_steps": 90 * int(time_s),
        "steps_per_s": rate,
        "trained_steps_per_s": rate,
        "learner_compute_fraction": 0.5 if lag == 1 else 0.9,
        "learner_wait_fraction": 0.1,
        "ledger": {"compute": 0.5 if lag == 1 else 0.9, "other": 0.1},
        "policy_lag_mean": float(lag),
        "policy_lag_max": lag,
        "policy_lag_histogram": {str(lag): 10 * lag},
        "latency_p50_s": 1.0,
        "latency_histogram": {"0": 5, "4": 5},
        "queue_fill": 0.3,
        "entropy": 0.7,
    }


def test_summary_covers_the_whole_run_and_not_its_last_interval(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.metrics(an_interval(1.0, 300.0, 1))
    record.metrics(an_interval(2.0, 200.0, 1))
    record.metrics(an_interval(4.0, 0.0, 3) | {"solved_at_s": 3.5})
    summary = close(record, "return", None)
    assert summary["solved_at_s"] == 3.5
    assert (summary["steps_per_s"], summary["trained_steps_per_s"]) == (100.0, 90.0)
    assert summary["policy_lag_mean"] == pytest.approx((20 * 1 + 30 * 3) / 50)
    assert summary["policy_lag_max"] == 3
    assert summary["policy_lag_histogram"] == {"1": 20, "3": 30}
    assert sum(summary["latency_histogram"].values()) == 30
    compute = (2 * 0.5 + 2 * 0.9) / 4
    assert summary["utilization"] == pytest.approx(compute)
    assert summary["learner_compute_fraction"] == pytest.approx(compute)
    assert summary["ledger"] == pytest.approx({"compute": compute, "other": 0.1})
    assert "queue_fill" not in summary
    assert "interval_s" not in summary
    assert summary["last_interval"]["steps_per_s"] == 0.0
    assert summary["last_interval"]["queue_fill"] == 0.3


def test_summary_fits_a_disk_that_has_become_full(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.metrics({"accounting": {"produced": 1, "trained": 1}}, final=True)
    # Files that hold something keep it, and do not grow.
    with full_disk(RESERVED_NBYTES):
        close(record, "fault", "learner-0: no space left")
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "fault"
    assert [path.name for path in tmp_path.iterdir() if "reserved" in path.name] == []


def test_summary_on_a_full_disk_is_reduced_to_the_essential(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.metrics({"time_s": 1.0, "cpu": {f"actor-{i}": 0.5 for i in range(10_000)}})
    with full_disk(RESERVED_NBYTES):
        close(record, "fault", "learner-0: no space left")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["exit_reason"], written["error"]) == ("fault", "learner-0: no space left")
    assert "last_interval" not in written


def test_unwritable_summary_raises_an_oserror(tmp_path: Path) -> None:
    record = Record(tmp_path)
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(OSError, match=r"summary\.json"):
        close(record, "return", None)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_of_a_run_are_private(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        record = Record(tmp_path)
        record.metrics({"time_s": 1.0})
        close(record, "return", None)
        write_atomic(tmp_path / "config.yaml", "env: {}")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("metrics.jsonl", "summary.json", "config.yaml"), 0o600)


def test_summary_has_the_closing_evaluation_and_metrics_the_ways_to_play(
    tmp_path: Path,
) -> None:
    of_ways = {
        "greedy": {"mean": -20.0, "se": 9.0, "episodes": 20},
        "sampled": {"mean": 255.0, "se": 5.0, "episodes": 20},
    }
    closing = {"goal": 200.0, "solved": True, "estimate": {"mean": 250.0, "se": 4.0}}
    found = {"return": {"mean": 255.0}, "length": {"mean": 9.0}, "best_return_mean": 255.0}
    found |= {"trained_steps": 640, "episodes": 20, "play": "sampled", **of_ways}
    record = Record(tmp_path)
    sinks = FanOut([record])
    sinks.event(evaluation({**found, "closing": closing}))
    sinks.metrics({"time_s": 2.0})
    [line] = lines_after_close(record, tmp_path)
    assert line == {
        "time_s": 2.0,
        "eval_return_mean": 255.0,
        "eval_return_best": 255.0,
        "eval_length_mean": 9.0,
        "eval_trained_steps": 640,
        "eval_play": "sampled",
        "eval_episodes": 20,
        "eval_return_greedy": -20.0,
        "eval_return_greedy_se": 9.0,
        "eval_return_sampled": 255.0,
        "eval_return_sampled_se": 5.0,
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    about = {"play": "sampled", "trained_steps": 640}
    assert summary["closing_evaluation"] == closing | about


def test_win_rates_of_an_evaluation_are_metrics_of_a_game_of_several_sides() -> None:
    against = [
        {"opponent": "bot:random", "win_rate": {"mean": 0.75, "lower": 0.5, "upper": 0.9}},
        {"opponent": "initial", "win_rate": None},
    ]
    found = {"return": {"mean": 0.5}, "length": {"mean": 9.0}, "best_return_mean": 0.5}
    found |= {"trained_steps": 640, "win_rate": 0.75, "against": against}
    figures = evaluation_figures(found)
    assert figures["eval_win_rate"] == 0.75
    assert figures["eval_win_rates"] == {"bot:random": 0.75, "initial": None}


@pytest.mark.parametrize(("goal", "known"), [(200.0, True), (300.0, False), (None, False)])
def test_a_resumed_run_knows_the_evaluation_that_confirmed_its_goal(
    tmp_path: Path, goal: float | None, known: bool
) -> None:
    closing = {"goal": 200.0, "solved": True, "estimate": {"mean": 250.0, "se": 4.0}}
    found = {"return": {"mean": 255.0}, "length": {"mean": 9.0}, "best_return_mean": 255.0}
    record = Record(tmp_path)
    record.event(evaluation({**found, "trained_steps": 640, "closing": closing, "play": "greedy",
                             "episodes": 20, "greedy": {"mean": 255.0, "se": 5.0},
                             "sampled": {"mean": 9.0, "se": 5.0}}))  # fmt: skip
    close(record, "return", None)
    record = Record(tmp_path, goal=goal)
    assert ("closing_evaluation" in close(record, "return", None)) == known


def lines_after_close(record: Record, run_dir: Path) -> list[dict[str, Any]]:
    close(record, "return", None)
    return lines(run_dir / "metrics.jsonl")
