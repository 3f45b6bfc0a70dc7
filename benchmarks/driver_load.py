"""Processor time of a run's driver on a Ray cluster with up to a thousand hosts.

The driver is real: `Supervisor`, `RayEngine` and Ray. The host agents are a load generator: one Ray
actor that answers the calls for all of them at their real rate and size, with a status of each of
their roles every `host_supervisor.SNAPSHOT_S` seconds. Measured once all roles are ready: processor
time of the driver's process, all threads, per second; and how old the status of a role is when the
next one arrives. The generator is not part of either, but shares this machine's cores.

    python benchmarks/driver_load.py [--agents 10 100 1000] [--roles 1 16] [--seconds 10]
                                     [--json] [--save]
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from common import finish, parser
from penstock.core.control import Message
from penstock.core.interfaces import Bundle, EngineContext
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch import topology
from penstock.launch.engines.host_supervisor import SNAPSHOT_S
from penstock.launch.engines.ray_agent import AgentPlacement, HostLocation, RayAgent
from penstock.launch.engines.ray_engine import RayEngine
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import RestartLimits
from penstock.monitor.sinks import FanOut

READY_S = 120.0
LIMITS = RestartLimits(hang_timeout_s=600.0, start_timeout_s=600.0)
THREADS = [["main", "environment", 0.001, {"environment": 1.0, "compute": 0.5, "send": 0.1}]]


def location(agent: int) -> HostLocation:
    """Where an agent of that number says that it is."""
    return HostLocation(f"host-{agent}", "127.0.0.1", f"node-{agent}")


class Generator:
    """Answers for all host agents of a run, as `ray_agent.HostAgent` does for one."""

    def __init__(self, agents: int) -> None:
        self._roles: list[list[str]] = [[] for _ in range(agents)]  # their keys
        self._said: list[list[Message]] = [[] for _ in range(agents)]
        self._next_s = [0.0] * agents

    async def location(self, agent: int) -> HostLocation:
        return location(agent)

    async def obey(self, agent: int, orders: list[Message]) -> None:
        for order in orders:
            key = order.get("key", "")
            if order["kind"] == "start":
                self._roles[agent].append(key)
                self._said[agent].append({"kind": "say", "key": key, "message": {"kind": "ready"}})
            elif order["kind"] == "signal" and key in self._roles[agent]:
                self._roles[agent].remove(key)
                self._said[agent].append({"kind": "end", "key": key, "code": 0, "tail": ""})

    async def reports(self, agent: int, wait_s: float) -> list[Message]:
        now_s = time.monotonic()
        if not self._said[agent] and self._roles[agent]:
            await asyncio.sleep(min(wait_s, max(0.0, self._next_s[agent] - now_s)))
        elif not self._said[agent]:
            await asyncio.sleep(wait_s)
        reports, self._said[agent] = self._said[agent], []
        if time.monotonic() >= self._next_s[agent]:
            self._next_s[agent] = time.monotonic() + SNAPSHOT_S
            steps = int(now_s * 1000)
            status = [True, 0, "environment", 0.01, 0.01, steps, steps, steps, 0, 0, 0]
            usage = [4711, "running", 12.5, 60.0, THREADS, 0.5, time.perf_counter_ns()]
            reports += [
                {"kind": "status", "key": key, "status": status, "usage": usage}
                for key in self._roles[agent]
            ]
        return reports


class Method:
    """A method of one agent, called in the generator."""

    def __init__(self, method: Any, agent: int) -> None:
        self._method, self._agent = method, agent

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._agent, *arguments)


class GeneratedActor:
    """The Ray actor of one agent, which the generator plays."""

    def __init__(self, generator: Any, agent: int) -> None:
        self.location = Method(generator.location, agent)
        self.obey = Method(generator.obey, agent)
        self.reports = Method(generator.reports, agent)


class GeneratedPlacement(AgentPlacement):
    """An agent of the generator, for which Ray is asked nothing."""

    def __init__(self, actor: GeneratedActor) -> None:
        self.is_requested = False
        self.group = None
        self.actor = actor

    def request(self, selector: list[dict[str, str]] | None = None) -> None:
        self.is_requested = True


class GeneratedEngine(RayEngine):
    """The Ray engine, with agents of the generator."""

    def reserve(self, bundles: Any) -> None:
        most = 2 * len(bundles) + 10  # two calls of each agent at a time
        made = self._ray.remote(num_cpus=0, max_concurrency=most)(Generator)
        self._generator = made.remote(len(bundles))
        self._bundles = bundles
        for number, bundle in enumerate(bundles):
            agent = self._make_agent(bundle)
            agent.placement.request()
            agent.on_located(location(number))
        self._listener.start()
        self._head.begin(time.monotonic())

    def _make_agent(self, bundle: Bundle, *, address: str = "", failures: int = 0) -> RayAgent:
        agent = super()._make_agent(bundle, address=address, failures=failures)
        actor = GeneratedActor(self._generator, self._bundles.index(bundle))
        agent.placement = GeneratedPlacement(actor)
        return agent

    def close(self) -> None:
        self._closing.set()
        self._listener.join()
        self._ray.shutdown()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000])
    args.add_argument("--roles", type=int, nargs="+", default=[1, 16], help="of each agent")
    args.add_argument("--seconds", type=float, default=10.0)
    options = args.parse_args()
    found = [
        one(agents, roles, options.seconds) for roles in options.roles for agents in options.agents
    ]
    rows: list[list[Any]] = [
        [
            "agents",
            "roles each",
            "driver's cores",
            "of it the loop",
            "turns/s",
            "age of a status, s",
        ]
    ]
    rows += [
        [f[key] for key in ("agents", "roles", "cores", "loop", "turns_per_s", "age_s")]
        for f in found
    ]
    finish("driver_load", {"seconds": options.seconds, "rows": found}, rows, options)


def one(agents: int, roles: int, seconds: float) -> dict[str, Any]:
    """One driver with so many agents."""
    specs = [RoleSpec("actor", i, "m:f", Stage.ACTORS) for i in range(agents * roles)]
    bundles = [
        Bundle(f"b{i}", tuple(s.name for s in specs[i * roles : (i + 1) * roles]), roles)
        for i in range(agents)
    ]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        place = Path(folder)
        (place / "logs").mkdir()
        with closing(GeneratedEngine(EngineContext(place, cluster=None))) as engine:
            engine.reserve(bundles)
            arguments = topology.role_arguments(place, place)
            supervisor = Supervisor(specs, LIMITS, arguments, place / "logs", FanOut([]), engine)
            found: dict[str, Any] = {"agents": agents, "roles": roles}
            watch = threading.Thread(target=measure, args=[supervisor, len(specs), seconds, found])
            watch.start()
            supervisor.run()
            watch.join()
    return found


def measure(supervisor: Supervisor, roles: int, seconds: float, found: dict[str, Any]) -> None:
    """Fill in ``found``, and end the run."""
    turns = 0
    turn = supervisor._turn

    def counted() -> None:
        nonlocal turns
        turns += 1
        turn()

    supervisor._turn = counted  # type: ignore[method-assign]
    ends_s = time.monotonic() + READY_S
    while supervisor._decisions.actors_alive < roles and time.monotonic() < ends_s:
        time.sleep(0.1)
    found["ready"] = supervisor._decisions.actors_alive
    before, loop_s, began_s, first = time.process_time(), thread_s(), time.monotonic(), turns
    ages = []
    while time.monotonic() < began_s + seconds:
        time.sleep(0.5)
        now_s = time.monotonic()
        alive = [handle.status().alive_s for handle in list(supervisor.handles.values())[::97]]
        ages += [now_s - alive_s for alive_s in alive if alive_s]  # else it has not reported yet
    took_s = time.monotonic() - began_s
    found["cores"] = (time.process_time() - before) / took_s
    found["loop"] = (thread_s() - loop_s) / took_s
    found["turns_per_s"] = (turns - first) / took_s
    found["age_s"] = max(ages)
    os.kill(os.getpid(), signal.SIGTERM)


def thread_s() -> float:
    """Processor time of the main thread."""
    fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
