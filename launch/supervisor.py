"""Starts the roles of a run, watches them, and cleans up after them.

The supervisor has one thread, normally the main one: an engine may tie its processes to the thread
that started them, and signals arrive there. Each turn of the loop reads events (signals, control
messages, ended processes, heartbeats), passes them to `decisions`, and performs the effects. Roles
are accessed only through the handles of an `Engine`. No role outlives the loop, however it ends.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.autotune.cores import CoreSplit
from penstock.configs.errors import UserError
from penstock.core.cgroup import oom_kills
from penstock.core.control import Message
from penstock.core.interfaces import Engine, Handle, Liveness, MetricSink, RoleStatus, RunEvent
from penstock.core.loop_pace import LoopPace
from penstock.core.role import EXIT_REJOIN
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import HeldFolder, has_checkpoint
from penstock.launch.decisions import Decisions
from penstock.launch.ledgers import Ledgers
from penstock.launch.signals import SIGNALS, SignalHandler, handled
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
    how_it_ended,
    signal_name,
    why_not_started,
)
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor.ranks import RankPhase, Ranks, whereabouts
from penstock.monitor.supervisor_client import SAVE, STACKS, TIMELINE
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase

TICK_S = 0.1
SHARE = 0.04  # of a core, for the loop
REST_S, LONGEST_REST_S = 0.001, 1.0  # between two turns, for each role, and at most
COUNTED = {  # in metrics, by reason: the kind of event, and its text
    "dropped": ("drop", "agent steps were dropped: {}"),
    "lost": ("lost", "agent steps were lost: {}"),
    "rejected": ("rejected", "messages were rejected: {}"),
}
RESERVED = 4  # descriptors
WAITING, REDUCING = Phase.WAITING.name.lower(), Phase.REDUCING.name.lower()
HELD_UP_S = 1.0  # a signal that was not read for so long never will be


class HeldUpError(KeyboardInterrupt):
    """A signal arrived while the loop was blocked for long. It is not an `Exception`, so that a
    callback does not catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Reserve:
    """Reserved descriptors, so that a lack of descriptors can still be reported."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def take(self) -> None:
        with suppress(OSError):
            while len(self._fds) < RESERVED:
                self._fds.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> None:
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
    """Supervises one set of processes, from their start to their end."""

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
    ) -> None:
        """``arguments`` are passed to every role; the ``engine`` has reserved resources for the
        ``specs``. ``core_split`` changes the numbers of actors and threads during the run;
        ``place`` returns the specs with their present addresses, where hosts may change."""
        self._specs = {spec.name: spec for spec in specs}
        self._limits = limits
        self._arguments = {
            "run_id": secrets.randbits(63),
            "grace_s": limits.grace_s,
            **arguments,
        }
        self._logs = logs
        self._folder = HeldFolder(logs.parent)
        self._lost_folder = False
        self._sinks = sinks
        self._engine = engine
        self._core_split = core_split
        self._place = place
        self._unplaced: set[str] = set()  # roles without a host
        self._decisions = Decisions(specs, limits)
        if arguments.get("resume", "no") != "no" and has_checkpoint(Path(arguments["run_dir"])):
            self._decisions.checkpoint_exists()
        learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
        self._has_learner = bool(learners)
        first = [spec.learner for spec in learners if not spec.spare]
        self._ranks = Ranks(first, several=len(learners) > 1)
        self._several = len(learners) > 1
        self._handles: dict[str, Handle] = {}
        self._presumed: list[Handle] = []  # that were presumed dead, and are no longer their role's
        self._ending: set[tuple[str, int]] = set()  # of these, that are known to run
        self._killed: set[tuple[str, int]] = set()  # by role and incarnation, with SIGKILL
        self._ledgers = Ledgers()
        self.began = False  # whether anybody has played or trained on an unroll
        self.ledger = TimeLedger()
        self.last_look: Callable[[Handle], None] | None = None  # at a process that has ended
        self._dropping: set[str] = set()  # roles whose output is not all in their logs
        self._pace = LoopPace(SHARE)
        self._reserve = Reserve()
        self._oom_kills = oom_kills()
        self._wakeup_fd: int | None = None  # that signals make readable
        self._stop_logged = False
        self._final = False  # a learner has given its last report
        self._counts: dict[str, dict[str, int]] = {}  # agent steps by reason, in the last metrics
        self._played_steps = 0  # by the actors of this host that have ended
        self._produced_steps = self._trained_steps = 0  # by the learners that have ended
        self._counted: dict[tuple[str, str], int] = {}  # by reason, as last reported
        self._unread_s: float | None = None  # when the first signal came that nobody has read

    def run(self, after: SignalHandler | None = None) -> Outcome:
        """Start all roles, and return when all have ended. ``after`` handles signals from then on;
        with None the handlers from before the run do."""
        folders = Path(self._arguments["run_dir"]), Path(self._arguments["runtime_dir"])
        with (
            self._signals(after),
            SupervisorServer(*folders) as self._server,
        ):
            try:
                self._reserve.take()
                while (outcome := self._decisions.outcome) is None:
                    self._turn()
                    for order in self._server.turn(self._decisions.listed(), self._handles):
                        self._obey(order)
                return outcome
            except HeldUpError as error:
                reason = "interrupted" if error.signum == signal.SIGINT else "terminated"
                text = "".join(traceback.format_exception(error))
                failure = Failure.killed_as_asked(
                    "supervisor",
                    has_checkpoint=has_checkpoint(Path(self._arguments["run_dir"])),
                    reason="; its loop was blocked",
                    traceback=text,
                )
                return Outcome(128 + error.signum, reason, failure)
            finally:
                self._reserve.release()
                self._abandon()
                self._account()

    @property
    def handles(self) -> Mapping[str, Handle]:
        """The roles that run, by name."""
        return self._handles

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

    def _turn(self) -> None:
        now_s = time.monotonic()
        if not self._lost_folder:
            self._check_folder(now_s)
        statuses = {name: handle.status() for name, handle in self._handles.items()}
        beats = {name: status.alive_s for name, status in statuses.items()}
        phases = {name: status.phase for name, status in statuses.items()}
        self._do(self._decisions.tick(now_s, beats, phases))
        for name, status in statuses.items():
            if status.dropped_nbytes and name not in self._dropping:
                self._note_dropped(name, self._handles[name])
        self._sinks.tick()
        self.ledger.switch(Part.WAIT)
        own = [] if self._wakeup_fd is None else [self._wakeup_fd]
        if own:
            rest_s = self._pace.rest_s(min(LONGEST_REST_S, REST_S * len(self._handles)))
            _wait(own, rest_s)
        ready = _wait([*own, *self._engine.filenos()], TICK_S)
        self.ledger.switch(Part.OTHER)
        if self._wakeup_fd in ready:
            self._interrupted()
        self._look_at_hosts()  # before the roles: those that wait for a host are not restarted
        for name, handle in list(self._handles.items()):
            self._look_at(name, handle)
        for handle in list(self._presumed):
            self._look_at_presumed(handle)

    def _check_folder(self, now_s: float) -> None:
        """End the run at once where its folder is not at its path: its roles would save there."""
        try:
            self._folder.check()
        except UserError as error:
            self._lost_folder = True
            failure = Failure("supervisor", str(error), user=True)
            self._do(self._decisions.abandon(failure, now_s))

    def _look_at_hosts(self) -> None:
        """See which roles have no host, and where those are that have one again."""
        if self._decisions.stopping:  # nothing is started any more, and needs a host for that
            return
        reasons = self._engine.unplaced()
        before, self._unplaced = self._unplaced, set(reasons)
        if self._place is not None and before - self._unplaced:
            specs = self._place()
            self._specs = {spec.name: spec for spec in specs}
            self._do(self._decisions.respec(specs))
        self._do(self._decisions.unplaced(reasons, time.monotonic()))

    def _look_at(self, name: str, handle: Handle) -> None:
        """Take the messages of a role and check its liveness."""
        self._take_messages(name, handle)
        liveness = handle.liveness()
        if liveness is Liveness.DEAD:
            self._ended(name, handle)
        elif liveness is Liveness.PRESUMED_DEAD:
            self._presumed_dead(name, handle)

    def _look_at_presumed(self, handle: Handle) -> None:
        """Check whether a presumed death is now confirmed or disproved. Its messages are
        discarded."""
        handle.receive()
        name, key = handle.spec.name, _key(handle)
        liveness = handle.liveness()
        if liveness is Liveness.PRESUMED_DEAD:
            self._ending.discard(key)  # an order to it may have been lost
        elif liveness is Liveness.DEAD:
            self._presumed.remove(handle)
            status = handle.status()
            if handle.spec.stage is Stage.ACTORS:
                self._note_progress(handle.spec, status)
                self._note_rank(handle.spec, status)
            end = self._reap(handle)
            self._do(self._decisions.confirmed_dead(name, handle.incarnation, end))
        elif key not in self._ending:
            self._ending.add(key)
            self._do(self._decisions.found_alive(name, handle.incarnation))

    def _obey(self, order: Message) -> None:
        """Carry out what a command has ordered."""
        if order["request"] == STACKS:
            for name in order["roles"]:
                if name in self._handles:
                    self._handles[name].signal(signal.SIGUSR1)
        elif order["request"] == TIMELINE:
            self._server.reply(TIMELINE, self._record_timeline())
        elif not self._has_learner:
            self._server.reply(SAVE, {"error": "it has no learner; save the run of its learner"})
        elif not self.stopping:  # a stopping run saves in any case
            for handle in self._handles.values():
                if handle.spec.stage is Stage.LEARNER:
                    handle.send({"kind": SAVE})

    def _record_timeline(self) -> Message:
        """Write what the threads did in the last minute; returns the reply to the order."""
        from penstock.profiling.report import last_minute  # needs numpy

        near = [handle for handle in self._handles.values() if handle.shares_memory]
        if self._handles and not near:
            return {
                "error": "its processes share no memory with the command; measure them with "
                "penstock profile and the same --engine"
            }
        try:
            folder = Path(self._arguments["run_dir"])
            last_minute.record(folder, near, self.ledger)
        except OSError as error:
            return {"error": f"the timeline could not be written: {error}"}
        return {}

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(name, incarnation):
                    self._start(name, incarnation)
                case Note(text, kind, role, data, which):
                    self._sinks.event(RunEvent(kind, text, role, which, data))
                case Kill(name, signum, why, incarnation):
                    for handle in self._find(name, incarnation):
                        self._kill(handle, signum, why)
                case Send(name, message) if name in self._handles:
                    self._handles[name].send(message)
                case _:
                    pass  # its process has ended

        self._log_stop()

    def _find(self, name: str, incarnation: int | None) -> list[Handle]:
        """The handle of a role; with an ``incarnation``, one that was presumed dead under it."""
        if incarnation is None:
            return [self._handles[name]] if name in self._handles else []
        return [handle for handle in self._presumed if _key(handle) == (name, incarnation)]

    def _log(self, handle: Handle, kind: str, text: str, **data: Any) -> None:
        self._sinks.event(_about(handle, kind, text, data))

    def _log_stop(self) -> None:
        if not self.stopping or self._stop_logged:
            return
        self._stop_logged = True
        reason, failure = self._decisions.why_stopped
        text = f"the run stops: {reason}" + (f"; {failure.name}: {failure.told}" if failure else "")
        role = failure.name if failure else None
        self._sinks.event(RunEvent("stop", text, role, data={"reason": reason}))

    def _kill(self, handle: Handle, signum: int, why: str) -> None:
        if signum == signal.SIGUSR1:
            self._log(handle, "hang", why)
        elif signum == signal.SIGKILL:
            self._killed.add(_key(handle))
            self._log(handle, "kill", why or "is killed")
        handle.signal(signum)

    def _start(self, name: str, incarnation: int) -> None:
        log = self._logs / f"{name}.log"
        try:
            arguments = {**self._arguments, "group_begun": self._decisions.group_begun}
            if self._decisions.resumes:
                arguments["resume"] = "must"
            handle = self._engine.start(self._specs[name], incarnation, arguments, log)
        except OSError as error:
            with self._reserve.lent():
                self._not_started(name, incarnation, why_not_started(error))
            return
        except UserError as error:  # another attempt would fail alike, so the run stops first
            failure = Failure(name, str(error), user=True)
            self._do(self._decisions.failed(failure, time.monotonic()))
            self._not_started(name, incarnation, str(error))
            return
        self._handles[name] = handle
        self._log(handle, "start", "was started")

    def _not_started(self, name: str, incarnation: int, why: str) -> None:
        now_s = time.monotonic()
        self._do(self._decisions.not_started(name, incarnation, why, now_s))

    def _note_dropped(self, name: str, handle: Handle) -> None:
        self._dropping.add(name)
        self._log(
            handle,
            "note",
            f"{name}: a part of its output is missing in {self._logs / name}.log, which contains "
            "the reason; the run continues",
        )

    def _take_messages(self, name: str, handle: Handle) -> None:
        for message in handle.receive():
            self._do(self._handle(name, message))

    def _handle(self, name: str, message: Message) -> list[Effect]:
        now_s = time.monotonic()
        kind = message.pop("kind")
        if kind == "ready":
            self._log(self._handles[name], "ready", "is ready")
            return self._decisions.ready(name, now_s)
        if kind == "error":
            log = str(self._logs / f"{name}.log")
            return self._decisions.failed(Failure(name, log=log, **message), now_s)
        if kind == "stop":
            error = message.get("error")
            failure = Failure(name, error) if error else None
            return self._decisions.stop(message["reason"], now_s, failure)
        if kind == "join":
            return self._decisions.join(name)
        if kind == "entered":
            return self._decisions.entered(name)
        if kind == "group_failed":
            return self._group_failed(message["epoch"], message["message"])
        if kind in ("note", "event"):
            self._reported(self._handles[name], message)
        elif kind in ("metrics", "final"):
            if self._measured(self._specs[name].learner, message, final=kind == "final"):
                return self._decisions.stop(CALLBACK, now_s)
        elif kind in ("checkpoint", "evaluation"):
            if kind == "checkpoint":
                self._decisions.checkpoint_exists()
                self._server.reply(SAVE, message)
            if self._sinks.event(_result(self._handles[name], kind, message)):
                return self._decisions.stop(CALLBACK, now_s)
        elif kind == "save_failed":
            self._server.reply(SAVE, {"error": message.get("error")})
        elif kind == "server":
            if not self._specs[name].index:  # all shards count the same pushes
                self._ranks.server = message
        else:
            return self._decisions.pass_on(name, {"kind": kind, **message})
        return []

    def _group_failed(self, epoch: int, message: str) -> list[Effect]:
        effects = self._decisions.group_failed(epoch)
        if effects:
            learners = (h for h in self._handles.values() if h.spec.stage is Stage.LEARNER)
            where = whereabouts({h.spec.learner: _rank_phase(h.status()) for h in learners})
            text = f"group {epoch} of learners: {message}; {where}"
            self._sinks.event(RunEvent("note", text, data={"epoch": epoch}))
        return effects

    def _reported(self, handle: Handle, message: Message) -> None:
        """A "note" or an "event" of a role."""
        kind, text = str(message.get("event", "note")), str(message.get("text"))
        event = _about(handle, kind, text, message.get("data") or {})
        self._sinks.event(replace(event, reported=True))

    def _log_counts(self, message: Message) -> None:
        """Log the counts of dropped, lost and rejected data that have grown."""
        for key, (kind, text) in COUNTED.items():
            for reason, total in (message.get(key) or {}).items():
                if total > self._counted.get((key, reason), 0):
                    data = {"reason": reason, "total": total}
                    self._sinks.event(RunEvent(kind, text.format(reason), data=data))
                self._counted[key, reason] = total

    def _note_progress(self, spec: RoleSpec, status: RoleStatus) -> None:
        """Add the final counters of a process that has ended."""
        if spec.stage is Stage.ACTORS:
            self._played_steps += status.played_steps
        elif spec.stage is Stage.LEARNER:
            self._produced_steps += status.produced_steps
            self._trained_steps += status.trained_steps
        else:
            return
        self.began = self.began or status.produced_steps > 0 or status.trained_steps > 0

    def _account(self) -> None:
        """Report the known part of the accounting if no learner has sent the final one.

        The status pages of the processes contain the produced and trained steps, the last metrics
        the dropped and lost ones. The steps in flight are unknown.
        """
        if self._final or not self.began or not self._has_learner:
            return
        known = {key: self._counts.get(key, {}) for key in ("dropped", "lost")}
        booked = self._trained_steps + sum(sum(counts.values()) for counts in known.values())
        accounting = {
            "produced": max(self._played_steps, self._produced_steps, booked),
            "trained": self._trained_steps,
            **known,
            "in_flight": None,
        }
        self._sinks.metrics({"accounting": accounting, "accounting_complete": False}, final=True)

    def _measured(self, rank: int, message: Message, *, final: bool) -> bool:
        """Pass on the figures of a learner; returns whether a callback ends the run."""
        decisions = self._decisions
        counts: Message = {
            "actors_alive": decisions.actors_alive,
            "actors_restarted": decisions.restarts[Stage.ACTORS],
        }
        merge = self._ranks.final if final else self._ranks.metrics
        merged = merge(rank, message)
        if merged is None:
            return False
        message = merged
        if self._several or decisions.restarts[Stage.LEARNER]:
            counts["learners_restarted"] = decisions.restarts[Stage.LEARNER]
        if self._several and not final:
            counts["learners_alive"] = decisions.learners_alive
        self._decisions.restart_policy.episodes(message.get("episodes"), time.monotonic())
        if not final:
            shares = self._ledgers.interval(self._handles)
            counts |= shares
            learners = message.get("ranks", [message])  # each, where there may be several
            self._split_cores(shares, [own.get("learner_ceiling_steps_per_s") for own in learners])
        self._log_counts(message)
        self._counts = {key: message[key] for key in ("dropped", "lost") if key in message}
        self._final = self._final or final
        return bool(self._sinks.metrics(counts | message, final=final))

    def _split_cores(self, shares: Mapping[str, Any], ceilings: Sequence[float | None]) -> None:
        """Change the number of actors, or of the learners' threads, where another one fits."""
        if self._core_split is None or self.stopping:
            return
        before, now_s, alive = self._core_split.now, time.monotonic(), self._decisions.actors_alive
        now = self._core_split.interval(shares["ledgers"], shares["cpu"], ceilings, alive, now_s)
        if now is None:
            return
        if now.actors != before.actors:
            noun = "actor" if now.actors == 1 else "actors"
            text = f"actors.count: {now.actors} {noun} instead of {before.actors}"
            effects = self._decisions.resize(now.actors, now_s)
        else:
            text = f"learner.threads auto: {now.threads} instead of {before.threads}"
            effects = self._decisions.set_threads(now.threads)
        data = {"actors": now.actors, "threads": now.threads}
        self._sinks.event(RunEvent("note", f"{text}, as {now.reason}", data=data))
        self._do(effects)

    def _ended(self, name: str, handle: Handle) -> None:
        """Take the role's remaining messages, then handle its end."""
        self._take_messages(name, handle)
        del self._handles[name]
        status, log = handle.status(), handle.log_tail()
        self._note_progress(handle.spec, status)
        if self.last_look is not None:
            self.last_look(handle)
        end = self._reap(handle)
        if status.began or not log:
            self._do(self._decisions.ended(name, end, time.monotonic()))
        else:
            self._not_started(name, end.incarnation, log)
        self._note_rank(handle.spec, status)

    def _presumed_dead(self, name: str, handle: Handle) -> None:
        """The role continues without this process. A learner's counters are final from now on; an
        actor's are final once its death is confirmed."""
        del self._handles[name]
        self._presumed.append(handle)
        status = handle.status()
        if handle.spec.stage is not Stage.ACTORS:
            self._note_progress(handle.spec, status)
            self._note_rank(handle.spec, status)
        if handle.spec.essential and has_checkpoint(Path(self._arguments["run_dir"])):
            self._decisions.checkpoint_found()
        self._do(
            self._decisions.presumed_dead(
                name, handle.incarnation, handle.host, status.produced_steps, time.monotonic()
            )
        )

    def _reap(self, handle: Handle) -> End:
        """The end of a process whose death is confirmed."""
        status, log = handle.status(), handle.log_tail()
        code = handle.reap()
        out_of_memory = code == -signal.SIGKILL and self._out_of_memory()
        stream = status.produced_steps, status.sequence, status.incarnation
        end = End(code, *stream, log=log, out_of_memory=out_of_memory)
        self._log_exit(handle, end)
        return end

    def _note_rank(self, spec: RoleSpec, status: RoleStatus) -> None:
        """Add the final counters of a learner or an actor that has ended."""
        if spec.stage is Stage.ACTORS:
            self._ranks.actor_ended(status.played_steps)
        elif spec.stage is Stage.LEARNER:
            merged = self._ranks.learner_ended(
                spec.learner, status.produced_steps, status.trained_steps
            )
            if merged is not None:
                self._sinks.metrics(merged, final=True)

    def _log_exit(self, handle: Handle, end: End) -> None:
        code = end.exit_code
        killed = _key(handle) in self._killed
        self._killed.discard(_key(handle))
        expected = self.stopping and (code == 0 or (killed and code == -signal.SIGKILL))
        needed = self._decisions.needs(handle.spec.name)
        expected = expected or code == EXIT_REJOIN
        expected = expected or (not needed and code in (0, -signal.SIGTERM))
        data = {
            "exit_code": code if code >= 0 else None,
            "signal": signal_name(-code) if code < 0 else None,
            "expected": expected,
        }
        text = "ended as requested" if expected else how_it_ended(code, end.out_of_memory)
        self._sinks.event(RunEvent("exit", text, handle.spec.name, end.incarnation, data))

    def _out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since the last call."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        return (self._oom_kills or 0) > (before or 0)

    def _woken(self, signum: int, frame: FrameType | None) -> None:
        """Handler of signals, which are read from the wake-up descriptor. If that was not read for
        `HELD_UP_S`, because a callback hangs, the next signal interrupts the loop."""
        now_s = time.monotonic()
        if self._unread_s is None:
            self._unread_s = now_s
        elif now_s - self._unread_s >= HELD_UP_S:
            self._unread_s = math.inf  # once: nothing may disturb the end
            raise HeldUpError(signum)

    def _interrupted(self) -> None:
        assert self._wakeup_fd is not None
        self._unread_s = None
        for signum in os.read(self._wakeup_fd, 64):
            if signum in SIGNALS:
                self._do(self._decisions.interrupt(signum, time.monotonic()))

    @contextmanager
    def _signals(self, after: SignalHandler | None) -> Iterator[None]:
        """Turn signals into events of the loop. In a thread other than the main one the program's
        handlers are not changed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._wakeup_fd = read_fd
        old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            with handled(self._woken, after):
                yield
        finally:
            signal.set_wakeup_fd(old_fd)
            self._wakeup_fd = None
            os.close(read_fd)
            os.close(write_fd)

    def _abandon(self) -> None:
        """End all roles that still run, which is the case only after an error of the supervisor."""
        ends_s = time.monotonic() + self._limits.grace_s
        for handle in self._handles.values():
            handle.signal(signal.SIGTERM if handle.spec.essential else signal.SIGKILL)
        while self._handles:
            if time.monotonic() >= ends_s:
                ends_s = math.inf
                for handle in self._handles.values():
                    handle.signal(signal.SIGKILL)
            for name, handle in list(self._handles.items()):
                handle.receive()  # or it could not send, and wait for that
                liveness = handle.liveness()
                if liveness is Liveness.ALIVE:
                    continue
                del self._handles[name]
                self._note_progress(handle.spec, handle.status())
                if liveness is Liveness.DEAD:
                    handle.reap()
            _wait(self._engine.filenos(), TICK_S if self._handles else 0.0)
        for handle in self._presumed:
            if handle.spec.stage is Stage.ACTORS:
                self._note_progress(handle.spec, handle.status())
                self._note_rank(handle.spec, handle.status())


def _wait(fds: Iterable[int], timeout_s: float) -> set[int]:
    """The ``fds`` that are readable, or become readable within the time."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(timeout_s * 1000)}


def _key(handle: Handle) -> tuple[str, int]:
    return handle.spec.name, handle.incarnation


def _rank_phase(status: RoleStatus) -> RankPhase:
    """The phase of a learner and its duration."""
    seconds = time.monotonic() - status.phase_s if status.phase_s else 0.0
    if status.phase == REDUCING:
        return RankPhase("all-reduce", seconds, status.reduction)
    return RankPhase("wait_data" if status.phase == WAITING else status.phase, seconds)


def _about(handle: Handle, kind: str, text: str, data: Message) -> RunEvent:
    return RunEvent(kind, text, handle.spec.name, handle.status().incarnation, data)


def _result(handle: Handle, kind: str, message: Message) -> RunEvent:
    """An "evaluation" or a "checkpoint" that a role has reported."""
    if kind == "evaluation":
        return replace(_about(handle, kind, "", {}), result=message)
    data = {key: message[key] for key in ("trained_steps", "learner_steps", "best")}
    return replace(_about(handle, kind, f"{message['folder']} was written", data), result=message)
