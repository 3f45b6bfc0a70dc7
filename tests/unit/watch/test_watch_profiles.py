"""Profiles and timelines for the page, also from damaged or huge files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.report import last_minute, trace
from penstock.profiling.report.readings import Spans, Thread
from penstock.watch import profiles
from penstock.watch.profiles import profile_of, recorded_of, timeline, timeline_of

SHARES = {"wait": 0.25, "forward": 0.75}
PROFILE: dict[str, Any] = {
    "target": "cartpole",
    "seconds": 5.0,
    "cores": 2.0,
    "device": "cpu",
    "learner": [{"name": "learner-0", "ledger": {"compute": 1.0}, "parts": SHARES, "threads": {}}],
    "actors": [{"name": "actor-0", "ledger": {"step": 0.5, "wait": 0.5}, "steps_per_s": 100.0}],
    "connectors": [],
    "others": [],
    "flow": {
        "produced_steps_per_s": 100.0,
        "trained_steps_per_s": 100.0,
        "dropped": {},
        "lost": {},
        "latency_s": {"p50": 0.1},
        "policy_lag": {"mean": 1.0, "max": 2},
        "queue_fill": 0.5,
        "stages": [],
    },
    "verdict": {"finding": "the learner is the limit", "reason": "it is", "next_step": "nothing"},
    "also": [{"finding": "<b>", "reason": "", "next_step": ""}],
    "notes": ["a note"],
}


def thread(name: str, edges_us: Sequence[int], parts: Sequence[Part]) -> Thread:
    edges = np.array(edges_us) * 1000
    spans = Spans(edges[:-1], edges[1:], np.array(parts, np.uint8))
    return Thread(name, 1 if name == "learner-0" else 2, "main", 0, spans)


def spent(found: dict[str, Any], name: str) -> dict[str, int]:
    """By part, the µs of a thread."""
    own = next(each for each in found["threads"] if each["name"] == name)
    assert len(own["signs"]) == len(own["us"])
    total: dict[str, int] = {}
    for sign, us in zip(own["signs"], own["us"], strict=True):
        part = found["parts"].get(sign, "gap")
        total[part] = total.get(part, 0) + us
    return total


def test_a_profile_becomes_bars_and_tables_of_text(tmp_path: Path) -> None:
    assert profile_of(tmp_path) is None
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    found = profile_of(tmp_path)
    assert found is not None
    assert found["heading"] == "cartpole: 5.0 s on 2 cores, learner on cpu"
    assert found["verdict"]["next_step"] == "nothing"
    assert found["also"] == ["<b>"]
    assert found["notes"] == ["a note"]
    assert found["bars"] == [
        {"name": "learner-0", "parts": {"compute": 1.0}},
        {"name": "actor-0", "parts": {"step": 0.5, "wait": 0.5}},
    ]
    actors = next(table for table in found["tables"] if table["title"].startswith("Actors"))
    assert actors["columns"][:3] == ["", "step", "wait"]
    assert actors["rows"][0][:3] == ["actor-0", "50.0", "50.0"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"target": 1}', "[" * 100_000])
def test_profile_of_another_format_gives_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    found = profile_of(tmp_path)
    assert found is not None
    assert "does not have the form of this release" in found["error"]
    assert "penstock profile" in found["error"]


def test_a_trace_becomes_a_timeline(tmp_path: Path) -> None:
    learner = thread("learner-0", [0, 100, 400, 1000], [Part.WAIT, Part.FORWARD, Part.BACKWARD])
    actor = thread("actor-0", [50, 60, 900], [Part.INFER, Part.STEP])
    trace.write(tmp_path / "trace.json", [learner, actor], 0, "it has all of them")
    found = timeline_of(tmp_path)
    assert found["note"] == "it has all of them"
    assert (found["from"], found["to"]) == (0, 1000)
    assert [each["begin"] for each in found["threads"]] == [0, 50]
    assert spent(found, "learner-0/main") == {"wait": 100, "forward": 300, "backward": 600}
    assert spent(found, "actor-0/main") == {"infer": 10, "step": 840}


def test_timeline_keeps_gaps_and_does_not_accumulate_rounding() -> None:
    spans = [("wait", i * 10.4, 10.4) for i in range(1000)]
    spans += [("step", 20_000.0, 5.0)]
    found = timeline({"a": spans}, "")
    assert spent(found, "a") == {"wait": 10_400, "gap": 9_600, "step": 5}
    assert found["to"] == 20_005


def test_a_timeline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MOST_SPANS", 100)
    many = [("wait", float(i), 1.0) for i in range(1000)]
    found = timeline({"many": many, "few": many[:10]}, "as written")
    assert sorted(len(each["us"]) for each in found["threads"]) == [10, 90]
    assert next(e for e in found["threads"] if e["name"] == "many")["begin"] == 910, "the newest"
    assert found["note"] == "as written; of 1,010 spans the newest 100 are shown"
    monkeypatch.setattr(profiles, "MOST_THREADS", 1)
    assert len(timeline({"many": many, "few": many[:10]}, "")["threads"]) == 1
    parts = [(f"part-{i}", float(i), 1.0) for i in range(80)]
    assert len(timeline({"a": parts}, "")["parts"]) == len(profiles.SIGNS)


@pytest.mark.parametrize(
    "line",
    [
        "{", '{"ph": "X"}', "[]", "null", '{"ph":"X","name":1,"pid":[],"tid":{},"ts":0,"dur":1}',
        '{"ph":"X","name":"a","pid":1,"tid":1,"ts":1e400,"dur":1}',
        '{"ph":"X","name":"a","pid":1,"tid":1,"ts":0,"dur":-1}',
        '{"ph":"M","name":"process_name","pid":1,"tid":0,"args":[]}', '{"' + "[" * 4000,
    ],
)  # fmt: skip
def test_damaged_lines_of_a_trace_are_left_out(tmp_path: Path, line: str) -> None:
    learner = thread("learner-0", [0, 100], [Part.WAIT])
    trace.write(tmp_path / "trace.json", [learner], 0, "note")
    text = (tmp_path / "trace.json").read_text().splitlines()
    (tmp_path / "trace.json").write_text("\n".join([text[0], f"{line},", *text[1:]]))
    assert spent(timeline_of(tmp_path), "learner-0/main") == {"wait": 100}


def test_a_run_without_a_trace_has_no_threads(tmp_path: Path) -> None:
    assert timeline_of(tmp_path)["threads"] == []
    assert recorded_of(tmp_path) == {**timeline({}, ""), "time": None}


class Shown:
    """A handle as far as a timeline needs it."""

    def __init__(self, found: list[Thread] | None) -> None:
        self.found = found

    def spans(self, since_ns: int) -> list[Thread] | None:
        return self.found


def test_timeline_of_the_last_minute_is_written_and_read(tmp_path: Path) -> None:
    ledger = TimeLedger()
    for part in (Part.WAIT, Part.OTHER):
        ledger.switch(part)
        time.sleep(0.002)
    now_us = time.perf_counter_ns() // 1000
    learner = thread("learner-0", [now_us - 500, now_us - 200, now_us], [Part.WAIT, Part.FORWARD])
    handles: Any = [Shown([learner]), Shown(None)]
    last_minute.write_last_minute(tmp_path, handles, ledger)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]
    assert (tmp_path / "timeline.json").stat().st_mode & 0o777 == 0o600
    found = recorded_of(tmp_path)
    assert abs(found["time"] - time.time()) < 60
    assert spent(found, "learner-0/main") == {"wait": 300, "forward": 200}
    assert spent(found, "supervisor-0/main")["wait"] >= 2000
    assert found["note"].startswith(
        "the trace has 5 spans; of learner-0/main it has the last 0.0005"
    )


def test_the_newest_spans_of_the_last_minute_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_minute, "MOST_SPANS", 10)
    long = thread("learner-0", range(0, 101), [Part.WAIT] * 100)
    found = json.loads(last_minute.encode_spans([long], 1.0))
    [spans] = last_minute.decode_spans(found).values()
    assert [begin for _, begin, _ in spans] == list(range(90, 100))
    assert "has the last" in found["note"]


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 1}, {"threads": [{}]}, {"parts": []}, {"time": "now", "threads": None},
        {"threads": [{"name": "a", "edges_ns": "AAAA", "part": ""}]},
        {"threads": [{"name": "a", "edges_ns": "AAAAAAAAAAA=", "part": "AAAA"}]},
        {"threads": [{"name": "a", "edges_ns": "AAAAAAAAAAA=", "part": "é"}]},
    ],
)  # fmt: skip
def test_recorded_timeline_of_another_format_is_not_shown(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    good = json.loads(last_minute.encode_spans([thread("learner-0", [0, 9], [Part.WAIT])], 1.0))
    (tmp_path / "timeline.json").write_text(json.dumps(good))
    assert len(recorded_of(tmp_path)["threads"]) == 1
    (tmp_path / "timeline.json").write_text(json.dumps({**good, **change}))
    assert recorded_of(tmp_path)["threads"] == []
