"""The socket of a supervisor, at which commands read what its processes do and order something.

A client connects to the Unix socket `supervisor.sock` in the runtime folder and sends one JSON
object in one line. It receives one JSON object, which ends with the connection. "request" names
what it wants:

    status   -> the phase of each process, and how long it has been in it
    stacks   have the processes named in "roles" write their stacks, which arrive in the run's logs
             -> {} at once
    save     write a checkpoint now -> the message of the checkpoint, or {"error": ...}
    timeline write what the threads did in the last minute into the run's folder
             -> {} once it is written, or {"error": ...}

`supervisor.json` in the run folder contains the socket's path; it is removed when the run ends, and
remains if the supervisor is killed. Only processes of this user can reach the socket, as its folder
is private, and these are trusted. Nothing here blocks the supervisor's loop: a client that is
silent, or does not read its reply, keeps its connection and delays nobody.
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

from penstock.core.control import Message
from penstock.core.files import without_nan, write_atomic
from penstock.core.interfaces import Handle
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE, RunFolderGuard
from penstock.monitor.supervisor_client import SAVE, STACKS, STATUS, TIMELINE
from penstock.profiling.dump import stacks_path, write_stacks_on_signal

SOCKET = "supervisor.sock"
BACKLOG = 16
"""Most connections that wait for the next `SupervisorServer.serve_clients`."""
CHUNK_NBYTES = 1 << 16


class SupervisorServer:
    """Replies to requests while the ``with`` block runs.

    Call `serve_clients` in every turn of the loop.
    """

    def __init__(self, run_dir: Path, runtime_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = RunFolderGuard(run_dir)
        self._file = run_dir / SUPERVISOR_FILE
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self.path = runtime_dir / SOCKET
        self._began_at = time.time()  # seconds since the epoch, for the report
        self._began_s = time.monotonic()
        self._clients: list[_Client] = []

    def __enter__(self) -> SupervisorServer:
        """Listen, and write into the run's folder where. SIGUSR1 then writes this process's stacks,
        too."""
        self._listener.bind(str(self.path))
        self._listener.listen(BACKLOG)
        write_stacks_on_signal(stacks_path(self._run_dir, "supervisor"))

        location = {
            "pid": os.getpid(),
            "began": began_ticks(os.getpid()),
            "host": socket.gethostname(),
            "socket": str(self.path),
        }
        with suppress(OSError):  # a full disk ends no run
            write_atomic(self._file, json.dumps(location) + "\n")
        return self

    def __exit__(self, *_: object) -> None:
        # The files are removed first: while `supervisor.json` exists, the socket must answer.
        if self._folder.is_in_place():
            self._remove_files()
        self.reply(SAVE, {"error": "the run has ended, and a run saves at its end"})
        for client in self._clients:
            client.close()

        self._listener.close()
        faulthandler.unregister(signal.SIGUSR1)
        with suppress(OSError):
            self.path.unlink()

    def _remove_files(self) -> None:
        """Remove `supervisor.json`, and the files for stacks that nobody has asked for."""
        with suppress(OSError):
            self._file.unlink()
        with suppress(OSError):
            for path in (self._run_dir / "logs").glob("*.stacks"):
                if path.stat().st_size == 0:
                    path.unlink()

    def serve_clients(self, names: Iterable[str], handles: Mapping[str, Handle]) -> list[Message]:
        """Accept clients, and receive and send what is possible at once.

        Args:
            names: names of the roles in a status report.
            handles: the processes of those of them that run, by name.

        Returns:
            Requests that the caller carries out. A client that ordered `SAVE` or `TIMELINE` waits
            until `reply` is called.
        """
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._clients.append(_Client(connection))

        orders: list[Message] = []
        report: Message | None = None
        for client in self._clients:
            request = client.receive()
            if request is None:
                continue

            kind = request.get("request")
            if kind == STATUS:
                report = report or self._report(names, handles)
                client.reply(report)
            elif kind in (SAVE, TIMELINE):
                client.order = kind
                orders.append(request)
            elif kind == STACKS and _are_names(request.get("roles")):
                client.reply({})
                orders.append(request)
            else:
                error = f"the order {kind!r:.40} is unknown to this run's release of Penstock"
                client.reply({"error": error})

        for client in self._clients:
            client.send()
        self._clients = [client for client in self._clients if not client.closed]
        return orders

    def reply(self, order: str, answer: Message) -> None:
        """Reply to all clients that wait for ``order``, which was carried out or has failed."""
        for client in self._clients:
            if client.order == order:
                client.order = None
                client.reply(answer)
                client.send()

    def _report(self, names: Iterable[str], handles: Mapping[str, Handle]) -> Message:
        """The reply to `STATUS`; the arguments are as of `serve_clients`."""
        return {
            "run": str(self._run_dir),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._began_at,
            "running_s": time.monotonic() - self._began_s,
            "processes": [
                _describe(handles[name]) if name in handles else {"name": name, "pid": None}
                for name in names
            ],
        }


class _Client:
    """A connection: it receives one request, and then sends one reply."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._received = b""  # of the request
        self._has_request = False
        self._unsent = memoryview(b"")  # part of the reply; empty before there is one
        self.order: str | None = None
        """The order for whose end the client waits."""
        self.closed = False

    def receive(self) -> Message | None:
        """Receive what has arrived, and close the connection if the client has.

        Returns:
            The request, in the turn in which it is complete, and otherwise None. A line that is no
            JSON object is an empty request.
        """
        try:
            chunk = self._connection.recv(CHUNK_NBYTES)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
        if self._has_request or self.closed:
            return None

        self._received += chunk
        line, line_end, _ = self._received.partition(b"\n")
        if not line_end:
            return None

        self._has_request = True
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return request if isinstance(request, dict) else {}

    def reply(self, answer: Message) -> None:
        """Let the next calls of `send` send ``answer``."""
        self._unsent = memoryview(json.dumps(without_nan(answer)).encode())

    def send(self) -> None:
        """Send as much of the reply as possible, and close the connection after the last byte."""
        if not self._unsent or self.closed:
            return

        try:
            sent_nbytes = self._connection.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return

        self._unsent = self._unsent[sent_nbytes:]
        if not self._unsent:
            self.close()

    def close(self) -> None:
        self.closed = True
        self._connection.close()


def _are_names(roles: object) -> bool:
    """Whether a client has sent a list of texts."""
    return isinstance(roles, list) and all(isinstance(role, str) for role in roles)


def _describe(handle: Handle) -> dict[str, Any]:
    """The status of a process, with durations in seconds until now."""
    status = handle.status()
    usage = handle.usage()
    spec = handle.spec
    now_s = time.monotonic()

    # A process is in no phase, and not silent, for longer than it exists.
    age_s = usage.age_s or 0.0
    phase_for_s = max(0.0, min(age_s, now_s - status.phase_s))
    silent_s = None
    if status.alive_s:
        silent_s = max(0.0, min(age_s, now_s - status.alive_s))

    kernel_values = {"state": usage.state, "cpu_s": usage.cpu_s, "age_s": usage.age_s}
    return {
        "name": spec.name,
        "host": handle.host,
        "pid": usage.pid,
        "learner": spec.learner,
        "incarnation": status.incarnation,
        **{name: value for name, value in kernel_values.items() if value is not None},
        "phase": status.phase,
        "phase_for_s": phase_for_s,
        "silent_s": silent_s,
        "threads": [thread._asdict() for thread in usage.threads],
    }
