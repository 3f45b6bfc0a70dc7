"""The local engine: roles as processes of this host, each with a control channel and status page.

Between the supervisor and a role's process stand the two processes of the shim (`shim.py`), which
end whatever the role leaves behind. The supervisor is the parent of the first, the guard, and reads
the role's pid from the status page. A role has ended when its own process has: the guard's
end does not prove it, since the guard may have been killed.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.core.control import Message, encode_message
from penstock.core.descriptors import wait_readable
from penstock.core.interfaces import (
    Bundle,
    EngineContext,
    Liveness,
    RoleStatus,
    RoleUsage,
    ThreadUsage,
)
from penstock.core.processes import SHIM_DIED, began_ticks, catches, coreless_s, process_facts
from penstock.core.role_spec import RoleSpec
from penstock.launch.engines import early_roles
from penstock.launch.engines.shim_process import ShimProcess
from penstock.profiling.ledger import Part, current_span, seconds_by_part
from penstock.profiling.status import Phase, StatusPage

if TYPE_CHECKING:
    from penstock.profiling.report.readings import Thread

LINGER_S = 10.0
"""A guard that still runs so long after its role's end is killed."""
GRACE_S = 10.0
"""Time for a role to save after its shim's death, if its arguments have none."""
WAIT_S = 0.1
"""Interval at which `LocalHandle.wait` looks at guard and role."""
LOOPBACK = "127.0.0.1"


