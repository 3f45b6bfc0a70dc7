"""Videos of a run's best weights: which are kept, what is deleted, and what a failure costs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.evaluation import best_videos
from penstock.evaluation.best_videos import PART, BestVideos, record_newest
from penstock.evaluation.recording_process import KEPT, keep_newest, remove_abandoned
from waiting import wait_until


def put(folder: Path, name: str, at_s: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).touch()
    (folder / f"{name}.json").touch()
    os.utime(folder / name, (at_s, at_s))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_newest_best_videos_are_kept_with_their_decisions(tmp_path: Path) -> None:
    for i in range(KEPT + 3):
        # A run that was resumed repeats steps.
        put(tmp_path, f"best-at-{1000 - i}.mp4", at_s=i)
        keep_newest(tmp_path)
    kept = {f"best-at-{1000 - i}.mp4" for i in range(3, KEPT + 3)}
    assert names(tmp_path) == kept | {f"{name}.json" for name in kept}


def test_videos_of_other_names_are_not_deleted(tmp_path: Path) -> None:
    others = {"agent.mp4", "best-1.mp4", "best-at-1-copy.mp4", "now.mp4"}
    for name in others:
        put(tmp_path, name, at_s=0)
    for i in range(KEPT + 1):
        put(tmp_path, f"best-at-{i}.mp4", at_s=i)
    keep_newest(tmp_path)
    assert others < names(tmp_path)
    assert not (tmp_path / "best-at-0.mp4").exists()
    keep_newest(tmp_path / "none")


def test_only_abandoned_recordings_are_removed(tmp_path: Path) -> None:
    for name in (f"{PART}1.part", f"{PART}1.part.json", f"{PART}2.part", ".agent.mp4"):
        (tmp_path / name).touch()
        if "2" not in name:
            os.utime(tmp_path / name, (1, 1))
    remove_abandoned(tmp_path)
    assert names(tmp_path) == {f"{PART}2.part", ".agent.mp4"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scripts that recordings run, one after another, in place of their program."""
    pytest.importorskip("imageio_ffmpeg")
    scripts: list[str] = []
    monkeypatch.setattr(best_videos, "FIRST_S", 0.0)
    command = lambda module, *given: [sys.executable, "-c", scripts.pop(0), *map(str, given)]  # noqa: E731
    monkeypatch.setattr(best_videos, "python", command)
    return scripts


def poll_until_idle(videos: BestVideos) -> None:
    ends_s = time.monotonic() + 20
    videos.poll()
    while videos._recording is not None:
        assert time.monotonic() < ends_s
        videos.poll()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("script", "noted"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with code -11"),
        ("print('not JSON')", "ended with code 0"),
        ("import json; print(json.dumps({'error': 'no\\nroom'}))", "(no room)"),
        ("import json; print(json.dumps({'skipped': 'shows nothing'}))", ""),
    ],
)
def test_recording_failure_is_noted_once_and_ends_further_attempts(
    tmp_path: Path, notes: list[str], started: list[str], script: str, noted: str
) -> None:
    started += [script, "raise SystemExit('never')"]
    videos = BestVideos(tmp_path, 0, enabled=True)
    for _ in range(3):
        videos.request()
        poll_until_idle(videos)
    videos.close()
    assert len(started) == 1
    assert len(notes) == bool(noted)
    assert all(noted in note and "eval.video=false" in note for note in notes)


WRITING = """
import pathlib, sys, time
for name in (sys.argv[-1], sys.argv[-1] + ".json"):
    pathlib.Path(sys.argv[2], "videos", name).touch()
time.sleep(100)
"""


def test_hanging_recording_is_killed_and_leaves_no_file(
    tmp_path: Path, notes: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "LIMIT_S", 2.0)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / f"{PART}of-another").touch()
    started.append(WRITING)
    videos = BestVideos(tmp_path, 0, enabled=True)
    videos.request()
    videos.poll()
    wait_until(lambda: len(names(tmp_path / "videos")) == 3)
    poll_until_idle(videos)
    assert "has not ended within 2 s" in notes[0]
    assert names(tmp_path / "videos") == {f"{PART}of-another"}


def test_a_recording_for_a_viewer_ends_with_the_server(tmp_path: Path, started: list[str]) -> None:
    started.append("import time; time.sleep(100)")
    began_s = time.monotonic()
    with pytest.raises(UserError, match="the recording was cancelled"):
        record_newest(tmp_path, str(tmp_path), lambda: True)
    assert time.monotonic() - began_s < 10


def test_recording_process_that_does_not_exit_is_killed(
    tmp_path: Path, notes: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "END_S", 0.2)
    started.append(
        'import os, time; os.write(1, b\'{"file": "best-at-1.mp4", "cpu_s": 1}\'); '
        "os.close(1); time.sleep(100)"
    )
    videos = BestVideos(tmp_path, 0, enabled=True)
    videos.request()
    poll_until_idle(videos)
    assert notes == []


def test_ending_evaluator_ends_the_recording(tmp_path: Path, started: list[str]) -> None:
    started.append("import time; time.sleep(100)")
    videos = BestVideos(tmp_path, 0, enabled=True)
    videos.request()
    videos.poll()
    assert videos._recording is not None
    process = videos._recording._process
    videos.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_request_during_a_recording_waits_and_records_the_newest_best(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "import json; print(json.dumps({'file': 'best-1.mp4', 'cpu_s': %s}))"
    started += [answer % 100, answer % 0, answer % 0]
    videos = BestVideos(tmp_path, 0, enabled=True)
    for _ in range(5):
        videos.request()
        poll_until_idle(videos)
    assert len(started) == 2  # 2,000 s are not over
    videos._next_s = 0.0
    poll_until_idle(videos)
    assert len(started) == 1  # one for all of the requests
    poll_until_idle(videos)
    assert len(started) == 1


def test_no_video_is_recorded_when_disabled(tmp_path: Path, started: list[str]) -> None:
    videos = BestVideos(tmp_path, 0, enabled=False)
    videos.request()
    videos.poll()
    assert videos._recording is None
    videos.close()


def test_no_video_is_recorded_in_the_first_seconds(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "FIRST_S", 10.0)
    videos = BestVideos(tmp_path, 0, enabled=True)
    videos.request()
    videos.poll()
    assert videos._recording is None
    videos.finish(lambda: False)  # returns at once: the run was short
    videos.close()
