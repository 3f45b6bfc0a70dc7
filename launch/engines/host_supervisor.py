"""The program that starts and ends roles on a host that an engine reaches only by messages.

    python -m penstock.launch.engines.host_supervisor CONTROL_FD

It starts roles as the local engine does, so that nothing of them outlives it. Orders arrive over
the inherited socket, each with a "kind"; "key" names one start of one role:

    start       start a role; its paths are replaced by those of this host, and the run's keys are
                written where there are none
    send        pass a control message to a role
    signal      send it a signal
    spans       report what its threads did since ``since_ns`` of this host's clock; the reports
                repeat ``asked``
    close       kill all roles, and end
    orphaned    the engine is lost: end, after learners had SIGTERM and ``grace_s`` seconds to save.
                A shard of a parameter server, which has SIGTERM too, ends after its learners

It reports, each time about one role: "say" (a control message of it), "status" (a snapshot, whose
times are seconds that have passed), "stacks" (those that it wrote after SIGUSR1), "spans" (some of
those of its threads; the last such report has "more" false), "end" (its exit code and last output;
nothing follows). With each round of snapshots it reports "alive", about no role: it uses the run's
disk, and may hang there while its agent answers.

A closed socket is an agent that died. It counts as "orphaned", unless there are learners on other
hosts: those have the state too and train on, and a learner that saved would make them all stop.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.core.control import Channel, Message
from penstock.core.interfaces import EngineContext, Handle, Liveness
from penstock.core.role import StoreAddress
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.runtime_folder import RuntimeFolder
from penstock.launch.engines.local import LocalEngine
from penstock.profiling.dump import stacks_path
from penstock.transport.zmq.keys import write_keys

TURN_S = 0.1
KEYS = "keys"  # name of the folder with the run's keys, in the run's folder
SNAPSHOT_S = 0.5
STACKS_S = 0.5  # time for a role's signal handler to write its stacks
STACKS_NBYTES = 1 << 15
FAILED = 1
"""Exit code of a role that an error of the host has kept from starting."""
REFUSED = 2
"""Exit code of a role that the user's mistake has kept from starting."""


class ExpectedStacks(NamedTuple):
    """The stacks that a role is writing to its file."""

    path: Path
    offset: int
    """Where they begin in the file, in bytes."""
    ready_s: float
    """When they are read, in seconds of CLOCK_MONOTONIC."""


