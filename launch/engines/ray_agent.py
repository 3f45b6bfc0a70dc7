"""The host agents of the Ray engine: the Ray actor on a host, and the engine's line to it.

`HostAgent` is the actor. In the engine's process a `RayAgent` stands for each: its
`AgentPlacement` is Ray's side of it, its `OrderQueue` holds the orders that were not sent yet, and
the engine's `PauseWatch` knows when this process stood still. `ray_engine` says how they are used.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.core.control import Channel, Message
from penstock.core.descriptors import wait_readable
from penstock.core.processes import python
from penstock.core.role_spec import Stage
from penstock.launch.engines.ray_connection import import_ray
from penstock.launch.engines.remote_handles import HostLine

RESERVE_S = 60.0
"""How long the engine waits for the hosts of all required bundles, in which a cluster may start
nodes."""
REPORT_S = 1.0
"""An agent answers after this time at the latest, also if it has nothing to report."""
SILENT_S = 5.0
"""An agent that has not answered for this long is presumed dead."""
STUCK_S = 30.0
"""A host supervisor that has not reported for this long is killed. It may wait for a disk, so this
is long; it is below the default of run.hang_timeout_s."""
LEASE_S = 15.0
"""An agent that was not called for this long has lost its engine."""
FIRST_S = 60.0
"""How long an agent that replaces a lost one may take for its first answer."""
LONGEST_RETRY_S = 60.0
"""Longest interval until an agent that did not start is replaced; the first is `SILENT_S`."""
MOST_REPORTS = 1000
"""Most reports that one call of an agent returns."""
PATIENCE_S = 5.0
"""How long an agent waits for a host supervisor that does not read its orders."""
NOT_INHERITED = ("OMP_", "RAY_", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Prefixes of variables of a Ray worker that roles do not inherit."""


class HostLocation(NamedTuple):
    """Where a host agent runs."""

    host: str
    """Name of the host."""
    address: str
    """Address of the host, as the other nodes reach it."""
    node: str
    """Id of the Ray node."""


