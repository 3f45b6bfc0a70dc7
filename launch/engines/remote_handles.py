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
from typing import TYPE_CHECKING, Any

from penstock.core.control import Message, encoded
from penstock.core.interfaces import Liveness, RoleStatus, RoleUsage, ThreadUsage
from penstock.core.role_spec import RoleSpec
from penstock.launch.engines.local import too_long
from penstock.transport.zmq.keys import read_keys

if TYPE_CHECKING:
    from penstock.profiling.report.readings import Thread

# The key files that an actor needs.
OF_ACTORS = ("learner.key", "actor.key_secret")
# Longest order, which is below what the default buffer of a socket on Linux holds.
MOST_NBYTES = 200_000
# The status of a role before its first snapshot.
UNKNOWN = RoleStatus(False, 0, "starting", 0.0, 0.0, 0, 0, 0, 0, 0, 0)


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

    def here_ns(self, at_ns: int) -> int:
        """Convert a time of that host's CLOCK_MONOTONIC to this host's.

        The error is at most the shortest time that one of its reports was on the way.
        """
        return at_ns + (self._behind_ns or 0)

    def there_ns(self, at_ns: int) -> int:
        """Convert a time of this host's CLOCK_MONOTONIC to that host's, as `here_ns` does back."""
        return at_ns - (self._behind_ns or 0)

    def heard(self, at_ns: int) -> None:
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
                handle.take(report)

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
        self.spec, self.incarnation, self.host = spec, incarnation, line.host
        self.key = f"{spec.name}/{incarnation}"
        self._line = line
        self._inbox: list[Message] = []
        self._status = UNKNOWN._replace(incarnation=incarnation)
        self._usage = RoleUsage(0, None, None, None, (), math.nan, 0)  # times of the host's clock
        self._spans: dict[tuple[int, str, int], list[str]] = {}
        """That were asked for, by pid, name and number of each thread, oldest first."""
        self._spans_asked: int | None = None  # since when; None: nothing is awaited
        self._spans_here = False
        self._code: int | None = None
        self._tail = ""
        self._stacks = log.with_suffix(".stacks")

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

        if (nbytes := len(encoded(order))) > MOST_NBYTES:
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
        # A role whose start was not even sent is ended here.
        if signum in (signal.SIGTERM, signal.SIGKILL) and self._line.withdraw(self.key):
            self._code, self._tail = -signum, "was not started: no host was found for it"
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
        return self._usage._replace(at_ns=self._line.here_ns(self._usage.at_ns))

    def spans(self, since_ns: int) -> list[Thread] | None:
        from penstock.profiling.report.readings import Thread, unpacked  # they need numpy

        if self._spans_asked != since_ns:
            self._spans_asked, self._spans, self._spans_here = since_ns, {}, False
            self._line.order(
                "spans", key=self.key, since_ns=self._line.there_ns(since_ns), asked=since_ns
            )

        if not self._spans_here:
            return None

        found, self._spans, self._spans_asked = self._spans, {}, None
        behind_ns = self._line.here_ns(0)
        return [
            Thread(self.spec.name, pid, name, lane, unpacked(texts, behind_ns))
            for (pid, name, lane), texts in found.items()
        ]

    def log_tail(self) -> str:
        return self._tail

    def reap(self) -> int:
        assert self._code is not None
        self._line.remove(self)
        return self._code

    def take(self, report: Message) -> None:
        """Take a report about this role; `host_supervisor` describes the kinds."""
        match report["kind"]:
            case "say":
                self._inbox.append(report["message"])
            case "status":
                self._snapshot(report["status"], report["usage"])
                self._line.heard(self._usage.at_ns)
            case "spans":
                if report["asked"] == self._spans_asked:
                    self._take_spans(report["threads"], report["more"])
            case "stacks":
                append_stacks(self._stacks, report["text"])
            case "end":
                self._code, self._tail = report["code"], report["tail"]

    def _take_spans(self, threads: Sequence[tuple[int, str, int, str]], more: bool) -> None:
        """Add spans, each with pid, name and number of its thread; ``more`` of them may follow."""
        for pid, name, lane, text in threads:
            self._spans.setdefault((pid, name, lane), []).append(text)
        self._spans_here = not more

    def _snapshot(self, status: list[Any], usage: list[Any]) -> None:
        """Take a snapshot of the role, whose times are seconds that have passed."""
        now_s = time.monotonic()
        found, used = RoleStatus(*status), RoleUsage(*usage)
        self._status = found._replace(
            phase_s=found.phase_s and now_s - found.phase_s,
            alive_s=found.alive_s and now_s - found.alive_s,
        )

        self._usage = used._replace(threads=tuple(ThreadUsage(*t) for t in used.threads))


def append_stacks(path: Path, text: str) -> None:
    """Append stacks from another host to this host's file.

    Where both hosts share a disk, the file ends with these stacks already and is left as it is.
    """
    added = text.encode()
    with suppress(OSError), path.open("ab+") as file:
        file.seek(-min(len(added), file.tell()), os.SEEK_END)
        if added and file.read() != added:
            file.write(added)


def _keys(spec: RoleSpec, folder: Path) -> dict[str, str]:
    """Returns the key files that a role needs, by name.

    A role that joins from another host does not get the learner's secret.
    """
    keys = read_keys(folder)
    if not spec.joins:
        return keys
    return {name: text for name, text in keys.items() if name in OF_ACTORS}
