"""Sinks that show videos get each new video of a run once, and none of an earlier start."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import waiting
from penstock.configs.load import resolve
from penstock.core.processes import process_facts
from penstock.monitor import tensorboard, wandb
from penstock.monitor.new_videos import NewVideos
from penstock.monitor.tensorboard import Board

pytestmark = pytest.mark.timeout(120)
wait_until = partial(waiting.wait_until, timeout_s=60.0, every_s=0.02)

# Writes down what it is given, as the real library needs an account or stores its own format.
LIBRARY = """
import json
from pathlib import Path

class Video:
    def __init__(self, path, format): self.size, self.format = Path(path).stat().st_size, format

class Run:
    def __init__(self, folder): self.file = open(Path(folder) / "sent.jsonl", "w", buffering=1)
    def define_metric(self, *names, **options): pass
    def finish(self): self.file.close()
    def log(self, figures):
        shown = {k: [v.size, v.format] if isinstance(v, Video) else v for k, v in figures.items()}
        self.file.write(json.dumps(shown) + chr(10))

def init(dir, **options): return Run(dir)
"""


def video(run_dir: Path, name: str, width: int = 64) -> Path:
    """An mp4 of 12 pictures, put in its place when it is whole."""
    import imageio_ffmpeg

    (run_dir / "videos").mkdir(parents=True, exist_ok=True)
    part = run_dir / "videos" / f".{name}.part"
    writer = imageio_ffmpeg.write_frames(
        str(part), (width, 48), fps=30, macro_block_size=2, output_params=["-f", "mp4"]
    )
    writer.send(None)
    for i in range(12):
        writer.send(np.full((48, width, 3), 20 * i, np.uint8))
    writer.close()
    return part.rename(part.with_name(name))


def pictures(run_dir: Path) -> Iterator[tuple[int, bytes]]:
    """Step and file of each image for TensorBoard."""
    for step, value in values(run_dir):
        if value.tag == "eval/video":
            yield step, value.image.encoded_image_string


def values(run_dir: Path) -> Iterator[tuple[int, Any]]:
    """Step and value of all that was written for TensorBoard. Records are: length u64, its checksum
    u32, an Event, its checksum u32."""
    from tensorboardX.proto.event_pb2 import Event

    [file] = (run_dir / "tensorboard").iterdir()
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        yield from ((event.step, value) for value in event.summary.value)
        data = data[16 + length :]


def test_sink_gets_each_new_video_once(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "earlier.mp4").write_bytes(b"film")
    videos = NewVideos(tmp_path)
    assert videos.take() == []
    for at_s, name in ((20, "b.mp4"), (10, "a.mp4"), (5, ".part.mp4"), (5, "a.mp4.json")):
        (tmp_path / "videos" / name).write_bytes(b"film")
        os.utime(tmp_path / "videos" / name, (at_s, at_s))
    assert [path.name for path in videos.take()] == ["a.mp4", "b.mp4"]
    assert videos.take() == []
    (tmp_path / "videos" / "b.mp4").write_bytes(b"another")
    assert [path.name for path in videos.take()] == ["b.mp4"]
    (tmp_path / "videos").rename(tmp_path / "away")
    assert videos.take() == [], "the folder cannot be read"
    (tmp_path / "away").rename(tmp_path / "videos")
    assert videos.take() == []
    assert NewVideos(tmp_path / "none").take() == []


def test_tensorboard_gets_videos_as_animated_images(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("imageio_ffmpeg")
    video(tmp_path, "earlier.mp4")
    board = Board(tmp_path, {})
    video(tmp_path, "best-at-1.mp4")
    steps = count()

    def is_shown() -> bool:
        board.metrics({"env_steps": next(steps)})
        files = [file.name for file in (tmp_path / "tensorboard").iterdir()]
        return len(files) == 1 and bool(list(pictures(tmp_path)))

    wait_until(is_shown)
    video(tmp_path, "best-at-2.mp4", width=640)
    board.close()
    (step, first), (_, second) = pictures(tmp_path)
    assert step > 0, "the sink does not wait for a video"
    assert first[:6] == second[:6] == b"GIF89a"
    assert struct.unpack_from("<HH", first, 6) == (64, 48)
    assert struct.unpack_from("<HH", second, 6) == (320, 24), "it is made smaller"


def test_a_damaged_video_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("imageio_ffmpeg")
    board = Board(tmp_path, {})
    board.metrics({"env_steps": 1})
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "bad.mp4").write_bytes(b"no film")
    video(tmp_path, "good.mp4")
    board.close()
    assert len(list(pictures(tmp_path))) == 1
    steps = [step for step, value in values(tmp_path) if value.tag == "flow/env_steps"]
    assert steps == [1], "waiting for a video adds no measurements"


def test_missing_ffmpeg_does_not_keep_metrics_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    library = pytest.importorskip("imageio_ffmpeg")
    board = Board(tmp_path, {})
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"film")

    def missing() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(library, "get_ffmpeg_exe", missing)
    for step in range(3):
        board.metrics({"env_steps": step})
    board.close()
    assert list(pictures(tmp_path)) == []


HANGING = """#!/bin/sh
for part; do :; done
echo $$ > $part
exec sleep 90
"""
RUN = """
import os, signal, sys, time
from pathlib import Path
import imageio_ffmpeg
from penstock.monitor.tensorboard import Board

