"""Starts one role, captures its output, and ends all of its descendants.

Two processes stand between the supervisor and a role, so that any one of the four may be killed:

    supervisor -> guard -> keeper -> role -> programs that its environments start

Guard and keeper are child subreapers: a program that left its session, forked twice or closed its
descriptors becomes a child of the nearest one that lives, and is killed there. So:

- the role ends: the keeper kills the role's descendants, then ends with the role's exit status. So
  does the guard, whose exit status the supervisor reads;
- the supervisor is killed: guard and keeper have a pidfd of it. The role gets SIGTERM; when it has
  ended, or after the grace, its descendants are killed;
- the keeper is killed: the role gets `shim_died` from the kernel (PR_SET_PDEATHSIG) and becomes a
  child of the guard, which takes over, its output included;
- the guard is killed: the keeper has a pidfd of it, and sends the role `shim_died`;
- the keeper is stopped: the guard kills it `LINGER_S` after the role's end. The supervisor does the
  same with a guard that is stopped;
- both are killed at once: the supervisor kills what carries the role's mark in its environment.

SIGTERM ends a learner with the run, `shim_died` has it save its state and be started again. A role
without state gets SIGKILL instead of either.

The role's output goes through a pipe. The last of it is always in the status page, where the
supervisor finds it after the role's death. A thread writes all of it to the log, so that a disk
that stalls delays only that thread. Output for which log or thread have no room is dropped and
counted. Output never blocks a role, and writing it never fails.

The module is run as a program and imports only what a bare interpreter offers. `_signal` and
`_thread` stand in for `signal` and `threading`, whose imports would double its start time.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _thread
import ctypes
import fcntl
import os
import select
import sys
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself takes a while to import
    from collections.abc import Callable
    from typing import Never

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
# A process that outlives SIGKILL for so long is stuck in the kernel.
KILL_S = 2.0
# A keeper that still runs so long after its role's end is killed.
LINGER_S = 5.0
# Interval at which the guard looks for the role's process, until it exists.
FIND_MS = 100

CHUNK_NBYTES = 1 << 16
# Most chunks of output that are read at once, as a role may write without a pause.
MOST_CHUNKS = 16
QUEUE_NBYTES = 1 << 20  # output that waits for the disk
# A log that has reached this size becomes NAME.log.1.
LOG_NBYTES = 10_000_000
# Average rate of a log; a burst may have `LOG_NBYTES`.
LOG_NBYTES_PER_S = 1_000_000
# The last output may take this long to reach the disk.
LOG_CLOSE_S = 1.0

# Signals that guard and keeper ignore, but that wake them.
HANDLED = (
    signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGALRM, signal.SIGTSTP,
)  # fmt: skip

libc = ctypes.CDLL(None)


class ShimPlan:
    """What the supervisor asks for, and what the shim notes about the role.

    The supervisor writes the path of the log and the grace into the status page, as they are not
    known yet when a process starts before its role (`early_roles`). Guard and keeper write there
    what happens to the role.
    """

    def __init__(self, arguments: list[str]) -> None:
        """Take the arguments that `ShimProcess` gives the program."""
        self.supervisor = int(arguments[0])  # pid
        self.status = int(arguments[1])  # descriptor of the status page
        layout = map(int, arguments[2].split(","))
        self._role_offset, self._tail_offset, self.tail_nbytes, self._log_offset = layout
        self.role_fds = [int(fd) for fd in arguments[3].split(",") if fd]
        self.shim_died = int(arguments[4])  # the signal that the role gets when its shim dies
        self._saves = self.shim_died != signal.SIGKILL
        self.mark = arguments[5]  # NAME=VALUE for the role's environment
        self.command = arguments[6:]
        self.output = (-1, -1)  # the pipe of the role's output: the ends to read and to write

    @property
    def grace_s(self) -> float:
        """Seconds from the signal of a death until the role is killed."""
        return self._read(self._role_offset + 32) / 1000 if self._saves else 0.0

    @property
    def supervisor_died(self) -> int:
        """The signal that the role gets when its supervisor dies."""
        return int(signal.SIGTERM if self._saves else signal.SIGKILL)

    @property
    def log(self) -> bytes:
        """The path of the log; empty until the supervisor has named it."""
        return os.pread(self.status, self._read(self._log_offset), self._log_offset + 8)

    def note_role(self, pid: int) -> None:
        """Note that the role is executed, by its pid and start time.

        Both together name one process for ever.
        """
        with open(f"/proc/{pid}/stat") as file:
            start_ticks = int(file.read().rpartition(")")[2].split()[19])
        os.pwrite(self.status, _word(pid) + _word(start_ticks), self._role_offset)

    @property
    def role(self) -> int:
        """The role's pid; 0 before it is executed."""
        return self._read(self._role_offset)

    def _read(self, offset: int) -> int:
        """Returns the integer of 8 bytes at an offset of the status page."""
        return int.from_bytes(os.pread(self.status, 8, offset), sys.byteorder)

    def note_cleared(self) -> None:
        """Note that nothing of the role is left."""
        os.pwrite(self.status, _word(1), self._role_offset + 16)

    def note_dropped(self, nbytes: int) -> None:
        """Note how many bytes of output are missing in the log."""
        os.pwrite(self.status, _word(nbytes), self._role_offset + 24)

    def note_tail(self, tail: bytes) -> None:
        """Note the last output, of at most ``tail_nbytes``."""
        os.pwrite(self.status, _word(len(tail)) + tail, self._tail_offset)

    def leave_to_role(self) -> None:
        """Close the descriptors that only the role may hold."""
        for fd in (*self.role_fds, self.output[1]):
            os.close(fd)


