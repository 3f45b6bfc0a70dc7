"""The Ray engine: Ray places bundles on the hosts of a cluster, and Penstock carries the data.

Each bundle gets a placement group and in it a *host agent*, a detached Ray actor that Ray does not
restart. The agent executes a host supervisor (`host_supervisor`) and passes messages between that
and the engine; samples and weights never pass through Ray.

    supervisor ── RayEngine ── thread ══ Ray ══ HostAgent ── host supervisor ── roles

The engine waits for reports with one call per agent at a time, which returns when there are some.
An agent that does not answer for `SILENT_S` is presumed dead, long before Ray says so. Its bundle
gets a new agent in a new placement group, maybe on another host. The same for actors on a node that
Ray drains, as its end was announced. An agent that does not start is replaced at growing intervals,
and its node is given up after some (`RefusedNodes`). An agent that is not called for `LEASE_S` has
lost its engine: its learners save, its other roles are killed, and it removes its placement group
and itself. It kills a host supervisor that does not report for `STUCK_S`, and so their roles.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.core.control import Channel, Message
from penstock.core.descriptors import wait_readable
from penstock.core.interfaces import Bundle, EngineContext
from penstock.core.loop_pace import LoopPace
from penstock.core.notes import note_logger
from penstock.core.processes import python
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.remote_handles import HostLine, RemoteHandle

logger = note_logger(__name__)

INSTALL = "--engine ray needs Ray, which is not installed; run: pip install 'penstock[ray]'"
RESERVE_S = 60.0  # for the hosts of all bundles; a cluster may start nodes meanwhile
HEAD_S = 15.0  # without an answer of the head node, until the run is stopped
REPORT_S = 1.0  # longest wait of an agent for something to report
SILENT_S = 5.0
STUCK_S = 30.0  # a host supervisor may wait for a disk; below the default of run.hang_timeout_s
SHARE = 0.07  # of a core, for all that takes reports
REST_S, LONGEST_REST_S = 0.0026, 2.6  # between two rounds, for each agent, and at most
LEASE_S = 15.0
CLOSE_S = 10.0  # for the ends of all roles, when the engine closes
MOST_REPORTS = 1000  # of one call
PATIENCE_S = 5.0  # of an agent whose host supervisor does not read
CONNECT_S = 5.0
HTTP2_BEGINS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
HTTP2_SETTINGS = b"\x04"  # the type of the first frame of a server, after its length
LEARNER, SERVER = "learner-", "server-"  # begin the names of roles with the trained state
FIRST_S = 60.0  # for the first answer of an agent that replaces a lost one
LONGEST_RETRY_S = 60.0  # until an agent that did not start is replaced; SILENT_S at first
MOST_CAUSES = 16  # of agents that did not start, which are reported
MOST_FAILURES = 3  # of starts on a node, until that is given up
NODE_LABEL = "ray.io/node-id"  # that Ray gives to every node
SAME_RELEASE = (
    "install the same version of Penstock, with its extra [ray], in the Python environment of "
    "every node"
)
LEFT_OUT = ("OMP_", "RAY_", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Prefixes of variables of a Ray worker that roles do not inherit."""