class HostAgent:
    """A Ray actor on the host of one bundle: executes a host supervisor and passes its messages.

    Only the engine calls its methods. Ray runs the calls of `obey` in order in one thread, and
    those of `reports` in another.
    """

    def __init__(self, lease_s: float, stuck_s: float, release: str) -> None:
        """Start the host supervisor.

        Args:
            lease_s: the agent ends if the engine does not call it for this long.
            stuck_s: the host supervisor is killed if it does not report for this long.
            release: the version of Penstock in the engine's process.

        Raises:
            UserError: this host has another release than the engine. Orders carry no version of
                their own, so that both must be the same.
        """
        if release != __version__:
            raise UserError(
                f"{socket.gethostname()} has Penstock {__version__}, and the run {release}"
            )
        self._lease_s = lease_s
        self._stuck_s = stuck_s

        # Both clocks begin later: the host supervisor may take long to start, and the engine does
        # not call this agent before other bundles have their hosts.
        self._silent_s = -RESERVE_S
        self._called_s = time.monotonic() + RESERVE_S

        self._channel, supervisor_end = Channel.pair()
        with supervisor_end:
            descriptor = supervisor_end.fileno()
            self._process = subprocess.Popen(
                python("penstock.launch.engines.host_supervisor", descriptor),
                pass_fds=(descriptor,),
                start_new_session=True,
                env={
                    name: value
                    for name, value in os.environ.items()
                    if not name.startswith(NOT_INHERITED)
                },
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def location(self) -> HostLocation:
        """Returns where this agent runs."""
        import ray

        return HostLocation(
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            node=ray.get_runtime_context().get_node_id(),
        )

    def obey(self, orders: Sequence[Message]) -> None:
        """Pass orders to the host supervisor. A call without orders renews the lease."""
        self._called_s = time.monotonic()
        for order in orders:
            self._channel.send(order, PATIENCE_S)

    def reports(self, wait_s: float) -> list[Message] | None:
        """Wait up to ``wait_s`` for reports of the host supervisor.

        Returns: the reports, oldest first; None once the host supervisor has ended.
        """
        begin_s = time.monotonic()
        self._called_s = begin_s
        wait_readable(self._channel.fileno(), wait_s)
        reports = self._channel.receive(most=MOST_REPORTS)

        if not reports and self._channel.closed:
            self._process.wait()  # it removes its files
            return None

        # The host itself may have stood still, which is no silence of the host supervisor.
        waited_s = min(time.monotonic() - begin_s, 2 * wait_s)
        self._silent_s = 0.0 if reports else self._silent_s + waited_s
        # No order reaches the roles of a host supervisor that is stuck.
        if self._silent_s > self._stuck_s:
            self._process.kill()
        return reports

    def _watch(self) -> None:
        """End this agent once the host supervisor has ended, and that once the lease has."""
        import ray

        while self._process.poll() is None:
            if time.monotonic() > self._called_s + self._lease_s:
                self._channel.send({"kind": "orphaned"}, PATIENCE_S)
                self._process.wait()
            time.sleep(0.2)

        # The engine still gets the last answer.
        time.sleep(REPORT_S)
        with suppress(Exception):  # the cluster may be gone
            ray.util.remove_placement_group(ray.util.get_current_placement_group())
        os._exit(0)


class ProcessStop(NamedTuple):
    """A time in which the whole process of the engine stood still, such as after SIGSTOP."""

    seconds: float
    ended_s: float
    """Its end, in seconds of CLOCK_MONOTONIC."""


class PauseWatch:
    """Notices when this process stands still, so that no host is blamed for that silence.

    Two threads report their turns here: the supervisor's, and the one that listens to the agents.
    Times are seconds of CLOCK_MONOTONIC.
    """

    def __init__(self) -> None:
        self.listened_s = 0.0
        """Until when the engine has listened. An agent is silent if its last answer is more than
        `SILENT_S` older than this."""
        self._supervisor_turn_s = math.inf
        self._listener_turn_s = math.inf
        self._resumed_s = -math.inf
        """When the listener continued after a pause."""
        self._stop: ProcessStop | None = None
        """The last stop that was long enough to end the leases of agents."""

    def begin(self, now_s: float) -> None:
        """Begin to watch, when all required bundles have their hosts."""
        self._supervisor_turn_s = now_s
        self._listener_turn_s = now_s
        # The first answers of agents may be old by now, as they are after a pause.
        self._resumed_s = now_s

    def on_listener_turn(self, now_s: float) -> None:
        """The listener has taken the answers that have arrived."""
        if now_s > self._listener_turn_s + SILENT_S:
            self._resumed_s = now_s
        self._listener_turn_s = now_s

        # After a pause the answers of agents need a moment.
        if now_s > self._resumed_s + SILENT_S:
            self.listened_s = now_s

    def on_supervisor_turn(self, now_s: float) -> bool:
        """The supervisor begins a turn.

        Returns: whether it has stood still for more than `SILENT_S` since the last one.
        """
        previous_turn_s = self._supervisor_turn_s
        self._supervisor_turn_s = now_s
        if now_s <= previous_turn_s + SILENT_S:
            return False

        # If only the supervisor stood still, as in a callback, the listener has kept the leases.
        process_stopped = (
            now_s > self._listener_turn_s + SILENT_S or self._resumed_s > previous_turn_s
        )
        if process_stopped and now_s > previous_turn_s + LEASE_S - 2 * REPORT_S:
            self._stop = ProcessStop(now_s - previous_turn_s, ended_s=now_s)
        return True

    def recent_stop(self, now_s: float) -> ProcessStop | None:
        """Returns the stop that may have ended leases a moment ago, or None."""
        if self._stop is not None and now_s > self._stop.ended_s + 2 * SILENT_S:
            self._stop = None
        return self._stop

    def forget_stop(self) -> None:
        """Forget the stop, which was reported to the user."""
        self._stop = None


class OrderQueue:
    """Orders for one agent, of a turn of the supervisor or until the agent's first answer.

    Used by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: list[Message] = []

    def append(self, order: Message) -> None:
        """Add an order at the end."""
        with self._lock:
            self._orders.append(order)

    def flush(self, send: Callable[[list[Message]], object]) -> None:
        """Pass all orders to ``send`` in one call, unless there are none."""
        with self._lock:
            if self._orders:
                send(self._orders)
                self._orders = []

    def withdraw(self, key: str) -> bool:
        """Remove the order to start a role, with those after it.

        Args:
            key: of the start of the role.

        Returns: False, with nothing removed, if that order is not in the queue.
        """
        with self._lock:
            starts = [order["key"] for order in self._orders if order["kind"] == "start"]
            if key not in starts:
                return False
            self._orders = [order for order in self._orders if order.get("key") != key]
            return True


@dataclass(frozen=True)
class AgentRequest:
    """What Ray is asked for: a placement group for one bundle, and a host agent in it."""

    name: str
    """Name of both, unique in the cluster."""
    namespace: str
    """Ray's namespace for the agents of this run."""
    resources: Mapping[str, float]
    """What the bundle needs on its host, by Ray's names: "CPU" and "GPU"."""
    lifetime: str | None
    """That of the placement group: "detached", or None to end with the engine's process."""
    preferred_node: Callable[[], str | None] | None
    """Returns the id of the node that is preferred; None: Ray chooses the node."""


class AgentPlacement:
    """Ray's side of one agent: its placement group and its actor."""

    def __init__(self, request: AgentRequest, actor_class: Any) -> None:
        """Ask for nothing yet.

        Args:
            request: what is asked for.
            actor_class: `HostAgent` as a class of Ray actors.
        """
        self.is_requested = False
        """Whether Ray was asked for the host."""
        self.group: Any = None
        self.ready: Any = None
        """Ray's promise of the host, which is fulfilled once the group has one."""
        self.actor: Any = None
        self._request = request
        self._actor_class = actor_class

    def request(self, selector: list[dict[str, str]] | None = None) -> None:
        """Ask Ray for the host, and for the agent there. Waits while the head node is away.

        Args:
            selector: the label selector that the host must match; None allows all nodes.
        """
        ray = import_ray()
        request = self._request
        # STRICT_PACK of a single bundle: Ray then prefers a node that has only this one.
        self.group = ray.util.placement_group(
            [dict(request.resources)],
            strategy="STRICT_PACK",
            name=request.name,
            lifetime=request.lifetime,
            bundle_label_selector=selector,
            _soft_target_node_id=request.preferred_node and request.preferred_node(),
        )
        self.ready = self.group.ready()

        self.actor = self._actor_class.options(
            name=request.name,
            namespace=request.namespace,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            num_gpus=request.resources.get("GPU", 0),
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=0
            ),
        ).remote(LEASE_S, STUCK_S, __version__)
        self.is_requested = True

    @property
    def is_ready(self) -> bool:
        """Whether Ray has found the host."""
        ready, _ = import_ray().wait([self.ready], timeout=0.0)
        return bool(ready)

    def find_node(self) -> str:
        """Returns the id of the node on which Ray has tried to start the agent, or ""."""
        table = import_ray().util.placement_group_table(self.group)
        return str(table.get("bundles_to_node_id", {}).get(0, ""))

    def free(self) -> None:
        """Give the resources back. An agent that still runs ends with them."""
        if self.group is not None:
            with suppress(import_ray().exceptions.RayError, ValueError):
                import_ray().util.remove_placement_group(self.group)

    def remove(self) -> None:
        """End the agent, and give the resources back."""
        ray = import_ray()
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor)
            ray.util.remove_placement_group(self.group)