folder = Path(sys.argv[1])
imageio_ffmpeg.get_ffmpeg_exe = lambda: str(folder / "ffmpeg")
board, part = Board(folder, {}), folder / "tensorboard" / ".video.gif"
(folder / "videos").mkdir()
(folder / "videos" / "a.mp4").touch()
while not part.exists() or not part.read_text():
    board.metrics({"env_steps": 1})
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_video_conversion_ends_with_a_killed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "ffmpeg").write_text(HANGING)
    (tmp_path / "ffmpeg").chmod(0o700)
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], check=False, timeout=60)
    part = tmp_path / "tensorboard" / ".video.gif"
    pid = int(part.read_text())
    wait_until(lambda: process_facts(pid)[0] in (None, "ended"))
    Board(tmp_path, {}).close()
    assert not part.exists()


def test_hanging_video_conversion_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX")
    library = pytest.importorskip("imageio_ffmpeg")
    good, part = library.get_ffmpeg_exe(), tmp_path / "tensorboard" / ".video.gif"
    (tmp_path / "ffmpeg").write_text(HANGING)
    (tmp_path / "ffmpeg").chmod(0o700)
    monkeypatch.setattr(library, "get_ffmpeg_exe", lambda: str(tmp_path / "ffmpeg"))
    monkeypatch.setattr(tensorboard, "CONVERSION_S", 4.0)
    board = Board(tmp_path, {})
    video(tmp_path, "a.mp4")
    steps, pids = count(), set[int]()

    def is_begun() -> bool:
        board.metrics({"env_steps": next(steps)})
        if part.exists() and (text := part.read_text()):
            pids.add(int(text))
        return bool(pids)

    wait_until(is_begun)
    [pid] = pids
    wait_until(lambda: is_begun() and process_facts(pid)[0] is None)
    assert not part.exists()
    monkeypatch.setattr(library, "get_ffmpeg_exe", lambda: good)
    monkeypatch.setattr(tensorboard, "CONVERSION_S", 60.0)
    video(tmp_path, "b.mp4")
    board.close()
    assert len(list(pictures(tmp_path))) == 1


def test_wandb_gets_videos_including_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, run_dir = tmp_path / "libraries", tmp_path / "run"
    libraries.mkdir()
    (run_dir / "logs").mkdir(parents=True)
    (libraries / "wandb.py").write_text(LIBRARY)
    paths = [str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    (run_dir / "wandb-id").touch()  # a full disk had no room for the id
    options = [f"run.dir={run_dir}", "run.wandb=games", "run.grace_s=60"]
    sink = wandb.make(resolve("cartpole", options), run_dir)
    sent = run_dir / "sent.jsonl"
    wait_until(sent.exists)
    (run_dir / "videos").mkdir()
    (run_dir / "videos" / "a.mp4").write_bytes(b"film")
    sink.metrics({"env_steps": 640, "kl": 0.5})
    wait_until(lambda: "eval/video" in sent.read_text())
    (run_dir / "videos" / "b.mp4").write_bytes(b"a film")
    sink.close()
    assert [json.loads(line) for line in sent.read_text().splitlines()] == [
        {"flow/env_steps": 640, "train/kl": 0.5},
        {"flow/env_steps": 640, "eval/video": [4, "mp4"]},
        {"flow/env_steps": 640, "eval/video": [6, "mp4"]},
    ]
    assert len((run_dir / "wandb-id").read_text()) == 12
