"""Writes the metrics and videos of a run for TensorBoard, in the folder `tensorboard` of the run.

Tags are in the sections of `metric_groups`. The options of the config are the hyper-parameters of
TensorBoard's HPARAMS page, which compares the runs of a folder. Videos are among its images, as
GIFs: it shows no other moving pictures.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.files import open_private
from penstock.core.interfaces import Json, MetricSink
from penstock.core.processes import die_with, python
from penstock.monitor.metric_groups import scalars, tag
from penstock.monitor.new_videos import TAG, NewVideos
from penstock.monitor.run_folder.folder import flat

if TYPE_CHECKING:
    from penstock.configs.schema import Config

COMPARED = tuple(
    map(tag, ("episode_return_mean", "eval_return_mean", "steps_per_s", "ledger/compute"))
)
"""Figures beside the hyper-parameters."""
GIF_S = 20  # only the beginning of a longer video is shown
GIF_PICTURES_PER_S = 10
GIF_WIDTH = 320
GIF_NBYTES = 8 << 20  # a larger one is left out
GIFS_WAITING = 5
CONVERSION_S = 60.0  # a video takes some seconds at the lowest priority
LAST_S = 10.0  # at the end of a run, for videos that wait

RGB = 3  # TensorBoard's number of a colour space
GIF_FILTER = (
    f"fps={GIF_PICTURES_PER_S},scale=w='min({GIF_WIDTH},iw)':h=-2,"
    "split[a][b];[a]palettegen[p];[b][p]paletteuse"
)


def make(config: Config, run_dir: Path) -> MetricSink:
    """Makes the sink of `run.tensorboard`."""
    return Board(run_dir, config.model_dump(mode="json"))


class Board(MetricSink):
    """Writes each interval as scalars over agent steps.

    The library is imported with the first interval, so that it does not delay the start of a run.
    """

    def __init__(self, run_dir: Path, config: Json) -> None:
        """Begin without a file.

        Args:
            run_dir: the folder of the run.
            config: its options, which are shown as hyper-parameters.
        """
        self._folder = run_dir / "tensorboard"
        self._config = config
        self._writer: Any = None  # an `_EventsFile`, from the first interval on
        self._gifs = _Gifs(run_dir, self._folder / ".video.gif")
        self._step = 0  # agent steps of the last interval

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Write at once, in this thread.

        The library's own thread would hide a full disk, and its full queue would block the caller.

        Raises:
            OSError: if the disk is full.
        """
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import hparams

        if self._writer is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # The third summary would mark the end of the run, and is left out.
            first_summaries = hparams(_hyper_parameters(self._config), COMPARED)[:2]
            self._writer = _EventsFile(self._folder, first_summaries)

        values = [
            Summary.Value(tag=tag(path), simple_value=value) for path, value in scalars(metrics)
        ]
        self._step = metrics.get("env_steps", 0)
        self._write(values)
        self._write_gif()

    def _write_gif(self) -> None:
        """Write a video, if one has been converted since the last call."""
        from tensorboardX.proto.summary_pb2 import Summary

        gif = self._gifs.next_gif()
        if gif is None:
            return

        # Width and height stand behind the six bytes of a GIF's signature.
        width, height = struct.unpack_from("<HH", gif, 6)
        image = Summary.Image(encoded_image_string=gif, width=width, height=height, colorspace=RGB)
        self._write([Summary.Value(tag=TAG, image=image)])

    def _write(self, values: Sequence[Any]) -> None:
        """Write values at the steps of the last interval."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        summary = Summary(value=values)
        self._writer.write(Event(wall_time=time.time(), step=self._step, summary=summary))

    def close(self) -> None:
        """Write the videos that wait, for at most `LAST_S`."""
        deadline_s = time.monotonic() + LAST_S
        self._gifs.find_new()
        with suppress(OSError):
            while self._writer is not None and self._gifs.busy and time.monotonic() < deadline_s:
                self._write_gif()
                time.sleep(0.05)
        self._gifs.close()

        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()


class _EventsFile:
    """A file of TensorBoard that contains complete records only.

    TensorBoard reads nothing behind a damaged record, and the writer of tensorboardX leaves one on
    a full disk.
    """

    def __init__(self, folder: Path, summaries: Sequence[Any]) -> None:
        """Create the file, without contents.

        Args:
            folder: where it is.
            summaries: they are written before the first event.
        """
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._fd = open_private(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._summaries = summaries

    def write(self, event: Any) -> None:
        """Append an event.

        Raises:
            OSError: if the disk is full; the file is then as it was.
        """
        from tensorboardX.proto.event_pb2 import Event

        size = os.fstat(self._fd).st_size
        events = [event]
        if not size:
            version = Event(wall_time=time.time(), file_version="brain.Event:2")
            summaries = [Event(wall_time=time.time(), summary=each) for each in self._summaries]
            events = [version, *summaries, event]

        data = b"".join(_record(each.SerializeToString()) for each in events)
        try:
            # A disk with little room takes a part of the data at a time.
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _record(data: bytes) -> bytes:
    """Returns a record of an events file: the length and the content, each before its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    length_sum = struct.pack("<I", masked_crc32c(length))
    data_sum = struct.pack("<I", masked_crc32c(data))
    return b"".join((length, length_sum, data, data_sum))


