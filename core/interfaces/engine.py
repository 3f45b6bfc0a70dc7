"""Engines: where the roles of a run are placed, and how they are started."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from penstock.core.control import Message
    from penstock.core.role_spec import RoleSpec
    from penstock.profiling.report.readings import Thread


@dataclass(frozen=True)
class Bundle:
    """Roles that are placed on one host together, with the resources that they need."""

    name: str
    """Such as "learner-0" or "actors"."""
    roles: tuple[str, ...]
    """Their names, such as "actor-3"."""
    cpus: int
    """Cores that the roles keep busy: the threads of learners, actors and parameter servers."""
    gpus: int = 0
    required: bool = True
    """Whether the run begins only once it has a host. Others get a host when there is one."""
    spread: bool = False
    """Whether it should be on a host without learners and other such bundles, if there is one."""


class Liveness(Enum):
    """State of a role's process, as its engine reports it."""

    ALIVE = "alive"
    """It runs, or is being started."""
    PRESUMED_DEAD = "presumed dead"
    """Its host does not answer, so the process may still run. It may become ALIVE again, or DEAD.
    An engine reports this only after its own timeout; the role is then replaced."""
    DEAD = "dead"
    """Its end is confirmed by the kernel of its host. This is final."""


class RoleStatus(NamedTuple):
    """The latest status that the engine has received from a role.

    Times are seconds of this host's CLOCK_MONOTONIC, 0.0 before the first. The counters of an actor
    and of a learner are those of `profiling.status.StatusPage`.
    """

    began: bool
    """Whether the role's own process exists or existed; before it only those that start it."""
    incarnation: int
    """That of an actor's present stream; for other roles that of the start."""
    phase: str
    """A `profiling.status.Phase` in lower case."""
    phase_s: float
    """When that phase began."""
    alive_s: float
    """Time of the last heartbeat."""
    produced_steps: int
    sequence: int
    played_steps: int
    trained_steps: int
    reduction: int
    dropped_nbytes: int
    """Output that is missing in the role's log."""


class ThreadUsage(NamedTuple):
    """How the time of one thread of a role is spent."""

    name: str
    part: str | None
    """The present part, a `profiling.ledger.Part` in lower case; None before the first."""
    for_s: float | None
    """Seconds since it entered that part; None before the first."""
    seconds: Mapping[str, float]
    """Seconds in each part, since the thread began."""


class RoleUsage(NamedTuple):
    """Resource usage of a role's process, from its kernel, and of its threads, from the role.

    ``state``, ``cpu_s`` and ``age_s`` are None where the process has ended or nothing is known. All
    figures are totals of its life, at ``at_ns``.
    """

    pid: int
    """Process id on its host; that of the process that starts the role, before the role exists."""
    state: str | None
    """State of the process in a word, such as "running"."""
    cpu_s: float | None
    """Processor time of all its threads, seconds."""
    age_s: float | None
    """Seconds since the process began."""
    threads: tuple[ThreadUsage, ...]
    coreless_s: float
    """Seconds in which its main thread was ready to run and had no core; NaN where the kernel does
    not tell."""
    at_ns: int
    """When the threads were read, in ns of this host's CLOCK_MONOTONIC."""


class Handle(Protocol):
    """One start of one role: the supervisor's connection to it.

    `Engine.start` makes it. One thread, the supervisor's, then calls all but `reap` in any order
    and as often as it likes; no call waits for the role or its host. In each turn it calls

        for message in handle.receive(): ...
        if handle.liveness() is Liveness.DEAD:
            handle.receive()                # messages sent before its end
            handle.status(), .log_tail()    # final status and output
            handle.reap()                   # last; nothing is called after it

    A handle that is presumed dead and is no longer wanted is not reaped: `Engine.close` releases
    it.
    """

    @property
    def spec(self) -> RoleSpec: ...

    @property
    def incarnation(self) -> int:
        """The number of the start. With ``spec.name`` it identifies the process."""

    @property
    def host(self) -> str:
        """Name of the host that the role runs on."""

    @property
    def shares_memory(self) -> bool:
        """Whether the role and this process share memory, so that `spans` has them at once."""

    def send(self, message: Message) -> None:
        """Send a control message as soon as there is room for it.

        Messages arrive in order, or are lost with the role or its host.
        """

    def receive(self) -> list[Message]:
        """Control messages that have arrived since the last call, in order. Each has a "kind"."""

    def signal(self, signum: int) -> None:
        """Send a signal to the role. Before its process exists, SIGTERM and SIGKILL prevent its
        start.

        The signal is lost where the process has ended or its host does not answer.
        """

    def liveness(self) -> Liveness:
        """Whether the role runs.

        Called in every turn: an engine may do periodic work here, such as killing processes that
        outlive the role.
        """

    def status(self) -> RoleStatus:
        """The latest status; cheap, and without a system call."""

    def usage(self) -> RoleUsage:
        """Resource usage of the process and its threads; may read some files."""

    def spans(self, since_ns: int) -> list[Thread] | None:
        """The parts that its threads were in since ``since_ns`` (ns of this host's
        CLOCK_MONOTONIC), also for roles on other hosts.

        None: they were asked for, and a later call with the same ``since_ns`` returns them, once.
        """

    def log_tail(self) -> str:
        """The last output of this process. Not after `reap`."""

    def reap(self) -> int:
        """Release every resource of a role whose death is confirmed.

        Returns: its exit code, negative for the signal that ended it.
        """