class HostAgent:
    """A Ray actor on the host of one bundle: executes a host supervisor and passes its messages.

    Its methods are called by the engine alone, each group of them in order.
    """

    def __init__(self, lease_s: float, stuck_s: float, release: str) -> None:
        """Raises UserError where this host has another ``release`` of Penstock than the engine,
        whose orders have no version of their own."""
        if release != __version__:
            raise UserError(
                f"{socket.gethostname()} has Penstock {__version__}, and the run {release}"
            )
        self._lease_s, self._stuck_s = lease_s, stuck_s
        self._silent_s = -RESERVE_S  # of the host supervisor, which may take long to start
        self._called_s = time.monotonic() + RESERVE_S  # while other bundles get their hosts
        self._channel, theirs = Channel.pair()
        with theirs:
            self._process = subprocess.Popen(
                python("penstock.launch.engines.host_supervisor", theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)},
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def where(self) -> tuple[str, str, str]:
        """Name and address of this host, and the id of the Ray node."""
        import ray

        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return socket.gethostname(), address, ray.get_runtime_context().get_node_id()

    def obey(self, orders: Sequence[Message]) -> None:
        """Pass orders to the host supervisor."""
        self._called_s = time.monotonic()
        for order in orders:
            self._channel.send(order, PATIENCE_S)

    def reports(self, wait_s: float) -> list[Message] | None:
        """Wait for reports of the host supervisor, and return them; None once it has ended."""
        self._called_s = begin_s = time.monotonic()
        wait_readable(self._channel.fileno(), wait_s)
        found = self._channel.receive(most=MOST_REPORTS)
        if found or not self._channel.closed:
            waited_s = min(time.monotonic() - begin_s, 2 * wait_s)  # a host itself may stand still
            self._silent_s = 0.0 if found else self._silent_s + waited_s
            if self._silent_s > self._stuck_s:  # no order reaches its roles any more
                self._process.kill()
            return found
        self._process.wait()  # it removes its files
        return None

    def _watch(self) -> None:
        """End with the host supervisor, which ends with the engine's lease."""
        import ray

        while self._process.poll() is None:
            if time.monotonic() > self._called_s + self._lease_s:
                self._channel.send({"kind": "orphaned"}, PATIENCE_S)
                self._process.wait()
            time.sleep(0.2)
        time.sleep(REPORT_S)  # for the last answer
        with suppress(Exception):  # the cluster may be gone
            ray.util.remove_placement_group(ray.util.get_current_placement_group())
        os._exit(0)


