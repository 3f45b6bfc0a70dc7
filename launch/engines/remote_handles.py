"""Roles on hosts that an engine reaches by messages: a handle, and the line to its host.

`penstock.launch.engines.host_supervisor` is at the other end of a line, and says what the messages
are. How they get there is the engine's.
"""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.control import Message, encode_message
from penstock.core.interfaces import Liveness, RoleStatus, RoleUsage, ThreadUsage
from penstock.core.role_spec import RoleSpec
from penstock.launch.engines.local import too_long
from penstock.transport.zmq.keys import read_keys

if TYPE_CHECKING:
    from penstock.profiling.report.readings import Thread

ACTOR_KEYS = ("learner.key", "actor.key_secret")
"""The key files that an actor needs."""
MOST_NBYTES = 200_000
"""Longest order, which is below what the default buffer of a socket on Linux holds."""
UNKNOWN = RoleStatus(
    began=False,
    incarnation=0,
    phase="starting",
    phase_s=0.0,
    alive_s=0.0,
    produced_steps=0,
    sequence=0,
    played_steps=0,
    trained_steps=0,
    reduction=0,
    dropped_nbytes=0,
)
"""The status of a role before its first snapshot."""
NO_USAGE = RoleUsage(
    pid=0, state=None, cpu_s=None, age_s=None, threads=(), coreless_s=math.nan, at_ns=0
)
"""The usage of a role before its first snapshot."""


class ThreadKey(NamedTuple):
    """Identifies a thread of a role."""

    pid: int
    name: str
    lane: int


class SpansRequest:
    """The spans of a role that its host was asked for, as far as they have arrived."""

    def __init__(self, since_ns: int) -> None:
        """``since_ns`` is the time since which they were asked for, by the clock of this host."""
        self.since_ns = since_ns
        self.complete = False
        """Whether all have arrived."""
        self.texts: dict[ThreadKey, list[str]] = {}
        """Packed spans of each thread, oldest first."""

    def add(self, threads: Sequence[tuple[int, str, int, str]], more: bool) -> None:
        """Add spans, each with pid, name and lane of its thread; ``more`` of them may follow."""
        for pid, name, lane, text in threads:
            self.texts.setdefault(ThreadKey(pid, name, lane), []).append(text)
        self.complete = not more


class HostLine(ABC):
    """The connection to one host supervisor, and the handles of the roles that it has started.

    An engine derives a class that sends orders, and appends the reports that arrive to `_reports`.
    """

    def __init__(self, host: str) -> None:
        """Begin without handles; ``host`` is the name of the host."""
        self.host = host
        self._reports: deque[Message] = deque()  # reports that have arrived, for `pump`
        self._handles: dict[str, RemoteHandle] = {}
        self._behind_ns: int | None = None
        """This host's clock minus that host's, with the shortest way of a report; None: unknown."""

    def to_local_ns(self, at_ns: int) -> int:
        """Convert a time of that host's CLOCK_MONOTONIC to this host's.

        The error is at most the shortest time that one of its reports was on the way.
        """
        return at_ns + (self._behind_ns or 0)

    def to_host_ns(self, at_ns: int) -> int:
        """Convert a time of this host's CLOCK_MONOTONIC to that host's."""
        return at_ns - (self._behind_ns or 0)

    def on_report_time(self, at_ns: int) -> None:
        """A report that was made at ``at_ns`` by that host's clock has arrived."""
        behind_ns = time.perf_counter_ns() - at_ns
        if self._behind_ns is None or behind_ns < self._behind_ns:
            self._behind_ns = behind_ns

    @property
    @abstractmethod
    def reached(self) -> bool:
        """Whether the host answers; also while it has not had the time for its first answer."""

    @abstractmethod
    def order(self, kind: str, **fields: Any) -> None:
        """Send an order; it arrives after those before it, or is lost with the host."""

    @abstractmethod
    def withdraw(self, key: str) -> bool:
        """Withdraw the order to start a role, and those to it that follow, unless it was sent.

        Args:
            key: of the start of the role.

        Returns: whether the orders are withdrawn; False means that the role may have started.
        """

    def pump(self) -> None:
        """Give the reports that have arrived to their handles.

        A report about a role that was reaped is ignored.
        """
        while self._reports:
            report = self._reports.popleft()
            handle = self._handles.get(report["key"])
            if handle is not None:
                handle.on_report(report)

    def add(self, handle: RemoteHandle) -> None:
        """Give a handle the reports about its role from now on."""
        self._handles[handle.key] = handle

    def remove(self, handle: RemoteHandle) -> None:
        """Ignore reports about this handle's role, which was reaped."""
        del self._handles[handle.key]


