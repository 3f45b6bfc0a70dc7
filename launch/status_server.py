"""The supervisor's answer to whoever asks what the processes of a run are in, and since when.

Who connects to a Unix socket in the runtime folder is sent one JSON object, and that is all:
nothing is read from them, so nothing can be wrong with what they say. `supervisor.json` in the run
folder tells where the socket is; a run that ends takes it away, one that is killed leaves it there.
The supervisor's loop never waits here: an answer leaves as fast as its asker takes it, for a while.
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
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.launch.process import Child
from penstock.profiling.dump import answer_with_stacks, stacks_path
from penstock.profiling.ledger import now_in, seconds_of

SOCKET = "supervisor.sock"
ASKERS = 8  # at a time; others wait until these are answered
PATIENCE_S = 5.0
STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "Z": "ended"}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StatusServer:
    """Where the supervisor is asked, for as long as the ``with`` lasts."""

    def __init__(self, run_dir: Path, runtime_dir: Path) -> None:
        self._run_dir = run_dir
        self._file = run_dir / SUPERVISOR_FILE
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self.path = runtime_dir / SOCKET
        self._since_s = time.time()
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
        with suppress(OSError):
            self._file.unlink()  # first: where it is there, somebody answers
        for asker in self._askers:
            asker.close()
        self._listener.close()
        faulthandler.unregister(signal.SIGUSR1)
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            for path in (self._run_dir / "logs").glob("*.stacks"):
                if not path.stat().st_size:  # no process was asked for its stacks
                    path.unlink()

    def turn(self, names: Iterable[str], children: Mapping[str, Child]) -> None:
        """Take in who asks, and send what they have room for; never waits. ``names`` are of all
        roles, ``children`` those that run."""
        fresh: list[socket.socket] = []
        with suppress(OSError):
            while len(self._askers) + len(fresh) < ASKERS:
                fresh.append(self._listener.accept()[0])
        if fresh:
            answer = json.dumps(without_nan(self._report(names, children))).encode()
            self._askers += [_Asker(connection, answer) for connection in fresh]
        if self._askers:
            self._askers = [asker for asker in self._askers if asker.send()]

    def _report(self, names: Iterable[str], children: Mapping[str, Child]) -> dict[str, Any]:
        return {
            "run": str(self._run_dir),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since_s,
            "running_s": time.time() - self._since_s,
            "processes": [
                describe(children[name]) if name in children else {"name": name, "pid": None}
                for name in names
            ],
        }


class _Asker:
    """One who has connected, and how much of the answer is still to be sent."""

    def __init__(self, connection: socket.socket, answer: bytes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._left = memoryview(answer)
        self._ends_s = time.monotonic() + PATIENCE_S

    def send(self) -> bool:
        """Whether there is more to be sent, to one who is still there."""
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


def describe(child: Child) -> dict[str, Any]:
    """What a process is in; durations in seconds up to now."""
    status, spec = child.status, child.spec
    alive_s, now_s = status.alive_s, time.monotonic()
    system = process_facts(child.pid)
    age_s = system.get("age_s", 0.0)
    return {
        "name": spec.name,
        "pid": child.pid,
        "learner": spec.learner,
        "incarnation": status.incarnation,
        **system,
        "phase": child.phase,
        "phase_for_s": max(0.0, min(age_s, now_s - status.phase_s)),
        "silent_s": max(0.0, min(age_s, now_s - alive_s)) if alive_s else None,
        "threads": [_thread(name, lane) for name, lane in status.lanes.items()],
    }


def _thread(name: str, lane: memoryview) -> dict[str, Any]:
    """The part that a thread is in, for how long, and its seconds by part since it began."""
    present = now_in(lane)
    part, for_s = None, None
    if present is not None:
        part = present[0].name.lower()
        for_s = max(0.0, (time.monotonic_ns() - present[1]) * 1e-9)
    return {"name": name, "part": part, "for_s": for_s, "seconds": seconds_of(lane)}


def process_facts(pid: int) -> dict[str, Any]:
    """What the kernel says of a process: state, processor seconds, age; nothing once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    fields = text.rpartition(")")[2].split()  # from the third on; a name may hold spaces
    began_s = int(fields[19]) / TICKS_PER_S
    return {
        "state": STATES.get(fields[0], fields[0]),
        "cpu_s": (int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        "age_s": max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s),
    }
