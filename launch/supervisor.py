"""Starts the roles of a run, watches them, and leaves nothing behind.

One thread, as a rule the main one: children are told to die with the thread that started them, and
signals arrive here. Each turn of the loop reads what happened (signals, control messages, processes
that ended, heartbeats), has `decisions` say what to do, and does it. Whatever way the loop is left,
no child outlives it.
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.core.cgroup import oom_kills
from penstock.core.control import Message
from penstock.core.interfaces import MetricSink, RunEvent
from penstock.core.role import EXIT_REJOIN
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.decisions import Decisions
from penstock.launch.ledgers import Ledgers
from penstock.launch.process import Child, why_not_started
from penstock.launch.status_server import StatusServer
from penstock.launch.supervisor_messages import (
    KILLED_AS_ASKED,
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
)
from penstock.monitor.ranks import Ranks, whereabouts
from penstock.profiling.ledger import Part, TimeLedger

TICK_S = 0.1
COUNTED = {  # in metrics, by reason: the kind of event, and its text
    "dropped": ("drop", "agent steps were dropped: {}"),
    "lost": ("lost", "agent steps were lost: {}"),
    "rejected": ("rejected", "messages were rejected: {}"),
}
CALLBACK = "callback"  # the reason where a callback ended the run
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RESERVED = 4  # descriptors
HELD_UP_S = 1.0  # a signal that was not read for so long never will be


class HeldUpError(KeyboardInterrupt):
    """A signal has come while the loop did not go on for long: no `Exception`, so that a callback
    does not swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Reserve:
    """Descriptors kept back, so that a process without any other can still report that."""

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
        """Let others have them for as long as the ``with`` lasts."""
        self.release()
        try:
            yield
        finally:
            self.take()