class _Gifs:
    """The new videos of a run as GIFs, made one at a time by ffmpeg in another process, so that the
    caller does not wait."""

    def __init__(self, run_dir: Path, part: Path) -> None:
        """Begin without a conversion.

        Args:
            run_dir: the folder of the run.
            part: the file that a conversion writes.
        """
        self._videos = NewVideos(run_dir)
        self._part = part
        self._waiting: deque[Path] = deque(maxlen=GIFS_WAITING)
        self._process: subprocess.Popen[bytes] | None = None  # the conversion that is in progress
        self._deadline_s = 0.0  # when it is ended

        with suppress(OSError):
            part.unlink()  # a run that was killed has left it

    def find_new(self) -> None:
        """Add the new videos to those that wait, of which the oldest may be left out."""
        self._waiting.extend(self._videos.take())

    @property
    def busy(self) -> bool:
        """Whether a video waits, or is being converted."""
        return self._process is not None or bool(self._waiting)

    def next_gif(self) -> bytes | None:
        """Returns the GIF of a conversion that has ended, and begins the next one; never blocks.

        Called again and again, it does one step at a time: it begins a conversion, ends one that
        takes too long, or returns the result; None without a result.
        """
        self.find_new()
        if not self.busy:
            return None
        if self._process is None:
            self._start(self._waiting.popleft())
            return None
        if self._process.poll() is None:
            if time.monotonic() > self._deadline_s:
                self.close()
            return None

        exit_code, self._process = self._process.returncode, None
        gif = None
        with suppress(OSError):
            if exit_code == 0 and self._part.stat().st_size <= GIF_NBYTES:
                gif = self._part.read_bytes()
            self._part.unlink()
        return gif

    def _start(self, video: Path) -> None:
        """Begin the conversion of a video; without ffmpeg the video is left out."""
        if find_spec("imageio_ffmpeg") is None:
            return
        from imageio_ffmpeg import get_ffmpeg_exe

        with suppress(OSError, RuntimeError):
            command = [get_ffmpeg_exe(), "-v", "quiet", "-nostdin", "-y", "-threads", "1"]
            command += ["-t", str(GIF_S), "-i", str(video), "-filter_complex", GIF_FILTER]
            command += ["-f", "gif", str(self._part)]
            self._process = subprocess.Popen(
                python("penstock.monitor.tensorboard", os.getpid(), *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                umask=0o077,
            )
            self._deadline_s = time.monotonic() + CONVERSION_S

    def close(self) -> None:
        """End a conversion, of which nothing remains."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._part.unlink(missing_ok=True)


def main() -> None:
    """Main function of the process of a conversion: become the command, which ends with the run."""
    parent_pid, *command = sys.argv[1:]
    die_with(int(parent_pid), signal.SIGKILL)
    os.nice(19)
    os.execv(command[0], command)


def _hyper_parameters(config: Json) -> dict[str, str | bool | float]:
    """Returns the options of a config by their dotted names, without null. Lists are text."""
    return {
        name: value if isinstance(value, str | bool | int | float) else json.dumps(value)
        for name, value in flat(config)
        if value is not None
    }


if __name__ == "__main__":
    main()