def main() -> None:
    """Start the role that the arguments describe. Ends the process; does not return."""
    plan = ShimPlan(sys.argv[1:])
    try:
        guard(plan)
    except BaseException as error:  # no process, no memory, no descriptor
        plan.note_tail(f"the role could not be started: {error}".encode())
    finally:
        os._exit(os.EX_OSERR)


def guard(plan: ShimPlan) -> Never:
    """Start the keeper, and take over its work if it is killed.

    Ends the process as the role has ended.
    """
    supervisor = os.pidfd_open(plan.supervisor)
    if os.getppid() != plan.supervisor:
        os._exit(1)

    # A signal that was not ignored on purpose only wakes this process.
    for signum in HANDLED:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    _leave_terminal()
    _become_subreaper()

    plan.output = os.pipe()
    os.set_blocking(plan.output[0], False)
    this_guard = os.pidfd_open(os.getpid())
    keeper = os.fork()
    if keeper == 0:
        run_keeper(plan, {supervisor: plan.supervisor_died, this_guard: plan.shim_died})
    os.close(this_guard)
    plan.leave_to_role()

    wake = _wake_pipe()
    status = _watch_keeper(plan, keeper, supervisor, wake)
    if plan.role in _children():  # the keeper was killed
        status = tend(plan, plan.role, wake, {})
    else:
        _end_descendants(wake)

    plan.note_cleared()
    _leave(status)


def _watch_keeper(plan: ShimPlan, keeper: int, supervisor: int, wake: int) -> int:
    """Wait until the keeper has ended, and kill it if it outlives its role or its supervisor.

    Args:
        plan: names the role.
        keeper: pid of the keeper.
        supervisor: pidfd of the supervisor.
        wake: descriptor that is readable after a signal.

    Returns: the keeper's wait status.
    """
    poller = select.poll()
    for fd in (supervisor, wake):
        poller.register(fd, select.POLLIN)
    role: int | None = None  # pidfd; -1 if the role cannot be watched by one
    kill_at_s = float("inf")

    while True:
        pid, status = os.waitpid(keeper, os.WNOHANG)
        if pid:
            return status

        # The role is watched by a pidfd as soon as its process exists.
        if role is None and plan.role:
            try:
                role = os.pidfd_open(plan.role)
                poller.register(role, select.POLLIN)
            except ProcessLookupError:  # it has ended
                role = -1
                kill_at_s = min(kill_at_s, time.monotonic() + LINGER_S)
            except OSError:  # no descriptor is left to watch it with
                role = -1

        if time.monotonic() >= kill_at_s:
            os.kill(keeper, signal.SIGKILL)
            kill_at_s = float("inf")

        # The keeper should end soon after the role or the supervisor has.
        timeout_ms = FIND_MS if role is None else _timeout_ms(kill_at_s)
        for fd, _ in poller.poll(timeout_ms):
            if fd == wake:
                os.read(wake, 4096)
                continue
            poller.unregister(fd)
            patience_s = LINGER_S if fd == role else plan.grace_s + LINGER_S
            kill_at_s = min(kill_at_s, time.monotonic() + patience_s)


