"""Operating-system processes: start one, identify one, end together with the parent."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import penstock

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, death_signal: int) -> None:
    """Get ``death_signal`` when the parent dies; exit at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def began_ticks(pid: int) -> int | None:
    """Start time of a process, in clock ticks since boot; None if there is no such process.

    Together with the pid it identifies a process, since pids are reused.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def python(module: str, *arguments: object) -> list[str]:
    """The command that runs a module with this interpreter.

    ``-P`` keeps the current folder out of the module search path, where a user's ``queue.py`` or a
    folder named ``penstock`` would shadow the libraries; unless Penstock itself is run from there.
    """
    here = Path(penstock.__file__).parents[1].samefile(os.curdir)
    return [sys.executable, *([] if here else ["-P"]), "-m", module, *map(str, arguments)]
