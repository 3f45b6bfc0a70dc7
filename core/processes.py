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
STATE, UTIME, STIME, STARTTIME = 0, 11, 12, 19  # of `_stat`


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
    others = psutil.Process().children(recursive=True)
    try:
        yield
    finally:
        end_programs(others)


def end_programs(others: Sequence[Any] = ()) -> None:
    """Kill the descendants of this process but the ``others``, and wait for their ends."""
    import psutil

    ends_s = time.monotonic() + KILL_S
    while time.monotonic() < ends_s:
        programs = [p for p in psutil.Process().children(recursive=True) if p not in others]
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
    began_s = int(fields[STARTTIME]) / TICKS_PER_S
    return (
        STATES.get(fields[STATE], fields[STATE]),
        (int(fields[UTIME]) + int(fields[STIME])) / TICKS_PER_S,
        max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s),
    )


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
    """Sets of signals by name: caught, blocked and pending ones of the main thread; nothing where
    the process is gone."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        found = re.findall(r"^(\w+(?:Pnd|Blk|Cgt)):\s*(\w+)", text, re.MULTILINE)
        return {name: int(bits, 16) for name, bits in found}
    return {}


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler of that signal."""
    return bool(signal_masks(pid).get("SigCgt", 0) >> signum - 1 & 1)


def _stat(pid: int) -> list[str]:
    """From the third field on; the second, the name, may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def python(module: str, *arguments: object) -> list[str]:
    """Returns the command that runs a module with this interpreter.

    ``-P`` keeps the current folder out of the module search path, where a user's ``queue.py`` or a
    folder named ``penstock`` would shadow the libraries. It is left out if Penstock itself is run
    from the current folder.
    """
    here = Path(penstock.__file__).parents[1].samefile(os.curdir)
    return [sys.executable, *([] if here else ["-P"]), "-m", module, *map(str, arguments)]
