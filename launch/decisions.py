"""The supervisor's decisions: which role to restart and when, when the run fails, how it stops.

A pure state machine. Its inputs are events with their times, its outputs effects; it never waits,
reads a clock or accesses a process. `penstock.launch.supervisor` performs the effects.

The life of the run:
    running -> stopping by stages: actors, carriers, learners, server, evaluator -> done

Invariants: an essential role is restarted only if other learners hold its state, or together with
all essential roles from the run's newest checkpoint. Nothing is started once stopping has begun.
The first failure is the one that is reported. A stage ends when its processes have ended; at its
deadline they are killed, so stopping always terminates. The evaluator runs until its stage if a
limit of the run is reached, and plays the last weights then; in any other stop it ends at once.

A *presumed* death is not confirmed: the host of a role does not answer, and the role may still run.
It is replaced under a new incarnation, by the rules for a death. What needs a confirmed death is
postponed: a learner gets ``actor_ended``, with the actor's step count, only after confirmation. A
role that turns out to be alive is killed, so that a role never has two processes for long.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.core.role import EXIT_REJOIN
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.learner_group import GroupMembership, Seats, Streams
from penstock.launch.supervisor_messages import (
    KILLED_AS_ASKED,
    LIMITS,
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
    notes_of_hosts,
    too_late,
)
from penstock.launch.worker import FIRST_DELAY_S, Life, RestartPolicy, SupervisedRole

HEALTHY_S = 10.0  # a role that worked this long starts with a clean record
DUMP_S = 0.5  # a hung process gets this long to write its stacks down
AGAIN_S = 2.0  # between two attempts to kill
SHARES = {Stage.ACTORS: 0.2, Stage.CARRIERS: 0.6}  # of the grace; learners have until its end
LAST_EVALUATION_S = 600.0  # for the evaluation of the last weights
WITH_LEARNER = ("learner", "connector")  # roles on the host of a learner
BLINK_S = 5.0  # after a pause of its own this long, the supervisor cannot detect hangs


class PresumedDead(NamedTuple):
    """A process that was replaced before its end was certain."""

    since_s: float
    streams: Streams


class Decisions:
    """The state of one supervised set of processes."""

    def __init__(self, specs: Sequence[RoleSpec], limits: RestartLimits) -> None:
        self._workers = {spec.name: SupervisedRole(spec) for spec in specs}
        learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
        actors = [spec for spec in specs if spec.stage is Stage.ACTORS]
        self._learners = {spec.learner: self._workers[spec.name] for spec in learners}
        self._group = GroupMembership(learners)
        self._seats = Seats(actors, learners)
        self._presumed: dict[tuple[str, int], PresumedDead] = {}  # by role and incarnation
        self._limits = limits
        self.restart_policy = RestartPolicy(limits.max_restarts)
        self._now_s: float | None = None
        self._stage: Stage | None = None
        self._stage_ends_s = 0.0
        self._stop_s = 0.0
        self._signals = 0
        self._plays_last = False  # whether the evaluator plays the last weights
        self._saver = 0  # the rank that is to save the run at its end
        self._reason, self._exit_code = "", 0
        self._asked = "", 0  # the same, where a signal has its way
        self._failure: Failure | None = None
        self._unplaced: set[str] = set()  # roles without a host
        self._threads = 1  # of each learner, where it changes during the run
        self._has_checkpoint = False
        self._losses = 0  # of the trained state, since a checkpoint was written
        self.resumes = False
        """Whether learners that are started without a group resume from the run's checkpoint,
        because the trained state was lost during this run."""
        self.restarts = {stage: 0 for stage in Stage}
        self.outcome: Outcome | None = None

    @property
    def actors_alive(self) -> int:
        return sum(
            w.spec.stage is Stage.ACTORS and w.life is Life.WORKING for w in self._workers.values()
        )

    @property
    def learners_alive(self) -> int:
        return sum(w.life is Life.WORKING for w in self._learners.values())

    @property
    def stopping(self) -> bool:
        return self._stage is not None

    @property
    def why_stopped(self) -> tuple[str, Failure | None]:
        """The reason of the stop, and the first failure, if any."""
        return self._reason, self._failure

    def needs(self, name: str) -> bool:
        """Whether the process of ``name`` is to run until the run ends."""
        worker = self._workers[name]
        return worker.needed and not worker.superseded

    def listed(self) -> list[str]:
        """The roles in a status report: all but spare actors that do not run and are not needed."""
        return [
            name
            for name, worker in self._workers.items()
            if worker.runs
            or worker.needed
            or not (worker.spec.spare and worker.spec.stage is Stage.ACTORS)
        ]

    def resize(self, actors: int, now_s: float) -> list[Effect]:
        """From now on the ``actors`` with the lowest indices play; the others end, after their
        unroll."""
        effects: list[Effect] = []
        for worker in self._workers.values():
            if worker.spec.stage is Stage.ACTORS:
                effects += self._need(worker, worker.spec.index < actors, now_s)
        return effects

    def unplaced(self, reasons: Mapping[str, str], now_s: float) -> list[Effect]:
        """The hosts of roles have changed.

        Actors and relays that lose their host stop, actors at the end of their unroll, and are
        started again when they have another host. A learner saves the run at once and continues
        until its host ends. It is then restarted, like the other roles beside it, on another host;
        a spare learner leaves the group until it has one. The relays of a learner run while that
        has a host. For a part of the parameter server, a learner saves.

        Args:
            reasons: roles that have no host or are about to lose it, with the reason. All others
                have one.
        """
        before, self._unplaced = self._unplaced, set(reasons)
        changed, found = before ^ self._unplaced, before - self._unplaced
        effects = notes_of_hosts(reasons, self._unplaced - before, found)
        for name, worker in sorted(self._workers.items()):
            spec = worker.spec
            learner = self._learners.get(spec.learner) if spec.role == "relay" else None
            if name not in changed and (learner is None or learner.name not in changed):
                continue
            if spec.essential and worker.runs and name not in found:
                is_learner = spec.stage is Stage.LEARNER
                saver = name if is_learner else self._learners[min(self._learners)].name
                effects.append(Send(saver, {"kind": "save"}))
            if spec.role in ("actor", "relay") or spec.spare:
                comes = learner is None or (learner.needed and learner.name not in reasons)
                has_learner = comes or (learner is not None and learner.runs)
                needed = name not in reasons and has_learner
                effects += self._need(worker, needed, now_s)
        return [] if self.stopping else effects

    def respec(self, specs: Sequence[RoleSpec]) -> list[Effect]:
        """The same roles, whose addresses may be others from now on. Relays are restarted at
        another address; actors are sent a learner's address when it is ready."""
        effects: list[Effect] = []
        for spec in specs:
            worker = self._workers[spec.name]
            moved = spec.role == "relay" and spec.address != worker.spec.address
            worker.spec = spec
            if moved and worker.runs and not self.stopping:
                worker.superseded = True
                effects.append(Kill(spec.name, signal.SIGTERM))
        learners = [worker.spec for worker in self._learners.values()]
        self._group.respec(learners)
        self._seats.respec(learners)
        return effects

    def _need(self, worker: SupervisedRole, needed: bool, now_s: float) -> list[Effect]:
        """Start a role that plays from now on, or have one end that no longer does."""
        if self.stopping or worker.needed == needed:
            return []
        worker.needed = needed
        if worker.runs:
            if worker.spec.stage is not Stage.ACTORS:
                return []
            worker.superseded = needed  # it ends, and is then replaced
            return [] if needed else [Kill(worker.name, signal.SIGTERM)]
        if needed:
            worker.wait(now_s)
        else:
            worker.enter(Life.GONE, now_s)
        return []

    def set_threads(self, threads: int) -> list[Effect]:
        """From now on each learner trains with so many threads."""
        self._threads = threads
        return self._inform({"kind": "threads", "threads": threads})

    def ready(self, name: str, now_s: float) -> list[Effect]:
        """``name`` has reported that it is ready."""
        worker = self._workers[name]
        if worker.life is not Life.STARTING:
            return []
        worker.enter(Life.WORKING, now_s)
        worker.alive_s = now_s
        if worker.spec.stage is not Stage.LEARNER:
            return self._notify_actors_alive()
        effects = self._move(self._seats.enter(worker.spec.learner)) + self._notify_actors_alive()
        for other in self._workers.values():
            if other.spec.expendable and other.life is Life.GONE:
                effects += self._notify_gone(other, worker.spec.learner)
        return effects + (self.set_threads(self._threads) if self._threads > 1 else [])

    def join(self, name: str) -> list[Effect]:
        """The learner ``name`` is ready to enter a group."""
        worker = self._workers[name]
        return [] if worker.superseded else self._group.join(worker.spec.learner)

    def entered(self, name: str) -> list[Effect]:
        """The learner ``name`` has entered a group and received its state. One that was killed as
        the state is lost may have sent that before: it keeps none."""
        worker = self._workers[name]
        if not worker.superseded:
            self._group.entered(worker.spec.learner)
        return []

    def checkpoint_exists(self) -> None:
        """The run has a checkpoint, or a newer one."""
        self._has_checkpoint, self._losses = True, 0

    def checkpoint_found(self) -> None:
        """There is a checkpoint in the run's folder, maybe written while no report arrived."""
        self._has_checkpoint = True

    def group_failed(self, epoch: int) -> list[Effect]:
        """The learners' group of ``epoch`` has failed, or could not be formed."""
        return self._group.failed(epoch)

    def failed(self, failure: Failure, now_s: float) -> list[Effect]:
        """A role has reported an error; its process is about to end."""
        worker = self._workers[failure.name]
        if self._has_rival(failure.name, now_s):  # for which it may have been refused
            failure = replace(failure, user=False)
        worker.failure = failure
        if self._stage is Stage.LEARNER and not failure.fault and self._spared(worker):
            return []  # another learner writes the checkpoint
        survived = not self.stopping and (self._spared(worker) or self._comes_back(failure))
        ends_run = worker.spec.essential and not worker.superseded and not survived
        spares_run = worker.spec.expendable or self._can_leave_out(worker)
        of_user = failure.user and not self.stopping and not spares_run
        return self._fail(failure, now_s) if ends_run or of_user else []

    def not_started(self, name: str, incarnation: int, why: str, now_s: float) -> list[Effect]:
        """The process of ``name`` could not be started. That counts as a crash, also of an
        essential role, which has lost no state."""
        worker = self._workers[name]
        worker.enter(Life.GONE, now_s)
        effects: list[Effect] = []
        if worker.spec.stage is not Stage.LEARNER:
            effects = self._notify_ended(worker, End(1, incarnation=incarnation), None, now_s)
        if self.stopping:
            return effects + self._advance(now_s)
        if not worker.needed:
            return effects
        return effects + self._after_crash(worker, Failure(name, why), False, False, now_s)

    def ended(self, name: str, end: End, now_s: float) -> list[Effect]:
        """The process of ``name`` has ended, which is confirmed."""
        ending = how_it_ended(end.exit_code, end.out_of_memory)
        return self._leave(name, end, Failure(name, ending, end.log), now_s)

    @property
    def group_begun(self) -> bool:
        """Whether learners have formed a group, so that the trained state is theirs."""
        return self._group.begun

    def presumed_dead(
        self, name: str, incarnation: int, host: str, produced: int, now_s: float
    ) -> list[Effect]:
        """The host of ``name``, which was started under ``incarnation``, does not answer.

        Args:
            produced: agent steps of its present stream, as last known.
        """
        failure = Failure(name, f"is presumed dead: its host {host} does not answer")
        end = End(1, produced)
        return self._leave(name, end, failure, now_s, presumed=incarnation)

    def found_alive(self, name: str, incarnation: int) -> list[Effect]:
        """A role that was presumed dead runs, and its host answers again."""
        why = f"is killed, because it was presumed dead as incarnation {incarnation} and still runs"
        return [Kill(name, signal.SIGKILL, why, incarnation)]

    def confirmed_dead(self, name: str, incarnation: int, end: End) -> list[Effect]:
        """The death of a role that was presumed dead is confirmed."""
        _, streams = self._presumed.pop((name, incarnation))
        worker = self._workers[name]
        is_actor = worker.spec.stage is Stage.ACTORS
        return self._notify_stream_ended(worker, streams, end) if is_actor else []

    def _leave(
        self, name: str, end: End, failure: Failure, now_s: float, presumed: int | None = None
    ) -> list[Effect]:
        """``name`` has ended, or is ``presumed`` to have under that incarnation."""
        worker = self._workers[name]
        was_ready, since_s = worker.life is Life.WORKING, worker.since_s
        worker.enter(Life.GONE, now_s)
        spared = self._spared(worker)  # evaluated while it still belongs to the group
        effects = self._notify_ended(worker, end, presumed, now_s)
        failure = worker.failure or failure
        if self._stage is not None:
            # A superseded learner was killed on purpose, as its state was lost before the stop.
            counts = worker.spec.essential and not worker.superseded
            if counts and was_ready and end.exit_code != 0:
                if spared and (worker.failure is None or not worker.failure.fault):
                    text = f"{name}: {failure.message}; another learner writes the checkpoint"
                    effects.append(Note(text))
                else:
                    self._record(failure)
            if self._stage is Stage.LEARNER and worker is self._learners.get(self._saver):
                effects += self._name_saver(saved=end.exit_code == 0)
            return effects + self._advance(now_s)
        if worker.superseded:  # its end was ordered, and is no further loss of the trained state
            worker.superseded = False
            return effects + (self._again(worker, FIRST_DELAY_S, now_s) if worker.needed else [])
        if worker.spec.essential and not spared:
            if self._comes_back(failure):
                return effects + self._start_from_checkpoint(worker, failure, now_s)
            return effects + self._fail(failure, now_s)
        if not worker.needed:
            return effects
        if end.exit_code == EXIT_REJOIN:
            return effects + self._again(worker, FIRST_DELAY_S, now_s)
        worked_until_s = now_s if worker.kill_at_s is None else worker.alive_s  # then it hung
        healthy = was_ready and worked_until_s - since_s >= HEALTHY_S
        produced = end.produced > 0 and not worker.spec.essential
        return effects + self._after_crash(worker, failure, healthy, produced, now_s)

    def _has_rival(self, name: str, now_s: float) -> bool:
        """Whether an earlier process of ``name`` may still hold resources of its successor, such as
        an actor's stream. After the timeout for hangs it is assumed not to."""
        since_s = (p.since_s for (role, _), p in self._presumed.items() if role == name)
        return any(now_s - at_s < self._limits.hang_timeout_s for at_s in since_s)

    def stop(self, reason: str, now_s: float, failure: Failure | None = None) -> list[Effect]:
        """The learner has reached a limit of the run, or ends it cleanly because of a
        ``failure``."""
        if failure is not None and not self.stopping:
            self._failure = failure
        # SIGTERM to all processes of a run may reach the learner before the supervisor.
        code = 1 if failure else 128 + signal.SIGTERM if reason == "terminated" else 0
        self._plays_last |= not self.stopping and not failure and reason in LIMITS
        return self._begin_stop(reason, code, now_s)

    def interrupt(self, signum: int, now_s: float) -> list[Effect]:
        """A signal to the supervisor: the first one stops the run, the second kills all
        processes."""
        self._signals += 1
        self._asked = "interrupted" if signum == signal.SIGINT else "terminated", 128 + signum
        if not self.stopping:
            return self._begin_stop(*self._asked, now_s)
        if self._signals == 1:
            note = Note("the run is stopping; another signal kills it")
            return [note, *self._end_evaluation(now_s)]
        for worker in self._workers.values():
            worker.failure = Failure(worker.spec.name, KILLED_AS_ASKED)
        return self._kill_all()

    def abandon(self, failure: Failure, now_s: float) -> list[Effect]:
        """End the run without saving it."""
        return self._fail(failure, now_s) + self._kill_all()

    def _kill_all(self) -> list[Effect]:
        return [Kill(w.spec.name, signal.SIGKILL) for w in self._workers.values() if w.runs]

    def pass_on(self, name: str, message: dict[str, Any]) -> list[Effect]:
        """Forward a message to the learner of ``name``, such as a connector's counts; that of an
        expendable role, which evaluates for all of them, to every learner."""
        worker = self._workers[name]
        if worker.spec.expendable:
            return self._inform(message)
        return [] if worker.orphaned else self._inform(message, worker.spec.learner)

    def tick(
        self, now_s: float, beats: Mapping[str, float], phases: Mapping[str, str]
    ) -> list[Effect]:
        """Time has passed; ``beats`` are the last heartbeats, ``phases`` the current phases."""
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
        effects = []
        for worker in late:
            if worker.spec.essential and not worker.superseded:
                self._record(too_late(worker.spec.name, self._limits.grace_s))
            elif self._plays_last and self._stage is Stage.EVALUATOR:
                text = (
                    f"takes longer than {LAST_EVALUATION_S:g} s for the last weights and is killed"
                )
                effects.append(Note(f"{worker.spec.name} {text}; penstock eval evaluates them"))
        return [*effects, *(Kill(w.spec.name, signal.SIGKILL) for w in late)]

    def _start_due(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for name, worker in self._workers.items():
            due = worker.life is Life.WAITING and now_s >= worker.since_s
            if due and not self._lacks_host(worker):
                worker.enter(Life.STARTING, now_s)
                worker.alive_s = now_s
                effects.append(Start(name, worker.incarnation))
                if worker.spec.stage is Stage.ACTORS:
                    effects += self._begin_stream(worker)
        return effects

    def _lacks_host(self, worker: SupervisedRole) -> bool:
        """Whether a role, or a part of the parameter server that it needs, has no host. A part that
        runs has one, even if that is about to end."""
        needed = {worker.name}
        if worker.spec.servers:
            servers = [w for w in self._workers.values() if w.spec.stage is Stage.SERVER]
            needed |= {w.name for w in servers if not w.runs or w.superseded}
        return not needed.isdisjoint(self._unplaced)

    def _check_alive(self, worker: SupervisedRole, phase: str, now_s: float) -> list[Effect]:
        """Let a hung process write its stacks, then kill it."""
        if not worker.runs:
            return []
        name = worker.spec.name
        if worker.kill_at_s is not None:
            return [Kill(name, signal.SIGKILL)] if now_s >= worker.kill_at_s else []
        timeout_s, limit = worker.silence(self._limits, phase)
        if now_s - worker.alive_s < timeout_s:
            return worker.note_silence(phase, now_s, timeout_s)
        worker.kill_at_s = now_s + DUMP_S
        worker.failure = worker.hung(f"{limit} = {timeout_s:g} s", phase)
        return [Kill(name, signal.SIGUSR1, worker.failure.message)]

    def _after_crash(
        self, worker: SupervisedRole, failure: Failure, healthy: bool, produced: bool, now_s: float
    ) -> list[Effect]:
        last_straw = None
        if self._has_rival(worker.name, now_s):  # its failures say nothing about the role
            worker.attempts = 0 if healthy else worker.attempts
        else:
            last_straw = self.restart_policy.crashed(worker, failure, healthy, produced, now_s)
        if last_straw is not None:
            if worker.spec.expendable:
                text = f"{failure.name}: {failure.told}; the run continues without it"
                return [Note(text), *self._notify_gone(worker)]
            if failure.user and self._can_leave_out(worker):
                return self._leave_out(worker, failure, now_s)
            return self._fail(last_straw, now_s)
        delay_s = worker.next_delay_s()
        others = ""
        if worker.spec.essential:
            others = (
                f"; the other learners {'continue without' if self._group.begun else 'wait for'} it"
            )
        text = f"{failure.name}: {failure.told}; it is restarted in {delay_s:g} s{others}"
        data = {"delay_s": delay_s}
        note = Note(text, "restart", worker.name, data, worker.incarnation)
        return [note, *self._again(worker, delay_s, now_s)]

    def _can_leave_out(self, worker: SupervisedRole) -> bool:
        """Whether a role is of a spare learner, without which the run continues."""
        learner = self._learners.get(worker.spec.learner)
        if learner is None or not learner.spec.spare or worker.spec.role not in WITH_LEARNER:
            return False
        return not learner.runs or self._spared(learner)

    def _leave_out(self, worker: SupervisedRole, failure: Failure, now_s: float) -> list[Effect]:
        """End a spare learner with its connectors and relays until it has another host, as the user
        must correct something on this one."""
        rank = worker.spec.learner
        learner = self._learners[rank].name
        worker.failures_without_progress, worker.first_failure = 0, None  # they were of this host
        text = f"{failure.name}: {failure.told}; the run continues without {learner} until it has"
        effects: list[Effect] = [Note(f"{text} another host")]
        for other in self._workers.values():
            is_learner = other.spec.stage is Stage.LEARNER
            if other.spec.learner != rank or not (is_learner or other.spec.stage is Stage.CARRIERS):
                continue
            other.needed = False
            if other.runs:
                # SIGTERM would have the learner end the run.
                signum = signal.SIGKILL if is_learner else signal.SIGTERM
                effects.append(Kill(other.name, signum, f"ends, as {failure.name} has failed"))
            else:
                other.enter(Life.GONE, now_s)
        return effects

    def _comes_back(self, failure: Failure) -> bool:
        """Whether a run that has lost its trained state resumes from its checkpoint. Learners of
        several supervisors do not, as no supervisor knows the state of the others."""
        alone = all(w.spec.store is None for w in self._learners.values())
        left = self._losses < self._limits.restarts
        return alone and self._has_checkpoint and left and not failure.user

    def _start_from_checkpoint(
        self, lost: SupervisedRole, failure: Failure, now_s: float
    ) -> list[Effect]:
        """The trained state has ended with ``lost``: restart all essential roles from the newest
        checkpoint. The other roles keep running."""
        if not self._losses:  # a checkpoint was written since the last loss
            lost.attempts = 0
        self._losses += 1
        self.resumes = True
        self._group.dissolve()
        delay_s = lost.next_delay_s()
        text = (
            f"{failure.name}: {failure.told}; the run continues from its newest checkpoint in "
            f"{delay_s:g} s (restart {self._losses} of run.restarts = {self._limits.restarts})"
        )
        data = {"delay_s": delay_s, "from": "checkpoint"}
        effects: list[Effect] = [Note(text, "restart", lost.name, data, lost.incarnation)]
        for worker in self._workers.values():
            if worker.spec.essential and worker.runs:
                worker.superseded = True
                why = "is restarted, as the run continues from its newest checkpoint"
                effects.append(Kill(worker.name, signal.SIGKILL, why))
        return effects + self._again(lost, delay_s, now_s)

    def _again(self, worker: SupervisedRole, delay_s: float, now_s: float) -> list[Effect]:
        worker.wait(now_s + delay_s)
        self.restarts[worker.spec.stage] += 1
        return []

    def _spared(self, worker: SupervisedRole) -> bool:
        """Whether the run continues without an essential role."""
        running = {rank for rank, w in self._learners.items() if w.runs}
        is_learner = worker.spec.stage is Stage.LEARNER
        return is_learner and self._group.holds_run(worker.spec.learner, running)

    def _move(self, actors: Sequence[str]) -> list[Effect]:
        """Start new streams of actors that were moved to other learners; an actor that does not run
        starts its stream when it is started."""
        effects: list[Effect] = []
        for worker in map(self._workers.__getitem__, actors):
            if worker.runs:
                worker.incarnation += 1
                effects += self._begin_stream(worker)
        return effects

    def _begin_stream(self, worker: SupervisedRole) -> list[Effect]:
        effect = self._seats.begin(worker.name, worker.incarnation)
        return [effect] if effect else []

    def _notify_ended(
        self, worker: SupervisedRole, end: End, presumed: int | None, now_s: float
    ) -> list[Effect]:
        """Notify the other learners of a learner's end, and an actor's learner of the actor's end
        unless that is only ``presumed``."""
        is_actor = worker.spec.stage is Stage.ACTORS
        streams = self._seats.part(worker.name) if is_actor else {}
        if presumed is not None:
            self._presumed[worker.name, presumed] = PresumedDead(now_s, streams)
        if worker.spec.stage is Stage.LEARNER:
            rank = worker.spec.learner
            for other in self._workers.values():
                its = other.spec.stage is Stage.CARRIERS and other.spec.learner == rank
                other.orphaned = other.orphaned or (its and other.life is Life.WORKING)
            return self._group.leave(rank) + self._move(self._seats.leave(rank))
        if not is_actor:
            return []
        effects = self._notify_stream_ended(worker, streams, end) if presumed is None else []
        return effects + self._notify_actors_alive()

    def _notify_stream_ended(
        self, worker: SupervisedRole, streams: Streams, end: End
    ) -> list[Effect]:
        message = {
            "kind": "actor_ended",
            "actor": worker.spec.index,
            "incarnation": end.incarnation,
            "produced_steps": end.produced,
            "sequence": end.sequence,
        }
        learner = self._seats.learner_of(streams, end.incarnation)
        return [] if learner is None else self._inform(message, learner)

    def _notify_actors_alive(self) -> list[Effect]:
        return self._inform({"kind": "actors", "alive": self.actors_alive})

    def _notify_gone(self, worker: SupervisedRole, rank: int | None = None) -> list[Effect]:
        """Notify learner ``rank``, or all, that the run continues without an expendable role."""
        return self._inform({"kind": "gone", "role": worker.spec.role}, rank)

    def _inform(self, message: dict[str, Any], rank: int | None = None) -> list[Effect]:
        """Send ``message`` to the informed roles of learner ``rank``, or of all learners."""
        return [
            Send(name, message)
            for name, w in self._workers.items()
            if w.spec.informed and w.runs and rank in (None, w.spec.learner)
        ]

    def _record(self, failure: Failure) -> None:
        """The first failure decides the reported reason and the exit code."""
        if self._failure is None:
            self._failure = failure
            found = ("user_error", 2) if failure.user else ("fault", 1)
            killed = failure.message == KILLED_AS_ASKED
            self._reason, self._exit_code = self._asked if killed else found

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
        effects = [] if self._plays_last else self._end_evaluation(now_s)
        return effects + self._enter_stage(Stage.ACTORS, now_s) + self._advance(now_s)

    def _end_evaluation(self, now_s: float) -> list[Effect]:
        """End the evaluator, which keeps nothing, without an evaluation of the last weights."""
        self._plays_last = False
        if self._stage is Stage.EVALUATOR:
            self._stage_ends_s = now_s + AGAIN_S
        return [
            Kill(w.spec.name, signal.SIGTERM if w.life is Life.WORKING else signal.SIGKILL)
            for w in self._running(Stage.EVALUATOR)
        ]

    def _advance(self, now_s: float) -> list[Effect]:
        """Enter the next stage while no process runs in the current one."""
        effects: list[Effect] = []
        while self.outcome is None and not self._running(self._stage):
            if self._stage is Stage.EVALUATOR:
                self.outcome = Outcome(self._exit_code, self._reason, self._failure)
            elif self._stage is not None:
                effects += self._enter_stage(Stage(self._stage + 1), now_s)
        return effects

    def _running(self, stage: Stage | None) -> list[SupervisedRole]:
        return [w for w in self._workers.values() if w.runs and w.spec.stage == stage]

    def _enter_stage(self, stage: Stage, now_s: float) -> list[Effect]:
        self._stage = stage
        if stage is Stage.EVALUATOR:
            return self._enter_evaluation(now_s)
        grace_s = self._limits.grace_s
        last = stage >= Stage.LEARNER
        self._stage_ends_s = self._stop_s + grace_s if last else now_s + SHARES[stage] * grace_s
        if stage is Stage.SERVER:  # the learners may have used all of the grace
            self._stage_ends_s = max(self._stage_ends_s, now_s + AGAIN_S)
        effects = self._name_saver() if stage is Stage.LEARNER else []
        for worker in self._running(stage):
            name = worker.spec.name
            # One that starts has no state yet that could be lost. A shard waits for the learners
            # of other supervisors, which notice by its end that this one has failed.
            failed = stage is Stage.SERVER and self._reason in ("fault", "user_error")
            if worker.life is Life.STARTING or (failed and worker.spec.store is not None):
                effects.append(Kill(name, signal.SIGKILL))
                continue
            if last:
                effects.append(Send(name, {"kind": "finish"}))
            effects.append(Kill(name, signal.SIGTERM))
        return effects

    def _enter_evaluation(self, now_s: float) -> list[Effect]:
        """The last checkpoint is written: have the evaluator play it."""
        if not self._plays_last:
            return self._end_evaluation(now_s)
        self._stage_ends_s = now_s + LAST_EVALUATION_S
        return [
            Send(w.spec.name, {"kind": "finish"})
            if w.life is Life.WORKING
            else Kill(w.spec.name, signal.SIGKILL)
            for w in self._running(Stage.EVALUATOR)
        ]

    def _name_saver(self, *, saved: bool = False) -> list[Effect]:
        """Name the learner that writes the final checkpoint; the others wait for it. If it dies,
        the next one writes it."""
        ranks = [rank for rank, w in self._learners.items() if w.life is Life.WORKING]
        self._saver = self._saver if saved else min(ranks, default=0)
        message = {"kind": "saver", "rank": self._saver, "saved": saved}
        several = len(self._learners) > 1
        return [Send(self._learners[rank].name, message) for rank in ranks if several]
