"""Videos of a run's best weights: which are kept, what is deleted, and what a failure costs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.evaluation import best_videos
from penstock.evaluation.best_videos import KEPT, LIST, BestVideos, keep, part_name, record_newest
from penstock.evaluation.recording_process import held


def put(folder: Path, name: str, text: str = "video") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / f"{name}.json").write_text("{}")
    return name


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.mp4*")}


def test_the_newest_are_kept_with_their_decisions(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    for i in range(KEPT + 3):
        keep(folder, put(folder, f"best-{i}.mp4"))
    kept = {f"best-{i}.mp4" for i in range(3, KEPT + 3)}
    assert names(folder) == kept | {f"{name}.json" for name in kept}


def test_only_files_that_were_recorded_and_are_unchanged_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    put(folder, "best-1.mp4")  # of `penstock record --out`
    put(folder, "agent.mp4")
    for i in range(2, 5):
        keep(folder, put(folder, f"best-{i}.mp4"))
    (folder / "best-3.mp4").unlink()
    put(folder, "best-3.mp4", "another one by now")
    for i in range(10, 10 + KEPT):
        keep(folder, put(folder, f"best-{i}.mp4"))
    found = {name for name in names(folder) if name.endswith(".mp4")}
    expected = {"best-1.mp4", "agent.mp4", "best-3.mp4"}
    assert found == expected | {f"best-{i}.mp4" for i in range(10, 10 + KEPT)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[" * 60_000,
        "[1, {}, null]",
        json.dumps([{"video": "x", "files": {"../secret.txt": [1, 2, 3]}}] * 9),
        json.dumps([{"video": "x", "files": {"..": None, "/etc/passwd": [1, 2, 3]}}] * 9),
        json.dumps([{"video": "x", "files": ["a"]}] * 9),
        json.dumps([{"video": "x", "files": {"agent.mp4": [1, 2, 3]}}] * 9),
    ],
)
def test_a_list_that_was_damaged_or_made_by_others_deletes_nothing(
    tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "videos"
    put(folder, "agent.mp4")
    about = (tmp_path / "secret.txt").write_text("secret")
    assert about
    (folder / LIST).write_text(text)
    keep(folder, put(folder, "best-1.mp4"))
    assert (tmp_path / "secret.txt").exists()
    assert {"agent.mp4", "best-1.mp4"} <= names(folder)
    assert [entry["video"] for entry in json.loads((folder / LIST).read_text())][-1] == "best-1.mp4"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scripts that recordings run, one after another, in place of their program."""
    pytest.importorskip("imageio_ffmpeg")
    scripts: list[str] = []
    monkeypatch.setattr(best_videos, "FIRST_S", 0.0)
    command = lambda module, *arguments: [sys.executable, "-c", scripts.pop(0)]  # noqa: E731
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
def test_a_failure_is_one_note_and_the_last_attempt(
    tmp_path: Path, notes: list[str], started: list[str], script: str, noted: str
) -> None:
    started += [script, "raise SystemExit('never')"]
    videos = BestVideos(tmp_path, 0, wanted=True)
    for _ in range(3):
        videos.request()
        poll_until_idle(videos)
    videos.close()
    assert len(started) == 1
    assert len(notes) == bool(noted)
    assert all(noted in note and "eval.video=false" in note for note in notes)


def test_a_recording_that_hangs_is_ended_and_leaves_nothing(
    tmp_path: Path, notes: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "LIMIT_S", 0.2)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / part_name("best")).touch()
    started.append("import time; time.sleep(100)")
    videos = BestVideos(tmp_path, 0, wanted=True)
    videos.request()
    poll_until_idle(videos)
    assert "has not ended within 0.2 s" in notes[0]
    assert list((tmp_path / "videos").iterdir()) == []


def test_a_file_that_another_recording_writes_is_left_alone(
    tmp_path: Path, notes: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "LIMIT_S", 0.2)
    part = tmp_path / "videos" / part_name("best")
    with held(part):
        with pytest.raises(UserError, match="another recording of this run is in progress"):
            held(part).__enter__()
        assert part.exists()
        started.append("import time; time.sleep(100)")
        videos = BestVideos(tmp_path, 0, wanted=True)
        videos.request()
        poll_until_idle(videos)
        assert notes
        assert part.exists()
    assert list((tmp_path / "videos").iterdir()) == []


def test_a_recording_for_a_viewer_ends_with_the_server(tmp_path: Path, started: list[str]) -> None:
    started.append("import time; time.sleep(100)")
    began_s = time.monotonic()
    with pytest.raises(UserError, match="the recording was cancelled"):
        record_newest(tmp_path, str(tmp_path), lambda: True)
    assert time.monotonic() - began_s < 10


def test_a_process_that_does_not_end_after_its_answer_is_ended(
    tmp_path: Path, notes: list[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "END_S", 0.2)
    put(tmp_path / "videos", "best-at-1.mp4")
    started.append(
        'import os, time; os.write(1, b\'{"file": "best-at-1.mp4", "cpu_s": 1}\'); '
        "os.close(1); time.sleep(100)"
    )
    videos = BestVideos(tmp_path, 0, wanted=True)
    videos.request()
    poll_until_idle(videos)
    assert notes == []
    assert "best-at-1.mp4" in (tmp_path / "videos" / LIST).read_text()


def test_an_evaluator_that_ends_ends_the_recording(tmp_path: Path, started: list[str]) -> None:
    started.append("import time; time.sleep(100)")
    videos = BestVideos(tmp_path, 0, wanted=True)
    videos.request()
    videos.poll()
    assert videos._recording is not None
    process = videos._recording._process
    videos.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_long_recording_lets_the_next_wait_which_then_shows_the_newest_best(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "import json; print(json.dumps({'file': 'best-1.mp4', 'cpu_s': %s}))"
    started += [answer % 100, answer % 0, answer % 0]
    put(tmp_path / "videos", "best-1.mp4")
    videos = BestVideos(tmp_path, 0, wanted=True)
    for _ in range(5):
        videos.request()
        poll_until_idle(videos)
    assert len(started) == 2  # 2,000 s are not over
    videos._next_s = 0.0
    poll_until_idle(videos)
    assert len(started) == 1  # one for all of the requests
    poll_until_idle(videos)
    assert len(started) == 1


def test_nothing_is_recorded_where_it_is_turned_off(tmp_path: Path, started: list[str]) -> None:
    videos = BestVideos(tmp_path, 0, wanted=False)
    videos.request()
    videos.poll()
    assert videos._recording is None
    videos.close()


def test_nothing_is_recorded_in_the_first_seconds(
    tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_videos, "FIRST_S", 10.0)
    videos = BestVideos(tmp_path, 0, wanted=True)
    videos.request()
    videos.poll()
    assert videos._recording is None
    videos.finish(lambda: False)  # returns at once: the run was short
    videos.close()