class RemoteHandle:
    """One start of a role on another host: a `Handle` whose role is known by reports."""

    def __init__(
        self,
        line: HostLine,
        spec: RoleSpec,
        incarnation: int,
        arguments: Mapping[str, Any],
        log: Path,
    ) -> None:
        """Order the role's start.

        Args:
            line: connects to the role's host.
            spec: the role.
            incarnation: number of this start.
            arguments: fields of `RoleContext` beyond those of the spec.
            log: the file for the role's output, on its host.

        Raises:
            UserError: the order is longer than `MOST_NBYTES`.
        """
        self.spec = spec
        self.incarnation = incarnation
        self.host = line.host
        self.key = f"{spec.name}/{incarnation}"
        self._line = line
        self._inbox: list[Message] = []
        self._status = UNKNOWN._replace(incarnation=incarnation)
        self._usage = NO_USAGE
        """The latest usage, whose ``at_ns`` is a time of that host's clock."""
        self._spans: SpansRequest | None = None
        """The spans that are awaited."""
        self._code: int | None = None
        """Exit code; None while the role's end is not confirmed."""
        self._tail = ""
        """The last output, once it has ended."""
        self._stacks_path = log.with_suffix(".stacks")

        config = arguments["config"]
        curve = config and config["transport"]["curve"]
        order = {
            "key": self.key,
            "spec": asdict(spec),
            "incarnation": incarnation,
            "arguments": dict(arguments),
            "log": str(log),
            "keys": _keys(spec, Path(curve)) if curve else {},
        }

        nbytes = len(encode_message(order))
        if nbytes > MOST_NBYTES:
            raise too_long(spec.name, nbytes, MOST_NBYTES)

        line.add(self)
        line.order("start", **order)

    @property
    def shares_memory(self) -> bool:
        return False

    def send(self, message: Message) -> None:
        self._line.order("send", key=self.key, message=message)

    def receive(self) -> list[Message]:
        self._line.pump()
        messages, self._inbox = self._inbox, []
        return messages

    def signal(self, signum: int) -> None:
        """Order a signal to the role, or withdraw its start if that was not sent yet."""
        # A role whose start was not even sent is ended here.
        if signum in (signal.SIGTERM, signal.SIGKILL) and self._line.withdraw(self.key):
            self._code = -signum
            self._tail = "was not started: no host was found for it"
        else:
            self._line.order("signal", key=self.key, signum=int(signum))

    def liveness(self) -> Liveness:
        self._line.pump()
        if self._code is not None:
            return Liveness.DEAD
        return Liveness.ALIVE if self._line.reached else Liveness.PRESUMED_DEAD

    def status(self) -> RoleStatus:
        return self._status

    def usage(self) -> RoleUsage:
        return self._usage._replace(at_ns=self._line.to_local_ns(self._usage.at_ns))

    def spans(self, since_ns: int) -> list[Thread] | None:
        """Ask the host for what the role's threads did since ``since_ns``, by this host's clock.

        Returns: None until all of it has arrived, and then that, once.
        """
        from penstock.profiling.report.readings import Thread, unpack_spans  # they need numpy

        if self._spans is None or self._spans.since_ns != since_ns:
            self._spans = SpansRequest(since_ns)
            host_ns = self._line.to_host_ns(since_ns)
            self._line.order("spans", key=self.key, since_ns=host_ns, asked=since_ns)
        if not self._spans.complete:
            return None

        texts_of_thread = self._spans.texts
        self._spans = None
        behind_ns = self._line.to_local_ns(0)
        return [
            Thread(self.spec.name, *thread, unpack_spans(texts, behind_ns))
            for thread, texts in texts_of_thread.items()
        ]

    def log_tail(self) -> str:
        return self._tail

    def reap(self) -> int:
        assert self._code is not None
        self._line.remove(self)
        return self._code

    def on_report(self, report: Message) -> None:
        """Take a report about this role; `host_supervisor` describes the kinds."""
        match report["kind"]:
            case "say":
                self._inbox.append(report["message"])
            case "status":
                self._set_snapshot(RoleStatus(*report["status"]), RoleUsage(*report["usage"]))
                self._line.on_report_time(self._usage.at_ns)
            case "spans":
                if self._spans is not None and report["asked"] == self._spans.since_ns:
                    self._spans.add(report["threads"], report["more"])
            case "stacks":
                append_stacks(self._stacks_path, report["text"])
            case "end":
                self._code = report["code"]
                self._tail = report["tail"]

    def _set_snapshot(self, status: RoleStatus, usage: RoleUsage) -> None:
        """Set status and usage from a report, in which times are seconds that have passed.

        A time of 0.0 stands for one that was never, and stays 0.0.
        """
        now_s = time.monotonic()
        self._status = status._replace(
            phase_s=status.phase_s and now_s - status.phase_s,
            alive_s=status.alive_s and now_s - status.alive_s,
        )
        threads = tuple(ThreadUsage(*thread) for thread in usage.threads)
        self._usage = usage._replace(threads=threads)


def append_stacks(path: Path, text: str) -> None:
    """Append stacks from another host to this host's file.

    Where both hosts share a disk, the file ends with these stacks already and is left as it is.
    """
    stacks = text.encode()
    with suppress(OSError), path.open("ab+") as file:
        file.seek(-min(len(stacks), file.tell()), os.SEEK_END)
        if stacks and file.read() != stacks:
            file.write(stacks)


def _keys(spec: RoleSpec, folder: Path) -> dict[str, str]:
    """Returns the key files that a role needs, by name.

    A role that joins from another host does not get the learner's secret.
    """
    keys = read_keys(folder)
    if not spec.joins:
        return keys
    return {name: text for name, text in keys.items() if name in ACTOR_KEYS}