def _timeout_ms(deadline_s: float) -> float | None:
    """Returns how long `poll` may wait for a deadline; None for one that is infinite."""
    if deadline_s == float("inf"):
        return None
    return max(0.0, deadline_s - time.monotonic()) * 1000 + 1


def run_keeper(plan: ShimPlan, owners: dict[int, int]) -> Never:
    """Be the keeper: start the role, and end as the role has ended.

    Args:
        plan: describes the role.
        owners: as for `tend`.
    """
    _become_subreaper()
    wake = _wake_pipe()
    keeper = os.getpid()
    role = os.fork()
    if role == 0:
        _execute(plan, keeper)
    plan.leave_to_role()
    _leave(tend(plan, role, wake, owners))


def _execute(plan: ShimPlan, keeper: int) -> Never:
    """Become the role, in the child process of the keeper.

    Args:
        plan: describes the role.
        keeper: pid of the keeper.
    """
    try:
        # The keeper may have died before the kernel was asked to announce its death.
        libc.prctl(PR_SET_PDEATHSIG, plan.shim_died, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)

        os.setpgid(0, 0)
        os.dup2(plan.output[1], 1)
        os.dup2(plan.output[1], 2)
        # Python ignores these, and what is ignored is inherited.
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        name, _, value = plan.mark.partition("=")
        os.environ[name] = value

        plan.note_role(os.getpid())
        os.execv(plan.command[0], plan.command)
    except BaseException as error:
        os.write(2, f"{plan.command[0]} cannot be executed: {error}\n".encode())
    finally:
        os._exit(os.EX_OSERR)


def tend(plan: ShimPlan, role: int, wake: int, owners: dict[int, int]) -> int:
    """Capture the output of a child, the role, until it has ended, then kill its descendants.

    Args:
        plan: describes the role.
        role: pid of the role.
        wake: descriptor that is readable after a signal.
        owners: pidfds of processes that the role must not outlive, each with the signal that the
            role gets at the end of that process. Without any, the keeper has died.

    Returns: the role's wait status.
    """
    pump = Pump(plan)
    poller = select.poll()
    for fd in (wake, pump.fd, *owners):
        poller.register(fd, select.POLLIN)
    kill_at_s = float("inf")
    death_signal = None if owners else plan.shim_died

    while True:
        status, _ = _reap(role)
        if status is not None:
            break

        # The role gets the signal of a death once, and SIGKILL after its grace.
        if death_signal is not None:
            os.kill(role, death_signal)
            kill_at_s = time.monotonic() + plan.grace_s
            death_signal = None
        if time.monotonic() >= kill_at_s:
            os.kill(role, signal.SIGKILL)
            kill_at_s = float("inf")

        for fd, _ in poller.poll(_timeout_ms(kill_at_s)):
            if fd == wake:
                os.read(wake, 4096)
            elif fd == pump.fd:
                if not pump.take():
                    poller.unregister(fd)
            elif fd in owners:
                # The role follows the first of its owners; the others' ends change nothing more.
                death_signal = owners[fd]
                for owner in owners:
                    poller.unregister(owner)
                owners = {}

    _end_descendants(wake)
    pump.close()
    return status


