"""A profile's report on the terminal and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.profiling.ledger import Part
from penstock.profiling.report import files, timeline
from penstock.profiling.report.readings import Spans, Thread
from penstock.profiling.report.tables import duration, rate_of_bytes, report_lines
from penstock.profiling.report.timeline import COLOURS
from penstock.profiling.report.window import ProfileWindow

PROFILE: dict[str, Any] = {
    "target": "pong <1>",
    "seconds": 10.0,
    "cores": 2.0,
    "device": "cpu",
    "learner": [
        {
            "rank": 0, "name": "learner-0",
            "ledger": {"wait_data": 0.2, "h2d_exposed": 0.0, "compute": 0.7, "reduce_exposed": 0.0,
                       "publish": 0.04, "other": 0.06},
            "parts": {"wait": 0.2, "forward": 0.3, "backward": 0.4, "publish": 0.04, "other": 0.06},
            "threads": {"feeder": {"wait": 0.75, "gather": 0.25}},
            "unmeasured": {"main": 0.002, "feeder": -0.01},
            "utilization": 0.7, "gpu_kernel_busy": 0.91, "cpu": 0.93, "coreless": 0.05,
            "steps_per_s": 1234.5, "updates_per_s": 2.5,
            "ceiling_steps_per_s": 2469.0, "achieved_over_ceiling": 0.5, "queue_fill": 0.5,
        }
    ],
    "actors": [
        {"name": "actor-0", "learner": 0, "ledger": {"step": 0.88, "infer": 0.1, "other": 0.02},
         "unmeasured": {"main": -0.0001}, "cpu": 0.99, "coreless": None, "steps_per_s": 1300.0}
    ],
    "connectors": [],
    "others": [{"name": "supervisor-0", "ledger": {"wait": 0.99, "other": 0.01}, "cpu": 0.02,
                "coreless": 0.0},
               {"name": "server-0", "ledger": {}, "cpu": 0.5, "coreless": None}],
    "flow": {
        "produced_steps_per_s": 1300.0, "trained_steps_per_s": 1234.5, "store_nbytes_per_s": 2.0e6,
        "dropped": {"lag": 64}, "lost": {},
        "latency_s": {"p50": 0.0123, "p95": 1.5, "p99": None},
        "policy_lag": {"mean": 1.5, "max": 4}, "queue_fill": 0.5,
        "stages": [
            {"stage": "actors", "steps_per_s": 1300.0, "nbytes_per_s": 2.0e6},
            {"stage": "store", "steps_per_s": 1300.0, "nbytes_per_s": None},
            {"stage": "weights", "steps_per_s": None, "nbytes_per_s": 1536.0,
             "versions_per_s": 2.5},
        ],
    },
    "config": {},
    "verdict": {
        "finding": "the learner waits", "reason": "1 < 2 & so on", "next_step": "more actors",
    },
    "also": [{"finding": "weights <3> are late", "reason": "", "next_step": ""}],
}  # fmt: skip


def threads() -> list[Thread]:
    """One thread, a millisecond of forward and three of backward, ten times over."""
    edges = np.concatenate([[0], np.cumsum(np.tile([1, 3], 10))]) * 1_000_000
    part = np.tile([Part.FORWARD, Part.BACKWARD], 10).astype(np.uint8)
    return [Thread("learner-0", 1, "main", 0, Spans(edges[:-1], edges[1:], part))]


def test_terminal_report_has_every_figure() -> None:
    told = "\n".join(report_lines(PROFILE))
    assert told.startswith("pong <1>: 10.0 s on 2 cores, learner on cpu\n")
    table = {cells[0]: cells[1:] for line in told.splitlines() if (cells := line.split())}
    assert table["learner-0/feeder"] == ["75.0", "25.0"]
    assert table["server-0"] == ["-", "-", "-", "0.50", "-"]  # it keeps no ledger
    assert table["supervisor-0"] == ["99.0", "1.0", "-", "0.02", "0.0"]
    assert table["actor-0"] == ["88.0", "10.0", "2.0", "0.0", "0.99", "-", "1,300"]
    assert "20.0          0.0     70.0             0.0      4.0    6.0" in told
    assert "        -1.0      0.93      5.0    1,234    2,469   0.50        2.5     91.0" in told
    assert "p50 12.3 ms, p95 1.5 s, p99 -" in told
    assert "64 (lag 64) steps" in told
    assert table["actors"] == ["play", "1,300", "1.9", "MiB/s"]
    assert table["into"] == ["the", "store", "1,300", "-"]
    assert table["weights"] == ["out", "-", "1.5", "KiB/s", "2.5"]
    assert told.endswith(
        "Verdict: the learner waits\n  because 1 < 2 & so on\n  next: more actors\n"
        "  also: weights <3> are late"
    )
    assert "Connectors" not in told


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.00123, "1.23 ms"), (2.0, "2 s")])
def test_durations_are_formatted(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (10.0, "10.0 B/s"), (1536.0, "1.5 KiB/s"), (2**40, "1024.0 GiB/s")],
)
def test_rates_of_bytes_are_formatted(rate: float | None, text: str) -> None:
    assert rate_of_bytes(rate) == text


def test_every_part_has_a_colour() -> None:
    assert COLOURS.keys() == {part.name.lower() for part in Part}


def test_shares_of_time_slices_of_a_thread_are_computed() -> None:
    spans = threads()[0].spans
    found = timeline.shares(spans, np.array([-4.0, -2.0, 2.0, 6.0, 14.0, 41.0]) * 1e6)
    assert found[0].sum() == 0  # before it began
    assert found[1, Part.FORWARD] == pytest.approx(0.25)  # -2 to 2: forward 0 to 1, backward 1 to 2
    assert found[1, Part.BACKWARD] == pytest.approx(0.25)
    assert found[2, Part.FORWARD] == pytest.approx(0.25)  # 2 to 6: backward, forward 4 to 5, ...
    assert found[3, Part.BACKWARD] == pytest.approx(0.75)
    assert found[4].sum() == pytest.approx(26 / 27)


def test_all_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = dict(PROFILE)
    window = ProfileWindow({}, {}, 0, 40_000_000, [])
    notes = files.write_profile_files(tmp_path, profile, window, threads(), ["first"])
    assert notes == ["first", "the trace has all 20 spans of the window"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "trace.json", "timeline.png", "profile.json",
    }  # fmt: skip
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert json.loads((tmp_path / "profile.json").read_text()) == profile
    assert profile["trace"] == str(tmp_path / "trace.json")
    assert profile["notes"] == notes


def test_full_disk_does_not_cost_the_printed_figures(tmp_path: Path) -> None:
    names = ("trace.json", "timeline.png", "profile.json.tmp")
    for name in names:
        (tmp_path / name).symlink_to("/dev/full")
    window = ProfileWindow({}, {}, 0, 40_000_000, [])
    notes = files.write_profile_files(tmp_path, dict(PROFILE), window, threads(), ["first"])
    full = "cannot be written: No space left on device"
    assert notes == [
        "first", f"trace.json {full}", f"timeline.png {full}", f"profile.json {full}"
    ]  # fmt: skip


def test_missing_matplotlib_is_named_with_its_install_command(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["matplotlib"] = None
from penstock.profiling.report import timeline
from penstock.configs.errors import UserError
try:
    timeline.draw({str(tmp_path / "t.png")!r}, [], 0, 1)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == (
        "timeline.png needs matplotlib, which is not installed; "
        "get it with pip install 'penstock[plot]'\n"
    ), done.stderr


def test_timeline_without_threads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no thread kept a ledger"):
        timeline.draw(tmp_path / "t.png", [], 0, 1)
