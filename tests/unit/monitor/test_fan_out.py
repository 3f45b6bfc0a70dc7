"""The fan-out to all sinks of a run: neither a full disk nor a closed terminal ends it."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path

import pytest

from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.notes import notes_to
from penstock.monitor.run_folder.events import EventLog
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import Record
from penstock.monitor.sinks import FanOut
from penstock.monitor.view import DeferredView


class Shown(MetricSink):
    """A view that keeps what it is told; ``broken`` as one whose terminal is gone."""

    def __init__(self, broken: bool = False) -> None:
        self.notes: list[str] = []
        self.shown: list[Json] = []
        self._broken = broken

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self._fail_if_broken()
        self.shown.append({**metrics})

    def note(self, text: str) -> None:
        self._fail_if_broken()
        self.notes.append(text)

    def close(self) -> None:
        self._fail_if_broken()

    def _fail_if_broken(self) -> None:
        if self._broken:
            raise BrokenPipeError


def without_time(notes: list[str]) -> list[str]:
    """Every note begins with the time of day."""
    assert all(re.match(r"\d\d:\d\d:\d\d ", note) for note in notes)
    return [note[9:] for note in notes]


def test_equal_notes_of_several_actors_are_shown_once() -> None:
    view = Shown()
    sinks = FanOut([DeferredView(lambda: view)])
    sinks.tick()
    for text in ("by its own vector form", "by its own vector form", "another"):
        sinks.note(text)
    assert without_time(view.notes) == ["by its own vector form", "another"]


def test_repeated_note_is_shown_each_minute_with_its_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    view = Shown()
    sinks = FanOut([DeferredView(lambda: view)])
    sinks.tick()
    for _ in range(121):
        sinks.note("the disk is full")
        now_s += 1.0
    said = ["the disk is full", *2 * ["the disk is full (60 times)"]]
    assert without_time(view.notes) == said


def test_all_events_are_written_and_user_events_are_shown(tmp_path: Path) -> None:
    view = Shown()
    sinks = FanOut([EventLog(tmp_path), DeferredView(lambda: view)])
    sinks.tick()
    sinks.event(RunEvent("start", "was started", "actor-0", 0))
    sinks.event(RunEvent("restart", "actor-0 starts again", "actor-0", 0, {"delay_s": 0.1}))
    host = {"host": "x"}
    sinks.event(RunEvent("refused", "a stranger came", "connector-0", 0, host, reported=True))
    assert without_time(view.notes) == ["actor-0 starts again", "a stranger came"]
    kinds = [line["kind"] for line in lines(tmp_path / "events.jsonl")]
    assert kinds == ["start", "restart", "refused"]


def test_notes_before_the_view_exists_are_shown_later() -> None:
    view = Shown()
    sinks = FanOut([DeferredView(lambda: view)])
    sinks.note("resumed")
    sinks.note("resumed")
    sinks.tick()
    sinks.note("later")
    assert without_time(view.notes) == ["resumed", "later"]


def test_full_disk_is_noted_once_and_metrics_are_still_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    view, record = Shown(), Record(tmp_path)
    sinks = FanOut([record, DeferredView(lambda: view)])
    sinks.tick()
    for time_s in (1.0, 2.0):
        sinks.metrics({"time_s": time_s})
    assert without_time(view.notes) == ["metrics.jsonl cannot be written: No space left on device"]
    assert [m["time_s"] for m in view.shown] == [1.0, 2.0]
    assert record.summary("return", None)["time_s"] == 2.0


def test_a_closed_terminal_does_not_keep_metrics_from_the_disk(tmp_path: Path) -> None:
    record = Record(tmp_path)
    sinks = FanOut([record, DeferredView(lambda: Shown(broken=True))])
    sinks.tick()
    sinks.note("nobody reads this")
    sinks.metrics({"time_s": 1.0})
    sinks.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"time_s": 1.0}


class Fails(MetricSink):
    """A sink for which every call fails."""

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        raise OSError(28, "No space left on device", "returns.csv")

    def event(self, event: RunEvent) -> bool:
        raise OSError(28, "No space left on device", "returns.csv")

    def close(self) -> None:
        raise OSError(28, "No space left on device", "returns.csv")


def test_failing_sink_does_not_affect_other_sinks(capsys: pytest.CaptureFixture[str]) -> None:
    view = Shown()
    sinks = FanOut([Fails(), DeferredView(lambda: view)])
    sinks.tick()
    sinks.metrics({"time_s": 1.0})
    assert not sinks.event(RunEvent("start", "was started", "actor-0", 0))
    sinks.note("by its own vector form")
    sinks.close()
    failure = "returns.csv cannot be written: No space left on device"
    assert without_time(view.notes) == [failure, "by its own vector form"]
    assert [metrics["time_s"] for metrics in view.shown] == [1.0]
    assert capsys.readouterr().err == f"{failure}\n"


def test_log_line_becomes_a_note_of_the_run_of_its_thread(tmp_path: Path) -> None:
    view = Shown()
    sinks = FanOut([EventLog(tmp_path), DeferredView(lambda: view)])
    sinks.tick()
    logger = logging.getLogger("penstock.of_a_user")
    with notes_to(sinks.note):
        logger.info("%s is resumed", "runs/x")
        logger.debug("not for the user")
        thread = threading.Thread(target=logger.warning, args=("of another run",))
        thread.start()
        thread.join()
    logger.info("after the run")
    assert without_time(view.notes) == ["runs/x is resumed"]
    [line] = lines(tmp_path / "events.jsonl")
    assert (line["kind"], line["text"]) == ("note", "runs/x is resumed")
