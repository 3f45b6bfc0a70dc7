"""Python stacks of all processes of a living run: `penstock stacks RUN`.

Each process writes them to a file of its own when it receives SIGUSR1, in the signal handler itself
(`faulthandler`), so also while it is in C code. On this host the signals are sent by this process
and not by the supervisor, which may hang itself; on other hosts the supervisor's engine sends them,
and brings what was written to the logs of this one. Processes are addressed by pidfds, so that
another process with a reused pid never receives the signal.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.configs.errors import UserError
from penstock.core.processes import catches, signal_masks
from penstock.monitor.status import in_a_line, lasting
from penstock.monitor.supervisor_client import STACKS, Report, give_order, reach
from penstock.profiling.dump import stacks_path

TIMEOUT_S = 2.0
# The time that the processes of a run with other hosts have.
ELSEWHERE_S = 6.0
POLL_S = 0.01
# A file with more bytes of old stacks is emptied before new ones are appended.
FILE_NBYTES = 1 << 20
MODULE = "penstock.launch.role"
BIT = 1 << signal.SIGUSR1 - 1  # of a signal mask


@dataclass
class StackRequest:
    """A process that is requested to append its stacks after ``start`` of its file."""

    name: str
    pid: int
    path: Path
    start: int = 0
    """Size of the file before the request."""
    why_not: str | None = None
    """Why there are no stacks; None as long as there is no reason."""
    elsewhere: bool = False
    """Whether the process is on another host, from where the supervisor gets its stacks."""

    def send(self, pidfd: int) -> None:
        """Send the signal, unless the process has no handler yet, which would end it."""
        if not catches(self.pid, signal.SIGUSR1):
            self.why_not = "the process has just been started, or has ended"
            return

        self.start = _size(self.path)
        if self.start > FILE_NBYTES:
            self._empty_file()
            self.start = _size(self.path)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        except ProcessLookupError:
            self.why_not = "the process has ended"

    def _empty_file(self) -> None:
        """Remove old stacks. A link is not followed: its target is no file of this run."""
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.truncate(descriptor, 0)
            finally:
                os.close(descriptor)

    @property
    def done(self) -> bool:
        """Whether the stacks are complete: the signal has arrived, and its handler has returned."""
        if self.why_not is not None:
            return True
        if self.elsewhere:
            return _size(self.path) > self.start

        # The signal is pending until it arrives, and blocked while its handler runs.
        masks = signal_masks(self.pid)
        awaited = masks.get("ShdPnd", 0) | masks.get("SigPnd", 0) | masks.get("SigBlk", 0)
        return not awaited & BIT and (not masks or _size(self.path) > self.start)

    @property
    def text(self) -> str | None:
        """The stacks that were appended since the request; None if there are none."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(FILE_NBYTES).decode(errors="replace").strip() or None
        return None


def stacks(run: str) -> Report:
    """Gets the stacks of the supervisor and of each process of a run, or the reason for missing
    ones.

    Args:
        run: the folder of the run.

    Returns:
        ``processes``, each as `_outcome` describes it, and ``supervisor_answers``, whether the
        supervisor has replied.

    Raises:
        UserError: if the run is not live.
    """
    supervisor = reach(run)
    reported = supervisor.report or {"processes": []}
    statuses = {process["name"]: process for process in reported["processes"]}
    with ExitStack() as open_fds:
        requests = _request_here(run, supervisor.pid, open_fds)

        # Processes that the supervisor knows and this host does not are on other hosts.
        local_names = {request.name for request in requests}
        remote_names = [
            name
            for name, status in statuses.items()
            if name not in local_names and status["pid"] is not None
        ]
        if remote_names:
            requests += _request_elsewhere(run, remote_names, statuses)

        deadline_s = time.monotonic() + (ELSEWHERE_S if remote_names else TIMEOUT_S)
        while time.monotonic() < deadline_s and not all(request.done for request in requests):
            time.sleep(POLL_S)
        return {
            "run": run,
            "supervisor_answers": supervisor.report is not None,
            "processes": [_outcome(each, statuses.get(each.name, {})) for each in requests],
        }


