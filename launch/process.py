"""One child process: its control channel, status page and pidfd, from its start to its burial.

It runs in a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, and
leads a process group, so that what an environment starts dies with it. The pid stays ours until
`bury`: a process that has ended and was not waited for keeps its number.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import penstock
from penstock.core.control import Channel, Message
from penstock.launch.ranks import Place
from penstock.launch.topology import RoleSpec
from penstock.profiling.ledger import Part, now_in
from penstock.profiling.status import Phase, StatusPage

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LOG_TAIL_NBYTES = 8192


class Child:
    """A running role. Create it in the main thread: it dies with the thread that created it."""

    def __init__(
        self,
        spec: RoleSpec,
        incarnation: int,
        arguments: Mapping[str, Any],
        log: Path,
        keep_fds: tuple[int, ...] = (),
    ) -> None:
        """Start it; ``keep_fds`` are inherited and only kept open."""
        self.spec = spec
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._backlog: deque[Message] = deque()
        self.channel, theirs = Channel.pair()
        self.status, status_fd = StatusPage.create()
        self.status.incarnation = incarnation
        self.send({**arguments, **_identity(spec, incarnation)})
        fds = (theirs.fileno(), status_fd)
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    python("penstock.launch.role", spec.name, *fds),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(*fds, *keep_fds),
                    start_new_session=True,
                    env={
                        **os.environ,
                        **dict.fromkeys(THREAD_VARIABLES, str(spec.threads)),
                    },
                )
        finally:
            theirs.close()
            os.close(status_fd)
        self.pidfd = os.pidfd_open(self._process.pid)

    def send(self, message: Message) -> None:
        """Send a message, as soon as the child has room for it."""
        self._backlog.append(message)
        self.flush()

    def flush(self) -> None:
        while self._backlog and self.channel.send(self._backlog[0]):
            self._backlog.popleft()

    def kill(self, signum: int) -> None:
        """Signal the process; SIGKILL goes to all that it started too."""
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._process.pid, signum)
            signal.pidfd_send_signal(self.pidfd, signum)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def phase(self) -> str:
        if self.status.phase == Phase.ENVIRONMENT and self.part is Part.INFER:
            return Phase.INFERENCE.name.lower()
        try:
            return Phase(self.status.phase).name.lower()
        except ValueError:
            return str(self.status.phase)

    @property
    def part(self) -> Part | None:
        """What its main thread is in the middle of."""
        lane = self.status.lanes.get("main")
        now = now_in(lane) if lane is not None else None
        return now[0] if now else None

    @property
    def place(self) -> Place:
        """Where a learner is."""
        status = self.status
        seconds = time.monotonic() - status.phase_s if status.phase_s else 0.0
        if status.phase == Phase.REDUCING:
            return Place("all-reduce", seconds, status.reduction)
        return Place("wait_data" if status.phase == Phase.WAITING else self.phase, seconds)

    def bury(self) -> int:
        """Wait for its end, end what it left behind, free everything; returns its exit code."""
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        os.close(self.pidfd)
        self.channel.close()
        self.status.close()
        return code

    def log_tail(self) -> str:
        """The last that this incarnation wrote to its log."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - LOG_TAIL_NBYTES))
            return file.read().decode(errors="replace").strip()


def role_arguments(run_dir: Path, runtime_dir: Path) -> dict[str, Any]:
    """What every role is told; the defaults of what only some commands set."""
    return {
        "run_dir": str(run_dir.absolute()),
        "runtime_dir": str(runtime_dir),
        "config": None,
        "resume": "no",
        "transport": "auto",
        "curve": None,
        "insecure": False,
        "allow": [],
    }


def _identity(spec: RoleSpec, incarnation: int) -> Message:
    return {
        "role": spec.role,
        "index": spec.index,
        "incarnation": incarnation,
        "main": spec.main,
        "address": spec.address,
        "learner": spec.learner,
        "store": asdict(spec.store) if spec.store else None,
        "nice": spec.nice,
        "parent_pid": os.getpid(),
        # A learner can still save what it has learned; nobody else has anything to lose.
        "death_signal": int(signal.SIGTERM if spec.essential else signal.SIGKILL),
    }


def python(module: str, *arguments: object) -> list[str]:
    """The command that runs a module with this interpreter.

    ``-P`` keeps the current folder from standing in front of the libraries, where a user's
    ``queue.py`` or a folder named ``penstock`` would shadow them; unless Penstock itself is run
    from there.
    """
    here = Path(penstock.__file__).parents[1].samefile(os.curdir)
    return [sys.executable, *([] if here else ["-P"]), "-m", module, *map(str, arguments)]
