"""A trial that a scheduler drives: a run in a process, which can be saved, ended and continued.

It continues from its own checkpoint, or from that of another trial with other options. In the
second case the run starts again in the same folder, by ``--resume-from`` a copy of that checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.files import open_private
from penstock.core.run_dir import Resume, has_checkpoint, in_use
from penstock.launch.engines.ray_agent import NOT_INHERITED
from penstock.launch.run_group import run_command
from penstock.launch.tuning.space import Options, overrides_of, with_fixed_cores
from penstock.launch.tuning.trials import (
    Metric,
    ProgressReader,
    TrialProgress,
    add_start,
    folder_of,
    nbytes_of,
)
from penstock.learner.checkpoints import checkpoint_history as history
from penstock.learner.checkpoints.checkpoint_format import FILE
from penstock.monitor.run_folder.record import EVALUATIONS
from penstock.monitor.supervisor_client import save

REPORT_S = 2.0
"""Longest time between two reports, which is the delay of an order to stop."""
POLL_S = 0.1
SAVE_S = 60.0
"""How long a run may take to save."""
RECEIVED = "received"
"""Folder in that of a run's checkpoints, for a copy of a checkpoint of another trial."""
ORIGIN = "trial.json"
"""File beside a checkpoint that is handed over: the number of its trial, and its steps."""
OUTPUT = "output.log"
"""File for the output of the trial's processes."""
OUTPUT_NBYTES = 1 << 16
"""How much of the end of that file is read."""
GPUS = "CUDA_VISIBLE_DEVICES"
"""Variable with the numbers of the GPUs that a process may use."""


@dataclass(frozen=True)
class TrialSettings:
    """What the trials of a sweep have in common."""

    target: str
    """As of `penstock train`; the path of a file is absolute."""
    overrides: Sequence[str]
    """``key=value``, for all trials."""
    folder: Path
    """Of the sweep, absolute."""
    cwd: Path
    """The current folder of the command, from which environments of the user are imported."""
    metric: Metric
    most_steps: int | None
    """Agent steps at which a run ends, if that is its limit."""
    grace_s: float
    """Seconds that a run may take to end."""
    gpus: str | None = None
    """The variable `GPUS` of the command, which Ray changes; None: it is not set."""


class TrialRun:
    """The run of one trial, over several processes one after another."""

    def __init__(self, settings: TrialSettings, number: int, options: Options) -> None:
        """Start nothing yet.

        Args:
            settings: what all trials have in common.
            number: number of the trial.
            options: its values of the space's parameters.
        """
        self._settings = settings
        self._number = number
        self._options = options
        self._path = folder_of(settings.folder, number)
        self._most_steps = math.inf if settings.most_steps is None else settings.most_steps
        self._process: subprocess.Popen[bytes] | None = None
        self._received: Path | None = None
        """Folder of the checkpoint of another trial, to begin from; None: there is none."""
        self._origin: Mapping[str, Any] = {}
        """Number and agent steps of the trial whose checkpoint was loaded; empty without one."""

    def step(self) -> tuple[TrialProgress, bool]:
        """Wait for the next evaluation, for the end of the run, or for `REPORT_S`.

        The first call starts the run.

        Returns: the progress, and whether the run has ended.

        Raises:
            RuntimeError: the run has failed; the message is its error.
        """
        if self._process is None:
            self._process = self._start()

        evaluations = self._path / EVALUATIONS
        previous_nbytes = nbytes_of(evaluations)
        deadline_s = time.monotonic() + REPORT_S
        while (code := self._process.poll()) is None and time.monotonic() < deadline_s:
            if nbytes_of(evaluations) != previous_nbytes:
                break
            time.sleep(POLL_S)
        if code:
            raise RuntimeError(last_output(self._path))

        progress = self._reader.read()
        has_ended = code is not None
        steps = max(progress.trained_steps, progress.scored_steps)
        if not has_ended and steps >= self._most_steps:
            # The run is about to end. A decision would start it again, for nothing.
            progress = replace(progress, score=None, scored_steps=0)
        return progress, has_ended

    def save(self, folder: Path) -> None:
        """Have the run save, and copy its newest checkpoint to ``folder``.

        A file `ORIGIN` beside it says which trial has saved it, and after how many agent steps.
        """
        reply: dict[str, Any] = {}
        if self._process is not None and self._process.poll() is None:
            with suppress(UserError):  # it has just ended, and has saved
                reply = save(str(self._path), SAVE_S)

        steps = reply.get("trained_steps") or self._reader.read().trained_steps
        shutil.copyfile(self._path / "checkpoints" / "last" / FILE, folder / FILE)
        origin = {"trial": self._number, "trained_steps": steps}
        (folder / ORIGIN).write_text(json.dumps(origin))

    def load(self, folder: Path) -> None:
        """Begin from what a trial has saved in ``folder``; called before the first `step`.

        This trial's own run continues from its newest checkpoint, which may be newer than that.
        """
        self._origin = json.loads((folder / ORIGIN).read_text())
        if self._origin["trial"] == self._number and has_checkpoint(self._path):
            return  # what the run saved when it ended is newer

        self._received = self._path / "checkpoints" / RECEIVED
        self._received.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(folder / FILE, self._received / FILE)

    def end(self) -> None:
        """End the run, which saves."""
        process, self._process = self._process, None
        if process is None:
            return

        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(self._settings.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()  # its roles end with it
            process.wait()

        # A run that has saved needs the received checkpoint no more.
        if has_checkpoint(self._path):
            history.remove(self._path / "checkpoints" / RECEIVED)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process of the run, and record the start.

        Begins from the received checkpoint if there is one, otherwise from the run's own.
        """
        # An earlier run of the trial may be about to end.
        settings = self._settings
        deadline_s = time.monotonic() + settings.grace_s
        while in_use(self._path) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

        resume: Resume = "must" if has_checkpoint(self._path) else "no"
        source = ""
        from_trial = None
        if self._received is not None:
            resume = "no"
            source = str(self._received)
            from_trial = self._origin["trial"]
            self._drop_own_checkpoints()
        steps = self._origin.get("trained_steps", 0)
        add_start(self._path, self._options, steps, from_trial)
        self._reader = ProgressReader(self._path, settings.metric)

        overrides = with_fixed_cores(
            settings.target, [*settings.overrides, *overrides_of(self._options)]
        )
        with open(self._path / OUTPUT, "ab", opener=open_private) as output:
            return subprocess.Popen(
                run_command(settings.target, overrides, self._path, resume, source),
                cwd=settings.cwd,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the command
            )

    def _environment(self) -> dict[str, str]:
        """Returns the command's environment, without what Ray has set for its own worker."""
        removed = (*NOT_INHERITED, GPUS)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(removed)
        }
        if self._settings.gpus is not None:
            environment[GPUS] = self._settings.gpus
        return environment

    def _drop_own_checkpoints(self) -> None:
        """Remove the checkpoints whose training is given up.

        The best one and files of the user stay.
        """
        last = self._path / "checkpoints" / "last"
        for folder in (last, *history.older(last)):
            history.remove(folder)


def last_output(path: Path) -> str:
    """Returns the error of a trial that has failed, from its folder.

    It is in the last line that its process has printed: a summary as JSON, or a sentence.
    """
    output = b""
    with suppress(OSError):
        output = (path / OUTPUT).read_bytes()[-OUTPUT_NBYTES:]
    lines = output.decode(errors="replace").splitlines()
    if not lines:
        return "its process has printed nothing"

    try:
        return str(json.loads(lines[-1])["error"])
    except (ValueError, LookupError, TypeError):
        return lines[-1]