class EngineContext(NamedTuple):
    """The arguments of an engine, which serves one run."""

    runtime_dir: Path
    """A folder of this host, of mode 0700, with a path short enough for Unix sockets. Create no
    folders in it."""
    keep_fds: tuple[int, ...] = ()
    """Descriptors of this process, of which essential roles on this host only keep duplicates
    open."""
    cluster: str | None = None
    """The address of the engine's cluster, as the user gave it."""
    working_dir: str | None = None
    """A folder that is copied to the other hosts, where it is the current folder of all roles."""


class EngineFactory(Protocol):
    """An entry of `launch.engines.registry.ENGINES`: a class of engines, or a function."""

    def __call__(self, context: EngineContext) -> Engine: ...


class Engine(Protocol):
    """Places the roles of a run on hosts and starts them there.

    It takes no decisions about roles and restarts none; only `launch.decisions` restarts.
    Calls come from one thread:

        hosts()                         before that
        reserve(bundles)                once
        endpoints()                     after that
        start(...)                      for each start of each role
        filenos(), unplaced()           in each turn of the supervisor
        close()                         last, also after an error
    """

    def hosts(self) -> Sequence[int]:
        """Returns the number of cores of each host among which the engine chooses.

        It is empty if all roles are started on this host, whatever they need.
        """

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Find a host for each bundle that is required, and ask for one for the others. A role is
        in exactly one bundle.

        Raises UserError where there is no room, naming what is missing.
        """

    def endpoints(self) -> Mapping[str, str]:
        """Returns the address of each role's host, as other hosts reach it, by the role's name.

        It is "127.0.0.1" for all of them if there is one host. It changes when a role that was
        `unplaced` has a host again.
        """

    def start(
        self, spec: RoleSpec, incarnation: int, arguments: Mapping[str, Any], log: Path
    ) -> Handle:
        """Start a role on the host of its bundle, or on another one where that host is lost.

        Args:
            spec: one of the roles that were reserved for.
            incarnation: higher than that of every earlier start of the role.
            arguments: fields of `RoleContext` beyond those of the spec, as JSON values; ``run_dir``
                is the same on every host; ``runtime_dir`` is this host's, and another host replaces
                it by its own.
            log: the file for the role's output, on its host.

        Returns:
            The handle of the new process. An engine that detects a failed start later returns a
            handle whose death is confirmed, whose status has ``began`` False and whose
            `Handle.log_tail` contains the reason.

        Raises:
            OSError: the role could not be started.
            UserError: its arguments are too long for the engine.

        After an error nothing of the process is left.
        """

    def filenos(self) -> Collection[int]:
        """Returns the descriptors that tell when to look at the handles.

        One becomes readable when a handle has a message, or its liveness may have changed. The
        descriptors may change with every call of the engine or of its handles.
        """

    def unplaced(self) -> Mapping[str, str]:
        """Returns the roles that are not to run where they are, by name, with the reason.

        There is no host for them yet, or it was lost, or it is about to end. The engine looks for
        another host for each of them; a role that is no longer in the mapping can be started.

        If the host of a learner, or of a shard of the parameter server, is about to end, only that
        role is in the mapping. It stays there while it runs, as the run needs it. The engine of a
        single host returns nothing.
        """

    def close(self) -> None:
        """Release everything; a second call does nothing.

        The supervisor has reaped all roles that it could. Roles that are presumed dead and still
        run must end: the engine kills them where their host can be reached; elsewhere they end by
        themselves within ``run.grace_s`` of losing the engine.
        """
