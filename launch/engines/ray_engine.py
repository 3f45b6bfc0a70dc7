"""The Ray engine: Ray places bundles on the hosts of a cluster, and Penstock carries the data.

Each bundle gets a placement group and in it a *host agent*, a detached Ray actor that Ray does not
restart. The agent executes a host supervisor (`host_supervisor`) and passes messages between that
and the engine; samples and weights never pass through Ray.

    supervisor ── RayEngine ── thread ══ Ray ══ HostAgent ── host supervisor ── roles

The engine waits for reports with one call per agent at a time, which returns when there are some.
An agent that does not answer for `SILENT_S` is presumed dead, long before Ray reports its death.
Its bundle gets a new agent in a new placement group, maybe on another host. A bundle of actors also
gets a new agent when Ray drains its node, that is, announces the node's end. An agent that does not
start is replaced at growing intervals, and after some failures its node is given up
(`RefusedNodes`).

An agent that is not called for `LEASE_S` has lost its engine: its learners save, its other roles
are killed, and it removes its placement group and itself. An agent kills a host supervisor that
does not report for `STUCK_S`, and its roles end with that.

This file decides which bundle has which agent; `ray_agent` holds both ends of the line to one
agent, and `ray_connection` joins the cluster.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.interfaces import Bundle, EngineContext
from penstock.core.loop_pace import LoopPace
from penstock.core.notes import note_logger
from penstock.core.role_spec import RoleSpec
from penstock.launch.engines.ray_agent import (
    LEASE_S,
    REPORT_S,
    RESERVE_S,
    AgentPlacement,
    AgentRequest,
    HostAgent,
    HostLocation,
    PauseWatch,
    RayAgent,
)
from penstock.launch.engines.ray_connection import connect, import_ray
from penstock.launch.engines.remote_handles import RemoteHandle

logger = note_logger(__name__)

HEAD_S = 15.0
"""The run is stopped when the head node has not answered for this long."""
CLOSE_S = 10.0
"""How long `RayEngine.close` waits for the ends of all roles."""
LISTENER_SHARE = 0.07
"""Share of a core that taking the reports of all agents may use."""
REST_S = 0.0026
"""The listening thread rests for this time per agent between two rounds."""
LONGEST_REST_S = 2.6
"""Longest rest of the listening thread, however many agents there are."""
MOST_CAUSES = 16
"""Most causes of failed starts that are reported to the user."""
MOST_FAILURES = 3
"""A node on which agents failed to start this often is given up."""
NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives to every node."""
LEARNER = "learner-"
"""Prefix of the names of learners, which hold the trained state."""
SERVER = "server-"
"""Prefix of the names of a parameter server's shards, which hold the trained state too."""
SAME_RELEASE = (
    "install the same version of Penstock, with its extra [ray], in the Python environment of "
    "every node"
)


