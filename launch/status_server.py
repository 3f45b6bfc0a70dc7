"""Status server: reports each process's current phase and how long it has been in it.

A client that connects to the Unix socket in the runtime folder receives one JSON object. Nothing is
read from clients, so their input needs no validation. `supervisor.json` in the run folder contains
the socket's path; it is removed when the run ends, and remains if the supervisor is killed. The
server never blocks the supervisor's loop: a reply is sent as fast as the client reads it, until a
deadline.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core.files import without_nan, write_atomic
from penstock.core.interfaces import Handle
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE, HeldFolder
from penstock.profiling.dump import answer_with_stacks, stacks_path

SOCKET = "supervisor.sock"
ASKERS = 8  # at a time; others wait until these are answered
PATIENCE_S = 5.0


class StatusServer:
    """Serves the status of the processes while the ``with`` block runs."""

    def __init__(self, run_dir: Path, runtime_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = HeldFolder(run_dir)
        self._file = run_dir / SUPERVISOR_FILE
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self.path = runtime_dir / SOCKET
        self._since_s, self._began_s = time.time(), time.monotonic()
        self._askers: list[_Asker] = []

    def __enter__(self) -> StatusServer:
        self._listener.bind(str(self.path))
        self._listener.listen(ASKERS)
        answer_with_stacks(stacks_path(self._run_dir, "supervisor"))
        about = {
            "pid": os.getpid(),
            "began": began_ticks(os.getpid()),
            "host": socket.gethostname(),
            "socket": str(self.path),
        }
        with suppress(OSError):  # a full disk ends no run
            write_atomic(self._file, json.dumps(about) + "\n")
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder.is_in_place():
            self._remove_files()  # first: while `supervisor.json` exists, the socket must answer
        for asker in self._askers:
            asker.close()
        self._listener.close()
        faulthandler.unregister(signal.SIGUSR1)
        with suppress(OSError):
            self.path.unlink()

    def _remove_files(self) -> None:
        with suppress(OSError):
            self._file.unlink()
        with suppress(OSError):
            for path in (self._run_dir / "logs").glob("*.stacks"):
                if not path.stat().st_size:  # no process was asked for its stacks
                    path.unlink()

    def turn(self, names: Iterable[str], handles: Mapping[str, Handle]) -> None:
        """Accept clients and send replies; never blocks. ``names`` are those of the roles to
        report, ``handles`` those of the running ones."""
        fresh: list[socket.socket] = []
        with suppress(OSError):
            while len(self._askers) + len(fresh) < ASKERS:
                fresh.append(self._listener.accept()[0])
        if fresh:
            answer = json.dumps(without_nan(self._report(names, handles))).encode()
            self._askers += [_Asker(connection, answer) for connection in fresh]
        if self._askers:
            self._askers = [asker for asker in self._askers if asker.send()]

    def _report(self, names: Iterable[str], handles: Mapping[str, Handle]) -> dict[str, Any]:
        return {
            "run": str(self._run_dir),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since_s,
            "running_s": time.monotonic() - self._began_s,
            "processes": [
                describe(handles[name]) if name in handles else {"name": name, "pid": None}
                for name in names
            ],
        }


class _Asker:
    """A connected client, and the rest of its reply."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._left = memoryview(answer)
        self._ends_s = time.monotonic() + PATIENCE_S

    def send(self) -> bool:
        """Send as much as possible; returns whether more is to be sent."""
        try:
            self._left = self._left[self._connection.send(self._left) :]
            more = bool(self._left)
        except BlockingIOError:
            more = time.monotonic() < self._ends_s
        except OSError:
            more = False
        if not more:
            self.close()
        return more

    def close(self) -> None:
        self._connection.close()


def describe(handle: Handle) -> dict[str, Any]:
    """Status of a process; durations in seconds until now."""
    status, usage, spec = handle.status(), handle.usage(), handle.spec
    now_s, age_s = time.monotonic(), usage.age_s or 0.0
    system = {"state": usage.state, "cpu_s": usage.cpu_s, "age_s": usage.age_s}
    return {
        "name": spec.name,
        "host": handle.host,
        "pid": usage.pid,
        "learner": spec.learner,
        "incarnation": status.incarnation,
        **{name: value for name, value in system.items() if value is not None},
        "phase": status.phase,
        "phase_for_s": max(0.0, min(age_s, now_s - status.phase_s)),
        "silent_s": max(0.0, min(age_s, now_s - status.alive_s)) if status.alive_s else None,
        "threads": [thread._asdict() for thread in usage.threads],
    }
