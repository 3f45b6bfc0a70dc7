"""Running the supervisor over tiny roles, as a program of its own that a test can signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from train_command import Command

HERE = Path(__file__).parent
WAIT_S = 20.0


class Supervised:
    """A supervisor over roles of `tiny_roles`, in the folder of the test."""

    def __init__(self, folder: Path, **plan: Any) -> None:
        self.folder = folder
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "tiny_supervisor.py"), json.dumps({"dir": "run", **plan})],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, text: str) -> None:
        """Read what it tells until a line holds ``text``."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line:
                return
        raise AssertionError(f"the supervisor ended without saying {text!r}")

    def wait_for_log(self, name: str, text: str) -> None:
        """Wait until a role has written ``text`` to its log."""
        ends_s = time.monotonic() + WAIT_S
        while not self._log_path(name).exists() or text not in self.log(name):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_s, f"{name} did not write {text!r}"
            time.sleep(0.02)

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def result(self) -> dict[str, Any]:
        """Wait for its end: notes, last metrics, failure, exit code, reason, time taken."""
        start_s = time.monotonic()
        out, err = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, err
        first, second = (json.loads(line) for line in out.splitlines())
        return {**first, **second, "took_s": time.monotonic() - start_s}

    @property
    def saved(self) -> bool:
        return (self.folder / "run" / "saved").exists()

    def log(self, name: str) -> str:
        return self._log_path(name).read_text()

    def _log_path(self, name: str) -> Path:
        return self.folder / "run" / "logs" / f"{name}.log"


@pytest.fixture
def supervise(tmp_path: Path, nothing_left_behind: None) -> Iterator[Callable[..., Supervised]]:
    """Start a supervisor: ``supervise(actors=["work"], learner="learn", limits={...})``."""
    started: list[Supervised] = []

    def start(**plan: Any) -> Supervised:
        started.append(Supervised(tmp_path, **plan))
        return started[-1]

    yield start
    for run in started:
        if run.process.poll() is None:
            run.signal(signal.SIGKILL)
        run.process.communicate()


@pytest.fixture
def penstock(tmp_path: Path, nothing_left_behind: None) -> Callable[..., Command]:
    """Start a command in the folder of the test, at whose end it is stopped."""
    return partial(Command, tmp_path)
