"""A process writes its Python stacks to a file of its own whenever it gets SIGUSR1."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path


def stacks_path(run_dir: Path, name: str) -> Path:
    """Returns the file to which the process of that name writes its stacks."""
    return run_dir / "logs" / f"{name}.stacks"


def write_stacks_on_signal(path: Path) -> None:
    """From now on append the stacks of all threads to ``path`` at SIGUSR1.

    The signal handler itself writes, without memory and without the interpreter, so that this works
    in a process that is stuck in C. If the file cannot be made, the stacks go to standard error.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError:
        descriptor = sys.stderr.fileno()
    faulthandler.register(signal.SIGUSR1, descriptor)
