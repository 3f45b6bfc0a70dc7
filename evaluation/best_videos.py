"""Videos of the weights of a run, recorded beside it: of each new best, or of the newest.

The evaluator starts a process for each new best (`penstock.evaluation.recording_process`), at the
lowest priority, so that an environment that cannot draw, or a renderer that crashes or hangs, costs
a note and no evaluation. The processes take at most about `SHARE` of a core: after a long recording
the next one waits, and then shows the best weights of that time. The first seconds of a run, in
which small environments are solved, are left alone.

That process writes `RUN/videos/best-at-<trained steps>.mp4` with its decisions, and deletes all but
the newest of these files.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from penstock.configs.errors import UserError
from penstock.core.notes import note_logger
from penstock.core.processes import python
from penstock.evaluation.decisions import decisions_path

FOLDER = "videos"
PART = ".recording-"
"""The name of a video begins with this until the video is complete."""
FIRST_S = 10.0
"""Seconds after the start of the evaluator before which no recording begins."""
SHARE = 0.05
"""Share of a core that all recordings of a run take together."""
LIMIT_S = 600.0
"""Seconds after which a recording is ended: it is slow on a host that does much else."""
NOW_S = 120.0
"""Seconds after which a recording is ended that a viewer waits for."""
LAST_S = 15.0
"""Seconds for the video of the last best, after the run has ended."""
ANSWER_NBYTES = 1 << 16
END_S = 2.0
"""Seconds in which the process of a recording has to exit, once it has answered."""
POLL_S = 0.05

Checkpoint = Literal["best", "last"]

logger = note_logger(__name__)


class Recording:
    """A process that records one episode, with its encoder."""

    def __init__(self, run_dir: Path, which: Checkpoint, seed: int, cwd: str | None = None) -> None:
        """Start the process.

        Args:
            run_dir: folder of the run.
            which: the checkpoint to play.
            seed: seed of the environment, which gives the episode.
            cwd: the folder in which the run was started, by default the present one.

        Raises:
            OSError: if the process cannot be started.
        """
        part = f"{PART}{secrets.token_hex(8)}.part"
        self._part = run_dir.absolute() / FOLDER / part
        self._output = b""  # what the process has written so far
        self._started_s = time.monotonic()

        arguments = os.getpid(), run_dir.absolute(), which, seed, part
        # Errors of the process go where those of this process go.
        self._process = subprocess.Popen(
            python("penstock.evaluation.recording_process", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
            cwd=cwd,
        )

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_s

    def answer(self) -> dict[str, Any] | None:
        """Returns the result of the recording, None while it records. Never blocks for long.

        It has the fields "file" and "cpu_s"; or a sentence, in "skipped" if the environment cannot
        be shown, else in "error".
        """
        if not self._read_output():
            return None

        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            # A renderer hangs as it is unloaded.
            self.kill()
            code = -signal.SIGKILL
        assert self._process.stdout is not None
        self._process.stdout.close()

        try:
            return dict(json.loads(self._output))
        except ValueError:
            return {"error": f"its process has ended with code {code}"}

    def _read_output(self) -> bool:
        """Read what the process has written, and return whether that is all."""
        stdout = self._process.stdout
        assert stdout is not None
        while select.select([stdout], [], [], 0)[0]:
            data = os.read(stdout.fileno(), ANSWER_NBYTES)
            if not data:
                return True
            self._output = (self._output + data)[:ANSWER_NBYTES]
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process, and remove what there is of the video."""
        with suppress(OSError):  # after its end
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        for path in (self._part, decisions_path(self._part)):
            with suppress(OSError):
                path.unlink()


class BestVideos:
    """Records the best weights of a run when asked to, one recording at a time."""

    def __init__(self, run_dir: Path, seed: int, *, enabled: bool) -> None:
        """Record nothing yet.

        Args:
            run_dir: folder of the run.
            seed: seed of the environment in all videos of the run, which begin alike.
            enabled: the option `eval.video`.
        """
        self._run_dir = run_dir
        self._seed = seed
        # False for good after a recording that failed, or if the environment cannot be shown.
        self._records = enabled and find_spec("imageio_ffmpeg") is not None
        self._is_due = False  # a best without a video
        self._recording: Recording | None = None

        # Times of the first recording and of the next one, at the earliest.
        self._first_s = time.monotonic() + FIRST_S
        self._next_s = self._first_s

    def request(self) -> None:
        """Record the new best, as soon as its turn comes."""
        self._is_due = self._records

    def poll(self) -> None:
        """Start a recording that is due, or see whether the present one has ended."""
        recording = self._recording
        if recording is None:
            if self._is_due and time.monotonic() >= self._next_s:
                self._start()
        elif (answer := recording.answer()) is not None:
            self._recording = None
            self._on_answer(answer)
        elif recording.seconds > LIMIT_S:
            self.close()
            self._give_up(f"a recording has not ended within {LIMIT_S:g} s")

    def finish(self, beat: Callable[[], bool]) -> None:
        """Record the last best, within `LAST_S`, unless the run was short.

        The rest of the run has ended, so `SHARE` does not matter any more.

        Args:
            beat: called meanwhile; returns whether to stop.
        """
        now_s = time.monotonic()
        if now_s >= self._first_s:
            self._next_s = now_s
            if self._is_due or self._recording is not None:
                logger.info("the best weights are recorded; Ctrl-C ends the run without that")

        while time.monotonic() < now_s + LAST_S and not beat():
            self.poll()
            can_start = self._is_due and now_s >= self._next_s
            if self._recording is None and not can_start:
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the recording, if there is one."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.kill()

    def _start(self) -> None:
        """Start the recording that is due."""
        self._is_due = False
        try:
            self._recording = Recording(self._run_dir, "best", self._seed)
        except OSError as error:
            self._give_up(str(error))

    def _on_answer(self, answer: dict[str, Any]) -> None:
        """A recording has ended with this ``answer``: decide when the next one may begin."""
        if "skipped" in answer:
            self._stop_recording()
        elif "error" in answer:
            self._give_up(str(answer["error"]))
        else:
            self._next_s = time.monotonic() + float(answer["cpu_s"]) / SHARE

    def _stop_recording(self) -> None:
        """Record no further videos."""
        self._records = False
        self._is_due = False

    def _give_up(self, reason: str) -> None:
        """Record no further videos, and give the user the ``reason``."""
        self._stop_recording()
        logger.info(
            "no further videos of the best weights are recorded (%s); the run continues, and "
            "eval.video=false turns them off",
            " ".join(reason.split())[:500],
        )


def record_newest(
    run_dir: Path, cwd: str, cancels: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Record an episode by `checkpoints/last` of a run as `videos/now.mp4`, and wait for it.

    Args:
        run_dir: folder of the run.
        cwd: the folder in which the run was started.
        cancels: returns whether to end the recording.

    Returns: the fields of `Recording.answer`, with "file".

    Raises:
        UserError: if there is no video in the end, with the reason.
    """
    try:
        recording = Recording(run_dir, "last", seed=0, cwd=cwd)
    except OSError as error:
        raise UserError(f"no recording can be started: {error}") from error

    while (answer := recording.answer()) is None:
        if cancels():
            recording.kill()
            raise UserError("the recording was cancelled, as the server of the page ends")
        if recording.seconds > NOW_S:
            recording.kill()
            raise UserError(
                f"the recording has not ended within {NOW_S:g} s; use penstock record, which has "
                "no limit"
            )
        time.sleep(POLL_S)

    if "file" not in answer:
        raise UserError(str(answer.get("error", answer.get("skipped"))))
    return answer