class RefusedNodes:
    """Nodes on which host agents do not start, such as those with another release.

    Counts failed starts by the id of the node; used by several threads. After `MOST_FAILURES` of
    them no bundle is placed there. Ray gives a node that joins the cluster again another id, so
    that it is tried anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()

    def failed(self, node: str, alive: Collection[str]) -> bool:
        """A host agent did not start on a node; returns whether that is given up now.

        Args:
            node: its id.
            alive: the ids of all nodes of the cluster; others are forgotten.
        """
        with self._lock:
            for gone in self._failures.keys() - set(alive):
                del self._failures[gone]
            if node not in alive:
                return False
            self._failures[node] += 1
            return self._failures[node] == MOST_FAILURES

    def selector(self) -> list[dict[str, str]] | None:
        """The label selector of a placement group of one bundle; None allows all nodes."""
        with self._lock:
            refused = sorted(n for n, count in self._failures.items() if count >= MOST_FAILURES)
        return [{NODE_LABEL: f"!in({','.join(refused)})"}] if refused else None


class RayEngine:
    """Places bundles by Ray, in the cluster that ``ray.init`` finds or starts."""

    def __init__(self, context: EngineContext) -> None:
        self._ray = ray = import_ray()
        connect(context.cluster, context.working_dir)
        self._name = f"penstock-{secrets.token_hex(4)}"
        self._bundles: Sequence[Bundle] = ()
        self._agents: list[RayAgent] = []
        self._places: dict[str, RayAgent] = {}  # of each role
        self._leaving: list[RayAgent] = []  # whose actors end their unrolls
        self._draining: frozenset[str] = frozenset()  # nodes whose end was announced
        self._numbers = itertools.count()  # of agents
        self._refused = RefusedNodes()
        self._unreported: deque[str] = deque(maxlen=MOST_CAUSES)  # sentences for the user
        self._causes: set[str] = set()  # of agents that did not start, which were reported
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._listened = [0.0]  # until when an agent without an answer counts as silent
        self._turned_s = self._listens_s = math.inf  # the last turns of supervisor and thread
        self._resumed_s = -math.inf  # when the thread continued after a stop of this process
        self._stop: tuple[float, float] | None = None
        """The last stop that ended the leases: how long it took, and when it ended, in seconds."""
        self._head_s = math.inf  # when the head node answered last
        self._head_error = ""  # the last error of Ray since that answer
        self._head_lost = False
        self._thread = threading.Thread(target=self._listen, name="ray", daemon=True)
        actor = ray.remote(concurrency_groups={"orders": 1, "reports": 1})
        ray.method(concurrency_group="orders")(HostAgent.obey)
        ray.method(concurrency_group="reports")(HostAgent.reports)
        self._actor = actor(HostAgent)

    def hosts(self) -> Sequence[int]:
        """Cores of each host of the cluster."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [int(found["CPU"]) for found in nodes if found.get("CPU", 0) >= 1]

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        ray, self._bundles = self._ray, bundles
        self._largest = max(self.hosts(), default=1)
        required = [bundle for bundle in bundles if bundle.required]
        together = [bundle for bundle in required if not bundle.spread]
        agents: list[RayAgent] = []
        try:
            # Those that avoid the hosts of others come last, one after the other.
            for group in (together, *([bundle] for bundle in required if bundle.spread)):
                new = [self._make_agent(bundle) for bundle in group]
                agents += new
                for agent in new:
                    agent.place()
                self._await_hosts(agents)
                for agent in new:
                    agent.arrived(*ray.get(agent.actor.where.remote(), timeout=RESERVE_S))
        except ray.exceptions.GetTimeoutError:
            needs = ", ".join(f"{b.name} {b.cpus} cores and {b.gpus} GPUs" for b in required)
            free = ray.available_resources()
            raise UserError(
                f"the Ray cluster has {free.get('CPU', 0):g} free cores and {free.get('GPU', 0):g} "
                f"free GPUs, and the run needs, each on one host, {needs}; add nodes, or wait for "
                "other jobs to end, or set actors.count lower"
            ) from None
        except ray.exceptions.RayError as error:
            raise UserError(
                "a host agent could not be started on the Ray cluster: "
                f"{_cause(error)}; {SAME_RELEASE}"
            ) from None
        for bundle in bundles:
            if not bundle.required:  # after the others have their hosts
                self._make_agent(bundle).place()
        self._turned_s = self._listens_s = self._head_s = time.monotonic()
        self._resumed_s = self._turned_s  # first answers of agents may be old
        self._thread.start()
        threading.Thread(target=self._ask_head, name="ray head", daemon=True).start()

    def _await_hosts(self, agents: Sequence[RayAgent]) -> None:
        """Wait until all of them have a host. Those that have one are called, to keep their leases.

        Raises Ray's GetTimeoutError after `RESERVE_S`.
        """
        ray, ends_s = self._ray, time.monotonic() + RESERVE_S
        missing = [agent.ready for agent in agents]
        while missing:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise ray.exceptions.GetTimeoutError
            _, missing = ray.wait(
                missing, num_returns=len(missing), timeout=min(left_s, LEASE_S / 3)
            )
            for agent in agents:
                if agent.ready not in missing:
                    agent.actor.obey.remote([])
        ray.get([agent.ready for agent in agents])  # raises what went wrong

    def _make_agent(self, bundle: Bundle, address: str = "") -> RayAgent:
        """An agent for a bundle, which has no host yet; ``address`` is that of the one before."""
        needs: dict[str, float] = {"CPU": max(1, min(bundle.cpus, self._largest))}
        if bundle.gpus:
            needs["GPU"] = bundle.gpus
        name = f"{self._name}-{bundle.name}-{next(self._numbers)}"
        agent = RayAgent(self._actor, name, self._name, needs, self._wake, self._listened)
        agent.lifetime = "detached" if bundle.required else None
        agent.target = partial(self._node_apart, bundle) if bundle.spread else None
        self._agents.append(agent)
        agent.address = address
        self._places |= dict.fromkeys(bundle.roles, agent)
        return agent

    def _node_apart(self, bundle: Bundle) -> str | None:
        """The id of the node with the fewest other parts of the parameter server, then learners,
        then cores that this run uses."""
        alive = [n for n in self._ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
        others = [o for o in self._bundles if o is not bundle and o.roles[0] in self._places]

        def load(node: Mapping[str, Any]) -> tuple[int, int, float]:
            there = [o for o in others if self._places[o.roles[0]].node == node["NodeID"]]
            learners = sum(role.startswith(LEARNER) for o in there for role in o.roles)
            free = node["Resources"]["CPU"] - sum(o.cpus for o in there)
            return sum(o.spread for o in there), learners, -free

        return str(min(alive, key=load)["NodeID"]) if alive else None

    def endpoints(self) -> Mapping[str, str]:
        return {role: agent.address for role, agent in self._places.items()}

    def start(
        self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any], log: Path
    ) -> RemoteHandle:
        lost = self._places[spec.name]
        if not lost.reached:
            bundle = next(bundle for bundle in self._bundles if spec.name in bundle.roles)
            self._place(self._make_agent(bundle, lost.address), lost)
        return RemoteHandle(self._places[spec.name], spec, incarnation, arguments, log)

    def filenos(self) -> Collection[int]:
        self._notice_stop()
        while self._unreported:  # here, as only the main thread's notes are shown
            logger.info("%s", self._unreported.popleft())
        if not self._head_lost and time.monotonic() > self._head_s + HEAD_S:
            # Ray would end this process within a minute, with nothing saved.
            self._head_lost = True
            why = f" ({self._head_error})" if self._head_error else ""
            logger.info("the head node of the Ray cluster does not answer%s; the run stops", why)
            os.kill(os.getpid(), signal.SIGTERM)
        for agent in self._agents:
            agent.flush()
        return [self._wake]

    def _notice_stop(self) -> None:
        """Report that this process was stopped for so long that its hosts have given it up."""
        now_s, before_s = time.monotonic(), self._turned_s
        self._turned_s = now_s
        if now_s > before_s + SILENT_S:  # in which the head node could not answer
            self._head_s = max(self._head_s, now_s)
            # Where only the supervisor stood still, as in a callback, leases were kept.
            stopped = now_s > self._listens_s + SILENT_S or self._resumed_s > before_s
            if stopped and now_s > before_s + LEASE_S - 2 * REPORT_S:
                self._stop = now_s - before_s, now_s
        if self._stop is None:
            return
        seconds, since_s = self._stop
        if now_s > since_s + 2 * SILENT_S:
            self._stop = None
        elif any(agent.node and agent.gone for agent in self._places.values()):
            self._stop = None
            self._unreported.append(
                f"this command was stopped for {seconds:.0f} s: its hosts wait for it for "
                f"{LEASE_S:g} s, and have then ended all roles, after learners had saved"
            )

    def unplaced(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for bundle in self._bundles:
            agent = self._places[bundle.roles[0]]
            drains = agent.node in self._draining
            why = f"its host {agent.host} is about to end" if drains else agent.why_missing
            keep = [role for role in bundle.roles if role.startswith((LEARNER, SERVER))]
            if drains and agent.has_any(keep):  # they hold the trained state until the host ends
                found |= dict.fromkeys(keep, why)
            elif why:
                found |= dict.fromkeys(bundle.roles, why)
                self._move(bundle, agent, drains)
        self._forget_agents()
        return found

    def _forget_agents(self) -> None:
        """End agents whose actors have left, and forget those that have ended and that no bundle
        has any more."""
        for agent in list(self._leaving):
            if agent.gone:  # else it removes its placement group itself
                self._leaving.remove(agent)
                threading.Thread(target=agent.free, name="free", daemon=True).start()
            elif not agent.plays:
                self._leaving.remove(agent)
                agent.close()
        kept = {*self._places.values(), *self._leaving}
        for agent in [a for a in self._agents if a.gone and a not in kept]:
            self._agents.remove(agent)

    def _move(self, bundle: Bundle, lost: RayAgent, drains: bool) -> None:
        """Ask for another host for a bundle, unless that is so already."""
        if not drains and (lost.is_awaited or lost.waits_for_retry):
            return
        agent = self._make_agent(bundle, lost.address)
        agent.failures = lost.failures + 1 if lost.cause else 0
        if drains:
            self._leaving.append(lost)
        self._place(agent, None if drains else lost)

    def _place(self, agent: RayAgent, lost: RayAgent | None) -> None:
        """Ask Ray for a host, which may wait for its head node; the supervisor must not."""
        threading.Thread(
            target=self._find_host, args=[agent, lost], name="place", daemon=True
        ).start()

    def _find_host(self, agent: RayAgent, lost: RayAgent | None) -> None:
        """Ask Ray for a host that is not refused; runs in a thread."""
        if lost is not None and lost.cause:
            with suppress(Exception):  # the head node may be lost
                self._count_failure(lost)
        agent.place(lost, self._refused.selector())

    def _count_failure(self, agent: RayAgent) -> None:
        """Count the failed start of an agent for its node, and report if that is given up."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        node = agent.find_node()
        if self._refused.failed(node, nodes):
            self._unreported.append(
                f"the Ray node {nodes[node]['NodeManagerAddress']} is not used any more, as "
                f"{MOST_FAILURES} host agents could not be started there: {agent.cause}; "
                f"{SAME_RELEASE}, and start Ray there again"
            )

    def _listen(self) -> None:
        """Take the reports of all agents, until the engine closes; runs in a thread."""
        calls: dict[Any, RayAgent] = {}
        pace = LoopPace(SHARE, time.process_time)  # most of it is in threads of Ray
        while not self._closing.is_set():
            called = set(calls.values())
            for agent in list(self._agents):
                if agent.placed.is_set() and agent not in called and not agent.gone:
                    calls[agent.ask()] = agent
            if not calls:
                self._closing.wait(REPORT_S)
                continue
            if self._take_answers(calls):
                os.eventfd_write(self._wake, 1)
            now_s = time.monotonic()
            if now_s > self._listens_s + SILENT_S:  # it was stopped: answers need a moment
                self._resumed_s = now_s
            self._listens_s = now_s
            if now_s > self._resumed_s + SILENT_S:
                self._listened[0] = now_s
            self._closing.wait(pace.rest_s(min(LONGEST_REST_S, REST_S * len(self._agents))))

    def _take_answers(self, calls: dict[Any, RayAgent]) -> int:
        """Wait for an answer to one of the calls, and take all that have arrived.

        Returns: their number.
        """
        ray = self._ray
        first, others = ray.wait(list(calls), timeout=REPORT_S)
        more = ray.wait(others, num_returns=len(others), timeout=0.0)[0] if first and others else []
        answered = first + more
        for call in answered:
            agent = calls.pop(call)
            try:
                answer = ray.get(call)
                agent.arrived(*answer) if isinstance(answer, tuple) else agent.answered(answer)
            except ray.exceptions.RayError as error:  # the agent has ended, or its node
                if isinstance(error, ray.exceptions.ActorDiedError) and not agent.node:
                    self._not_started(agent, error)
                agent.answered(None)
        return len(answered)

    def _not_started(self, agent: RayAgent, error: Any) -> None:
        """Report why an agent did not start, each cause once; only an error that the agent raised
        says something about its node."""
        cause, advice = _cause(error), ""
        if error.actor_init_failed:
            agent.cause, advice = cause, f"; {SAME_RELEASE}"
        if cause not in self._causes and len(self._causes) < MOST_CAUSES:
            self._causes.add(cause)
            self._unreported.append(f"a host agent could not be started: {cause}{advice}")

    def _ask_head(self) -> None:
        """Ask the head node for the nodes, again and again; runs in a thread, which may hang."""
        while not self._closing.wait(REPORT_S):
            try:
                self._draining = frozenset(self._ray._private.state.state.get_draining_nodes())
            except Exception as error:  # the run is stopped after `HEAD_S` without an answer
                self._head_error = _cause(error)
                continue
            self._head_s, self._head_error = time.monotonic(), ""

    def close(self) -> None:
        if self._closing.is_set():
            return
        ray = self._ray
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        ends_s = time.monotonic() + CLOSE_S
        placed = [agent for agent in self._agents if agent.placed.is_set()]
        for agent in placed:
            agent.close()
        for agent in placed:
            with suppress(ray.exceptions.RayError):
                while agent.has_host and not agent.gone and time.monotonic() < ends_s:
                    agent.answered(ray.get(agent.actor.reports.remote(0.1), timeout=CLOSE_S))
            if not self._head_lost:  # else agents remove their groups, if they can
                with suppress(ray.exceptions.RayError, ValueError):
                    ray.kill(agent.actor)
                    ray.util.remove_placement_group(agent.group)
        os.close(self._wake)
        if not self._head_lost:
            ray.shutdown()


def _cause(error: Exception) -> str:
    """The last line of an error of Ray: what the agent itself raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].removeprefix("penstock.configs.errors.UserError: ")


