from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.launch.record import Record, lines, write_atomic


def test_metrics_are_lines_and_the_summary_is_the_last_with_the_end(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.metrics({"time_s": 1.0, "episodes": 3})
    record.metrics({"time_s": 2.0, "episodes": 5, "episode_return_mean": float("nan")})
    accounting = {"produced": 9, "trained": 8, "dropped": {"stale": 1}, "lost": {}, "in_flight": 0}
    record.final({"solved_at_s": 1.5, "accounting": accounting})
    summary = record.close("return", None)
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
        "exit_reason": "return",
        "error": None,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for time_s in (1.0, 2.0):
        record = Record(tmp_path)
        record.metrics({"time_s": time_s})
        record.close("interrupted", None)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"time_s": 1.0}\n{"time_s": 2.0}\n'


def test_what_is_appended_stands_apart_from_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"time_s": 1.0}\n[2]\n\xff\n{"time_s": 2')
    assert lines(path) == [{"time_s": 1.0}]
    record = Record(tmp_path)
    record.metrics({"time_s": 3.0})
    record.close("return", None)
    assert lines(path) == [{"time_s": 1.0}, {"time_s": 3.0}]
    assert lines(tmp_path / "evaluations.jsonl") == []


def test_a_resumed_run_knows_its_evaluations(tmp_path: Path) -> None:
    before = {"return": {"mean": 5.0}, "length": {"mean": 9.0}, "trained_steps": 640}
    record = Record(tmp_path)
    record.evaluation({**before, "best_return_mean": 6.0})
    record.close("interrupted", None)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"return": {"me')
    record = Record(tmp_path)
    record.metrics({"time_s": 2.0})
    known = {"eval_return_mean": 5.0, "eval_return_best": 6.0}
    known |= {"eval_length_mean": 9.0, "eval_trained_steps": 640}
    assert lines(tmp_path / "metrics.jsonl") == [{"time_s": 2.0, **known}]
    record.evaluation({**before, "best_return_mean": 7.0})
    assert record.close("return", None)["eval_return_best"] == 7.0
    assert len(lines(tmp_path / "evaluations.jsonl")) == 2


def test_a_run_that_never_began_has_a_summary_with_the_same_names(tmp_path: Path) -> None:
    record = Record(tmp_path)
    assert record.close("user_error", "no such game") == {
        "solved_at_s": None,
        "accounting": {"produced": 0, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 0},
        "exit_reason": "user_error",
        "error": "no such game",
    }


def test_infinity_is_null_at_any_depth(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.metrics({"a": {"b": [1.0, float("inf")]}})
    record.close("return", None)
    assert record.last == {"a": {"b": [1.0, None]}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, "old")
    (tmp_path / "config.yaml.tmp").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(path, "new")
    assert path.read_text() == "old"