class HostSupervisor:
    """Obeys the orders of one channel until that ends."""

    def __init__(self, channel: Channel, folder: Path) -> None:
        """Start nothing yet.

        Args:
            channel: brings the orders, and takes the reports.
            folder: the runtime folder of this host.
        """
        self._channel = channel
        self._folder = folder
        self._engine = LocalEngine(EngineContext(folder))
        self._handles: dict[str, Handle] = {}
        self._reports: deque[Message] = deque()
        self._stacks: dict[str, ExpectedStacks] = {}
        """The stacks that roles are writing, by the key of the role."""
        self._snapshot_s = 0.0
        """When the next round of snapshots is due."""
        self._grace_s = 0.0
        """Time for learners to save if the engine is lost; the roles' arguments have it."""
        self._run_dir = Path()
        """The run's folder; the roles' arguments have it."""
        self._closing = False
        self._orphaned = False

    def run(self) -> None:
        """Obey orders until the engine closes or is lost, then end all roles."""
        try:
            while not self._closing and not self._orphaned:
                if self._channel.closed and not self._reconnect():
                    break
                self._wait()
                for order in self._channel.receive():
                    self._obey(**order)
                self._report_roles()

            if not self._closing:
                self._end_orphans()
        finally:
            self._engine.close()

    def _reconnect(self) -> bool:
        """Replace the channel, which was closed, by another one to the same engine.

        Returns: whether there is one. Here the engine is lost with its channel; a subclass whose
        engine may come back overrides this.
        """
        return False

    def _wait(self) -> None:
        """Wait up to `TURN_S` for an order, for room for a report, or for an event of a role."""
        poller = select.poll()
        for fd in self._engine.filenos():
            poller.register(fd, select.POLLIN)
        if not self._channel.closed:
            events = select.POLLIN
            if self._reports:
                events |= select.POLLOUT
            poller.register(self._channel.fileno(), events)

        poller.poll(TURN_S * 1000)

    def _obey(self, kind: str, key: str = "", **fields: Any) -> None:
        """Obey one order; one about a role that has ended is ignored."""
        handle = self._handles.get(key)
        if kind == "start":
            self._start(key, **fields)
        elif kind == "close":
            self._closing = True
        elif kind == "orphaned":
            self._orphaned = True
        elif kind == "send" and handle is not None:
            handle.send(fields["message"])
        elif kind == "signal" and handle is not None:
            if fields["signum"] == signal.SIGUSR1:
                self._expect_stacks(key, handle)
            handle.signal(fields["signum"])
        elif kind == "spans" and handle is not None:
            self._report_spans(key, handle, **fields)

    def _report_spans(self, key: str, handle: Handle, since_ns: int, asked: int) -> None:
        """Report what the threads of a role did since ``since_ns`` of this host's clock.

        The spans are in as many reports as they need, each with ``asked``, by which the engine
        knows the question; the last report has no spans.
        """
        from penstock.profiling.report.readings import pack_spans  # only a profile needs numpy

        for thread in handle.spans(since_ns) or ():
            for text in pack_spans(thread.spans):
                spans = thread.pid, thread.name, thread.lane, text
                self._report("spans", key, asked=asked, threads=[spans], more=True)
        self._report("spans", key, asked=asked, threads=[], more=False)

    def _start(
        self,
        key: str,
        spec: Message,
        incarnation: int,
        arguments: Message,
        log: str,
        keys: Mapping[str, str],
    ) -> None:
        """Start a role on this host; a failure is reported as its end.

        Args:
            key: of this start, in orders and reports.
            spec: the fields of its `RoleSpec`.
            incarnation: number of the start.
            arguments: fields of its `RoleContext`, with the engine's runtime folder.
            log: path of the file for its output.
            keys: the run's key files by name, for a host that does not have them yet.
        """
        engine_folder = arguments["runtime_dir"]
        local_folder = str(self._folder)
        arguments["runtime_dir"] = local_folder
        self._grace_s = arguments["grace_s"]
        self._run_dir = Path(arguments["run_dir"])
        keys_folder = self._run_dir / KEYS
        if keys:
            arguments["config"]["transport"]["curve"] = str(keys_folder)

        # A socket in the runtime folder of the engine's host is in this host's folder here.
        if spec["address"]:
            spec["address"] = spec["address"].replace(engine_folder, local_folder)
        spec["servers"] = tuple(
            address.replace(engine_folder, local_folder) for address in spec["servers"]
        )
        spec["stage"] = Stage(spec["stage"])
        spec["store"] = StoreAddress(**spec["store"]) if spec["store"] else None

        try:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            write_keys(keys_folder, keys)
            handle = self._engine.start(RoleSpec(**spec), incarnation, arguments, Path(log))
            self._handles[key] = handle
        except OSError as error:
            self._report("end", key, code=FAILED, tail=f"could not be started: {error}")
        except UserError as error:
            message = {"kind": "error", "user": True, "message": str(error), "traceback": ""}
            self._report("say", key, message=message)
            self._report("end", key, code=REFUSED, tail=str(error))

    def _report_roles(self) -> None:
        """Report the messages, snapshots, ends and stacks of all roles."""
        now_s = time.monotonic()
        snapshot_due = now_s >= self._snapshot_s
        if snapshot_due:
            self._snapshot_s = now_s + SNAPSHOT_S
            self._report("alive", "")

        for key, handle in list(self._handles.items()):
            self._report_role(key, handle, snapshot_due)
        for key, stacks in list(self._stacks.items()):
            if now_s >= stacks.ready_s:
                del self._stacks[key]
                self._report("stacks", key, text=_read(stacks.path, stacks.offset))
        self._send_reports()

    def _report_role(self, key: str, handle: Handle, snapshot_due: bool) -> None:
        """Report a role's messages, its snapshot if one is due, and its end, at which it is reaped.

        The end comes last, after a final snapshot.
        """
        # The liveness comes before the messages, so that those of a dead role are complete.
        is_dead = handle.liveness() is Liveness.DEAD
        for message in handle.receive():
            self._report("say", key, message=message)
        if snapshot_due or is_dead:
            self._report("status", key, **_snapshot(handle))

        if is_dead:
            del self._handles[key]
            tail = handle.log_tail()
            self._report("end", key, code=handle.reap(), tail=tail)

    def _send_reports(self) -> None:
        """Send the reports for which the channel has room."""
        while self._reports and self._channel.send(self._reports[0]):
            self._reports.popleft()

    def _expect_stacks(self, key: str, handle: Handle) -> None:
        """Note that a role is about to write its stacks, after what its file has now."""
        path = stacks_path(self._run_dir, handle.spec.name)
        offset = path.stat().st_size if path.exists() else 0
        self._stacks[key] = ExpectedStacks(path, offset, ready_s=time.monotonic() + STACKS_S)

    def _report(self, kind: str, key: str, **fields: Any) -> None:
        """Queue a report about the role with this key; "" for one about no role."""
        self._reports.append({"kind": kind, "key": key, **fields})

    def _end_orphans(self) -> None:
        """End the roles of an engine that is lost; essential roles may have time to save."""
        handles = self._handles.values()
        # Learners on other hosts train on, and one that saved here would make them all stop.
        no_other_learners = all(handle.spec.meets_at is None for handle in handles)
        essential_roles_save = self._orphaned or no_other_learners
        for handle in handles:
            saves = essential_roles_save and handle.spec.essential
            handle.signal(signal.SIGTERM if saves else signal.SIGKILL)

        deadline_s = time.monotonic() + self._grace_s
        while self._handles and time.monotonic() < deadline_s:
            self._wait()
            self._report_roles()
            self._reports.clear()


def _read(path: Path, offset: int) -> str:
    """Returns what was written to a file after ``offset``; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(STACKS_NBYTES).decode(errors="replace")
    except OSError:
        return ""


def _snapshot(handle: Handle) -> Message:
    """Returns the status and usage of a role, with times as seconds that have passed."""
    now_s = time.monotonic()
    status = handle.status()
    status = status._replace(
        phase_s=status.phase_s and now_s - status.phase_s,
        alive_s=status.alive_s and now_s - status.alive_s,
    )
    return {"status": list(status), "usage": list(handle.usage())}


def main() -> None:
    """Obey the orders that come over the descriptor in the program's argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with RuntimeFolder() as folder:
        HostSupervisor(Channel(socket.socket(fileno=descriptor)), folder).run()


if __name__ == "__main__":
    main()
