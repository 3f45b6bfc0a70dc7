"""Operating-system processes: how to start, identify and end them.

Other modules ask psutil about a process. What is read from /proc here is either missing in psutil
or needed by the supervisor: psutil takes 15 ms to import, and fails without a free file descriptor.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import penstock

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# The longest wait for processes that were killed.
KILL_S = 2.0
# The signal that asks a role with state to save, as it is started again.
SHIM_DIED = signal.SIGUSR2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "Z": "ended"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions in the fields of `_stat`; times are in clock ticks.
STATE = 0
UTIME = 11
STIME = 12
STARTTIME = 19


def die_with(parent_pid: int, death_signal: int) -> None:
    """Let the kernel send ``death_signal`` to this process when its parent dies.

    ``parent_pid`` is the parent that started this process; if that has died already, exit at once.
    """
    import ctypes  # takes 2 ms, and the command starts processes before all else

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")

    # It may have died before the call.
    if os.getppid() != parent_pid:
        os._exit(1)


@contextmanager
def ending_programs() -> Iterator[None]:
    """End the programs that the code of the ``with`` block starts, when the block ends.

    Programs that left their parent are ended too: as orphans they become children of this process.
    """
    import ctypes

    import psutil

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    earlier_programs = psutil.Process().children(recursive=True)
    try:
        yield
    finally:
        end_programs(spared=earlier_programs)


def end_programs(spared: Sequence[Any] = ()) -> None:
    """Kill the descendants of this process, and wait until they have ended, at most `KILL_S`.

    ``spared`` are psutil's objects for descendants that go on.
    """
    import psutil

    # Again and again, as a program may start another one before it dies.
    deadline_s = time.monotonic() + KILL_S
    while time.monotonic() < deadline_s:
        programs = [p for p in psutil.Process().children(recursive=True) if p not in spared]
        if not programs:
            return
        for program in programs:
            with suppress(psutil.Error):
                program.kill()
        psutil.wait_procs(programs, timeout=KILL_S)


def began_ticks(pid: int) -> int | None:
    """Returns the start time of a process, in clock ticks since boot; None without such a process.

    Together with the pid it identifies a process, since pids are reused.
    """
    try:
        return int(_stat(pid)[STARTTIME])
    except OSError:
        return None


def process_facts(pid: int) -> tuple[str, float, float] | tuple[None, None, None]:
    """Returns state, processor seconds and age in seconds of a process, as the kernel says.

    They are None once the process is gone.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return None, None, None

    state = STATES.get(fields[STATE], fields[STATE])
    processor_s = (int(fields[UTIME]) + int(fields[STIME])) / TICKS_PER_S
    began_s = int(fields[STARTTIME]) / TICKS_PER_S
    age_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    return state, processor_s, age_s


def coreless_s(pid: int) -> float:
    """Returns the seconds in which the main thread of a process could run and had no core.

    NaN if that is not known: the process has ended, or the kernel has no scheduler statistics.
    """
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return math.nan
    return int(waited_ns) * 1e-9


def signal_masks(pid: int) -> dict[str, int]:
    """Returns the pending, blocked and caught signals of the main thread of a process.

    They are bit masks by the kernel's names, such as "SigCgt", in which the lowest bit is signal 1.
    There are none if the process is gone.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    lines = re.findall(r"^(\w+(?:Pnd|Blk|Cgt)):\s*(\w+)", text, re.MULTILINE)
    return {name: int(digits, 16) for name, digits in lines}


def catches(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler of the signal ``signum``."""
    caught = signal_masks(pid).get("SigCgt", 0)
    return caught & (1 << (signum - 1)) != 0


def _stat(pid: int) -> list[str]:
    """Returns the kernel's numbers about a process, from the third field on: the state is first.

    The second field, the name in parentheses, may contain spaces. Raises OSError without a process.
    """
    _, _, text = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return text.split()


def python(module: str, *arguments: object) -> list[str]:
    """Returns the command that runs a module with this interpreter.

    ``-P`` keeps the current folder out of the module search path, where a user's ``queue.py`` or a
    folder named ``penstock`` would shadow the libraries. It is left out if Penstock itself is run
    from the current folder.
    """
    runs_from_here = Path(penstock.__file__).parents[1].samefile(os.curdir)
    options = [] if runs_from_here else ["-P"]
    return [sys.executable, *options, "-m", module, *map(str, arguments)]
