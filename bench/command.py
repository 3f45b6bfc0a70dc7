"""Runs commands that have processes of their own, which need a word before the end to end them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 30.0


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    cwd: Path | None = None,
    keep_errors: bool = False,
) -> subprocess.CompletedProcess[str]:
    """A command's end, with its standard output, and its standard error with ``keep_errors``.

    Whatever ends the waiting, a signal or the timeout (subprocess.TimeoutExpired), asks it to stop
    and waits for that.
    """
    errors = subprocess.PIPE if keep_errors else None
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=cwd,
    )
    try:
        out, error = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)
