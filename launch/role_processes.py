"""The processes of a run's roles: their handles, from the start to the confirmed end."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.cgroup import oom_kills
from penstock.core.interfaces import Engine, Handle, Liveness
from penstock.core.role_spec import RoleSpec
from penstock.launch.supervisor_messages import End

POLL_S = 0.1
"""Seconds between two looks at processes that end."""


@dataclass(eq=False)
class PresumedProcess:
    """A process that is presumed dead, and no longer that of its role."""

    handle: Handle
    is_ending: bool = False
    """Whether it was found to run and was ordered to end."""


class RoleProcesses:
    """The processes that an engine has started and that have not been reaped."""

    def __init__(self, engine: Engine, logs: Path) -> None:
        """``logs`` is the folder of the roles' logs."""
        self._engine = engine
        self._logs = logs
        self.handles: dict[str, Handle] = {}
        """The present process of each role that runs, by the role's name."""
        self.presumed: list[PresumedProcess] = []
        self._killed: set[tuple[str, int]] = set()  # with SIGKILL, by role and incarnation
        self._oom_kills = oom_kills()

    def log_of(self, name: str) -> Path:
        """The log of a role."""
        return self._logs / f"{name}.log"

    def start(self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any]) -> Handle:
        """Start the process of a role. Raises OSError or UserError if it cannot be started."""
        handle = self._engine.start(spec, incarnation, arguments, self.log_of(spec.name))
        self.handles[spec.name] = handle
        return handle

    def find(self, name: str, incarnation: int | None) -> Handle | None:
        """Returns a process of a role, if it exists.

        Args:
            name: the role.
            incarnation: that of a process that is presumed dead; None: the present process.
        """
        if incarnation is None:
            return self.handles.get(name)
        for process in self.presumed:
            if _key(process.handle) == (name, incarnation):
                return process.handle
        return None

    def signal(self, handle: Handle, signum: int) -> None:
        """Send a signal to a process."""
        if signum == signal.SIGKILL:
            self._killed.add(_key(handle))
        handle.signal(signum)

    def was_killed(self, handle: Handle) -> bool:
        """Whether `signal` has sent SIGKILL to a process that is not reaped yet."""
        return _key(handle) in self._killed

    def presume_dead(self, name: str) -> None:
        """Separate the present process of a role from it, as its host does not answer."""
        self.presumed.append(PresumedProcess(self.handles.pop(name)))

    def reap(self, handle: Handle) -> End:
        """Release a process whose death is confirmed; returns how it has ended."""
        status = handle.status()
        log = handle.log_tail()
        exit_code = handle.reap()
        self._killed.discard(_key(handle))
        out_of_memory = exit_code == -signal.SIGKILL and self._memory_ran_out()
        return End(
            exit_code,
            produced=status.produced_steps,
            sequence=status.sequence,
            incarnation=status.incarnation,
            log=log,
            out_of_memory=out_of_memory,
        )

    def _memory_ran_out(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the last call."""
        previous_kills = self._oom_kills
        self._oom_kills = oom_kills()
        return (self._oom_kills or 0) > (previous_kills or 0)

    def end_all(self, grace_s: float) -> Iterator[Handle]:
        """End all processes of roles, and kill those that still run after ``grace_s`` seconds.

        Yields:
            The handle of each process that has ended or is presumed dead, before it is reaped.
        """
        deadline_s = time.monotonic() + grace_s
        for handle in self.handles.values():
            handle.signal(signal.SIGTERM if handle.spec.essential else signal.SIGKILL)

        while self.handles:
            if time.monotonic() >= deadline_s:
                deadline_s = math.inf
                for handle in self.handles.values():
                    handle.signal(signal.SIGKILL)

            for name, handle in list(self.handles.items()):
                # A process whose messages nobody takes could wait for that instead of ending.
                handle.receive()
                liveness = handle.liveness()
                if liveness is Liveness.ALIVE:
                    continue
                del self.handles[name]
                yield handle
                if liveness is Liveness.DEAD:
                    handle.reap()
            wait_readable(self._engine.filenos(), POLL_S if self.handles else 0.0)


def wait_readable(fds: Iterable[int], timeout_s: float) -> set[int]:
    """Wait until one of the descriptors is readable, at most ``timeout_s`` seconds; returns those
    that are."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout_s * 1000)}


def _key(handle: Handle) -> tuple[str, int]:
    """Role and incarnation, which identify a process."""
    return handle.spec.name, handle.incarnation