class RayAgent(HostLine):
    """The line to a host agent."""

    def __init__(
        self,
        kind: Any,
        name: str,
        namespace: str,
        needs: Mapping[str, float],
        wake: int,
        listened: Sequence[float],
    ) -> None:
        """``kind`` is the class of Ray actors, ``needs`` the resources of its host; ``wake`` the
        descriptor that announces reports. ``listened`` has the time until which the engine has
        listened: silence does not count while it was stopped itself."""
        super().__init__(name)  # until the agent reports its host
        self.address = ""
        self.node = ""
        self.lifetime: str | None = "detached"
        """Of the placement group; None: it ends with the engine's process."""
        self.group: Any = None
        self.ready: Any = None  # Ray's promise of a host
        self.actor: Any = None
        self.target: Callable[[], str | None] | None = None
        """Returns the id of the node that is preferred; None: Ray chooses."""
        self.placed = threading.Event()
        """Whether Ray was asked for a host."""
        self.gone = False
        """Whether the agent has ended."""
        self.cause = ""
        """Why the agent could not be started on its node; empty if it was, or was not tried."""
        self.failures = 0
        """Of the agents before it, since the last that was started."""
        self._kind, self._name, self._namespace, self._needs = kind, name, namespace, needs
        self._wake, self._listened = wake, listened
        self._lock = threading.Lock()
        self._orders: list[Message] = []  # of this turn, or until its first answer
        self._answered_s: float | None = None
        self._made_s = time.monotonic()

    def place(
        self, lost: RayAgent | None = None, selector: list[dict[str, str]] | None = None
    ) -> None:
        """Ask Ray for a host, and for the agent there; in the room of an agent that is ``lost``,
        and that ends if it still runs. ``selector`` is that of the labels of the host."""
        ray = import_ray()
        if lost is not None:
            lost.free()
        self.group = ray.util.placement_group(
            [dict(self._needs)],
            strategy="STRICT_PACK",  # of one bundle; Ray prefers a node with this one only
            name=self._name,
            lifetime=self.lifetime,
            bundle_label_selector=selector,
            _soft_target_node_id=self.target and self.target(),
        )
        self.ready = self.group.ready()
        self.actor = self._kind.options(
            name=self._name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            num_gpus=self._needs.get("GPU", 0),
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=0
            ),
        ).remote(LEASE_S, STUCK_S, __version__)
        self.placed.set()

    def free(self) -> None:
        """Give back the resources of an agent that is lost; it ends if it still runs."""
        if self.group is not None:
            with suppress(import_ray().exceptions.RayError, ValueError):
                import_ray().util.remove_placement_group(self.group)

    def find_node(self) -> str:
        """The id of the node on which Ray has tried to start the agent; empty if there is none."""
        table = import_ray().util.placement_group_table(self.group)
        return str(table.get("bundles_to_node_id", {}).get(0, ""))

    def ask(self) -> Any:
        """Call the agent: where it is, at first, and then for its reports."""
        return self.actor.reports.remote(REPORT_S) if self.node else self.actor.where.remote()

    def arrived(self, host: str, address: str, node: str) -> None:
        """Take the answer that says where the agent is."""
        self.host, self.address, self.node = host, address, node
        self.answered([])

    @property
    def is_awaited(self) -> bool:
        """Whether Ray has not found a host yet."""
        return not self.node and not self.gone

    @property
    def why_missing(self) -> str:
        """Why no role can run here; empty if it can."""
        if self.is_awaited or self.cause:
            return "no host has been found yet"
        return "" if self.reached else f"its host {self.host} does not answer"

    @property
    def plays(self) -> bool:
        """Whether an actor runs here."""
        return any(handle.spec.stage is Stage.ACTORS for handle in self._handles.values())

    def has_any(self, roles: Collection[str]) -> bool:
        """Whether one of the ``roles`` runs here, or was not reaped yet."""
        return any(handle.spec.name in roles for handle in self._handles.values())

    @property
    def waits_for_retry(self) -> bool:
        """Whether it is too early to replace an agent that is lost, or did not start."""
        retry_s = min(SILENT_S * 2.0**self.failures, LONGEST_RETRY_S)
        return time.monotonic() < self._made_s + retry_s

    @property
    def reached(self) -> bool:
        if self.gone:
            return False
        if self._answered_s is None:
            return time.monotonic() < self._made_s + FIRST_S
        return self._listened[0] < self._answered_s + SILENT_S

    def order(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._orders.append({"kind": kind, **fields})

    def flush(self) -> None:
        """Send the orders, in one call, once the agent has answered for the first time."""
        with self._lock:
            if self._orders and self._answered_s is not None:
                self.actor.obey.remote(self._orders)
                self._orders = []

    def withdraw(self, key: str) -> bool:
        with self._lock:
            if ("start", key) not in ((order["kind"], order.get("key")) for order in self._orders):
                return False
            self._orders = [order for order in self._orders if order.get("key") != key]
            return True

    @property
    def has_host(self) -> bool:
        """Whether Ray has found a host."""
        ready = import_ray().wait([self.ready], timeout=0.0)[0]
        return self._answered_s is not None or bool(ready)

    def close(self) -> None:
        """Order the agent to end its roles and itself; no order follows."""
        self.order("close")
        self.flush()

    def pump(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)  # before the reports that it announces
        super().pump()

    def answered(self, reports: list[Message] | None) -> None:
        """Take an answer of the agent, None where it has ended; called by another thread."""
        if reports is None:
            self.gone = True
            return
        self._reports.extend(reports)
        self._answered_s = time.monotonic()
        self.flush()


def import_ray() -> Any:
    """Ray itself; UserError where it is not installed."""
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise UserError(INSTALL) from error
    return ray


def connect(address: str | None, working_dir: str | None = None, cores: int | None = None) -> None:
    """Join a cluster, or start one on this host, whatever other clusters there are.

    Args:
        address: of the cluster; "auto": that of the environment variable ``RAY_ADDRESS``, or the
            one of this host; None: a new one.
        working_dir: a folder that is copied to the other hosts.
        cores: of a new cluster, which Ray gives away; None: those of this host.

    Raises UserError.
    """
    ray = import_ray()
    try:
        if address is not None:
            _check_port(_found_by_ray(address))
        ray.init(
            "local" if address is None else address,  # Ray itself takes None for "auto"
            num_cpus=cores,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
            runtime_env={"working_dir": working_dir} if working_dir else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--address {address} is not a Ray cluster that can be reached ({error}); start one by "
            "`ray start --head`, or leave out --address to start one on this host"
        ) from error


def _found_by_ray(address: str) -> str:
    """The ``host:port`` to which ``ray.init(address)`` would connect."""
    from ray._private.services import canonicalize_bootstrap_address

    host, _, port = address.rpartition(":")
    if address != "auto" and (not host or not port.isdecimal() or "/" in host):
        raise ValueError(f"{address} is not auto, or host:port of the head node")
    try:
        found: str | None = canonicalize_bootstrap_address(address)
    except ConnectionError:
        raise ConnectionError("RAY_ADDRESS is not set, and none runs on this host") from None
    if found is None:
        raise ValueError("RAY_ADDRESS is local")
    return found


def _check_port(address: str) -> None:
    """Raise OSError if no server of HTTP/2, as gRPC has, is at ``host:port``: Ray would try for
    minutes."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(HTTP2_BEGINS)
            answer = connection.makefile("rb").read(4)
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error
    if answer[3:] != HTTP2_SETTINGS:
        raise ConnectionError(f"{address} does not answer as a head node does, by gRPC")
