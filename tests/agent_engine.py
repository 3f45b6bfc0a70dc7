"""An engine of two pages: each bundle has a host agent, a process of its own that starts roles.

Agents stand for other hosts: the engine reaches them by a Unix socket alone, and shares no memory
and no pidfd with what they start. When the socket of an agent is cut, its roles are presumed dead
at once; further starts go to another agent. An agent that misses its engine for ``MISSED_S`` ends
its roles and itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core.control import Channel, Message
from penstock.core.interfaces import Bundle, EngineContext
from penstock.core.role_spec import RoleSpec
from penstock.core.runtime_folder import RuntimeFolder
from penstock.launch.engines.host_supervisor import TURN_S, HostSupervisor
from penstock.launch.engines.remote_handles import HostLine, RemoteHandle

MISSED_S = 20.0
CLOSE_S = 10.0
LOST = {"kind": "end", "code": 1, "tail": "could not be started: its host was lost"}


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
    ) -> RemoteHandle:
        if not self._places[spec.name].reached:
            self._place(next(b for b in self._bundles if spec.name in b.roles))
        return RemoteHandle(self._places[spec.name], spec, incarnation, arguments, log)

    def filenos(self) -> Collection[int]:
        return [fd for agent in self._agents for fd in agent.filenos()]

    def unplaced(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        self._agents = []

    def agents(self, bundle: str) -> list[AgentClient]:
        """Returns all agents that a bundle has had, the current one last."""
        return [agent for agent in self._agents if agent.bundle == bundle]


class AgentClient(HostLine):
    """The engine's connection to one agent."""

    def __init__(self, bundle: str, number: int, runtime_dir: Path) -> None:
        super().__init__(f"agent-{number}")
        self.bundle = bundle
        self.address = f"127.0.0.{2 + number}"
        self._reached = True
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
        """Connects to the agent's socket, which may accept a moment later."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(str(self._path))
        return Channel(end)

    @property
    def reached(self) -> bool:
        return self._reached

    def cut(self) -> None:
        """Lose the connection, and what is on its way."""
        assert self._channel is not None
        self._channel.close()
        self._channel, self._reached = None, False

    def reconnect(self) -> None:
        """Connects again; the agent counts as reached once it has named its roles."""
        self._orders.clear()
        self._channel = self._connect()
        self.order("list")

    def filenos(self) -> list[int]:
        return [] if self._channel is None else [self._channel.fileno()]

    @property
    def handles(self) -> Collection[RemoteHandle]:
        """Returns the handles that have not been reaped."""
        return self._handles.values()

    def order(self, kind: str, **fields: Any) -> None:
        if self._channel is not None:
            self._orders.append({"kind": kind, **fields})
            self.pump()

    def withdraw(self, key: str) -> bool:
        return False

    def pump(self) -> None:
        if self._channel is None:
            return
        while self._orders and self._channel.send(self._orders[0]):
            self._orders.popleft()
        for report in self._channel.receive():
            if report["kind"] == "list":
                self._reached = True
                for key in self._handles.keys() - set(report["keys"]):
                    self._reports.append({**LOST, "key": key})  # the order to start it was lost
            else:
                self._reports.append(report)
        super().pump()
        if self._channel.closed:
            self.cut()

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


class Agent(HostSupervisor):
    """A host supervisor whose engine may come back, and then asks for all that has ended."""

    def __init__(self, listener: socket.socket, folder: Path, missed_s: float) -> None:
        super().__init__(Channel(listener.accept()[0]), folder)
        self._listener, self._missed_s = listener, missed_s
        self._ends: dict[str, Message] = {}

    def _reconnect(self) -> bool:
        ends_s = time.monotonic() + self._missed_s
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        while not poller.poll(TURN_S * 1000):
            self._report_roles()
            if time.monotonic() > ends_s:
                return False
        self._channel = Channel(self._listener.accept()[0])
        self._reports.clear()
        return True

    def _obey(self, kind: str, key: str = "", **fields: Any) -> None:
        if kind == "list":
            self._report("list", "", keys=[*self._handles, *self._ends])
            self._reports.extend(self._ends.values())
        else:
            super()._obey(kind, key, **fields)

    def _report(self, kind: str, key: str, **fields: Any) -> None:
        super()._report(kind, key, **fields)
        if kind == "end":
            self._ends[key] = self._reports[-1]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with RuntimeFolder() as own:
        Agent(socket.socket(fileno=descriptor), own, float(sys.argv[2])).run()