class Supervisor:
    """One set of processes, from their start to their end."""

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        limits: RestartLimits,
        arguments: Mapping[str, Any],
        logs: Path,
        sinks: MetricSink,
        keep_fds: tuple[int, ...] = (),
    ) -> None:
        """``arguments`` are what every role gets; ``keep_fds`` are for essential roles to hold."""
        self._specs = {spec.name: spec for spec in specs}
        self._limits = limits
        self._arguments = {
            "run_id": secrets.randbits(63),
            "grace_s": limits.grace_s,
            **arguments,
        }
        self._logs = logs
        self._sinks = sinks
        self._keep_fds = keep_fds
        self._decisions = Decisions(specs, limits)
        learners = [spec.learner for spec in specs if spec.stage is Stage.LEARNER]
        self._has_learner = bool(learners)
        self._ranks = Ranks(learners) if len(learners) > 1 else None
        self._children: dict[str, Child] = {}
        self._ledgers = Ledgers()
        self.began = False  # whether anybody has played or trained on an unroll
        self.ledger = TimeLedger()
        self.last_look: Callable[[Child], None] | None = None  # at a process that has ended
        self._dropping: set[str] = set()  # roles whose output is not all in their logs
        self._reserve = Reserve()
        self._oom_kills = oom_kills()
        self._selector = selectors.DefaultSelector()
        self._stop_logged = False
        self._final = False  # a learner has given its last report
        self._counts: dict[str, dict[str, int]] = {}  # agent steps by reason, in the last metrics
        self._played_steps = 0  # by the actors of this host that have ended
        self._heard_steps = self._trained_steps = 0  # by the learners that have ended
        self._counted: dict[tuple[str, str], int] = {}  # by reason, as last reported
        self._unread_s: float | None = None  # when the first signal came that nobody has read

    def run(self) -> Outcome:
        """Start everything, and return when all has ended."""
        folders = Path(self._arguments["run_dir"]), Path(self._arguments["runtime_dir"])
        with self._selector, self._signals(), StatusServer(*folders) as inquiry:
            try:
                self._reserve.take()
                while (outcome := self._decisions.outcome) is None:
                    self._turn()
                    inquiry.turn(self._specs, self._children)
                return outcome
            except HeldUpError as error:
                reason = "interrupted" if error.signum == signal.SIGINT else "terminated"
                text = "".join(traceback.format_exception(error))
                failure = Failure("supervisor", f"{KILLED_AS_ASKED}; it was held up", text)
                return Outcome(128 + error.signum, reason, failure)
            finally:
                self._reserve.release()
                self._abandon()
                self._account()

    @property
    def children(self) -> Mapping[str, Child]:
        """The processes that live, by name."""
        return self._children

    @property
    def stopping(self) -> bool:
        """Whether the run is about to end."""
        return self._decisions.stopping

    def stop(self, reason: str) -> None:
        """End the run as if the learner had reached a limit; ``reason`` is what it will say."""
        self._do(self._decisions.stop(reason, time.monotonic()))

    def _turn(self) -> None:
        now_s = time.monotonic()
        beats = {name: child.status.alive_s for name, child in self._children.items()}
        phases = {name: child.phase for name, child in self._children.items()}
        self._do(self._decisions.tick(now_s, beats, phases))
        for name, child in list(self._children.items()):
            child.flush()
            self._note_dropped(name, child)
            if child.ended(now_s):
                self._ended(name, child)
        self._sinks.tick()
        self.ledger.switch(Part.WAIT)
        ready = self._selector.select(TICK_S)
        self.ledger.switch(Part.OTHER)
        for key, _ in ready:
            if key.fd in self._selector.get_map():  # not closed by an event before it
                key.data()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(name, incarnation):
                    self._start(name, incarnation)
                case Note(text, kind, role, data, which):
                    self._sinks.event(RunEvent(kind, text, role, which, data))
                case Kill(name, signum, why) if name in self._children:
                    self._kill(self._children[name], signum, why)
                case Send(name, message) if name in self._children:
                    self._children[name].send(message)
                case _:
                    pass  # its process has ended meanwhile

        self._log_stop()

    def _log(self, child: Child, kind: str, text: str, **data: Any) -> None:
        self._sinks.event(_about(child, kind, text, data))

    def _log_stop(self) -> None:
        if not self.stopping or self._stop_logged:
            return
        self._stop_logged = True
        reason, failure = self._decisions.why_stopped
        text = f"the run stops: {reason}" + (f"; {failure.name}: {failure.told}" if failure else "")
        role = failure.name if failure else None
        self._sinks.event(RunEvent("stop", text, role, data={"reason": reason}))

    def _kill(self, child: Child, signum: int, why: str) -> None:
        if signum == signal.SIGUSR1:
            self._log(child, "hang", why)
        elif signum == signal.SIGKILL:
            child.killed = True
            self._log(child, "kill", "is killed")
        child.kill(signum)

    def _start(self, name: str, incarnation: int) -> None:
        spec = self._specs[name]
        keep = self._keep_fds if spec.essential else ()
        log = self._logs / f"{name}.log"
        try:
            child = Child(spec, incarnation, self._arguments, log, keep)
        except OSError as error:
            with self._reserve.lent():
                self._not_started(name, incarnation, why_not_started(error))
            return
        self._children[name] = child
        self._log(child, "start", "was started")
        self._watch(child.pidfd, lambda: self._guard_ended(name, child))
        self._watch(child.channel.fileno(), lambda: self._heard(name, child))

    def _not_started(self, name: str, incarnation: int, why: str) -> None:
        now_s = time.monotonic()
        self._do(self._decisions.not_started(name, incarnation, why, now_s))

    def _guard_ended(self, name: str, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        if child.ended(time.monotonic()):  # else the role still lives: each turn looks for its end
            self._ended(name, child)

    def _note_dropped(self, name: str, child: Child) -> None:
        if child.status.role_dropped and name not in self._dropping:
            self._dropping.add(name)
            self._log(
                child,
                "note",
                f"{name}: what it writes does not all reach {self._logs / name}.log, which says "
                "why; the run goes on without",
            )

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _heard(self, name: str, child: Child) -> None:
        for message in child.channel.receive():
            self._do(self._handle(name, message))
        if child.channel.closed:
            self._selector.unregister(child.channel.fileno())

    def _handle(self, name: str, message: Message) -> list[Effect]:
        now_s = time.monotonic()
        kind = message.pop("kind")
        if kind == "ready":
            self._log(self._children[name], "ready", "works")
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
            return self._group_failed(**message)
        if kind in ("note", "event"):
            self._reported(self._children[name], message)
        elif kind in ("metrics", "final"):
            self._measured(self._specs[name].learner, message, final=kind == "final")
        elif kind in ("checkpoint", "evaluation"):
            if self._sinks.event(_result(self._children[name], kind, message)):
                return self._decisions.stop(CALLBACK, now_s)
        elif kind == "server" and self._ranks is not None:
            self._ranks.server = message
        else:
            return self._decisions.pass_on(name, {"kind": kind, **message})
        return []

    def _group_failed(self, epoch: int, message: str) -> list[Effect]:
        effects = self._decisions.group_failed(epoch)
        if effects:
            learners = (c for c in self._children.values() if c.spec.stage is Stage.LEARNER)
            where = whereabouts({child.spec.learner: child.place for child in learners})
            text = f"group {epoch} of learners: {message}; {where}"
            self._sinks.event(RunEvent("note", text, data={"epoch": epoch}))
        return effects

    def _reported(self, child: Child, message: Message) -> None:
        """A "note" or an "event" of a role."""
        kind, text = str(message.get("event", "note")), str(message.get("text"))
        event = _about(child, kind, text, message.get("data") or {})
        self._sinks.event(replace(event, reported=True))

    def _log_counts(self, message: Message) -> None:
        """What was not trained on or not taken in, where there is more of it than before."""
        for key, (kind, text) in COUNTED.items():
            for reason, total in (message.get(key) or {}).items():
                if total > self._counted.get((key, reason), 0):
                    data = {"reason": reason, "total": total}
                    self._sinks.event(RunEvent(kind, text.format(reason), data=data))
                self._counted[key, reason] = total

    def _note_progress(self, child: Child) -> None:
        """What the page of a process that has ended says of its life."""
        page = child.status
        if child.spec.stage is Stage.ACTORS:
            self._played_steps += page.played_steps
        elif child.spec.stage is Stage.LEARNER:
            self._heard_steps += page.produced_steps
            self._trained_steps += page.trained_steps
        else:
            return
        self.began = self.began or page.produced_steps > 0 or page.trained_steps > 0

    def _account(self) -> None:
        """Where no learner has lived to give the final accounting, give what is known of it: the
        pages of the processes say what was played and trained, the last metrics what was dropped
        and lost until then. What was on its way at that moment is not known."""
        if self._final or not self.began or not self._has_learner:
            return
        known = {key: self._counts.get(key, {}) for key in ("dropped", "lost")}
        booked = self._trained_steps + sum(sum(counts.values()) for counts in known.values())
        accounting = {
            "produced": max(self._played_steps, self._heard_steps, booked),
            "trained": self._trained_steps,
            **known,
            "in_flight": None,
        }
        self._sinks.metrics({"accounting": accounting, "accounting_complete": False}, final=True)

    def _measured(self, rank: int, message: Message, *, final: bool) -> None:
        decisions = self._decisions
        counts: Message = {
            "actors_alive": decisions.actors_alive,
            "actors_restarted": decisions.restarts[Stage.ACTORS],
        }
        if self._ranks is not None:
            merge = self._ranks.final if final else self._ranks.metrics
            merged = merge(rank, message)
            if merged is None:
                return
            message = merged
            counts["learners_restarted"] = decisions.restarts[Stage.LEARNER]
            if not final:
                counts["learners_alive"] = decisions.learners_alive
        self._decisions.patience.episodes(message.get("episodes"), time.monotonic())
        if not final:
            counts |= self._ledgers.interval(self._children)
        self._log_counts(message)
        self._counts = {key: message[key] for key in ("dropped", "lost") if key in message}
        self._final = self._final or final
        self._sinks.metrics(counts | message, final=final)

    def _ended(self, name: str, child: Child) -> None:
        """Its last words first, then its end."""
        if not child.channel.closed:
            self._heard(name, child)
        for fd in (child.channel.fileno(), child.pidfd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        del self._children[name]
        page = child.status
        said = page.produced_steps, page.sequence, page.incarnation
        played, trained = page.played_steps, page.trained_steps
        self._note_progress(child)
        if self.last_look is not None:
            self.last_look(child)
        log, began = child.log_tail(), child.began
        code = child.reap()
        out_of_memory = code == -signal.SIGKILL and self._out_of_memory()
        end = End(code, *said, log=log, out_of_memory=out_of_memory)
        self._log_exit(child, end)
        if began or not log:
            self._do(self._decisions.ended(name, end, time.monotonic()))
        else:
            self._not_started(name, end.incarnation, log)
        if self._ranks is None:
            return
        if child.spec.stage is Stage.ACTORS:
            self._ranks.actor_ended(played)
        elif child.spec.stage is Stage.LEARNER:
            merged = self._ranks.learner_ended(child.spec.learner, end.produced, trained)
            if merged is not None:
                self._sinks.metrics(merged, final=True)

    def _log_exit(self, child: Child, end: End) -> None:
        """Its status page is closed by now."""
        code = end.exit_code
        expected = self.stopping and (code == 0 or (child.killed and code == -signal.SIGKILL))
        expected = expected or code == EXIT_REJOIN
        data = {
            "exit_code": code if code >= 0 else None,
            "signal": signal_name(-code) if code < 0 else None,
            "expected": expected,
        }
        text = "ended as asked" if expected else how_it_ended(code, end.out_of_memory)
        self._sinks.event(RunEvent("exit", text, child.spec.name, end.incarnation, data))

    def _out_of_memory(self) -> bool:
        """Whether the kernel has killed for memory since the last look."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        return (self._oom_kills or 0) > (before or 0)

    def _woken(self, signum: int, frame: FrameType | None) -> None:
        """A signal needs some handler to be written to the wake-up descriptor. Where nobody reads
        that, because a callback hangs, the next one gets the loop out of there."""
        now_s = time.monotonic()
        if self._unread_s is None:
            self._unread_s = now_s
        elif now_s - self._unread_s >= HELD_UP_S:
            self._unread_s = math.inf  # once: nothing may disturb the end
            raise HeldUpError(signum)

    def _interrupted(self, wakeup: int) -> None:
        self._unread_s = None
        for signum in os.read(wakeup, 64):
            if signum in SIGNALS:
                self._do(self._decisions.interrupt(signum, time.monotonic()))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into events of the loop; one that the user has ignored (nohup) stays so.
        In another thread than the main one they stay what they are to the program."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._watch(read_fd, lambda: self._interrupted(read_fd))
        before = {s: signal.getsignal(s) for s in SIGNALS}
        old_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            for signum, handler in before.items():
                if handler != signal.SIG_IGN:
                    signal.signal(signum, self._woken)
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(old_fd)
            os.close(read_fd)
            os.close(write_fd)

    def _abandon(self) -> None:
        """End whatever still runs; only after a fault of the supervisor itself there is any."""
        ends_s = time.monotonic() + self._limits.grace_s
        for child in self._children.values():
            child.kill(signal.SIGTERM if child.spec.essential else signal.SIGKILL)
        while self._children:
            _, child = self._children.popitem()
            if not child.wait(max(0.0, ends_s - time.monotonic())):
                child.kill(signal.SIGKILL)
            self._note_progress(child)
            child.reap()


def _about(child: Child, kind: str, text: str, data: Message) -> RunEvent:
    return RunEvent(kind, text, child.spec.name, child.status.incarnation, data)


def _result(child: Child, kind: str, message: Message) -> RunEvent:
    """An "evaluation" or a "checkpoint" that a role has reported."""
    if kind == "evaluation":
        return replace(_about(child, kind, "", {}), result=message)
    data = {key: message.get(key) for key in ("trained_steps", "learner_steps", "best")}
    return replace(
        _about(child, kind, f"{message.get('folder')} was written", data), result=message
    )
