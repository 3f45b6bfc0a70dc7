"""One command of Penstock as a session runs it: its processes, what it says, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.vitals import alive
from penstock.configs.errors import UserError
from penstock.monitor.supervisor_client import reach

SUPERVISOR = "supervisor"
STARTING = "starting"
WITHOUT_PHASES = ("relay", "evaluator", "server")  # a beat says that they have started


class Broken(Exception):
    """Something that must hold does not; the text says what."""


class NotHereError(Exception):
    """This machine cannot have the fault or the topology; the text says why."""


@dataclass(frozen=True)
class Role:
    """A living process of a program; ``name`` is as the supervisor has it, such as actor-1."""

    name: str
    pid: int
    phase: str
    program: Program

    @property
    def kind(self) -> str:
        return self.name.rpartition("-")[0] or self.name


class Program:
    """``argv`` started with ``environ``, its output in files in ``folder``; ``run_dir`` is where
    its supervisor writes, if it has one."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        run_dir: Path | None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.run_dir = run_dir
        self._environ = dict(environ)
        self._folder = folder
        self._starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Start it, with ``more`` arguments; its output goes to new files."""
        self._starts += 1
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.process = subprocess.Popen(
                [*self.argv, *more],
                cwd=self._folder,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def said(self) -> str:
        """What it has written to standard error since its last start."""
        return self._file("err").read_text(errors="replace")

    def answer(self) -> dict[str, Any]:
        """The object that --json ends standard output with; {} where there is none."""
        lines = self._file("out").read_text(errors="replace").splitlines()
        try:
            value = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def roles(self) -> list[Role]:
        """Its processes that live, the supervisor first; none where it does not answer."""
        if not self.runs:
            return []
        found = [Role(SUPERVISOR, self.pid, "running", self)]
        if self.run_dir is None:
            return found
        try:
            report = reach(str(self.run_dir)).report
        except UserError:
            return found
        for process in (report or {}).get("processes", []):
            if process["pid"] is not None and alive(process["pid"]):
                found.append(Role(process["name"], process["pid"], _phase(process), self))
        return found

    def all_names(self) -> int:
        """How many roles its supervisor has, alive or not."""
        assert self.run_dir is not None
        try:
            report = reach(str(self.run_dir)).report
        except UserError:
            return 0
        return len((report or {}).get("processes", []))

    def end(self, within_s: float, signum: int | None = signal.SIGTERM) -> int:
        """Signal it, if it runs, and wait for its end; its exit code. Raises Broken where it goes
        on for longer than ``within_s``."""
        assert self.process is not None
        if self.runs and signum is not None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Broken(f"{self.name} has not ended within {within_s:.1f} s") from None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def _file(self, kind: str) -> Path:
        return self._folder / f"{self.name}-{self._starts}.{kind}"


def _phase(process: Mapping[str, Any]) -> str:
    """What it is in; "starting" until it works."""
    if process["silent_s"] is None:
        return STARTING
    if process["name"].partition("-")[0] in WITHOUT_PHASES:
        return "working"
    return str(process["phase"])


def wait_until(condition: Callable[[], object], within_s: float, step_s: float = 0.03) -> bool:
    """Whether ``condition`` came to hold within the time."""
    ends_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > ends_s:
            return False
        time.sleep(step_s)
    return True