class RefusedNodes:
    """Nodes on which host agents do not start, such as those with another release.

    Counts failed starts by the id of the node; used by several threads. After `MOST_FAILURES` of
    them no bundle is placed there. Ray gives a node that joins the cluster again another id, so
    that it is tried anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()

    def count_failure(self, node: str, alive: Collection[str]) -> bool:
        """Count a failed start of a host agent.

        Args:
            node: id of the node on which the agent did not start.
            alive: ids of all nodes of the cluster; the counts of others are forgotten.

        Returns: whether the node is given up because of this failure.
        """
        with self._lock:
            for departed in self._failures.keys() - set(alive):
                del self._failures[departed]
            if node not in alive:
                return False
            self._failures[node] += 1
            return self._failures[node] == MOST_FAILURES

    def selector(self) -> list[dict[str, str]] | None:
        """Returns the label selector for a placement group of one bundle; None allows all nodes."""
        with self._lock:
            refused = sorted(
                node for node, count in self._failures.items() if count >= MOST_FAILURES
            )
        return [{NODE_LABEL: f"!in({','.join(refused)})"}] if refused else None


class HeadNode:
    """The cluster's head node, which a thread asks again and again for the nodes that drain."""

    def __init__(self, ray: Any, closing: threading.Event) -> None:
        self.draining: frozenset[str] = frozenset()
        """Ids of the nodes whose end was announced."""
        self.is_lost = False
        """Whether the head node was given up."""
        self._ray = ray
        self._closing = closing
        self._answered_s = math.inf
        """When it has answered last."""
        self._error = ""
        """The last error of Ray since that answer."""

    def begin(self, now_s: float) -> None:
        """Begin to ask, in a thread of its own since a question may hang."""
        self._answered_s = now_s
        threading.Thread(target=self._ask, name="ray head", daemon=True).start()

    def _ask(self) -> None:
        while not self._closing.wait(REPORT_S):
            try:
                self.draining = frozenset(self._ray._private.state.state.get_draining_nodes())
            except Exception as error:  # the run is stopped after `HEAD_S` without an answer
                self._error = _last_line(error)
                continue
            self._answered_s = time.monotonic()
            self._error = ""

    def on_pause(self, now_s: float) -> None:
        """This process stood still until now, so that no answer could arrive."""
        self._answered_s = max(self._answered_s, now_s)

    def stop_run_if_lost(self, now_s: float) -> None:
        """Stop the run by SIGTERM if the head node does not answer.

        Ray would end this process within a minute, with nothing saved.
        """
        if self.is_lost or now_s <= self._answered_s + HEAD_S:
            return

        self.is_lost = True
        detail = f" ({self._error})" if self._error else ""
        logger.info("the head node of the Ray cluster does not answer%s; the run stops", detail)
        os.kill(os.getpid(), signal.SIGTERM)


class AgentFleet:
    """The agents of a run: the present one of each bundle, and earlier ones until they have ended.

    The supervisor's thread changes it, and the listening thread reads `agents`.
    """

    def __init__(self) -> None:
        self.agents: list[RayAgent] = []
        """The present agents, and earlier ones that have not ended."""
        self._agent_of_role: dict[str, RayAgent] = {}
        """The present agent of each role's bundle, by the name of the role."""
        self._leaving: list[RayAgent] = []
        """Agents on nodes that drain, which end once their actors have."""

    def add(self, bundle: Bundle, agent: RayAgent) -> None:
        """Add an agent, which is the present one of the bundle from now on."""
        self.agents.append(agent)
        self._agent_of_role |= dict.fromkeys(bundle.roles, agent)

    def agent_of(self, role: str) -> RayAgent:
        """Returns the present agent of a role's bundle."""
        return self._agent_of_role[role]

    def node_of(self, bundle: Bundle) -> str:
        """Returns the id of the node that a bundle is on; empty if it has none yet."""
        agent = self._agent_of_role.get(bundle.roles[0])
        return agent.node if agent is not None else ""

    def addresses(self) -> dict[str, str]:
        """Returns the address of each role's host, by the name of the role."""
        return {role: agent.address for role, agent in self._agent_of_role.items()}

    def has_lost_agent(self) -> bool:
        """Returns whether a present agent has ended after it had started."""
        return any(agent.node and agent.gone for agent in self._agent_of_role.values())

    def leave(self, agent: RayAgent) -> None:
        """Keep an agent whose node drains until its actors have ended their unrolls."""
        self._leaving.append(agent)

    def end_leaving_agents(self) -> None:
        """End the agents on nodes that drain whose actors have ended."""
        for agent in list(self._leaving):
            if agent.gone:
                # It could not remove its placement group itself. Ray may wait for the head node.
                self._leaving.remove(agent)
                threading.Thread(target=agent.placement.free, name="free", daemon=True).start()
            elif not agent.has_actors:
                self._leaving.remove(agent)
                agent.close()

    def forget_ended_agents(self) -> None:
        """Forget agents that have ended and that no bundle has any more."""
        used = {*self._agent_of_role.values(), *self._leaving}
        for agent in [agent for agent in self.agents if agent.gone and agent not in used]:
            self.agents.remove(agent)


