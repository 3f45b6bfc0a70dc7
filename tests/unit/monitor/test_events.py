"""The log of events: its schema, repeated events, full disks and hostile roles."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from penstock.core.interfaces import MetricSink, RunEvent
from penstock.monitor import sinks
from penstock.monitor.run_folder import events
from penstock.monitor.run_folder.events import KINDS, EventLog
from penstock.monitor.sinks import FanOut

SCHEMA = {
    "schema": int,
    "time": float,
    "uptime_s": float,
    "kind": str,
    "role": str | None,
    "incarnation": int | None,
    "text": str,
    "count": int,
    "data": dict,
}


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Notes(MetricSink):
    """Keeps what a person would see."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[EventLog]:
    made = EventLog(tmp_path, clock, lambda: 1.7e9 + clock.s)
    yield made
    made.close()


def lines(folder: Path, name: str = "events.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_line_has_the_schema(log: EventLog, tmp_path: Path, kind: str) -> None:
    log.add(kind, "a sentence")
    log.add(kind, "another", "actor-3", 2, {"reason": "lag"})
    assert [list(line) for line in lines(tmp_path)] == [list(SCHEMA)] * 2
    for line in lines(tmp_path):
        assert line["schema"] == 1
        assert all(isinstance(line[name], type_) for name, type_ in SCHEMA.items())
    assert [line["role"] for line in lines(tmp_path)] == [None, "actor-3"]


def test_kinds_of_events_are_documented() -> None:
    page = Path(__file__).parents[3] / "docs" / "runs.md"
    assert all(f"| `{kind}` |" in page.read_text() for kind in KINDS)


def test_event_times_are_those_of_the_clock(log: EventLog, clock: Clock, tmp_path: Path) -> None:
    clock.s += 2.5
    log.add("note", "later")
    [line] = lines(tmp_path)
    assert (line["time"], line["uptime_s"]) == (1.7e9 + 102.5, 2.5)


def test_first_event_is_written_at_once_and_repetitions_are_counted(
    log: EventLog, clock: Clock, tmp_path: Path
) -> None:
    for number in range(5):
        log.add("note", "is slow", "actor-0", 0, {"number": number})
        log.add("note", "is slow", "actor-1", 0)
    log.tick()
    assert [line["count"] for line in lines(tmp_path)] == [1, 1]
    clock.s += events.REPEAT_S
    log.tick()
    assert [(x["role"], x["count"]) for x in lines(tmp_path)[2:]] == [
        ("actor-0", 4),
        ("actor-1", 4),
    ]
    assert lines(tmp_path)[2]["data"] == {"number": 4}
    log.add("note", "is slow", "actor-0", 0)
    assert len(lines(tmp_path)) == 4
    log.close()
    assert sum(line["count"] for line in lines(tmp_path)) == 11


def test_each_death_of_a_process_is_written_at_once(log: EventLog, tmp_path: Path) -> None:
    """Counts in memory are lost when the supervisor is killed."""
    for number in range(3):
        log.add("exit", "was killed", "actor-0", number)
    assert [line["incarnation"] for line in lines(tmp_path)] == [0, 1, 2]


def test_event_is_written_again_after_a_long_pause(
    log: EventLog, clock: Clock, tmp_path: Path
) -> None:
    for _ in range(3):
        log.add("note", "the same")
        clock.s += 2 * events.REPEAT_S
        log.tick()
    assert [line["count"] for line in lines(tmp_path)] == [1, 1, 1]


def test_many_different_events_take_bounded_memory(log: EventLog, tmp_path: Path) -> None:
    for number in range(3 * events.ALIKE):
        log.add("note", f"number {number}")
        log.add("note", f"number {number}")
    log.close()
    assert sum(line["count"] for line in lines(tmp_path)) == 6 * events.ALIKE


def test_a_resumed_run_appends_apart_from_a_line_that_was_never_finished(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "note"}\n{"ki')
    log = EventLog(tmp_path)
    log.add("note", "resumed")
    log.close()
    found = (tmp_path / "events.jsonl").read_text().splitlines()
    assert found[:2] == ['{"kind": "note"}', '{"ki']
    assert json.loads(found[2])["text"] == "resumed"


def test_event_file_is_bounded(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FILE_NBYTES", 10_000)
    for number in range(1000):
        log.add("note", f"number {number}")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"events.jsonl", "events.jsonl.1"}
    assert all(size <= 10_000 for size in sizes.values())
    assert lines(tmp_path)[-1]["text"] == "number 999"
    kept = lines(tmp_path, "events.jsonl.1") + lines(tmp_path)
    numbers = [int(line["text"].split()[1]) for line in kept]
    assert numbers == [*range(numbers[0], 1000)]


def test_persistent_rejections_do_not_push_out_deaths(
    log: EventLog, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FILE_NBYTES", 20_000)
    monkeypatch.setattr(events, "SHARE_NBYTES", 4_000)
    log.add("exit", "was killed", "actor-0", 0)
    for number in range(1000):
        log.add("rejected", f"a peer has version {number}", "connector-0", 0)
        clock.s += events.REPEAT_S
        log.tick()
    log.add("exit", "was killed", "actor-0", 1)
    log.close()
    assert not (tmp_path / "events.jsonl.1").exists()
    assert [x["incarnation"] for x in lines(tmp_path) if x["kind"] == "exit"] == [0, 1]
    assert sum(x["count"] for x in lines(tmp_path) if x["kind"] == "rejected") == 1000


def test_a_removed_file_delays_no_event(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.add("note", "before")
    (tmp_path / "events.jsonl").unlink()
    monkeypatch.setattr(events, "FILE_NBYTES", 10)
    log.add("note", "after")
    assert [line["text"] for line in lines(tmp_path)] == ["after"]


@pytest.mark.parametrize("room", [0, 100, 250, 400])
def test_events_refused_by_a_full_disk_are_written_once_there_is_room(
    log: EventLog, clock: Clock, tmp_path: Path, room: int
) -> None:
    with full_disk(room):
        for number in range(20):
            log.add("note", f"number {number}")
            clock.s += 0.5
            log.tick()
    clock.s += events.RETRY_S
    log.tick()
    assert [line["text"] for line in lines(tmp_path)] == [f"number {n}" for n in range(20)]


def test_a_disk_that_is_full_for_too_long_costs_the_oldest_events(
    log: EventLog, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "WAITING_NBYTES", 10_000)
    with full_disk():
        for number in range(1000):
            log.add("note", f"number {number}")
    clock.s += events.RETRY_S
    log.tick()
    first, *others = lines(tmp_path)
    assert first["text"].startswith("events are missing here")
    assert first["count"] + len(others) == 1000
    assert others[-1]["text"] == "number 999"


def test_events_of_a_missing_folder_are_written_once_it_exists(
    clock: Clock, tmp_path: Path
) -> None:
    log = EventLog(tmp_path / "gone", clock)
    log.add("note", "kept")
    (tmp_path / "gone").mkdir()
    clock.s += events.RETRY_S
    log.tick()
    assert lines(tmp_path / "gone")[0]["text"] == "kept"
    log.close()


def test_role_that_reports_endlessly_does_not_fill_the_disk(
    log: EventLog, clock: Clock, tmp_path: Path
) -> None:
    notes = Notes()
    fan_out = FanOut([log, notes], clock=clock)
    for number in range(20_000):
        text = f"number {number}"
        fan_out.event(RunEvent("refused", text, "connector-0", 0, {"n": number}, reported=True))
        clock.s += 0.001  # for 20 s
    log.add("exit", "ended", "connector-0", 0)
    log.close()
    taken = len(notes.notes)
    assert taken == pytest.approx(sinks.ROLE_BURST + 20 * sinks.ROLE_RATE, abs=1)
    assert len(lines(tmp_path)) < taken + 10
    assert sum(line["count"] for line in lines(tmp_path)) == 20_001
    assert lines(tmp_path)[-1]["text"] == "reports too many events; the rest is counted only"


@pytest.mark.parametrize(
    ("kind", "text", "data"),
    [
        ("no kind\n", "fine", {}),
        ("note", "x" * 1_000_000, {}),
        ("note", "a\nb\x00\ud800", {}),
        ("note", "fine", {"x": "y" * 1_000_000}),
        ("note", "fine", {"x": float("nan")}),
        ("note", "fine", {"x": object()}),
        ("note", "fine", [1, 2]),
    ],
)
def test_any_report_of_a_role_is_one_short_json_line(
    log: EventLog, tmp_path: Path, kind: str, text: str, data: Any
) -> None:
    FanOut([log]).event(RunEvent(kind, text, "actor-0", 0, data, reported=True))
    [line] = lines(tmp_path)
    assert all(isinstance(line[name], type_) for name, type_ in SCHEMA.items())
    assert (tmp_path / "events.jsonl").stat().st_size < 50_000


def test_event_file_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        log = EventLog(tmp_path)
        log.add("note", "secret")
        log.close()
    finally:
        os.umask(before)
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600