class LocalEngine:
    """Starts every role on this host, whatever its bundle asks for: the kernel shares the cores.

    A role's death is always confirmed here, so nothing is ever presumed dead.
    """

    def __init__(self, context: EngineContext) -> None:
        self._keep_fds = context.keep_fds
        self._roles: list[str] = []
        self._handles: list[LocalHandle] = []

    def hosts(self) -> Sequence[int]:
        return ()

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        self._roles = [role for bundle in bundles for role in bundle.roles]
        early_roles.discard(self._roles)

    def endpoints(self) -> Mapping[str, str]:
        return dict.fromkeys(self._roles, LOOPBACK)

    def start(
        self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any], log: Path
    ) -> LocalHandle:
        """Start a role, in the process that waits for it already if there is one."""
        self._handles = [handle for handle in self._handles if not handle.reaped]
        keep_fds = self._keep_fds if spec.essential else ()
        shim = early_roles.take(spec)
        handle = LocalHandle(spec, incarnation, arguments, log, keep_fds=keep_fds, shim=shim)
        self._handles.append(handle)
        return handle

    def filenos(self) -> Collection[int]:
        return [fd for handle in self._handles for fd in handle.filenos()]

    def unplaced(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        for handle in self._handles:
            if not handle.reaped:
                handle.signal(signal.SIGKILL)
                handle.reap()
        self._handles = []


class RoleProcess:
    """The process of a role, held by a pidfd as soon as the status page names it.

    Descriptors are reserved for that, so that it succeeds also if this process has none left.
    """

    def __init__(self, page: StatusPage, reserved_fds: list[int]) -> None:
        """Wait for the process that ``page`` will name; ``reserved_fds`` are closed before."""
        self.fd: int | None = None
        """The pidfd; None before the process is found, or if it had ended by then."""
        self._page = page
        self._reserved_fds = reserved_fds
        self._gone = False
        """Whether the process had ended before a pidfd was opened."""

    @property
    def began(self) -> bool:
        """Whether there is or was a process of the role."""
        return self._page.role_pid != 0

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; False also while there is none yet."""
        return self._gone if self.fd is None else _ended(self.fd)

    def find(self) -> None:
        """Open a pidfd of the process that the status page names, unless its pid was reused."""
        if self.fd is not None or self._gone or not self.began:
            return

        self._close_reserved()
        pid = self._page.role_pid
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
            return
        except OSError:  # no descriptor is left: another time
            return

        began_at = began_ticks(pid)
        if began_at == self._page.role_began:
            self.fd = fd
            return
        # Another process has the pid, or the role's ended a moment ago.
        self._gone = began_at is not None or _ended(fd)
        os.close(fd)

    def close(self) -> None:
        """Close all descriptors."""
        self._close_reserved()
        if self.fd is not None:
            os.close(self.fd)

    def _close_reserved(self) -> None:
        while self._reserved_fds:
            os.close(self._reserved_fds.pop())


class LocalHandle:
    """A role on this host and its shim: one start of it."""

    def __init__(
        self,
        spec: RoleSpec,
        incarnation: int,
        arguments: Mapping[str, Any],
        log: Path,
        keep_fds: tuple[int, ...] = (),
        shim: ShimProcess | None = None,
    ) -> None:
        """Start the role.

        Args:
            spec: the role.
            incarnation: the number of this start.
            arguments: fields of `RoleContext` beyond those of the spec, as JSON values.
            log: the file for the role's output.
            keep_fds: descriptors of which the role only keeps duplicates open.
            shim: the shim of a process that waits for this role already; None starts one.

        Raises:
            OSError: no process, descriptor or memory is left, or the process ended at once. Nothing
                of the role runs.
            UserError: the arguments, with the config, are too long for a message.
        """
        self.spec = spec
        self.incarnation = incarnation
        self.host = socket.gethostname()
        self.reaped = False
        """Whether `reap` has released everything."""
        self._backlog: deque[Message] = deque()
        """Messages for which the channel had no room yet."""
        self._guard_ended = False
        self._kill_at_s: float | None = None
        """When the one of guard and role that has outlived the other is killed; None: both run."""

        # A learner can still save what it has learned; the others have nothing to lose. One with
        # learners on other hosts does not: they have its state, and would all stop with it.
        saves = spec.essential and spec.meets_at is None
        self._shim_died = SHIM_DIED if saves else signal.SIGKILL
        self._grace_s = arguments.get("grace_s", GRACE_S) if saves else 0.0

        with ExitStack() as undo:
            if shim is None:
                shim = ShimProcess(spec.name, spec.threads, saves)
            undo.callback(shim.discard)
            self.channel = shim.channel
            self.page = shim.page
            self._mark = shim.mark
            self._process = shim.process

            self.page.incarnation = incarnation
            self.page.role_grace_ms = int(self._grace_s * 1000)
            self.page.name_log(log)
            self.pidfd = os.pidfd_open(self._process.pid)  # the guard's
            undo.callback(os.close, self.pidfd)
            reserved_fd = os.dup(shim.status_fd)
            undo.callback(os.close, reserved_fd)

            self._send_role(arguments, keep_fds)
            undo.pop_all()
        self._role = RoleProcess(self.page, [shim.status_fd, reserved_fd])

    def _send_role(self, arguments: Mapping[str, Any], keep_fds: tuple[int, ...]) -> None:
        """Send the first message, for which the role's process waits.

        Raises:
            UserError: the message is longer than the process accepts.
            BrokenPipeError: the process has ended.
        """
        identity = asdict(self.spec) | {
            "incarnation": self.incarnation,
            "yields": self.spec.yields,
        }
        message = {**arguments, **identity}
        if self.channel.send(message, fds=keep_fds):
            return

        nbytes = len(encode_message(message))
        most_nbytes = self.channel.most_nbytes
        if nbytes > most_nbytes:
            raise too_long(self.spec.name, nbytes, most_nbytes)
        raise BrokenPipeError(errno.EPIPE, "its process ended before it had its role")

    def send(self, message: Message) -> None:
        """Send a message as soon as the channel has room for it."""
        self._backlog.append(message)
        self._flush()

    def _flush(self) -> None:
        """Send the messages for which the channel has room."""
        while self._backlog and self.channel.send(self._backlog[0]):
            self._backlog.popleft()

    def receive(self) -> list[Message]:
        self._flush()
        return self.channel.receive()

    def filenos(self) -> list[int]:
        """Descriptors that become readable when a message has come or the guard has ended."""
        descriptors = []
        if not self._guard_ended and not self.reaped:
            descriptors.append(self.pidfd)
        if not self.channel.closed:
            descriptors.append(self.channel.fileno())
        return descriptors

    def signal(self, signum: int) -> None:
        """Send the role a signal.

        Before its process exists, SIGTERM and SIGKILL end its shim instead. SIGUSR1 is not sent
        until the role has a handler, without which it would end.
        """
        self._role.find()
        if signum == signal.SIGUSR1 and not catches(self.pid, signum):
            return

        with suppress(ProcessLookupError):
            if self._role.fd is not None:
                signal.pidfd_send_signal(self._role.fd, signum)
            elif not self.began:
                prevents_start = signum in (signal.SIGTERM, signal.SIGKILL)
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL if prevents_start else signum)

    @property
    def pid(self) -> int:
        """Pid of the role, or of its guard before the role begins."""
        return self.page.role_pid or self._process.pid

    @property
    def began(self) -> bool:
        """Whether there is or was a process of the role."""
        return self._role.began

    def liveness(self) -> Liveness:
        return Liveness.DEAD if self._check_end(time.monotonic()) else Liveness.ALIVE

    def _check_end(self, now_s: float) -> bool:
        """Check whether the role and its guard have ended.

        If only one of them has, the other is ended: a role gets the signal for a dead shim and its
        grace, a guard gets `LINGER_S`, and what still runs after that is killed.

        Returns: whether both have ended.
        """
        self._role.find()
        guard_ended = _ended(self.pidfd)
        role_ended = self._role.has_ended
        self._guard_ended = guard_ended

        if guard_ended and (role_ended or not self.began or self.page.role_cleared):
            return True
        if not guard_ended and not role_ended:
            return False

        # One of them has outlived the other.
        if self._kill_at_s is None:
            self._kill_at_s = now_s + (self._grace_s if guard_ended else LINGER_S)
            if guard_ended:
                self.signal(self._shim_died)
        elif now_s >= self._kill_at_s:
            if guard_ended:
                self.signal(signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        return False

    def status(self) -> RoleStatus:
        """Returns the latest status of the role, without a system call."""
        # The role writes its figures to its page in shared memory.
        page = self.page
        return RoleStatus(
            began=self.began,
            incarnation=page.incarnation,
            phase=self._phase(),
            phase_s=page.phase_s,
            alive_s=page.alive_s,
            produced_steps=page.produced_steps,
            sequence=page.sequence,
            played_steps=page.played_steps,
            trained_steps=page.trained_steps,
            reduction=page.reduction,
            dropped_nbytes=page.role_dropped,
        )

    def _phase(self) -> str:
        """Returns the role's phase; one that steps environments may be in inference as well."""
        phase = self.page.phase
        if phase == Phase.ENVIRONMENT:
            lane = self.page.lanes.get("main")
            present = current_span(lane) if lane is not None else None
            if present is not None and present[0] is Part.INFER:
                phase = Phase.INFERENCE
        return Phase(phase).name.lower()

    def usage(self) -> RoleUsage:
        """Returns the resource usage of the role's process and its threads, from ``/proc``."""
        # ``at_ns`` is when the threads were read.
        pid = self.pid
        threads = tuple(_thread(name, lane) for name, lane in self.page.lanes.items())
        at_ns = time.perf_counter_ns()

        state, cpu_s, age_s = process_facts(pid)
        return RoleUsage(
            pid=pid,
            state=state,
            cpu_s=cpu_s,
            age_s=age_s,
            threads=threads,
            coreless_s=coreless_s(pid),
            at_ns=at_ns,
        )

    @property
    def shares_memory(self) -> bool:
        return True

    def spans(self, since_ns: int) -> list[Thread]:
        from penstock.profiling.report.readings import read_threads  # only a profile needs numpy

        return read_threads(self.spec, self.pid, self.page, since_ns)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for the end of the role and its guard.

        Returns: whether both have ended; False after ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._check_end(now_s := time.monotonic()):
            if now_s >= deadline_s:
                return False

            # The first call waits for the guard, the last for a role that outlives it.
            interval_s = min(deadline_s - now_s, WAIT_S)
            _ended(self.pidfd, interval_s)
            if _ended(self.pidfd) and self._role.fd is not None:
                _ended(self._role.fd, interval_s)
        return True

    def reap(self) -> int:
        """Wait for the role's end, and free everything of it.

        Returns: its exit code, negative for the signal that ended it.
        """
        self.wait()
        code = self._process.wait()
        # Guard and keeper were killed before they could end what the role has started.
        if self.began and not self.page.role_cleared:
            _kill_marked(self._mark.encode())

        os.close(self.pidfd)
        self._role.close()
        self.channel.close()
        self.page.close()
        self.reaped = True
        return code

    def log_tail(self) -> str:
        """Returns the last output of this start of the role. Call it before `reap`."""
        return self.page.tail.decode(errors="replace").strip()


def _kill_marked(mark: bytes) -> None:
    """Kill every process that has ``mark`` in its environment.

    A pidfd holds each process while its environment is read, so that its pid cannot be reused
    meanwhile; psutil would look at the pid only.
    """
    for path in Path("/proc").glob("[0-9]*/environ"):
        # A process that has ended, or is another user's, raises OSError.
        with suppress(OSError), ExitStack() as cleanup:
            pidfd = os.pidfd_open(int(path.parent.name))
            cleanup.callback(os.close, pidfd)
            if mark in path.read_bytes().split(b"\0"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _ended(pidfd: int, timeout_s: float = 0.0) -> bool:
    """Wait up to ``timeout_s`` for the end of a process; returns whether it has ended."""
    return wait_readable(pidfd, timeout_s)


def _thread(name: str, lane: memoryview) -> ThreadUsage:
    """Returns the usage of a thread from its lane of the status page."""
    present = current_span(lane)
    if present is None:
        return ThreadUsage(name, part=None, for_s=None, seconds=seconds_by_part(lane))

    part, since_ns = present
    for_s = max(0.0, (time.monotonic_ns() - since_ns) * 1e-9)
    return ThreadUsage(name, part.name.lower(), for_s, seconds_by_part(lane))


def too_long(name: str, nbytes: int, most_nbytes: int) -> UserError:
    """Returns the error for a first message to a role that is longer than its process accepts."""
    return UserError(
        f"the config and arguments of {name} are {nbytes:,} bytes of JSON, and its process accepts "
        f"at most {most_nbytes:,}; move the longest values, such as those in env.kwargs, to a file "
        "that the environment reads"
    )