class RayEngine:
    """Places bundles by Ray, in the cluster that ``ray.init`` finds or starts."""

    def __init__(self, context: EngineContext) -> None:
        """Join the cluster, or start one; raises UserError if that fails."""
        ray = import_ray()
        connect(context.cluster, context.working_dir)
        self._ray = ray
        self._namespace = f"penstock-{secrets.token_hex(4)}"
        self._actor_class = self._make_actor_class()

        self._bundles: Sequence[Bundle] = ()
        self._most_cores = 1
        """Cores of the largest host."""
        self._fleet = AgentFleet()
        self._agent_numbers = itertools.count()

        self._refused = RefusedNodes()
        self._notes: deque[str] = deque(maxlen=MOST_CAUSES)
        """Sentences for the user that were not reported yet."""
        self._reported_causes: set[str] = set()
        """Why agents did not start, as far as it was reported."""

        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._pauses = PauseWatch()
        self._head = HeadNode(ray, self._closing)
        self._listener = threading.Thread(target=self._listen, name="ray", daemon=True)

    def _make_actor_class(self) -> Any:
        """Returns `HostAgent` as a class of Ray actors.

        An actor waits for reports in one thread, and takes orders in another.
        """
        ray = self._ray
        actor_class = ray.remote(concurrency_groups={"orders": 1, "reports": 1})
        ray.method(concurrency_group="orders")(HostAgent.obey)
        ray.method(concurrency_group="reports")(HostAgent.reports)
        return actor_class(HostAgent)

    def hosts(self) -> Sequence[int]:
        """Returns the cores of each host of the cluster."""
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return [int(host["CPU"]) for host in resources if host.get("CPU", 0) >= 1]

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Wait until each required bundle has a host, and ask Ray for hosts for the others.

        Raises:
            UserError: the cluster has no room, or an agent could not start.
        """
        exceptions = self._ray.exceptions
        self._bundles = bundles
        self._most_cores = max(self.hosts(), default=1)

        required = [bundle for bundle in bundles if bundle.required]
        try:
            self._place_required(required)
        except exceptions.GetTimeoutError:
            raise self._no_room(required) from None
        except exceptions.RayError as error:
            raise UserError(
                "a host agent could not be started on the Ray cluster: "
                f"{_last_line(error)}; {SAME_RELEASE}"
            ) from None

        # The other bundles get a host when there is one, after those without which no run begins.
        for bundle in bundles:
            if not bundle.required:
                self._make_agent(bundle).placement.request()

        now_s = time.monotonic()
        self._pauses.begin(now_s)
        self._listener.start()
        self._head.begin(now_s)

    def _place_required(self, required: Sequence[Bundle]) -> None:
        """Find a host for each required bundle, and wait for its agent.

        Raises:
            GetTimeoutError: of Ray, if hosts or agents are missing after `RESERVE_S` seconds.
            RayError: if an agent could not start.
        """
        # Bundles that avoid the hosts of others come last, one after the other.
        together = [bundle for bundle in required if not bundle.spread]
        groups = [together, *([bundle] for bundle in required if bundle.spread)]

        agents: list[RayAgent] = []
        for group in groups:
            new_agents = [self._make_agent(bundle) for bundle in group]
            agents += new_agents
            for agent in new_agents:
                agent.placement.request()

            self._await_hosts(agents)
            for agent in new_agents:
                location = agent.placement.actor.location.remote()
                agent.on_located(self._ray.get(location, timeout=RESERVE_S))

    def _await_hosts(self, agents: Sequence[RayAgent]) -> None:
        """Wait until Ray has placed every agent on a host.

        An agent that waits for the others gets an empty order every third of its lease, so that it
        does not take the engine for lost.

        Raises:
            GetTimeoutError: of Ray, if an agent has no host after `RESERVE_S` seconds.
            RayError: if a placement failed.
        """
        ray = self._ray
        deadline_s = time.monotonic() + RESERVE_S
        pending = [agent.placement.ready for agent in agents]

        while pending:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise ray.exceptions.GetTimeoutError

            timeout_s = min(remaining_s, LEASE_S / 3)
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=timeout_s)
            for agent in agents:
                if agent.placement.ready not in pending:
                    agent.placement.actor.obey.remote([])

        # All promises are fulfilled now; `get` raises the error of one that failed.
        ray.get([agent.placement.ready for agent in agents])

    def _no_room(self, required: Sequence[Bundle]) -> UserError:
        """Returns the error for a cluster on which the required bundles do not fit."""
        free = self._ray.available_resources()
        needs = ", ".join(
            f"{bundle.name} {bundle.cpus} cores and {bundle.gpus} GPUs" for bundle in required
        )
        return UserError(
            f"the Ray cluster has {free.get('CPU', 0):g} free cores and {free.get('GPU', 0):g} "
            f"free GPUs, and the run needs, each on one host, {needs}; add nodes, or wait for "
            "other jobs to end, or set actors.count lower"
        )

    def _make_agent(self, bundle: Bundle, *, address: str = "", failures: int = 0) -> RayAgent:
        """Make the agent that a bundle has from now on; Ray was not asked for its host yet.

        Args:
            bundle: gets the agent.
            address: of the host of the agent before.
            failures: number of agents before it that did not start, since one did.
        """
        resources: dict[str, float] = {"CPU": max(1, min(bundle.cpus, self._most_cores))}
        if bundle.gpus:
            resources["GPU"] = bundle.gpus
        request = AgentRequest(
            name=f"{self._namespace}-{bundle.name}-{next(self._agent_numbers)}",
            namespace=self._namespace,
            resources=resources,
            lifetime="detached" if bundle.required else None,
            preferred_node=partial(self._node_apart, bundle) if bundle.spread else None,
        )

        agent = RayAgent(
            AgentPlacement(request, self._actor_class),
            request.name,
            self._wake,
            self._pauses,
            address=address,
            failures=failures,
        )
        self._fleet.add(bundle, agent)
        return agent

    def _node_apart(self, bundle: Bundle) -> str | None:
        """Choose the node for a bundle that is to be apart from others.

        Returns: the id of the node with the fewest other such bundles; of several, that with the
        fewest learners; of several, that with the most cores that this run does not use. None if
        no node has a core.
        """
        nodes = [
            node
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        ]
        other_bundles = [other for other in self._bundles if other is not bundle]

        def load(node: Mapping[str, Any]) -> tuple[int, int, float]:
            neighbours = [
                other for other in other_bundles if self._fleet.node_of(other) == node["NodeID"]
            ]
            apart = [other for other in neighbours if other.spread]
            learners = [
                role for other in neighbours for role in other.roles if role.startswith(LEARNER)
            ]
            free_cores = node["Resources"]["CPU"] - sum(other.cpus for other in neighbours)
            return len(apart), len(learners), -free_cores

        return str(min(nodes, key=load)["NodeID"]) if nodes else None

    def endpoints(self) -> Mapping[str, str]:
        """Returns the address of each role's host, by the name of the role."""
        return self._fleet.addresses()

    def start(
        self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any], log: Path
    ) -> RemoteHandle:
        """Order the start of a role on the host of its bundle, or on another if that is lost.

        As for `Engine.start`. The order waits while the bundle has no host.
        """
        agent = self._fleet.agent_of(spec.name)
        if not agent.reached:
            lost = agent
            bundle = next(bundle for bundle in self._bundles if spec.name in bundle.roles)
            agent = self._make_agent(bundle, address=lost.address)
            self._request_host(agent, lost)
        return RemoteHandle(agent, spec, incarnation, arguments, log)

    def filenos(self) -> Collection[int]:
        """Begin a turn of the supervisor: report what has happened, and send orders.

        Returns: the descriptor that becomes readable when agents have reported.
        """
        now_s = time.monotonic()
        if self._pauses.on_supervisor_turn(now_s):
            self._head.on_pause(now_s)
        self._note_stop(now_s)
        # Notes of other threads are logged here, as only those of the main thread are shown.
        while self._notes:
            logger.info("%s", self._notes.popleft())
        self._head.stop_run_if_lost(now_s)

        for agent in self._fleet.agents:
            agent.flush()
        return [self._wake]

    def _note_stop(self, now_s: float) -> None:
        """Tell the user if hosts have ended their roles since this process had stopped."""
        stop = self._pauses.recent_stop(now_s)
        if stop is not None and self._fleet.has_lost_agent():
            self._pauses.forget_stop()
            self._notes.append(
                f"this command was stopped for {stop.seconds:.0f} s: its hosts wait for it for "
                f"{LEASE_S:g} s, and have then ended all roles, after learners had saved"
            )

    def unplaced(self) -> Mapping[str, str]:
        """Look for other hosts for bundles that have none, or whose host is lost or drains.

        Returns: the roles that are not to run where they are, by name, with the reason.
        """
        reasons: dict[str, str] = {}
        for bundle in self._bundles:
            agent = self._fleet.agent_of(bundle.roles[0])
            if agent.node in self._head.draining:
                reasons |= self._leave_draining_node(bundle, agent)
            elif reason := agent.why_missing:
                reasons |= dict.fromkeys(bundle.roles, reason)
                if not agent.is_awaited and not agent.waits_for_retry:
                    self._request_host(self._make_successor(bundle, agent), lost=agent)

        self._fleet.end_leaving_agents()
        self._fleet.forget_ended_agents()
        return reasons

    def _leave_draining_node(self, bundle: Bundle, agent: RayAgent) -> dict[str, str]:
        """Move a bundle away from a node that is about to end, if its roles may move.

        Learners and shards of a parameter server hold the trained state: a bundle with them stays
        while one of them runs.

        Returns: the roles that are not to run on that node, with the reason.
        """
        reason = f"its host {agent.host} is about to end"
        stateful = [role for role in bundle.roles if role.startswith((LEARNER, SERVER))]
        if agent.has_any(stateful):
            return dict.fromkeys(stateful, reason)

        # The old agent keeps its host until its actors have ended their unrolls.
        self._fleet.leave(agent)
        self._request_host(self._make_successor(bundle, agent))
        return dict.fromkeys(bundle.roles, reason)

    def _make_successor(self, bundle: Bundle, agent: RayAgent) -> RayAgent:
        """Make the agent that takes the place of a bundle's present ``agent``."""
        failures = agent.failures + 1 if agent.start_error else 0
        return self._make_agent(bundle, address=agent.address, failures=failures)

    def _request_host(self, agent: RayAgent, lost: RayAgent | None = None) -> None:
        """Ask Ray for a host, in a thread since the call may wait for the head node.

        Args:
            agent: gets the host.
            lost: the agent that it replaces; its resources are given back first.
        """
        threading.Thread(
            target=self._find_host, args=[agent, lost], name="place", daemon=True
        ).start()

    def _find_host(self, agent: RayAgent, lost: RayAgent | None) -> None:
        """Ask Ray for a host that is not refused; runs in a thread."""
        if lost is not None and lost.start_error:
            with suppress(Exception):  # the head node may be lost
                self._count_failure(lost)
        selector = self._refused.selector()

        if lost is not None:
            lost.placement.free()
        agent.placement.request(selector)

    def _count_failure(self, agent: RayAgent) -> None:
        """Count the failed start of an agent for its node, and report a node that is given up."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        node = agent.placement.find_node()
        if self._refused.count_failure(node, nodes):
            self._notes.append(
                f"the Ray node {nodes[node]['NodeManagerAddress']} is not used any more, as "
                f"{MOST_FAILURES} host agents could not be started there: {agent.start_error}; "
                f"{SAME_RELEASE}, and start Ray there again"
            )

    def _listen(self) -> None:
        """Take the reports of all agents, until the engine closes; runs in a thread."""
        calls: dict[Any, RayAgent] = {}
        pace = LoopPace(LISTENER_SHARE, time.process_time)  # most of it is in threads of Ray
        while not self._closing.is_set():
            # Each agent has one call at a time.
            called = set(calls.values())
            for agent in list(self._fleet.agents):
                if agent.placement.is_requested and agent not in called and not agent.gone:
                    calls[agent.call()] = agent
            if not calls:
                self._closing.wait(REPORT_S)
                continue

            if self._take_answers(calls):
                os.eventfd_write(self._wake, 1)
            self._pauses.on_listener_turn(time.monotonic())

            longest_s = min(LONGEST_REST_S, REST_S * len(self._fleet.agents))
            self._closing.wait(pace.rest_s(longest_s))

    def _take_answers(self, calls: dict[Any, RayAgent]) -> int:
        """Wait for an answer to one of the ``calls``, and take all that have arrived.

        Args:
            calls: the agents by Ray's promises of their answers; those that are answered are
                removed.

        Returns: the number of answers.
        """
        ray = self._ray
        answered, pending = ray.wait(list(calls), timeout=REPORT_S)
        if answered and pending:
            more, _ = ray.wait(pending, num_returns=len(pending), timeout=0.0)
            answered = answered + more

        for call in answered:
            self._take_answer(calls.pop(call), call)
        return len(answered)

    def _take_answer(self, agent: RayAgent, call: Any) -> None:
        """Pass an agent its answer: where it is, reports, or that it has ended."""
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(call)
        except exceptions.RayError as error:
            if isinstance(error, exceptions.ActorDiedError) and not agent.node:
                self._on_start_failure(agent, error)
            agent.on_end()
            return

        if answer is None:
            agent.on_end()
        elif isinstance(answer, HostLocation):
            agent.on_located(answer)
        else:
            agent.on_reports(answer)

    def _on_start_failure(self, agent: RayAgent, error: Any) -> None:
        """Report why an agent did not start, each cause once."""
        cause = _last_line(error)
        advice = ""
        # Only an error that the agent itself raised says something about its node.
        if error.actor_init_failed:
            agent.on_start_failure(cause)
            advice = f"; {SAME_RELEASE}"

        if cause not in self._reported_causes and len(self._reported_causes) < MOST_CAUSES:
            self._reported_causes.add(cause)
            self._notes.append(f"a host agent could not be started: {cause}{advice}")

    def close(self) -> None:
        """End all agents and what they have started, and leave the cluster."""
        if self._closing.is_set():
            return

        self._closing.set()
        if self._listener.is_alive():
            self._listener.join()

        deadline_s = time.monotonic() + CLOSE_S
        requested = [agent for agent in self._fleet.agents if agent.placement.is_requested]
        for agent in requested:
            agent.close()
        for agent in requested:
            self._await_end(agent, deadline_s)
            # Without a head node, agents remove their placement groups themselves if they can.
            if not self._head.is_lost:
                agent.placement.remove()

        os.close(self._wake)
        if not self._head.is_lost:
            self._ray.shutdown()

    def _await_end(self, agent: RayAgent, deadline_s: float) -> None:
        """Take the last reports of an agent that was closed, until it has ended."""
        ray = self._ray
        with suppress(ray.exceptions.RayError):
            while agent.has_host and not agent.gone and time.monotonic() < deadline_s:
                reports = ray.get(agent.placement.actor.reports.remote(0.1), timeout=CLOSE_S)
                if reports is None:
                    agent.on_end()
                else:
                    agent.on_reports(reports)


def _last_line(error: Exception) -> str:
    """Returns the last line of an error of Ray, which is what the agent itself raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].removeprefix("penstock.configs.errors.UserError: ")