def _end_descendants(wake: int) -> None:
    """Kill the children of this process until there are none, for `KILL_S` at most.

    The children of a child that was killed become children of this process.
    """
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    deadline_s = time.monotonic() + KILL_S

    while time.monotonic() < deadline_s:
        _, has_children = _reap()
        if not has_children:
            break

        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:  # it has become another user
                continue
        if poller.poll(20):
            os.read(wake, 4096)


class Pump:
    """Captures the output of a role.

    Reads it from its pipe, keeps the last of it in the status page, and hands all of it to the
    thread that writes the log.
    """

    def __init__(self, plan: ShimPlan) -> None:
        self.fd = plan.output[0]
        self._plan = plan
        self._tail = b""
        # How many bytes may go to the log, by a rate of `LOG_NBYTES_PER_S`, at a time.
        self._allowance = float(LOG_NBYTES)
        self._allowance_s = time.monotonic()
        self._queue: int | None = None  # the pipe to the thread that writes the log
        self._written = _thread.allocate_lock()  # held until that thread has written all output
        self._dropped_nbytes = 0
        self._drop_reason = ""
        self._log = Log(lambda: plan.log, lambda: (self._dropped_nbytes, self._drop_reason))

    def take(self) -> bool:
        """Read the output that is in the pipe, in a limited number of chunks.

        Returns: False once all writers have closed their end of the pipe.
        """
        for _ in range(MOST_CHUNKS):
            try:
                data = os.read(self.fd, CHUNK_NBYTES)
            except BlockingIOError:
                return True
            if not data:
                return False

            self._tail = (self._tail + data)[-self._plan.tail_nbytes :]
            self._plan.note_tail(self._tail)
            self._pass_on(data)
        return True

    def close(self) -> None:
        """Read the last output, and wait up to `LOG_CLOSE_S` until it is in the log."""
        for _ in range(MOST_CHUNKS):
            if not self.take() or not select.select([self.fd], [], [], 0)[0]:
                break

        if self._queue is not None:
            os.close(self._queue)
            self._written.acquire(timeout=LOG_CLOSE_S)

    def _pass_on(self, data: bytes) -> None:
        """Hand output to the thread that writes the log, or drop it where there is no room."""
        now_s = time.monotonic()
        allowance = self._allowance + (now_s - self._allowance_s) * LOG_NBYTES_PER_S
        self._allowance = min(LOG_NBYTES, allowance)
        self._allowance_s = now_s
        if self._allowance < len(data):
            return self._drop(len(data), f"more than {LOG_NBYTES_PER_S:,} bytes/s")
        self._allowance -= len(data)

        try:
            if self._queue is None:
                self._queue = self._start_thread()
            written_nbytes = os.write(self._queue, data)
        except BlockingIOError:
            return self._drop(len(data), "the disk is too slow")
        except (OSError, RuntimeError) as error:  # no descriptor, no thread
            return self._drop(len(data), str(error))

        if written_nbytes < len(data):
            self._drop(len(data) - written_nbytes, "the disk is too slow")

    def _drop(self, nbytes: int, reason: str) -> None:
        """Count bytes that do not reach the log, for a reason in words."""
        self._dropped_nbytes += nbytes
        self._drop_reason = reason
        self._plan.note_dropped(self._dropped_nbytes + self._log.lost)

    def _start_thread(self) -> int:
        """Start the thread that writes the log.

        Returns: the end of the pipe from which the thread reads, to write output to.
        """
        source, queue = os.pipe()
        os.set_blocking(queue, False)
        try:  # noqa: SIM105  # contextlib takes a while to import
            fcntl.fcntl(queue, fcntl.F_SETPIPE_SZ, QUEUE_NBYTES)
        except OSError:  # the user's limit on pipes
            pass

        self._written.acquire()
        try:
            _thread.start_new_thread(self._write_log, (source,))
        except RuntimeError:
            self._written.release()
            os.close(source)
            os.close(queue)
            raise
        return queue

    def _write_log(self, source: int) -> None:
        """Write all output that comes through a pipe to the log; runs in a thread."""
        while data := os.read(source, CHUNK_NBYTES):
            self._log.write(data)
            if self._log.lost:
                self._plan.note_dropped(self._dropped_nbytes + self._log.lost)

        # An empty write still appends the line that counts what was dropped last.
        self._log.write(b"")
        self._written.release()


