"""An engine of a few pages: each bundle has a host agent, a process of its own that starts roles.

Agents stand for other hosts: the engine reaches them by a socket alone, and shares no memory and no
pidfd with what they start. They exec roles by the local engine's code, relay control messages and
snapshots of status, and report confirmed ends. When the socket of an agent is cut, its roles are
presumed dead at once; further starts go to another agent. An agent that misses its engine for
``MISSED_S`` ends its roles and itself.

Left out, as agents run on this host: finding agents through a registry, keys for the socket, a
tolerance for short silences, the agents' own logs, and the spans of a profile. An agent that misses
its engine kills a learner, too, and does not wait for its last checkpoint.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.control import Channel, Message
from penstock.core.interfaces import (
    Bundle,
    EngineContext,
    Handle,
    Liveness,
    RoleStatus,
    RoleUsage,
    ThreadUsage,
)
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import runtime_folder
from penstock.launch.engines.local import LocalEngine
from penstock.profiling.report.readings import Reading, Thread

TURN_S = 0.05
MISSED_S = 20.0
CLOSE_S = 10.0
NOTHING = RoleStatus(False, 0, "starting", 0.0, 0.0, 0, 0, 0, 0, 0, 0)


class AgentEngine:
    """Starts an agent for each bundle, and another where that one is lost."""

    def __init__(self, context: EngineContext) -> None:
        self._runtime_dir = context.runtime_dir
        self._agents: list[AgentClient] = []
        self._places: dict[str, AgentClient] = {}  # of each role
        self._bundles: Sequence[Bundle] = ()

    def hosts(self) -> Sequence[int]:
        return ()

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        self._bundles = bundles
        for bundle in bundles:
            self._place(bundle)

    def _place(self, bundle: Bundle) -> None:
        agent = AgentClient(bundle.name, len(self._agents), self._runtime_dir)
        self._agents.append(agent)
        self._places |= dict.fromkeys(bundle.roles, agent)

    def endpoints(self) -> Mapping[str, str]:
        return {role: agent.address for role, agent in self._places.items()}

    def start(
        self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any], log: Path
    ) -> AgentHandle:
        if not self._places[spec.name].reached:
            self._place(next(b for b in self._bundles if spec.name in b.roles))
        return AgentHandle(self._places[spec.name], spec, incarnation, arguments, log)

    def filenos(self) -> Collection[int]:
        return [fd for agent in self._agents for fd in agent.filenos()]

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        self._agents = []

    def agents(self, bundle: str) -> list[AgentClient]:
        """All that a bundle has had, the present one last."""
        return [agent for agent in self._agents if agent.bundle == bundle]


class AgentClient:
    """The engine's line to one agent."""

    def __init__(self, bundle: str, number: int, runtime_dir: Path) -> None:
        self.bundle = bundle
        self.host = f"agent-{number}"
        self.address = f"127.0.0.{2 + number}"
        self.reached = True
        self._handles: dict[str, AgentHandle] = {}
        self._orders: deque[Message] = deque()
        self._path = runtime_dir / f"{self.host}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._path))
            listener.listen(1)
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno()), str(MISSED_S)],
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
            self._channel: Channel | None = self._connect()

    def _connect(self) -> Channel:
        """To a socket that listens; the agent itself may take a moment to accept."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(str(self._path))
        return Channel(end)

    def cut(self) -> None:
        """Lose the connection, and what is on its way."""
        assert self._channel is not None
        self._channel.close()
        self._channel, self.reached = None, False

    def reconnect(self) -> None:
        """The agent is reached as soon as it has answered which roles it has."""
        self._orders.clear()
        self._channel = self._connect()
        self.order("list")

    def filenos(self) -> list[int]:
        return [] if self._channel is None else [self._channel.fileno()]

    @property
    def handles(self) -> Collection[AgentHandle]:
        """Those that have not been reaped."""
        return self._handles.values()

    def add(self, handle: AgentHandle) -> None:
        self._handles[handle.key] = handle

    def remove(self, handle: AgentHandle) -> None:
        del self._handles[handle.key]
        self.order("forget", key=handle.key)

    def order(self, kind: str, **fields: Any) -> None:
        """What the agent is to do; lost where it cannot be reached."""
        if self._channel is not None:
            self._orders.append({"kind": kind, **fields})
            self.pump()

    def pump(self) -> None:
        """Send and receive what there is."""
        if self._channel is None:
            return
        while self._orders and self._channel.send(self._orders[0]):
            self._orders.popleft()
        for message in self._channel.receive():
            self._take(**message)
        if self._channel.closed:
            self.cut()

    def _take(self, kind: str, roles: Mapping[str, Any]) -> None:
        if kind == "list":
            self.reached = True
            for key in self._handles.keys() - roles.keys():  # the order to start it was lost
                self._handles[key].ended(code=1, tail="could not be started: its host was lost")
        for key, fields in roles.items():
            handle = self._handles.get(key)
            if handle is None:
                continue
            if kind == "say":
                handle.inbox.append(fields)
            elif kind == "status":
                handle.told(**fields)
            elif kind == "end":
                handle.ended(**fields)

    def close(self) -> None:
        """End the agent, and all that it has started. One that is not reached ends by itself."""
        self.order("close")
        try:
            self._process.wait(MISSED_S + CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._path.unlink()


class AgentHandle:
    """A role that an agent has been asked to start."""

    def __init__(
        self,
        agent: AgentClient,
        spec: RoleSpec,
        incarnation: int,
        arguments: Mapping[str, Any],
        log: Path,
    ) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.host = agent.host
        self.key = f"{spec.name}/{incarnation}"
        self.inbox: list[Message] = []
        self._agent = agent
        self._status = NOTHING._replace(incarnation=incarnation)
        self._usage = RoleUsage(0, None, None, None, ())
        self._code: int | None = None
        self._tail = ""
        agent.add(self)
        fields = {"spec": asdict(spec), "incarnation": incarnation, "log": str(log)}
        agent.order("start", key=self.key, arguments=dict(arguments), **fields)

    def send(self, message: Message) -> None:
        self._agent.order("send", key=self.key, message=message)

    def receive(self) -> list[Message]:
        self._agent.pump()
        messages, self.inbox = self.inbox, []
        return messages

    def signal(self, signum: int) -> None:
        self._agent.order("signal", key=self.key, signum=int(signum))

    def liveness(self) -> Liveness:
        self._agent.pump()
        if self._code is not None:
            return Liveness.DEAD
        return Liveness.ALIVE if self._agent.reached else Liveness.PRESUMED_DEAD

    def status(self) -> RoleStatus:
        return self._status

    def usage(self) -> RoleUsage:
        return self._usage

    def reading(self) -> Reading:
        usage, status = self._usage, self._status
        lanes = {thread.name: dict(thread.seconds) for thread in usage.threads}
        cpu_s = math.nan if usage.cpu_s is None else usage.cpu_s
        counts = status.played_steps, status.trained_steps, status.sequence
        return Reading(
            self.spec, usage.pid, time.perf_counter_ns(), lanes, cpu_s, math.nan, *counts
        )

    def spans(self, since_ns: int) -> list[Thread]:
        return []

    def log_tail(self) -> str:
        return self._tail

    def reap(self) -> int:
        assert self._code is not None
        self._agent.remove(self)
        return self._code

    def told(self, status: list[Any], usage: list[Any]) -> None:
        """A snapshot, whose times are seconds that have passed since."""
        now_s = time.monotonic()
        found = RoleStatus(*status)
        self._status = found._replace(
            phase_s=found.phase_s and now_s - found.phase_s,
            alive_s=found.alive_s and now_s - found.alive_s,
        )
        used = RoleUsage(*usage)
        self._usage = used._replace(threads=tuple(ThreadUsage(*t) for t in used.threads))

    def ended(self, code: int, tail: str) -> None:
        self._code, self._tail = code, tail


class Agent:
    """The agent's process: does what it is ordered to, and reports."""

    def __init__(self, listener: socket.socket, folder: Path, missed_s: float) -> None:
        self._listener = listener
        self._missed_s = missed_s
        self._folder = folder
        self._engine = LocalEngine(EngineContext(folder))
        self._channel: Channel | None = None
        self._handles: dict[str, Handle] = {}
        self._ends: dict[str, Message] = {}  # until the engine has taken note of them
        self._reports: deque[Message] = deque()
        self._closing = False

    def run(self) -> None:
        missed_s = time.monotonic()
        while not self._closing and time.monotonic() - missed_s < self._missed_s:
            self._wait()
            if self._channel is not None:
                missed_s = time.monotonic()
                for order in self._channel.receive():
                    self._obey(**order)
                if self._channel.closed:
                    self._channel = None
            self._report()
        self._engine.close()

    def _wait(self) -> None:
        own = [self._listener.fileno()] + ([self._channel.fileno()] if self._channel else [])
        poller = select.poll()
        for fd in (*own, *self._engine.filenos()):
            poller.register(fd, select.POLLIN)
        if self._listener.fileno() in {fd for fd, _ in poller.poll(TURN_S * 1000)}:
            self._channel = Channel(self._listener.accept()[0])
            self._reports.clear()

    def _obey(self, kind: str, key: str = "", **fields: Any) -> None:
        handle = self._handles.get(key)
        if kind == "start":
            self._start(key, **fields)
        elif kind == "list":
            self._say("list", dict.fromkeys([*self._handles, *self._ends]))
            for known, end in self._ends.items():
                self._say("end", {known: end})
        elif kind == "forget":
            self._ends.pop(key, None)
        elif kind == "close":
            self._closing = True
        elif kind == "send" and handle is not None:
            handle.send(fields["message"])
        elif kind == "signal" and handle is not None:
            handle.signal(fields["signum"])

    def _start(
        self, key: str, spec: Message, incarnation: int, arguments: Message, log: str
    ) -> None:
        made = RoleSpec(**spec | {"stage": Stage(spec["stage"]), "store": None})
        arguments["runtime_dir"] = str(self._folder)
        try:
            self._handles[key] = self._engine.start(made, incarnation, arguments, Path(log))
        except OSError as error:
            self._end(key, 1, f"could not be started: {error}")

    def _report(self) -> None:
        for key, handle in list(self._handles.items()):
            dead = handle.liveness() is Liveness.DEAD
            for message in handle.receive():
                self._say("say", {key: message})
            self._say("status", {key: _snapshot(handle)})
            if dead:
                del self._handles[key]
                tail = handle.log_tail()
                self._end(key, handle.reap(), tail)
        while self._channel and self._reports and self._channel.send(self._reports[0]):
            self._reports.popleft()

    def _end(self, key: str, code: int, tail: str) -> None:
        self._ends[key] = {"code": code, "tail": tail}
        self._say("end", {key: self._ends[key]})

    def _say(self, kind: str, roles: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._reports.append({"kind": kind, "roles": roles})


def _snapshot(handle: Handle) -> Message:
    now_s = time.monotonic()
    status = handle.status()
    status = status._replace(
        phase_s=status.phase_s and now_s - status.phase_s,
        alive_s=status.alive_s and now_s - status.alive_s,
    )
    return {"status": list(status), "usage": list(handle.usage())}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with runtime_folder() as own:
        Agent(socket.socket(fileno=descriptor), own, float(sys.argv[2])).run()
