"""The output of `run.log=json`, as a program reads it."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.sections import StopConfig
from penstock.core.interfaces import RunEvent
from penstock.launch import seeds
from penstock.monitor.json_view import JsonView, level
from penstock.monitor.view import make_deferred, make_view

METRICS: dict[str, Any] = {
    "time_s": 75.2,
    "env_steps": 640,
    "steps_per_s": 64.0,
    "loss": float("nan"),
    "ledger": {"compute": 0.5},
    "actors_alive": 2,
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_line_is_an_object_with_time_level_kind_role_and_text() -> None:
    stream = io.StringIO()
    view = JsonView(stream, "penstock runs/x", StopConfig(minutes=2))
    view.event(RunEvent("restart", "starts\nagain", "actor-0", 1, {"delay_s": float("nan")}))
    view.metrics(METRICS)
    view.metrics({"accounting": {}}, final=True)
    title, event, figures = lines(stream)
    for line in (title, event, figures):
        assert list(line) == ["time", "level", "kind", "role", "text", "data"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (title["kind"], title["text"]) == ("note", "penstock runs/x")
    assert (event["level"], event["kind"], event["role"]) == ("warning", "restart", "actor-0")
    assert (event["text"], event["data"]) == ("starts\nagain", {"delay_s": None})
    assert figures["text"].startswith("1:15, 0:44 to go | 640 steps, 64/s")
    assert figures["data"] == {
        "time_s": 75.2, "env_steps": 640, "steps_per_s": 64.0, "actors_alive": 2
    }  # fmt: skip


def test_figures_come_every_ten_seconds_and_repetitions_every_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    view = JsonView(stream, "a title", None, clock)
    for _ in range(65):
        view.metrics(METRICS)
        view.event(RunEvent("drop", "steps are dropped", "learner-0", 0))
        clock.now_s += 1.0
    found = lines(stream)
    assert sum(line["kind"] == "metrics" for line in found) == 7
    assert [line.get("count", 1) for line in found if line["kind"] == "drop"] == [1, 60]


def test_every_start_of_a_process_is_written() -> None:
    stream = io.StringIO()
    view = JsonView(stream, "a title", None)
    for incarnation in range(3):
        view.event(RunEvent("start", "was started", "actor-0", incarnation))
    assert len(lines(stream)) == 4


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (RunEvent("note", "a note"), "info"),
        (RunEvent("hang", "hangs"), "warning"),
        (RunEvent("exit", "has ended", data={"expected": True}), "info"),
        (RunEvent("exit", "has ended", data={"expected": False}), "warning"),
        (RunEvent("end", "ended by minutes", data={"error": None}), "info"),
        (RunEvent("end", "learner-0: was killed", data={"error": "was killed"}), "error"),
    ],
)
def test_level_follows_the_kind_of_event(event: RunEvent, expected: str) -> None:
    assert level(event) == expected


def test_json_view_is_created_at_once_to_receive_every_event() -> None:
    stream = io.StringIO()
    view = make_deferred(lambda: make_view(stream, "run", None, "CartPole-v1", "json"), "json")
    view.event(RunEvent("start", "was started", "actor-0", 0))
    assert [line["text"] for line in lines(stream)] == ["run; CartPole-v1", "was started"]


def test_json_output_and_metrics_port_are_refused_for_several_runs() -> None:
    with pytest.raises(UserError, match=r"run\.log=json is the output of one run"):
        seeds.train_seeds("cartpole", ["run.log=json"], 2, "no", as_json=True)
    with pytest.raises(UserError, match=r"run\.metrics_port=9200 is one port, and 2 runs"):
        seeds.train_seeds("cartpole", ["run.metrics_port=9200"], 2, "no", as_json=True, parallel=2)
