"""Starts the roles of a run, watches them, and cleans up after them.

The supervisor has one thread, normally the main one: an engine may tie its processes to the thread
that started them, and signals arrive there. Each turn of the loop reads events (signals, control
messages, ended processes, heartbeats), passes them to `decisions`, and performs the effects. Roles
are accessed only through the handles of an `Engine`. No role outlives the loop, however it ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.autotune.cores import CoreSplit
from penstock.configs.errors import UserError
from penstock.core.control import Message
from penstock.core.interfaces import Engine, Handle, Liveness, MetricSink, RunEvent
from penstock.core.loop_pace import LoopPace
from penstock.core.role import EXIT_REJOIN
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import RunFolderGuard, has_checkpoint
from penstock.launch.decisions import Decisions
from penstock.launch.ledgers import Ledgers
from penstock.launch.role_processes import PresumedProcess, RoleProcesses, wait_readable
from penstock.launch.run_report import RunReport
from penstock.launch.signals import HeldUpError, SignalHandler, SignalInbox
from penstock.launch.supervisor_messages import (
    CALLBACK,
    Effect,
    End,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    Start,
    why_not_started,
)
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor.supervisor_client import SAVE, STACKS, TIMELINE
from penstock.profiling.ledger import Part, TimeLedger

TICK_S = 0.1
"""Most seconds that a turn of the loop waits for an event."""
SHARE = 0.04
"""Share of a core that the loop may use."""
REST_S = 0.001
"""Seconds that the loop rests at most between two turns, for each role."""
LONGEST_REST_S = 1.0
"""Seconds that it rests at most, for any number of roles."""
RESERVED_FDS = 4


class Reserve:
    """Reserved descriptors, so that a lack of descriptors can still be reported."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def take(self) -> None:
        """Reserve as many descriptors as there are, up to `RESERVED_FDS`."""
        with suppress(OSError):
            while len(self._fds) < RESERVED_FDS:
                self._fds.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> None:
        """Close the reserved descriptors."""
        while self._fds:
            os.close(self._fds.pop())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Release the descriptors while the ``with`` block runs."""
        self.release()
        try:
            yield
        finally:
            self.take()


class Supervisor:
    """Supervises one set of processes, from their start to their end.

    It connects the parts: `RoleProcesses` and a `SignalInbox`, from which events come; `Decisions`,
    which choose the effects; and `RunReport`, which tells the run's sinks what happens.
    """

    _server: SupervisorServer
    """The socket for commands, while `run` runs."""

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        limits: RestartLimits,
        arguments: Mapping[str, Any],
        logs: Path,
        sinks: MetricSink,
        engine: Engine,
        core_split: CoreSplit | None = None,
        place: Callable[[], Sequence[RoleSpec]] | None = None,
        on_role_end: Callable[[Handle], object] | None = None,
    ) -> None:
        """Prepare the supervision; `run` starts the roles.

        Args:
            specs: the roles, for which the ``engine`` has reserved resources.
            limits: of restarts and timeouts.
            arguments: what every role gets, `topology.role_arguments` among it.
            logs: the folder of the roles' logs, in the run's folder.
            sinks: receives events and metrics, and has a `tick` in every turn of the loop.
            engine: starts the processes.
            core_split: changes the numbers of actors and threads during the run.
            place: returns the specs with their present addresses, if hosts may change.
            on_role_end: is called with each process that has ended, before it is reaped.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._limits = limits
        self._arguments = {
            "run_id": secrets.randbits(63),
            "grace_s": limits.grace_s,
            **arguments,
        }
        self._folder = RunFolderGuard(logs.parent)
        self._folder_is_lost = False
        self._sinks = sinks
        self._engine = engine
        self._core_split = core_split
        self._place = place
        self._on_role_end = on_role_end
        self._unplaced: set[str] = set()  # names of the roles without a host

        learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
        self._report = RunReport(sinks, learners)
        self._processes = RoleProcesses(engine, logs)
        self._signals = SignalInbox()
        self._decisions = Decisions(specs, limits)
        if arguments.get("resume", "no") != "no" and self._has_checkpoint():
            self._decisions.recovery.on_checkpoint_written()

        self._ledgers = Ledgers()
        self._pace = LoopPace(SHARE)
        self._reserve = Reserve()
        self.ledger = TimeLedger()
        """How this thread spends its time."""

    def run(self, handler_after: SignalHandler | None = None) -> Outcome:
        """Start all roles, and return when all have ended.

        Args:
            handler_after: handles signals from then on; None: the handlers from before the run do.
        """
        run_dir = Path(self._arguments["run_dir"])
        runtime_dir = Path(self._arguments["runtime_dir"])
        with (
            self._signals.open(handler_after),
            SupervisorServer(run_dir, runtime_dir) as self._server,
        ):
            try:
                self._reserve.take()
                while (outcome := self._decisions.outcome) is None:
                    self._turn()
                    names = self._decisions.roles_in_status()
                    for order in self._server.serve_clients(names, self._processes.handles):
                        self._obey(order)
                return outcome
            except HeldUpError as error:
                return self._held_up_outcome(error)
            finally:
                self._reserve.release()
                self._end_processes()
                self._report.report_accounting()

    @property
    def handles(self) -> Mapping[str, Handle]:
        """The processes of the roles that run, by the role's name."""
        return self._processes.handles

    @property
    def began(self) -> bool:
        """Whether an unroll was played or trained on, as far as is known from ended processes."""
        return self._report.began

    @property
    def stopping(self) -> bool:
        """Whether the run is about to end."""
        return self._decisions.stopping

    @property
    def learner_threads(self) -> int | None:
        """Threads of each learner now; None where they do not change during the run."""
        return None if self._core_split is None else self._core_split.now.threads

    def stop(self, reason: str) -> None:
        """End the run as if the learner had reached a limit, with this ``reason``."""
        self._do(self._decisions.stop(reason, time.monotonic()))

    # The loop.

    def _turn(self) -> None:
        """One turn of the loop: act on what time brings, wait for events, and handle them."""
        now_s = time.monotonic()
        if not self._folder_is_lost:
            self._check_folder(now_s)

        statuses = {name: handle.status() for name, handle in self.handles.items()}
        heartbeats = {name: status.alive_s for name, status in statuses.items()}
        phases = {name: status.phase for name, status in statuses.items()}
        self._do(self._decisions.tick(now_s, heartbeats, phases))
        for name, status in statuses.items():
            if status.dropped_nbytes:
                handle = self._processes.handles[name]
                self._report.log_missing_output(handle, self._processes.log_of(name))
        self._sinks.tick()

        self.ledger.switch(Part.WAIT)
        signal_fds = self._signals.filenos()
        if signal_fds:
            # Rest, so that the loop keeps to its share of a core, but not when a signal arrives.
            longest_s = min(LONGEST_REST_S, REST_S * len(self.handles))
            wait_readable(signal_fds, self._pace.rest_s(longest_s))
        ready_fds = wait_readable([*signal_fds, *self._engine.filenos()], TICK_S)
        self.ledger.switch(Part.OTHER)

        if not ready_fds.isdisjoint(signal_fds):
            for signum in self._signals.read():
                self._do(self._decisions.on_signal(signum, time.monotonic()))
        # Hosts come before roles, since roles that wait for a host are not restarted.
        self._check_hosts()
        for name, handle in list(self.handles.items()):
            self._check_process(name, handle)
        for process in list(self._processes.presumed):
            self._check_presumed(process)

    def _check_folder(self, now_s: float) -> None:
        """End the run at once if its folder is not at its path, where its roles would save."""
        try:
            self._folder.check()
        except UserError as error:
            self._folder_is_lost = True
            failure = Failure("supervisor", str(error), user=True)
            self._do(self._decisions.abandon(failure, now_s))

    def _check_hosts(self) -> None:
        """Learn from the engine which roles have no host, and where the others are."""
        if self._decisions.stopping:  # nothing is started any more, so no host is needed
            return

        reasons = self._engine.unplaced()
        previously_unplaced = self._unplaced
        self._unplaced = set(reasons)
        if self._place is not None and previously_unplaced - self._unplaced:
            specs = self._place()
            self._specs = {spec.name: spec for spec in specs}
            self._do(self._decisions.update_specs(specs))
        self._do(self._decisions.on_hosts_changed(reasons, time.monotonic()))

    def _check_process(self, name: str, handle: Handle) -> None:
        """Take the messages of a role and check its liveness."""
        self._take_messages(name, handle)
        liveness = handle.liveness()
        if liveness is Liveness.DEAD:
            self._on_dead(name, handle)
        elif liveness is Liveness.PRESUMED_DEAD:
            self._on_presumed_dead(name, handle)

    def _check_presumed(self, process: PresumedProcess) -> None:
        """Check whether a presumed death is now confirmed or disproved."""
        handle = process.handle
        name = handle.spec.name
        handle.receive()  # its messages are discarded, as another process has its role
        liveness = handle.liveness()

        if liveness is Liveness.PRESUMED_DEAD:
            process.is_ending = False  # an order to it may have been lost
        elif liveness is Liveness.DEAD:
            self._processes.presumed.remove(process)
            self._count_presumed_actor(handle)
            end = self._reap(handle)
            self._do(self._decisions.on_confirmed_dead(name, handle.incarnation, end))
        elif not process.is_ending:
            process.is_ending = True
            self._do(self._decisions.on_found_alive(name, handle.incarnation))

    # Effects.

    def _do(self, effects: list[Effect]) -> None:
        """Carry out the effects of a decision."""
        for effect in effects:
            match effect:
                case Start(name, incarnation):
                    self._start(name, incarnation)
                case Note(text, kind, role, data, incarnation):
                    event = RunEvent(kind, text, role=role, incarnation=incarnation, data=data)
                    self._report.event(event)
                case Kill(name, signum, why, incarnation):
                    handle = self._processes.find(name, incarnation)
                    if handle is not None:
                        self._kill(handle, signum, why)
                case Send(name, message) if name in self.handles:
                    self.handles[name].send(message)
                case _:
                    pass  # the message is for a process that has ended

        if self.stopping:
            self._report.log_stop(self._decisions.stop_cause)

    def _start(self, name: str, incarnation: int) -> None:
        """Start the process of a role, or let the decisions know why that failed."""
        arguments = {**self._arguments, "group_begun": self._decisions.group_begun}
        if self._decisions.recovery.resumes:
            arguments["resume"] = "must"
        try:
            handle = self._processes.start(self._specs[name], incarnation, arguments)
        except OSError as error:
            with self._reserve.lent():
                self._on_start_failed(name, incarnation, why_not_started(error))
        except UserError as error:
            # Another attempt would fail alike, so the run stops first.
            failure = Failure(name, str(error), user=True)
            self._do(self._decisions.on_error(failure, time.monotonic()))
            self._on_start_failed(name, incarnation, str(error))
        else:
            self._report.log(handle, "start", "was started")

    def _on_start_failed(self, name: str, incarnation: int, why: str) -> None:
        now_s = time.monotonic()
        self._do(self._decisions.on_start_failed(name, incarnation, why, now_s))

    def _kill(self, handle: Handle, signum: int, why: str) -> None:
        """Send a signal to a process, and report those that are no ordinary end."""
        if signum == signal.SIGUSR1:
            self._report.log(handle, "hang", why)
        elif signum == signal.SIGKILL:
            self._report.log(handle, "kill", why or "is killed")
        self._processes.signal(handle, signum)

    # Orders of commands.

    def _obey(self, order: Message) -> None:
        """Carry out what a command has ordered: `STACKS`, `TIMELINE` or `SAVE`.

        The reply to `SAVE` follows when a learner reports a checkpoint.
        """
        request = order["request"]
        if request == STACKS:
            for name in order["roles"]:
                if name in self.handles:
                    self.handles[name].signal(signal.SIGUSR1)
        elif request == TIMELINE:
            self._server.reply(TIMELINE, self._record_timeline())
        elif not self._report.has_learner:
            self._server.reply(SAVE, {"error": "it has no learner; save the run of its learner"})
        elif not self.stopping:  # a stopping run saves in any case
            for learner in self._learner_handles():
                learner.send({"kind": SAVE})

    def _record_timeline(self) -> Message:
        """Write what the threads did in the last minute; returns the reply to the order."""
        from penstock.profiling.report import last_minute  # needs numpy

        sharing_memory = [handle for handle in self.handles.values() if handle.shares_memory]
        if self.handles and not sharing_memory:
            return {
                "error": "its processes share no memory with the command; measure them with "
                "penstock profile and the same --engine"
            }

        run_dir = Path(self._arguments["run_dir"])
        try:
            last_minute.write_last_minute(run_dir, sharing_memory, self.ledger)
        except OSError as error:
            return {"error": f"the timeline could not be written: {error}"}
        return {}

    # Messages of roles.

    def _take_messages(self, name: str, handle: Handle) -> None:
        for message in handle.receive():
            self._do(self._on_message(name, message))

    def _on_message(self, name: str, message: Message) -> list[Effect]:
        """Handle a control message of the role ``name``; returns the effects.

        Messages of other kinds than these are for the learner of the role.
        """
        now_s = time.monotonic()
        decisions = self._decisions
        handle = self.handles[name]
        kind = message.pop("kind")
        match kind:
            case "ready":
                self._report.log(handle, "ready", "is ready")
                return decisions.on_ready(name, now_s)
            case "error":
                log = str(self._processes.log_of(name))
                return decisions.on_error(Failure(name, log=log, **message), now_s)
            case "stop":
                error = message.get("error")
                failure = Failure(name, error) if error else None
                return decisions.stop(message["reason"], now_s, failure)
            case "join":
                return decisions.on_join(name)
            case "entered":
                return decisions.on_group_entered(name)
            case "group_failed":
                return self._on_group_failed(message["epoch"], message["message"])
            case "note" | "event":
                self._report.log_reported(handle, message)
            case "metrics" | "final":
                if self._on_metrics(handle.spec.learner, message, final=kind == "final"):
                    return decisions.stop(CALLBACK, now_s)
            case "checkpoint" | "evaluation":
                if kind == "checkpoint":
                    decisions.recovery.on_checkpoint_written()
                    self._server.reply(SAVE, message)
                if self._report.log_result(handle, kind, message):
                    return decisions.stop(CALLBACK, now_s)
            case "save_failed":
                self._server.reply(SAVE, {"error": message.get("error")})
            case "server":
                if handle.spec.index == 0:  # all shards count the same pushes
                    self._report.ranks.server = message
            case _:
                return decisions.forward(name, {"kind": kind, **message})
        return []

    def _on_group_failed(self, epoch: int, message: str) -> list[Effect]:
        """Handle a learner's report that its group has failed, unless there is a newer group."""
        effects = self._decisions.on_group_failed(epoch)
        if effects:
            self._report.log_group_failure(epoch, message, self._learner_handles())
        return effects

    def _on_metrics(self, rank: int, message: Message, *, final: bool) -> bool:
        """Handle the figures of a learner; returns whether a callback ends the run."""
        decisions = self._decisions
        own_metrics: Message = {
            "actors_alive": decisions.actors_alive,
            "actors_restarted": decisions.restarts[Stage.ACTORS],
        }
        metrics = self._report.merge(rank, message, final=final)
        if metrics is None:  # the report of another rank completes those of the run
            return False

        has_several_learners = self._report.has_several_learners
        if has_several_learners or decisions.restarts[Stage.LEARNER]:
            own_metrics["learners_restarted"] = decisions.restarts[Stage.LEARNER]
        if has_several_learners and not final:
            own_metrics["learners_alive"] = decisions.learners_alive
        decisions.restart_policy.on_episodes(metrics.get("episodes"), time.monotonic())

        if not final:
            shares = self._ledgers.interval(self.handles)
            own_metrics |= shares
            # Of several learners each has its own figures.
            learners = metrics.get("ranks", [metrics])
            ceilings = [learner.get("learner_ceiling_steps_per_s") for learner in learners]
            self._split_cores(shares, ceilings)
        return self._report.metrics(metrics, own_metrics, final=final)

    def _split_cores(self, shares: Mapping[str, Any], ceilings: Sequence[float | None]) -> None:
        """Change the number of actors, or of the learners' threads, if another one is better.

        Args:
            shares: the metrics of `Ledgers.interval`.
            ceilings: agent steps per second that each learner could train; None if not known.
        """
        if self._core_split is None or self.stopping:
            return

        now_s = time.monotonic()
        actors_alive = self._decisions.actors_alive
        previous = self._core_split.now
        # What the processes measured may show that another split is better.
        split = self._core_split.interval(
            shares["ledgers"], shares["cpu"], ceilings, actors_alive, now_s
        )
        if split is None:
            return

        if split.actors != previous.actors:
            noun = "actor" if split.actors == 1 else "actors"
            text = f"actors.count: {split.actors} {noun} instead of {previous.actors}"
            effects = self._decisions.set_actors(split.actors, now_s)
        else:
            text = f"learner.threads auto: {split.threads} instead of {previous.threads}"
            effects = self._decisions.set_learner_threads(split.threads)
        data = {"actors": split.actors, "threads": split.threads}
        self._report.event(RunEvent("note", f"{text}, as {split.reason}", data=data))
        self._do(effects)

    # Ends of processes.

    def _on_dead(self, name: str, handle: Handle) -> None:
        """Take the remaining messages of a role whose process has ended, then handle its end."""
        self._take_messages(name, handle)
        del self._processes.handles[name]
        status = handle.status()
        log = handle.log_tail()
        self._report.add_progress(handle.spec, status)
        if self._on_role_end is not None:
            self._on_role_end(handle)

        end = self._reap(handle)
        if status.began or not log:
            self._do(self._decisions.on_ended(name, end, time.monotonic()))
        else:
            self._on_start_failed(name, end.incarnation, log)
        self._report.add_to_ranks(handle.spec, status)

    def _on_presumed_dead(self, name: str, handle: Handle) -> None:
        """Let the role continue without this process. A learner's counters are final from now on;
        an actor's are final once its death is confirmed."""
        self._processes.presume_dead(name)
        status = handle.status()
        if handle.spec.stage is not Stage.ACTORS:
            self._report.add_progress(handle.spec, status)
            self._report.add_to_ranks(handle.spec, status)

        # The report of a checkpoint may have been lost with the host.
        if handle.spec.essential and self._has_checkpoint():
            self._decisions.recovery.on_checkpoint_found()
        effects = self._decisions.on_presumed_dead(
            name,
            handle.incarnation,
            host=handle.host,
            produced=status.produced_steps,
            now_s=time.monotonic(),
        )
        self._do(effects)

    def _count_presumed_actor(self, handle: Handle) -> None:
        """Add the final counters of an actor that was presumed dead; those of other roles were
        added then."""
        if handle.spec.stage is Stage.ACTORS:
            status = handle.status()
            self._report.add_progress(handle.spec, status)
            self._report.add_to_ranks(handle.spec, status)

    def _reap(self, handle: Handle) -> End:
        """Release a process whose death is confirmed, and report its end."""
        was_killed = self._processes.was_killed(handle)
        end = self._processes.reap(handle)
        expected = self._is_expected(handle.spec.name, end.exit_code, was_killed)
        self._report.log_exit(handle, end, expected=expected)
        return end

    def _is_expected(self, name: str, exit_code: int, was_killed: bool) -> bool:
        """Whether a process of the role ``name`` has ended because the run wanted it to."""
        if exit_code == EXIT_REJOIN:
            return True
        if not self._decisions.needs(name) and exit_code in (0, -signal.SIGTERM):
            return True
        ended_as_ordered = exit_code == 0 or (was_killed and exit_code == -signal.SIGKILL)
        return self.stopping and ended_as_ordered

    def _end_processes(self) -> None:
        """End all processes that still run, which is the case only after an error of the
        supervisor."""
        for handle in self._processes.end_all(self._limits.grace_s):
            self._report.add_progress(handle.spec, handle.status())
        for process in self._processes.presumed:
            self._count_presumed_actor(process.handle)

    def _held_up_outcome(self, error: HeldUpError) -> Outcome:
        """The result of a run whose loop was blocked, so that a signal had to interrupt it."""
        failure = Failure.killed_by_user(
            "supervisor",
            has_checkpoint=self._has_checkpoint(),
            reason="; its loop was blocked",
            traceback="".join(traceback.format_exception(error)),
        )
        reason = "interrupted" if error.signum == signal.SIGINT else "terminated"
        return Outcome(128 + error.signum, reason, failure)

    def _has_checkpoint(self) -> bool:
        """Whether the run's folder has a checkpoint."""
        return has_checkpoint(Path(self._arguments["run_dir"]))

    def _learner_handles(self) -> list[Handle]:
        """The processes of the learners that run."""
        return [handle for handle in self.handles.values() if handle.spec.stage is Stage.LEARNER]
