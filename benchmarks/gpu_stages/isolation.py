"""Runs a stage in a process of its own, so that a crash or a hang loses no other stage."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from gpu_stages.finding import Finding, Options
from penstock.core.processes import die_with

# Its server imports torch once for all stages and never touches a GPU, so forks of it may.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["penstock.learner.factory"])
GRACE_S = 15.0
LAST_LINES = 12


class StageError(Exception):
    """A stage failed; the text is the reason, and the last lines of what its process wrote."""


def findings(target: str, options: Options, timeout_s: float) -> Iterator[Finding]:
    """The findings of ``target`` ("module:function"), as they are made.

    Raises StageError where it fails, dies or takes longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory(
        prefix="bench-penstock-", ignore_cleanup_errors=True
    ) as folder:
        log = Path(folder) / "log"
        receiving, sending = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_work, args=(target, options, sending, log, folder))
        process.start()
        sending.close()
        ended = False
        try:
            yield from _received(receiving, time.monotonic() + timeout_s)
            process.join(GRACE_S)
            ended = True
        except TimeoutError:
            pass
        finally:
            _end(process, ended)
        if not ended or process.exitcode:
            why = f"ended with {process.exitcode}" if ended else f"stopped after {timeout_s:.0f} s"
            raise StageError("\n".join([why, *_last_lines(log)]))


def _received(receiving: Connection, ends_s: float) -> Iterator[Finding]:
    while receiving.poll(max(0.0, ends_s - time.monotonic())):
        try:
            yield receiving.recv()
        except EOFError:
            return
    raise TimeoutError


def _work(target: str, options: Options, sending: Connection, log: Path, folder: str) -> None:
    """The main function of the process."""
    die_with(os.getppid(), signal.SIGKILL)
    os.setsid()
    with log.open("ab") as written:
        os.dup2(written.fileno(), sys.stdout.fileno())
        os.dup2(written.fileno(), sys.stderr.fileno())
    tempfile.tempdir = os.environ["TMPDIR"] = folder  # killed, it leaves nothing
    for finding in resolve_name(target)(options):
        sending.send(finding)


def _end(process: Any, ended: bool) -> None:
    """End what is left of a stage: its process leads a session, in which its commands are."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        ends_s = time.monotonic() + GRACE_S
        while not ended and time.monotonic() < ends_s:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _last_lines(log: Path) -> list[str]:
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if line.strip()][-LAST_LINES:]
