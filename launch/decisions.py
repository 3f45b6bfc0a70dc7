"""What a supervisor decides: whom to start again and when, when to give up, how to stop.

A pure state machine. It is told what happened and at what time, and returns what to do about it; it
never waits, reads a clock or touches a process. `penstock.launch.supervisor` is its hands and eyes.

The life of a worker:   WAITING -> STARTING -> WORKING -> GONE   (-> WAITING, as a new incarnation)
The life of the run:    running -> stopping by stages: actors, carriers, learner -> done

Invariants: an essential role is never started again. Nothing is started once stopping has begun.
The first failure is the one that is told. A stage ends when its processes have ended, and at its
deadline they are killed, so that stopping always comes to an end.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.core.role import EXIT_REJOIN
from penstock.launch.effects import (
    Effect,
    Failure,
    Kill,
    Limits,
    Note,
    Outcome,
    Send,
    Start,
    how_it_ended,
)
from penstock.launch.topology import RoleSpec, Stage

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
HEALTHY_S = 10.0  # who worked this long starts with a clean record
DUMP_S = 0.5  # a hung process gets this long to write its stacks to its log
AGAIN_S = 2.0  # between two attempts to kill
SHARES = {Stage.ACTORS: 0.2, Stage.CARRIERS: 0.6}  # of the grace; the learner has until its end
KILLED_AS_ASKED = "was killed, as asked, before it had finished; its last checkpoint stands"
BLINK_S = 5.0  # a supervisor that slept this long itself cannot tell who else did


class Life(Enum):
    """Where a worker stands."""

    WAITING = "waiting"
    STARTING = "starting"
    WORKING = "working"
    GONE = "gone"


@dataclass
class _Worker:
    spec: RoleSpec
    life: Life = Life.WAITING
    incarnation: int = 0
    since_s: float = 0.0  # of its present life; while WAITING, when to start it
    alive_s: float = 0.0  # last sign of life
    doomed_s: float | None = None  # hung: when to kill it
    attempts: int = 0  # restarts since it was last healthy
    barren: int = 0  # of these, in a row without a sample
    failure: Failure | None = None  # of this incarnation
    first_failure: Failure | None = None  # of the row

    @property
    def runs(self) -> bool:
        return self.life in (Life.STARTING, Life.WORKING)

    def enter(self, life: Life, now_s: float) -> None:
        self.life, self.since_s = life, now_s


class Decisions:
    """The state of one supervised set of processes."""

    def __init__(self, specs: Sequence[RoleSpec], limits: Limits) -> None:
        self._workers = {spec.name: _Worker(spec) for spec in specs}
        self._limits = limits
        self._now_s: float | None = None
        self._stage: Stage | None = None
        self._stage_ends_s = 0.0
        self._stop_s = 0.0
        self._signals = 0
        self._reason = ""
        self._exit_code = 0
        self._failure: Failure | None = None
        self.restarts = 0
        self.outcome: Outcome | None = None

    @property
    def actors_alive(self) -> int:
        return sum(
            w.spec.stage is Stage.ACTORS and w.life is Life.WORKING for w in self._workers.values()
        )

    @property
    def stopping(self) -> bool:
        return self._stage is not None

    def ready(self, name: str, now_s: float) -> list[Effect]:
        """``name`` has said that it works."""
        worker = self._workers[name]
        if worker.life is not Life.STARTING:
            return []
        worker.enter(Life.WORKING, now_s)
        worker.alive_s = now_s
        return self._tell_alive()

    def failed(self, failure: Failure, now_s: float) -> list[Effect]:
        """A role has reported an error; its process is about to end."""
        worker = self._workers[failure.name]
        worker.failure = failure
        if worker.spec.essential or (failure.user and not self.stopping):
            return self._fail(failure, now_s)
        return []

    def ended(
        self, name: str, exit_code: int, now_s: float, *, produced: int, sequence: int, log: str
    ) -> list[Effect]:
        """The process of ``name`` has ended; a negative exit code is the signal that killed it."""
        worker = self._workers[name]
        was_ready, since_s = worker.life is Life.WORKING, worker.since_s
        worker.enter(Life.GONE, now_s)
        effects = self._tell_ended(worker, produced, sequence)
        failure = worker.failure or Failure(name, how_it_ended(exit_code), log)
        if self.stopping:
            if worker.spec.essential and was_ready and exit_code != 0:
                self._record(failure)
            return effects + self._advance(now_s)
        if worker.spec.essential:
            return effects + self._fail(failure, now_s)
        if exit_code == EXIT_REJOIN:
            return effects + self._again(worker, FIRST_DELAY_S, now_s)
        healthy = was_ready and now_s - since_s >= HEALTHY_S
        return effects + self._after_crash(worker, failure, healthy, produced > 0, now_s)

    def stop(self, reason: str, now_s: float) -> list[Effect]:
        """The learner has reached a limit of the run."""
        return self._begin_stop(reason, 0, now_s)

    def interrupt(self, signum: int, now_s: float) -> list[Effect]:
        """A signal to the supervisor: the first asks all to end, another kills them."""
        self._signals += 1
        if not self.stopping:
            reason = "interrupted" if signum == signal.SIGINT else "terminated"
            return self._begin_stop(reason, 128 + signum, now_s)
        if self._signals == 1:
            return [Note("already stopping; once more kills")]
        running = [w for w in self._workers.values() if w.runs]
        for worker in running:
            worker.failure = Failure(worker.spec.name, KILLED_AS_ASKED)
        return [Kill(w.spec.name, signal.SIGKILL) for w in running]

    def inform(self, message: dict[str, Any]) -> list[Effect]:
        """Pass ``message`` on to the roles that are to hear of the others."""
        return [
            Send(w.spec.name, message) for w in self._workers.values() if w.spec.informed and w.runs
        ]

    def tick(
        self, now_s: float, beats: Mapping[str, float], phases: Mapping[str, str]
    ) -> list[Effect]:
        """Time has passed; ``beats`` are the last heartbeats, ``phases`` what each is doing."""
        blinked = self._now_s is not None and now_s - self._now_s > BLINK_S
        self._now_s = now_s
        for name, worker in self._workers.items():
            beat_s = now_s if blinked else beats.get(name, 0.0)
            worker.alive_s = max(worker.alive_s, beat_s)
        if not self.stopping:
            effects = self._start_due(now_s)
            for worker in self._workers.values():
                effects += self._check_alive(worker, phases.get(worker.spec.name, ""), now_s)
            return effects
        if now_s < self._stage_ends_s:
            return []
        self._stage_ends_s = now_s + AGAIN_S
        late = [w for w in self._workers.values() if w.runs and w.spec.stage == self._stage]
        for worker in late:
            if worker.spec.essential:
                self._record(_too_late(worker.spec.name, self._limits.grace_s))
        return [Kill(w.spec.name, signal.SIGKILL) for w in late]

    def _start_due(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for name, worker in self._workers.items():
            if worker.life is Life.WAITING and now_s >= worker.since_s:
                worker.enter(Life.STARTING, now_s)
                worker.alive_s = now_s
                effects.append(Start(name, worker.incarnation))
        return effects

    def _check_alive(self, worker: _Worker, phase: str, now_s: float) -> list[Effect]:
        """Have a process that gave no sign of life write its stacks, then kill it."""
        if not worker.runs:
            return []
        name = worker.spec.name
        if worker.doomed_s is not None:
            return [Kill(name, signal.SIGKILL)] if now_s >= worker.doomed_s else []
        starting = worker.life is Life.STARTING
        limits = self._limits
        key = "start_timeout_s" if starting else "hang_timeout_s"
        timeout_s: float = getattr(limits, key)
        if now_s - worker.alive_s < timeout_s:
            return []
        worker.doomed_s = now_s + DUMP_S
        doing = "while it was starting" if starting else f"in phase {phase}"
        worker.failure = Failure(name, f"no sign of life for run.{key} = {timeout_s:g} s, {doing}")
        return [Kill(name, signal.SIGUSR1)]

    def _after_crash(
        self, worker: _Worker, failure: Failure, healthy: bool, produced: bool, now_s: float
    ) -> list[Effect]:
        if healthy:
            worker.attempts = 0
        if healthy or produced:
            worker.barren, worker.first_failure = 0, None
        worker.first_failure = worker.first_failure or failure
        worker.barren += 1
        if worker.barren > self._limits.max_restarts:
            return self._fail(worker.first_failure, now_s)
        delay_s = min(FIRST_DELAY_S * 2**worker.attempts, LONGEST_DELAY_S)
        worker.attempts += 1
        text = f"{failure.name}: {failure.message}; it starts again in {delay_s:g} s"
        return [Note(text), *self._again(worker, delay_s, now_s)]

    def _again(self, worker: _Worker, delay_s: float, now_s: float) -> list[Effect]:
        worker.enter(Life.WAITING, now_s + delay_s)
        worker.incarnation += 1
        worker.failure = worker.doomed_s = None
        if worker.spec.stage is Stage.ACTORS:
            self.restarts += 1
        return []

    def _tell_ended(self, worker: _Worker, produced: int, sequence: int) -> list[Effect]:
        if worker.spec.stage is not Stage.ACTORS:
            return []
        message = {
            "kind": "actor_ended",
            "actor": worker.spec.index,
            "incarnation": worker.incarnation,
            "produced_steps": produced,
            "sequence": sequence,
        }
        return self.inform(message) + self._tell_alive()

    def _tell_alive(self) -> list[Effect]:
        return self.inform({"kind": "actors", "alive": self.actors_alive})

    def _record(self, failure: Failure) -> None:
        """The first failure decides what is told and the exit code."""
        if self._failure is None:
            self._failure = failure
            self._exit_code = 2 if failure.user else 1
            self._reason = "user_error" if failure.user else "fault"

    def _fail(self, failure: Failure, now_s: float) -> list[Effect]:
        self._record(failure)
        return self._begin_stop(self._reason, self._exit_code, now_s)

    def _begin_stop(self, reason: str, exit_code: int, now_s: float) -> list[Effect]:
        if self.stopping:
            return []
        self._reason, self._exit_code = reason, exit_code
        self._stop_s = now_s
        for worker in self._workers.values():
            if worker.life is Life.WAITING:
                worker.enter(Life.GONE, now_s)
        return self._enter_stage(Stage.ACTORS, now_s) + self._advance(now_s)

    def _advance(self, now_s: float) -> list[Effect]:
        """Enter the next stage while nothing runs in the present one."""
        effects: list[Effect] = []
        while self.outcome is None and not self._running(self._stage):
            if self._stage is Stage.LEARNER:
                self.outcome = Outcome(self._exit_code, self._reason, self._failure)
            elif self._stage is not None:
                effects += self._enter_stage(Stage(self._stage + 1), now_s)
        return effects

    def _running(self, stage: Stage | None) -> list[_Worker]:
        return [w for w in self._workers.values() if w.runs and w.spec.stage == stage]

    def _enter_stage(self, stage: Stage, now_s: float) -> list[Effect]:
        self._stage = stage
        grace_s = self._limits.grace_s
        last = stage is Stage.LEARNER
        self._stage_ends_s = self._stop_s + grace_s if last else now_s + SHARES[stage] * grace_s
        effects: list[Effect] = []
        for worker in self._running(stage):
            name = worker.spec.name
            if worker.life is Life.STARTING:  # there is nothing yet that it could lose
                effects.append(Kill(name, signal.SIGKILL))
                continue
            if last:
                effects.append(Send(name, {"kind": "finish"}))
            effects.append(Kill(name, signal.SIGTERM))
        return effects


def _too_late(name: str, grace_s: float) -> Failure:
    return Failure(
        name,
        f"did not finish within run.grace_s = {grace_s:g} s and was killed; what it had learned "
        "since its last checkpoint is lost, so set run.grace_s higher",
    )
