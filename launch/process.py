"""The supervisor's handle on one role: its control channel, status page and processes.

Between the supervisor and the role's process stand the two processes of `penstock.launch.shim`,
which end whatever the role leaves behind. The supervisor is the parent of the first, the guard, and
reads the role's pid from the status page. A role has ended when its own process has: the guard's
end does not prove it, since the guard may have been killed.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.control import Channel, Message
from penstock.core.processes import began_ticks, python
from penstock.core.role_spec import RoleSpec
from penstock.monitor.ranks import RankPhase
from penstock.profiling.ledger import Part, now_in
from penstock.profiling.status import ROLE_AT, TAIL_AT, TAIL_NBYTES, Phase, StatusPage

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LINGER_S = 10.0  # from the role's end until a guard that still runs is killed
GRACE_S = 10.0
WAIT_S = 0.1
MARK = "PENSTOCK_ROLE"  # in the environment of a role and of what it starts
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); import shim; shim.main()"
ADVICE = {
    errno.EMFILE: "raise the limit of `ulimit -n`, or have fewer actors",
    errno.ENFILE: "the machine's limit is fs.file-max",
    errno.EAGAIN: "raise the limit of `ulimit -u` or of the container's processes",
    errno.ENOMEM: "free memory, or have fewer actors",
}


class Child:
    """A running role and its shim."""

    def __init__(
        self,
        spec: RoleSpec,
        incarnation: int,
        arguments: Mapping[str, Any],
        log: Path,
        keep_fds: tuple[int, ...] = (),
    ) -> None:
        """Start the role; ``keep_fds`` are inherited by it and only kept open.

        Raises:
            OSError: no process, descriptor or memory is left. Nothing was started.
        """
        self.spec = spec
        self.killed = False  # by the supervisor, with SIGKILL
        self._backlog: deque[Message] = deque()
        self._role_fd: int | None = None
        self._role_gone = False
        self._spare: list[int] = []  # descriptors reserved for the role's pidfd
        self._kill_at_s: float | None = None
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        # A learner can still save what it has learned; the others have nothing to lose.
        self._death_signal = signal.SIGTERM if spec.essential else signal.SIGKILL
        self._grace_s = arguments.get("grace_s", GRACE_S) if spec.essential else 0.0
        with ExitStack() as undo:
            self.channel, theirs = Channel.pair()
            undo.callback(self.channel.close)
            with theirs:
                self.status, status_fd = StatusPage.create()
                undo.callback(self.status.close)
                undo.callback(self._release)
                self._spare = [status_fd]
                self._spare.append(os.dup(status_fd))
                self.status.incarnation = incarnation
                self.send({**arguments, **_identity(spec, incarnation)})
                self._process = self._start(log, theirs.fileno(), status_fd, keep_fds)
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()

    def _start(
        self, log: Path, control: int, status: int, keep_fds: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        page = ",".join(map(str, (ROLE_AT, TAIL_AT, TAIL_NBYTES)))
        fds = ",".join(map(str, (control, *keep_fds)))
        ends = int(self._death_signal), self._grace_s
        plan = (os.getpid(), status, page, fds, *ends, log, self._mark)
        role = python("penstock.launch.role", self.spec.name, control, status)
        shim = [sys.executable, "-I", "-S", "-c", BOOT, str(Path(__file__).parent)]
        return subprocess.Popen(
            [*shim, *map(str, plan), *role],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(control, status, *keep_fds),
            start_new_session=True,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(self.spec.threads))},
        )

    def send(self, message: Message) -> None:
        """Send a message as soon as the channel has room for it."""
        self._backlog.append(message)
        self.flush()

    def flush(self) -> None:
        while self._backlog and self.channel.send(self._backlog[0]):
            self._backlog.popleft()

    def kill(self, signum: int) -> None:
        """Signal the role. Before its process exists, SIGTERM and SIGKILL end its shim."""
        self._find_role()
        with suppress(ProcessLookupError):
            if self._role_fd is not None:
                signal.pidfd_send_signal(self._role_fd, signum)
            elif not self.began and signum != signal.SIGUSR1:
                ends = signum in (signal.SIGTERM, signal.SIGKILL)
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL if ends else signum)

    @property
    def pid(self) -> int:
        """Of the role; of its guard, before the role begins."""
        return self.status.role_pid or self._process.pid

    @property
    def began(self) -> bool:
        """Whether there is or was a process of the role."""
        return self.status.role_pid != 0

    def ended(self, now_s: float) -> bool:
        """Whether the role and its guard have ended. Call it regularly: where one of them has ended
        and the other has not in time, it kills the other.

        Args:
            now_s: CLOCK_MONOTONIC, in seconds.
        """
        self._find_role()
        guard_ended, role_ended = _ended(self.pidfd), self._role_gone
        if self._role_fd is not None:
            role_ended = _ended(self._role_fd)
        if guard_ended and (role_ended or not self.began or self.status.role_cleared):
            return True
        if not guard_ended and not role_ended:
            return False
        if self._kill_at_s is None:
            self._kill_at_s = now_s + (self._grace_s if guard_ended else LINGER_S)
            if guard_ended:
                self.kill(self._death_signal)
        elif now_s >= self._kill_at_s:
            if guard_ended:
                self.kill(signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return False

    def _find_role(self) -> None:
        """Open a pidfd of the process that the status page names, unless its pid was reused."""
        if self._role_fd is not None or self._role_gone or not self.began:
            return
        self._release()
        pid = self.status.role_pid
        try:
            role_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._role_gone = True
        except OSError:  # no descriptor is left: another time
            return
        else:
            began = began_ticks(pid)
            if began == self.status.role_began:
                self._role_fd = role_fd
                return
            self._role_gone = began is not None or _ended(role_fd)
            os.close(role_fd)

    def _release(self) -> None:
        while self._spare:
            os.close(self._spare.pop())

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
        """What its main thread does now."""
        lane = self.status.lanes.get("main")
        now = now_in(lane) if lane is not None else None
        return now[0] if now else None

    @property
    def place(self) -> RankPhase:
        """What a learner does, and for how long it has."""
        status = self.status
        seconds = time.monotonic() - status.phase_s if status.phase_s else 0.0
        if status.phase == Phase.REDUCING:
            return RankPhase("all-reduce", seconds, status.reduction)
        return RankPhase("wait_data" if status.phase == Phase.WAITING else self.phase, seconds)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end of the role and its guard; False after ``timeout_s``."""
        ends_s = time.monotonic() + timeout_s
        while not self.ended(now_s := time.monotonic()):
            if now_s >= ends_s:
                return False
            _ended(self.pidfd, min(ends_s - now_s, WAIT_S))
            if _ended(self.pidfd) and self._role_fd is not None:
                _ended(self._role_fd, min(ends_s - now_s, WAIT_S))
        return True

    def reap(self) -> int:
        """Wait for its end and free everything; returns its exit code, negative for a signal."""
        self.wait()
        code = self._process.wait()
        if self.began and not self.status.role_cleared:
            _kill_marked(self._mark.encode())
        self._release()
        for fd in (self.pidfd, self._role_fd):
            if fd is not None:
                os.close(fd)
        self.channel.close()
        self.status.close()
        return code

    def log_tail(self) -> str:
        """The last output of this incarnation. Call it before `reap`."""
        return self.status.tail.decode(errors="replace").strip()


def why_not_started(error: OSError) -> str:
    """Why a `Child` could not be made, and what to do about it."""
    advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
    return f"could not be started: {error.strerror or error}{advice}"


def _kill_marked(mark: bytes) -> None:
    """Kill every process that has ``mark`` in its environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError), ExitStack() as held:  # it has ended, or is another user's
            pidfd = os.pidfd_open(int(path.parent.name))
            held.callback(os.close, pidfd)
            if mark in path.read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Whether a process has ended, or does within the time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def role_arguments(run_dir: Path, runtime_dir: Path) -> dict[str, Any]:
    """Arguments that every role gets, with defaults for those that only some commands set."""
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
    }
