"""The view of the agent in a real browser: what was decided, beside the video as it plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from run_folders import make_run
from train_command import SMALL, Penstock, trained

pytest.importorskip("starlette")
pytest.importorskip("plotly")
pytest.importorskip("imageio_ffmpeg")
pytest.importorskip("pygame")
pytest.importorskip("playwright.sync_api", reason="needs the extra browser")

from penstock.evaluation.decisions import FORMAT
from system.test_watch_browser import Screen, browser, screen  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(400)]

HTML = "<img src=x onerror=document.title='hacked'>"
GIF = bytes.fromhex("47494638396101000100800000000000ffffff2c00000000010001000002024401003b")
STEP = "Number(document.querySelector('.decisions input').value)"


def decided(steps: int, **columns: Any) -> str:
    rows = [[0.9, 0.1] if k % 2 else [0.25, 0.75] for k in range(steps)]
    return json.dumps(
        {
            "format": FORMAT,
            "fps": 50.0,
            "kind": "probabilities",
            "names": ["left", "right"],
            "counts": [2],
            "values": 2,
            "steps": steps,
            "episodes": [{"return": float(steps), "length": steps}],
            "picture": [*range(steps)],
            "action": [[0.0] if k % 2 else [1.0] for k in range(steps)],
            "reward": [1.0] * steps,
            "value": [10.0 + k for k in range(steps)],
            "rows": rows,
            "std": [None] * steps,
            **columns,
        }
    )


@pytest.fixture
def recorded(tmp_path: Path, penstock: Penstock) -> Path:
    """A run with a video of `penstock record`."""
    options = ("run.dir=runs/agent", "stop.learner_steps=60", *SMALL)
    assert penstock("train", "cartpole", "--json", *options).end()[0] == 0
    assert penstock("record", "runs/agent", "--json").end()[0] == 0
    return tmp_path / "runs/agent"


def test_decisions_follow_the_playing_video(recorded: Path, screen: Screen) -> None:  # noqa: F811
    screen.open("agent", "agent")
    screen.wait_for(".decisions .bar", "left")
    assert screen.page.locator(".decisions .bar").count() == 2
    assert screen.page.locator(".decisions .bar.chosen").count() == 1
    screen.wait_for(".stepline", "Step 1 of")
    screen.wait_until("document.querySelector('video').readyState >= 2")
    screen.page.evaluate("document.querySelector('video').play()")
    screen.wait_until(f"{STEP} > 3")  # it moves as the video does
    screen.page.evaluate("document.querySelector('video').pause()")
    fps = json.loads((recorded / "videos/best-0.mp4.json").read_text())["fps"]
    screen.page.evaluate(f"document.querySelector('video').currentTime = 5.5 / {fps}")
    screen.wait_until(f"{STEP} === 5")
    screen.wait_for(".stepline", "Step 6 of")

    slider = screen.page.get_by_label("Step of the video")
    slider.focus()
    screen.page.keyboard.press("ArrowRight")
    screen.wait_for(".stepline", "Step 7 of")
    screen.wait_until(f"Math.abs(document.querySelector('video').currentTime - 6 / {fps}) < .01")
    screen.page.keyboard.press("Home")
    screen.wait_until("document.querySelector('video').currentTime < .01")
    assert screen.page.locator(".valuecurve svg[role=img]").count() == 1
    assert screen.inspect() == []


def test_foreign_decision_files_are_shown_as_text_and_bounded(
    screen: Screen,  # noqa: F811
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "runs/odd", [1.0, 2.0, 3.0], evaluated={100: 1.0})
    videos = run / "videos"
    videos.mkdir()
    (videos / "moves.gif").write_bytes(GIF)
    names = {"names": [HTML, "x" * 1000], "value": [None] * 30}
    (videos / "moves.gif.json").write_text(decided(30, **names))
    screen.open("odd", "agent")
    screen.wait_for(".decisions .bar", HTML[:20])
    screen.wait_for(".decisions p", "A GIF does not tell which picture it shows")
    assert screen.page.locator(".valuecurve").count() == 0  # without values
    screen.page.get_by_label("Step of the video").focus()
    screen.page.keyboard.press("ArrowRight")
    screen.wait_for(".stepline", "Step 2 of 30")
    assert screen.inspect() == []
    assert screen.page.title() != "hacked"

    numbers = {"kind": "mean", "names": [], "counts": [], "rows": [[0.5, -2.0]] * 30}
    (videos / "moves.gif.json").write_text(decided(30, std=[[0.1, 0.2]] * 30, **numbers))
    screen.open("odd", "agent")
    screen.wait_for(".decisions .bar", "number 2").filter(has_text="-2 ± 0.2000")
    assert screen.inspect() == []

    many: dict[str, Any] = {
        "kind": "q",
        "names": [],
        "counts": [40],
        "rows": [[0.5] * 24] * 30,
        "values": 40,
    }
    many["episodes"] = [{"return": 9.0, "length": 900, "cut": True}]
    (videos / "moves.gif.json").write_text(decided(30, action=[[33]] * 30, **many))
    screen.open("odd", "agent")
    screen.wait_for(".player p", "cut after 900 steps, return so far 9")
    screen.wait_for(".decisions p", "Only the first 24 of 40 values are kept")
    screen.wait_for(".decisions p", "● action 33: not among the values that are kept")
    assert screen.inspect() == []

    for text in ("{", decided(0), decided(3, rows="text", action=7, counts=[2] * 9, kind=None)):
        (videos / "moves.gif.json").write_text(text)
        screen.open("odd", "agent")
        screen.wait_for(".player img.gif")
        screen.wait_for(".decisions p")


def test_a_run_in_progress_is_recorded_on_request(
    penstock: Penstock,
    screen: Screen,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = ("run.dir=runs/live", "stop.minutes=10", "checkpoint.every_s=1")
    run = penstock("train", "cartpole", *SMALL, *options)
    run.wait_until(lambda: trained(tmp_path / "runs/live"))
    run.wait_until(lambda: [*(tmp_path / "runs/live/checkpoints/last").glob("*.safetensors")])
    screen.open("live", "agent")
    screen.wait_for(".note", "The run has no video")
    screen.page.get_by_role("button", name="Record a video now").click()
    screen.wait_for("[role=status]", "now.mp4 is recorded")
    screen.wait_for(".decisions .bar", "left")
    screen.page.get_by_role("button", name="Stop", exact=True).click()
    screen.page.get_by_role("button", name="Stop the run").click()
    run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    screen.wait_until("!document.querySelector('.section button').checkVisibility()")
    videos = {path.name for path in (tmp_path / "runs/live/videos").iterdir()}
    assert videos == {"now.mp4", "now.mp4.json"}