class Log:
    """A file of at most `LOG_NBYTES` bytes, beside one older file.

    Errors of the disk are counted, not raised.
    """

    def __init__(self, path: Callable[[], bytes], dropped: Callable[[], tuple[int, str]]) -> None:
        """Open nothing yet.

        Args:
            path: returns the path of the file; empty where that is not known yet.
            dropped: returns how many bytes were dropped before they reached `write`, and the last
                reason.
        """
        self._path = path
        self._dropped = dropped
        self._early_output = b""  # output that came before the path is known
        self._fd: int | None = None
        self._nbytes = 0  # size of the file
        self.lost = 0  # number of bytes that the disk did not take
        self._loss_reason = ""
        self._reported = 0  # number of missing bytes that lines in the log count

    def write(self, data: bytes) -> None:
        """Append ``data``, after a line that counts the bytes that were dropped before it."""
        path = self._path()
        if not path:
            self._early_output += data[: LOG_NBYTES - len(self._early_output)]
            return

        data = self._early_output + data
        self._early_output = b""
        try:
            dropped, drop_reason = self._dropped()
            missing = dropped + self.lost
            if missing > self._reported:
                nbytes = f"{missing - self._reported:,}"
                reason = self._loss_reason or drop_reason
                line = f"[penstock: {nbytes} bytes of output were dropped: {reason}]\n"
                self._append(path, line.encode())
                self._reported = missing
                self._loss_reason = ""

            self._append(path, data)
        except OSError as error:
            self.lost += len(data)
            self._loss_reason = error.strerror or str(error)

    def _append(self, path: bytes, data: bytes) -> None:
        """Append ``data`` to the file, which is renamed before if it would become too large.

        Raises:
            OSError: the disk has not taken all of it.
        """
        if self._fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            self._nbytes = os.fstat(self._fd).st_size

        if data and self._nbytes and self._nbytes + len(data) > LOG_NBYTES:
            os.close(self._fd)
            self._fd = None
            try:  # noqa: SIM105  # contextlib takes a while to import
                os.replace(path, path + b".1")
            except FileNotFoundError:  # the user has removed it
                pass
            return self._append(path, data)

        while data:
            written_nbytes = os.write(self._fd, data)
            self._nbytes += written_nbytes
            data = data[written_nbytes:]


def _leave_terminal() -> None:
    """Give up the controlling terminal.

    A process in the background that reads from one would be stopped.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        fcntl.ioctl(terminal, termios.TIOCNOTTY)
        os.close(terminal)
    except OSError:  # there is none, or a sandbox forbids it
        return


def _become_subreaper() -> None:
    """Become the parent of descendants whose own parents end."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wake_pipe() -> int:
    """Returns a descriptor that is readable after a signal, such as that of a child's end."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd


def _reap(role: int = -1) -> tuple[int | None, bool]:
    """Collect the children that have ended.

    Args:
        role: pid of the role; -1 if it is no child of this process.

    Returns: the role's wait status, or None if it has not ended; whether other children are left.
    """
    role_status = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return role_status, True
            if pid == role:
                role_status = status
    except ChildProcessError:
        return role_status, False


def _children() -> list[int]:
    """Returns the pids of this process's children."""
    try:
        children: list[int] = []
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                children += map(int, file.read().split())
        return children
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if _is_child(pid)]


def _is_child(pid: int) -> bool:
    """Returns whether a process is a child of this one."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:  # it has ended
        return False


def _word(value: int) -> bytes:
    """Returns a number as it is in the status page."""
    return value.to_bytes(8, sys.byteorder)


def _leave(status: int) -> Never:
    """End this process in the way that a wait status describes: by that exit code or signal."""
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # one core file is enough
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))