def _request_here(run: str, supervisor_pid: int, open_fds: ExitStack) -> list[StackRequest]:
    """Sends the signal to the supervisor and to the roles of this host.

    Args:
        run: the folder of the run.
        supervisor_pid: pid of the supervisor.
        open_fds: closes the pidfds of the processes.

    Raises:
        UserError: if the supervisor has ended, or a process cannot be accessed.
    """
    supervisor = StackRequest("supervisor", supervisor_pid, stacks_path(Path(run), "supervisor"))
    requests = [supervisor]
    try:
        supervisor.send(_open_pidfd(supervisor_pid, open_fds))
    except ProcessLookupError:
        reach(run)  # raises an error with the end of the run
        raise UserError(f"the run {run} is ending; try `penstock status {run}`") from None

    for process in _descendants_of(supervisor_pid):
        with suppress(ProcessLookupError, psutil.Error):  # it has ended meanwhile
            # The pidfd is opened first, so that name and signal are of the same process.
            pidfd = _open_pidfd(process.pid, open_fds)
            name = _role_of(process)
            if name is not None:
                request = StackRequest(name, process.pid, stacks_path(Path(run), name))
                requests.append(request)
                request.send(pidfd)
    return requests


def describe(report: Report) -> str:
    """Returns the report of `stacks` as text: a heading for each process, then its stacks,
    innermost call first."""
    blocks: list[str] = []
    for process in report["processes"]:
        title = f"== {process['name']}, pid {process['pid']}"
        if process["status"] is not None:
            title = f"== {process['name']}, {in_a_line(process['status'])}"
        blocks.append(f"{title}\n{process['stacks'] or process['why_not']}")

    if not report["supervisor_answers"]:
        blocks.append("the supervisor does not reply: it is busy, or hangs in the call shown above")
    return "\n\n".join(blocks)


def _request_elsewhere(run: str, names: list[str], statuses: Report) -> list[StackRequest]:
    """Has the supervisor request the stacks of processes that it has started on other hosts.

    Args:
        run: the folder of the run.
        names: of the processes.
        statuses: by name, what the supervisor has reported of each.
    """
    requests = []
    for name in names:
        path = stacks_path(Path(run), name)
        pid = statuses[name]["pid"]
        requests.append(StackRequest(name, pid, path, start=_size(path), elsewhere=True))

    try:
        give_order(run, STACKS, TIMEOUT_S, roles=names)
    except (TimeoutError, UserError):
        for request in requests:
            request.why_not = "it is not a process of this host, and the supervisor does not reply"
    return requests


def _outcome(request: StackRequest, status: dict[str, Any]) -> dict[str, Any]:
    """Returns what came of a request.

    Args:
        request: the process that was requested to append its stacks.
        status: what the supervisor has reported of it; empty if unknown.

    Returns:
        Name, pid and status of the process, and either ``stacks`` or ``why_not``; the other is
        None.
    """
    text = request.text
    why_not = request.why_not
    if why_not is None and not request.done:
        limit_s = ELSEWHERE_S if request.elsewhere else TIMEOUT_S
        why_not = f"no reply within {limit_s:g} s{_last_state(status)}"
    elif why_not is None and text is None:
        why_not = "the process has ended"

    return {
        "name": request.name,
        "pid": request.pid,
        "status": status or None,
        "stacks": text if why_not is None else None,
        "why_not": why_not,
    }


def _last_state(status: dict[str, Any]) -> str:
    """Returns the last known state of a process that does not reply, with the part of its code in
    which its main thread is."""
    text = f"; it is {status['state']}" if status.get("state") else ""
    started = [thread for thread in status.get("threads", []) if thread["part"] is not None]
    for main_thread in started[:1]:
        text += f", in {main_thread['part']} for {lasting(main_thread['for_s'])}"
    return text


def _open_pidfd(pid: int, open_fds: ExitStack) -> int:
    """Opens a pidfd of a process, which ``open_fds`` closes.

    Raises:
        ProcessLookupError: if there is no such process.
        UserError: if this process may not access it.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise UserError(
            f"process {pid} cannot be accessed: {error.strerror}; run this command in the "
            "container of the run"
        ) from error

    open_fds.callback(os.close, pidfd)
    return pidfd


def _descendants_of(pid: int) -> list[psutil.Process]:
    """Returns all descendants of the supervisor by their pids; these include the roles."""
    with suppress(psutil.NoSuchProcess):
        return sorted(psutil.Process(pid).children(recursive=True), key=lambda child: child.pid)
    return []


def _role_of(process: psutil.Process) -> str | None:
    """Returns the name of the role of a process; None for other processes, such as a role's shim,
    whose command line contains that of the role."""
    words: list[str] = process.cmdline()
    if "-c" in words or MODULE not in words[:-1]:
        return None
    return words[words.index(MODULE) + 1]


def _size(path: Path) -> int:
    """Returns the size of a file in bytes; 0 without one."""
    return path.stat().st_size if path.exists() else 0