class RayAgent(HostLine):
    """The line to a host agent.

    The thread that listens to the agents calls the methods `on_...`, and the supervisor's thread
    all others. Before the first and after the last turn of the supervisor there is only its thread.
    """

    def __init__(
        self,
        placement: AgentPlacement,
        name: str,
        wake: int,
        pauses: PauseWatch,
        *,
        address: str = "",
        failures: int = 0,
    ) -> None:
        """Make the line to an agent that has no host yet.

        Args:
            placement: Ray's side of the agent.
            name: of the agent, which stands for its host's name until that is known.
            wake: descriptor of the eventfd that announces reports.
            pauses: knows until when the engine has listened.
            address: of the host of the agent that this one replaces.
            failures: number of agents before this one that did not start, since one did.
        """
        super().__init__(name)
        self.placement = placement
        self.address = address
        """Address of its host; before that is known, that of the agent before."""
        self.node = ""
        """Id of its Ray node; empty until the agent has answered."""
        self.gone = False
        """Whether the agent has ended."""
        self.start_error = ""
        """Why the agent could not be started on its node; empty if it was, or was not tried."""
        self.failures = failures
        self._wake = wake
        self._pauses = pauses
        self._orders = OrderQueue()
        self._created_s = time.monotonic()
        self._answered_s: float | None = None

    def call(self) -> Any:
        """Call the agent.

        Returns: Ray's promise of a `HostLocation` at first, and of reports once that is known.
        """
        if not self.node:
            return self.placement.actor.location.remote()
        return self.placement.actor.reports.remote(REPORT_S)

    def on_located(self, location: HostLocation) -> None:
        """The agent runs, and has answered where."""
        self.host = location.host
        self.address = location.address
        self.node = location.node
        self.on_reports([])

    def on_reports(self, reports: list[Message]) -> None:
        """The agent has answered, with the reports of its host supervisor."""
        self._reports.extend(reports)
        self._answered_s = time.monotonic()
        self.flush()

    def on_start_failure(self, cause: str) -> None:
        """The agent itself has raised an error on its node."""
        self.start_error = cause

    def on_end(self) -> None:
        """The agent has ended, or its node."""
        self.gone = True

    @property
    def is_awaited(self) -> bool:
        """Whether Ray has not found a host yet."""
        return not self.node and not self.gone

    @property
    def has_host(self) -> bool:
        """Whether the agent has answered, or Ray has at least found a host for it."""
        return self._answered_s is not None or self.placement.is_ready

    @property
    def reached(self) -> bool:
        """Whether the agent answers. One without a first answer has `FIRST_S` for it."""
        if self.gone:
            return False
        if self._answered_s is None:
            return time.monotonic() < self._created_s + FIRST_S
        return self._pauses.listened_s < self._answered_s + SILENT_S

    @property
    def why_missing(self) -> str:
        """Why no role can run here; empty if roles can."""
        if self.is_awaited or self.start_error:
            return "no host has been found yet"
        return "" if self.reached else f"its host {self.host} does not answer"

    @property
    def waits_for_retry(self) -> bool:
        """Whether it is too early to replace this agent, which is lost or did not start."""
        retry_s = min(SILENT_S * 2.0**self.failures, LONGEST_RETRY_S)
        return time.monotonic() < self._created_s + retry_s

    @property
    def has_actors(self) -> bool:
        """Whether an actor of the run is on this host, or was not reaped yet."""
        return any(handle.spec.stage is Stage.ACTORS for handle in self._handles.values())

    def has_any(self, roles: Collection[str]) -> bool:
        """Whether one of the ``roles`` is on this host, or was not reaped yet."""
        return any(handle.spec.name in roles for handle in self._handles.values())

    def order(self, kind: str, **fields: Any) -> None:
        self._orders.append({"kind": kind, **fields})

    def withdraw(self, key: str) -> bool:
        return self._orders.withdraw(key)

    def flush(self) -> None:
        """Send the orders, in one call, once the agent has answered for the first time."""
        if self._answered_s is not None:
            self._orders.flush(self.placement.actor.obey.remote)

    def pump(self) -> None:
        # The descriptor is read before the reports that it announces, so that none is missed.
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        super().pump()

    def close(self) -> None:
        """Order the agent to end its roles and itself; no order follows."""
        self.order("close")
        self.flush()
