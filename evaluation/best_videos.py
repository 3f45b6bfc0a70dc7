"""Videos of the best weights of a run, recorded while it trains: an episode for each new best.

The evaluator starts a process of its own for each (`penstock.evaluation.best_video_process`), at
the lowest priority, so that an environment that cannot draw, or a renderer that crashes or hangs,
costs a note and no evaluation. The processes take at most about `SHARE` of a core: after a long
recording the next one waits, and then shows the best weights of that time. The first seconds of a
run, in which small environments are solved, are left alone.

In `RUN/videos` the newest `KEPT` are kept as `best-<trained steps>.mp4`, each with its decisions.
`.best-videos.json` there lists them by inode, size and time: a file is deleted only if it is still
the one that was written.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.core.notes import note_logger
from penstock.core.processes import python

FOLDER = "videos"
LIST = ".best-videos.json"
PART = ".best.part.mp4"
KEPT = 5
FIRST_S = 10.0  # after the start of the evaluator
SHARE = 0.05  # of a core, for all recordings
LIMIT_S = 600.0  # for one recording, on a host that does much else
LAST_S = 15.0  # for the recording that runs when the run has ended
ANSWER_NBYTES = 1 << 16
LIST_NBYTES = 1 << 16
POLL_S = 0.05

logger = note_logger(__name__)


class BestVideos:
    """Records the best weights of a run when asked to, one recording at a time."""

    def __init__(self, run_dir: Path, seed: int, *, wanted: bool) -> None:
        """seed: of the game that all videos of the run show. ``wanted``: `eval.video`."""
        self._run_dir, self._seed = run_dir, seed
        self._records = wanted and find_spec("imageio_ffmpeg") is not None
        self._is_due = False  # there is a best without a video
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = b""
        self._began_s = time.monotonic()
        self._first_s = self._next_s = self._began_s + FIRST_S

    def request(self) -> None:
        """There is a new best: record it, as soon as its turn comes."""
        self._is_due = self._records

    def poll(self) -> None:
        """Start a recording that is due, or see whether the present one has ended. Never blocks."""
        now_s = time.monotonic()
        if self._process is not None:
            if self._has_ended(self._process):
                self._end(self._process.wait())
            elif now_s > self._began_s + LIMIT_S:
                self._stop(f"a recording has not ended within {LIMIT_S:g} s")
        elif self._is_due and now_s >= self._next_s:
            self._start()

    def finish(self, beat: Callable[[], bool]) -> None:
        """Record the last best, within `LAST_S`, unless the run was short. The rest of the run has
        ended, so `SHARE` does not matter. ``beat`` is called meanwhile, and returns whether to
        stop."""
        now_s = time.monotonic()
        if now_s >= self._first_s:
            self._next_s = now_s
        while time.monotonic() < now_s + LAST_S and not beat():
            self.poll()
            if self._process is None and (not self._is_due or now_s < self._next_s):
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the recording, and remove what there is of it."""
        if self._process is not None:
            self._kill(self._process)

    def _start(self) -> None:
        self._is_due, self._answer, self._began_s = False, b"", time.monotonic()
        arguments = os.getpid(), self._run_dir, self._seed
        command = python("penstock.evaluation.best_video_process", *arguments)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # its errors go to the log of this process
                process_group=0,  # with its encoder
            )
        except OSError as error:
            self._give_up(str(error))

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout is not None
        while select.select([process.stdout], [], [], 0)[0]:
            data = os.read(process.stdout.fileno(), ANSWER_NBYTES)
            if not data:
                return True
            self._answer = (self._answer + data)[:ANSWER_NBYTES]
        return process.poll() is not None

    def _end(self, code: int) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        process.stdout.close()
        try:
            answer = json.loads(self._answer)
        except ValueError:
            answer = {"error": f"its process has ended with code {code}"}
        if "skipped" in answer:  # it cannot be shown
            self._records = False
        elif "error" in answer:
            self._give_up(str(answer["error"]))
        else:
            keep(self._run_dir / FOLDER, str(answer["file"]))
            self._next_s = time.monotonic() + float(answer["cpu_s"]) / SHARE

    def _stop(self, reason: str) -> None:
        assert self._process is not None
        self._kill(self._process)
        self._give_up(reason)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        with suppress(OSError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        with suppress(OSError):
            (self._run_dir / FOLDER / PART).unlink()

    def _give_up(self, reason: str) -> None:
        self._records = self._is_due = False
        logger.info(
            "no further videos of the best weights are recorded (%s); the run continues, and "
            "eval.video=false turns them off",
            " ".join(reason.split())[:500],
        )


def keep(folder: Path, name: str) -> None:
    """Add a video, and its decisions, to the list of those that were recorded, and delete the
    oldest beyond `KEPT`; only files that are still as they were listed."""
    listed = [entry for entry in _listed(folder) if entry["video"] != name]
    files = {each: _identity(folder / each) for each in (name, f"{name}.json")}
    listed.append({"video": name, "files": files})
    for entry in listed[:-KEPT]:
        for each, identity in entry["files"].items():
            if identity is not None and _identity(folder / each) == identity:
                with suppress(OSError):
                    (folder / each).unlink()
    part = folder / f"{LIST}.part"
    with suppress(OSError):
        part.write_text(json.dumps(listed[-KEPT:]) + "\n")
        part.replace(folder / LIST)


def _listed(folder: Path) -> list[dict[str, Any]]:
    """The entries of the list; none of a list that is damaged. Names lie in the folder itself."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, ValueError, RecursionError):
        with open(folder / LIST, "rb") as file:
            entries = json.loads(file.read(LIST_NBYTES))
        for entry in entries if isinstance(entries, list) else ():
            files = entry.get("files") if isinstance(entry, dict) else None
            if isinstance(files, dict) and all(name == Path(name).name for name in files):
                found.append({"video": entry.get("video"), "files": files})
    return found


def _identity(path: Path) -> list[int] | None:
    """Inode, size and time of a regular file, which differ if it was replaced or written to."""
    with suppress(OSError):
        about = path.lstat()
        return [about.st_ino, about.st_size, about.st_mtime_ns]
    return None
