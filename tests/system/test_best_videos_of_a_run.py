"""A run records videos of its best weights while it trains, if its environment can be rendered."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from penstock.evaluation.decisions import decisions_path, parse_decisions
from train_command import SMALL, Penstock, assert_balanced

pytestmark = pytest.mark.system
pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")

EVALUATED = (*SMALL[:-1], "run.dir=run", "eval.every_steps=20000", "eval.episodes=2")
BROKEN = """
import sys
import gymnasium


class Drawn(gymnasium.Wrapper):
    def render(self):
        raise RuntimeError("the renderer is broken")


def make(render_mode=None):
    return Drawn(gymnasium.make("CartPole-v1", render_mode=render_mode))
"""


@pytest.mark.slow
def test_a_new_best_is_recorded_with_its_decisions(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("train", "cartpole", "--json", *EVALUATED, "stop.minutes=0.4")
    code, summary, err = run.end()
    assert (code, summary["exit_reason"]) == (0, "minutes"), err
    assert_balanced(summary)
    found = sorted((tmp_path / "run/videos").glob("best-at-*.mp4"))
    assert found, err
    lines = (tmp_path / "run/evaluations.jsonl").read_text().splitlines()
    bests = {line["trained_steps"] for line in map(json.loads, lines) if line["best"]}
    for video in found:
        decisions = parse_decisions(decisions_path(video).read_text())
        assert decisions is not None
        assert decisions["trained_steps"] in bests
        assert video.name == f"best-at-{decisions['trained_steps']}.mp4"
        assert decisions["names"] == ["left", "right"]
        [episode] = decisions["episodes"]
        assert episode["return"] == sum(decisions["reward"]) == len(decisions["picture"])
        assert all(value is not None for value in decisions["value"])
    hidden = {path.name for path in (tmp_path / "run/videos").glob(".*")}
    assert hidden == set()


@pytest.mark.slow
def test_environment_without_rendering_causes_one_note_and_no_videos(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    run = penstock("train", "broken:make", "--json", *EVALUATED, "stop.minutes=0.4")
    code, summary, err = run.end()
    assert (code, summary["exit_reason"]) == (0, "minutes"), err
    assert err.count("no further videos of the best weights are recorded") == 1
    assert err.count("(RuntimeError: the renderer is broken)") == 1
    assert len((tmp_path / "run/evaluations.jsonl").read_text().splitlines()) > 1
    assert [*(tmp_path / "run/videos").glob("*")] == []


@pytest.mark.slow
def test_recording_ends_with_its_killed_evaluator(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("train", "cartpole", "--json", *EVALUATED, "stop.minutes=5")

    def recordings() -> list[psutil.Process]:
        inner = psutil.Process(run.process.pid).children(recursive=True)
        return [p for p in inner if "penstock.evaluation.recording_process" in command_of(p)]

    run.wait_until(recordings)
    recording = recordings()[0]
    psutil.Process(run.pid_of("evaluator-0")).send_signal(signal.SIGKILL)
    psutil.wait_procs([recording], timeout=20)
    assert not recording.is_running()
    run.process.send_signal(signal.SIGINT)
    code, summary, err = run.end()
    assert code == 130, err
    assert_balanced(summary)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
