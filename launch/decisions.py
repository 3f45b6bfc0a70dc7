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
from penstock.launch.membership import ActorAssignment, GroupMembership, Streams
from penstock.launch.supervised_role import FIRST_DELAY_S, Life, RestartPolicy, SupervisedRole
from penstock.launch.supervisor_messages import (
    LIMITS,
    OVER,
    Effect,
    End,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    Start,
    cause_of_end,
    how_it_ended,
    notes_of_hosts,
    too_late,
)

HEALTHY_S = 10.0  # a role that worked this long starts with a clean record
DUMP_S = 0.5  # a hung process gets this long to write its stacks down
AGAIN_S = 2.0  # between two attempts to kill
SHARES = {Stage.ACTORS: 0.2, Stage.CARRIERS: 0.6}  # of the grace; learners have until its end
LAST_EVALUATION_S = 600.0  # for the evaluation of the last weights
BLINK_S = 5.0  # after a pause of its own this long, the supervisor cannot detect hangs


class PresumedDead(NamedTuple):
    """A process that was replaced before its end was certain."""

    since_s: float
    streams: Streams


class Decisions:
    """The state of one supervised set of processes."""

    def __init__(self, specs: Sequence[RoleSpec], limits: RestartLimits) -> None:
        self._roles = {spec.name: SupervisedRole(spec) for spec in specs}
        learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
        actors = [spec for spec in specs if spec.stage is Stage.ACTORS]
        self._learners = {spec.learner: self._roles[spec.name] for spec in learners}
        self._group = GroupMembership(learners)
        self._assignment = ActorAssignment(actors, learners)
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
            role.spec.stage is Stage.ACTORS and role.life is Life.WORKING
            for role in self._roles.values()
        )

    @property
    def learners_alive(self) -> int:
        return sum(learner.life is Life.WORKING for learner in self._learners.values())

    @property
    def stopping(self) -> bool:
        return self._stage is not None

    @property
    def why_stopped(self) -> tuple[str, Failure | None]:
        """The reason of the stop, and the first failure, if any."""
        return self._reason, self._failure

    def needs(self, name: str) -> bool:
        """Whether the process of ``name`` is to run until the run ends."""
        role = self._roles[name]
        return role.needed and not role.superseded

    def listed(self) -> list[str]:
        """The roles in a status report: all but spare actors that do not run and are not needed."""
        return [
            name
            for name, role in self._roles.items()
            if role.runs or role.needed or not (role.spec.spare and role.spec.stage is Stage.ACTORS)
        ]

    def resize(self, actors: int, now_s: float) -> list[Effect]:
        """From now on the ``actors`` with the lowest indices play; the others end, after their
        unroll."""
        effects: list[Effect] = []
        for role in self._roles.values():
            if role.spec.stage is Stage.ACTORS:
                effects += self._need(role, role.spec.index < actors, now_s)
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
        for name, role in sorted(self._roles.items()):
            spec = role.spec
            learner = self._learners.get(spec.learner) if spec.relays else None
            if name not in changed and (learner is None or learner.name not in changed):
                continue
            if spec.essential and role.runs and name not in found:
                is_learner = spec.stage is Stage.LEARNER
                saver = name if is_learner else self._learners[min(self._learners)].name
                effects.append(Send(saver, {"kind": "save"}))
            if spec.joins or spec.spare:
                comes = learner is None or (learner.needed and learner.name not in reasons)
                has_learner = comes or (learner is not None and learner.runs)
                needed = name not in reasons and has_learner
                effects += self._need(role, needed, now_s)
        return [] if self.stopping else effects

    def respec(self, specs: Sequence[RoleSpec]) -> list[Effect]:
        """The same roles, whose addresses may be others from now on. Relays are restarted at
        another address; actors are sent a learner's address when it is ready."""
        effects: list[Effect] = []
        for spec in specs:
            role = self._roles[spec.name]
            moved = spec.relays and spec.address != role.spec.address
            role.spec = spec
            if moved and role.runs and not self.stopping:
                role.superseded = True
                effects.append(Kill(spec.name, signal.SIGTERM))
        learners = [role.spec for role in self._learners.values()]
        self._group.respec(learners)
        self._assignment.respec(learners)
        return effects

    def _need(self, role: SupervisedRole, needed: bool, now_s: float) -> list[Effect]:
        """Start a role that plays from now on, or have one end that no longer does."""
        if self.stopping or role.needed == needed:
            return []
        role.needed = needed
        if role.runs:
            if role.spec.stage is not Stage.ACTORS:
                return []
            role.superseded = needed  # it ends, and is then replaced
            return [] if needed else [Kill(role.name, signal.SIGTERM)]
        if needed:
            role.wait(now_s)
        else:
            role.enter(Life.GONE, now_s)
        return []

    def set_threads(self, threads: int) -> list[Effect]:
        """From now on each learner trains with so many threads."""
        self._threads = threads
        return self._inform({"kind": "threads", "threads": threads})

    def ready(self, name: str, now_s: float) -> list[Effect]:
        """``name`` has reported that it is ready."""
        role = self._roles[name]
        if role.life is not Life.STARTING:
            return []
        role.enter(Life.WORKING, now_s)
        role.alive_s = now_s
        if role.spec.stage is not Stage.LEARNER:
            return self._notify_actors_alive()
        effects = (
            self._move(self._assignment.enter(role.spec.learner)) + self._notify_actors_alive()
        )
        for other in self._roles.values():
            if other.spec.expendable and other.life is Life.GONE:
                effects += self._notify_gone(other, role.spec.learner)
        return effects + (self.set_threads(self._threads) if self._threads > 1 else [])

    def join(self, name: str) -> list[Effect]:
        """The learner ``name`` is ready to enter a group."""
        role = self._roles[name]
        return [] if role.superseded else self._group.join(role.spec.learner)

    def entered(self, name: str) -> list[Effect]:
        """The learner ``name`` has entered a group and received its state. One that was killed as
        the state is lost may have sent that before: it keeps none."""
        role = self._roles[name]
        if not role.superseded:
            self._group.entered(role.spec.learner)
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
        role = self._roles[failure.name]
        if self._has_rival(failure.name, now_s):  # for which it may have been refused
            failure = replace(failure, user=False)
        role.failure = failure
        if self._stage is Stage.LEARNER and not failure.fault and self._spared(role):
            return []  # another learner writes the checkpoint
        survived = not self.stopping and (self._spared(role) or self._comes_back(failure))
        ends_run = role.spec.essential and not role.superseded and not survived
        spares_run = role.spec.expendable or self._can_leave_out(role)
        of_user = failure.user and not self.stopping and not spares_run
        return self._fail(failure, now_s) if ends_run or of_user else []

    def not_started(self, name: str, incarnation: int, why: str, now_s: float) -> list[Effect]:
        """The process of ``name`` could not be started. That counts as a crash, also of an
        essential role, which has lost no state."""
        role = self._roles[name]
        role.enter(Life.GONE, now_s)
        effects: list[Effect] = []
        if role.spec.stage is not Stage.LEARNER:
            effects = self._notify_ended(role, End(1, incarnation=incarnation), None, now_s)
        if self.stopping:
            return effects + self._advance(now_s)
        if not role.needed:
            return effects
        return effects + self._after_crash(role, Failure(name, why), False, False, now_s)

    def ended(self, name: str, end: End, now_s: float) -> list[Effect]:
        """The process of ``name`` has ended, which is confirmed."""
        ending = how_it_ended(end.exit_code, end.out_of_memory)
        failure = Failure(name, ending, end.log, cause=cause_of_end(end.exit_code))
        return self._leave(name, end, failure, now_s)

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
        role = self._roles[name]
        is_actor = role.spec.stage is Stage.ACTORS
        return self._notify_stream_ended(role, streams, end) if is_actor else []

    def _leave(
        self, name: str, end: End, failure: Failure, now_s: float, presumed: int | None = None
    ) -> list[Effect]:
        """``name`` has ended, or is ``presumed`` to have under that incarnation."""
        role = self._roles[name]
        was_ready, since_s = role.life is Life.WORKING, role.since_s
        role.enter(Life.GONE, now_s)
        spared = self._spared(role)  # evaluated while it still belongs to the group
        effects = self._notify_ended(role, end, presumed, now_s)
        failure = role.failure or failure
        if self._stage is not None:
            # A superseded learner was killed on purpose, as its state was lost before the stop.
            counts = role.spec.essential and not role.superseded
            if counts and was_ready and end.exit_code != 0:
                if spared and (role.failure is None or not role.failure.fault):
                    text = f"{name}: {failure.message}; another learner writes the checkpoint"
                    effects.append(Note(text))
                else:
                    self._record(failure)
            if self._stage is Stage.LEARNER and role is self._learners.get(self._saver):
                effects += self._name_saver(saved=end.exit_code == 0)
            return effects + self._advance(now_s)
        if role.superseded:  # its end was ordered, and is no further loss of the trained state
            role.superseded = False
            return effects + (self._again(role, FIRST_DELAY_S, now_s) if role.needed else [])
        if role.spec.essential and not spared:
            if self._comes_back(failure):
                return effects + self._start_from_checkpoint(role, failure, now_s)
            return effects + self._fail(failure, now_s)
        if not role.needed:
            return effects
        if end.exit_code == EXIT_REJOIN:
            return effects + self._again(role, FIRST_DELAY_S, now_s)
        worked_until_s = now_s if role.kill_at_s is None else role.alive_s  # then it hung
        healthy = was_ready and worked_until_s - since_s >= HEALTHY_S
        produced = end.produced > 0 and not role.spec.essential
        return effects + self._after_crash(role, failure, healthy, produced, now_s)

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
        for role in self._roles.values():
            role.failure = Failure.killed_as_asked(role.name, has_checkpoint=self._has_checkpoint)
        return self._kill_all()

    def abandon(self, failure: Failure, now_s: float) -> list[Effect]:
        """End the run without saving it."""
        return self._fail(failure, now_s) + self._kill_all()

    def _kill_all(self) -> list[Effect]:
        return [Kill(role.name, signal.SIGKILL) for role in self._roles.values() if role.runs]

    def pass_on(self, name: str, message: dict[str, Any]) -> list[Effect]:
        """Forward a message to the learner of ``name``, such as a connector's counts; that of an
        expendable role, which evaluates for all of them, to every learner."""
        role = self._roles[name]
        if role.spec.expendable:
            return self._inform(message)
        return [] if role.orphaned else self._inform(message, role.spec.learner)

    def tick(
        self, now_s: float, beats: Mapping[str, float], phases: Mapping[str, str]
    ) -> list[Effect]:
        """Time has passed; ``beats`` are the last heartbeats, ``phases`` the current phases."""
        blinked = self._now_s is not None and now_s - self._now_s > BLINK_S
        self._now_s = now_s
        for name, role in self._roles.items():
            beat_s = now_s if blinked else beats.get(name, 0.0)
            role.alive_s = max(role.alive_s, beat_s)
        if not self.stopping:
            effects = self._start_due(now_s)
            for role in self._roles.values():
                effects += self._check_alive(role, phases.get(role.name, ""), now_s)
            return effects
        if now_s < self._stage_ends_s:
            return []
        self._stage_ends_s = now_s + AGAIN_S
        late = [
            role for role in self._roles.values() if role.runs and role.spec.stage == self._stage
        ]
        effects = []
        for role in late:
            if role.spec.essential and not role.superseded:
                self._record(too_late(role.name, self._limits.grace_s))
            elif self._plays_last and self._stage is Stage.EVALUATOR:
                text = (
                    f"takes longer than {LAST_EVALUATION_S:g} s for the last weights and is killed"
                )
                effects.append(Note(f"{role.name} {text}; penstock eval evaluates them"))
        return [*effects, *(Kill(role.name, signal.SIGKILL) for role in late)]

    def _start_due(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for name, role in self._roles.items():
            due = role.life is Life.WAITING and now_s >= role.since_s
            if due and not self._lacks_host(role):
                role.enter(Life.STARTING, now_s)
                role.alive_s = now_s
                effects.append(Start(name, role.incarnation))
                if role.spec.stage is Stage.ACTORS:
                    effects += self._begin_stream(role)
        return effects

    def _lacks_host(self, role: SupervisedRole) -> bool:
        """Whether a role, or a part of the parameter server that it needs, has no host. A part that
        runs has one, even if that is about to end."""
        needed = {role.name}
        if role.spec.servers:
            servers = [
                server for server in self._roles.values() if server.spec.stage is Stage.SERVER
            ]
            needed |= {server.name for server in servers if not server.runs or server.superseded}
        return not needed.isdisjoint(self._unplaced)

    def _check_alive(self, role: SupervisedRole, phase: str, now_s: float) -> list[Effect]:
        """Let a hung process write its stacks, then kill it."""
        if not role.runs:
            return []
        name = role.name
        if role.kill_at_s is not None:
            return [Kill(name, signal.SIGKILL)] if now_s >= role.kill_at_s else []
        timeout_s, limit = role.silence(self._limits, phase)
        if now_s - role.alive_s < timeout_s:
            return role.note_silence(phase, now_s, timeout_s)
        role.kill_at_s = now_s + DUMP_S
        role.failure = role.hung(f"{limit} = {timeout_s:g} s", phase)
        return [Kill(name, signal.SIGUSR1, role.failure.message)]

    def _after_crash(
        self, role: SupervisedRole, failure: Failure, healthy: bool, produced: bool, now_s: float
    ) -> list[Effect]:
        last_straw = None
        if self._has_rival(role.name, now_s):  # its failures say nothing about the role
            role.attempts = 0 if healthy else role.attempts
        else:
            last_straw = self.restart_policy.crashed(role, failure, healthy, produced, now_s)
        if last_straw is not None:
            if role.spec.expendable:
                text = f"{failure.name}: {failure.told}; the run continues without it"
                return [Note(text), *self._notify_gone(role)]
            if failure.user and self._can_leave_out(role):
                return self._leave_out(role, failure, now_s)
            return self._fail(last_straw, now_s)
        delay_s = role.next_delay_s()
        others = ""
        if role.spec.essential:
            others = (
                f"; the other learners {'continue without' if self._group.begun else 'wait for'} it"
            )
        text = f"{failure.name}: {failure.told}; it is restarted in {delay_s:g} s{others}"
        data = {"delay_s": delay_s, "cause": failure.cause or failure.message}
        note = Note(text, "restart", role.name, data, role.incarnation)
        return [note, *self._again(role, delay_s, now_s)]

    def _can_leave_out(self, role: SupervisedRole) -> bool:
        """Whether a role is of a spare learner, without which the run continues."""
        learner = self._learners.get(role.spec.learner)
        if learner is None or not learner.spec.spare or role.spec.joins:
            return False
        return not learner.runs or self._spared(learner)

    def _leave_out(self, role: SupervisedRole, failure: Failure, now_s: float) -> list[Effect]:
        """End a spare learner with its connectors and relays until it has another host, as the user
        must correct something on this one."""
        rank = role.spec.learner
        learner = self._learners[rank].name
        role.failures_without_progress, role.first_failure = 0, None  # they were of this host
        text = f"{failure.name}: {failure.told}; the run continues without {learner} until it has"
        effects: list[Effect] = [Note(f"{text} another host")]
        for other in self._roles.values():
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
        alone = all(learner.spec.store is None for learner in self._learners.values())
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
        data = {
            "delay_s": delay_s,
            "cause": failure.cause or failure.message,
            "from": "checkpoint",
        }
        effects: list[Effect] = [Note(text, "restart", lost.name, data, lost.incarnation)]
        for role in self._roles.values():
            if role.spec.essential and role.runs:
                role.superseded = True
                why = "is restarted, as the run continues from its newest checkpoint"
                effects.append(Kill(role.name, signal.SIGKILL, why))
        return effects + self._again(lost, delay_s, now_s)

    def _again(self, role: SupervisedRole, delay_s: float, now_s: float) -> list[Effect]:
        role.wait(now_s + delay_s)
        self.restarts[role.spec.stage] += 1
        return []

    def _spared(self, role: SupervisedRole) -> bool:
        """Whether the run continues without an essential role."""
        running = {rank for rank, learner in self._learners.items() if learner.runs}
        is_learner = role.spec.stage is Stage.LEARNER
        return is_learner and self._group.holds_run(role.spec.learner, running)

    def _move(self, actors: Sequence[str]) -> list[Effect]:
        """Start new streams of actors that were moved to other learners; an actor that does not run
        starts its stream when it is started."""
        effects: list[Effect] = []
        for role in map(self._roles.__getitem__, actors):
            if role.runs:
                role.incarnation += 1
                effects += self._begin_stream(role)
        return effects

    def _begin_stream(self, role: SupervisedRole) -> list[Effect]:
        effect = self._assignment.begin(role.name, role.incarnation)
        return [effect] if effect else []

    def _notify_ended(
        self, role: SupervisedRole, end: End, presumed: int | None, now_s: float
    ) -> list[Effect]:
        """Notify the other learners of a learner's end, and an actor's learner of the actor's end
        unless that is only ``presumed``."""
        is_actor = role.spec.stage is Stage.ACTORS
        streams = self._assignment.part(role.name) if is_actor else {}
        if presumed is not None:
            self._presumed[role.name, presumed] = PresumedDead(now_s, streams)
        if role.spec.stage is Stage.LEARNER:
            rank = role.spec.learner
            for other in self._roles.values():
                its = other.spec.stage is Stage.CARRIERS and other.spec.learner == rank
                other.orphaned = other.orphaned or (its and other.life is Life.WORKING)
            return self._group.leave(rank) + self._move(self._assignment.leave(rank))
        if not is_actor:
            return []
        effects = self._notify_stream_ended(role, streams, end) if presumed is None else []
        return effects + self._notify_actors_alive()

    def _notify_stream_ended(
        self, role: SupervisedRole, streams: Streams, end: End
    ) -> list[Effect]:
        message = {
            "kind": "actor_ended",
            "actor": role.spec.index,
            "incarnation": end.incarnation,
            "produced_steps": end.produced,
            "sequence": end.sequence,
        }
        learner = self._assignment.learner_of(streams, end.incarnation)
        return [] if learner is None else self._inform(message, learner)

    def _notify_actors_alive(self) -> list[Effect]:
        return self._inform({"kind": "actors", "alive": self.actors_alive})

    def _notify_gone(self, role: SupervisedRole, rank: int | None = None) -> list[Effect]:
        """Notify learner ``rank``, or all, that the run continues without an expendable role."""
        return self._inform({"kind": "gone", "role": role.spec.role}, rank)

    def _inform(self, message: dict[str, Any], rank: int | None = None) -> list[Effect]:
        """Send ``message`` to the informed roles of learner ``rank``, or of all learners."""
        return [
            Send(name, message)
            for name, role in self._roles.items()
            if role.spec.informed and role.runs and rank in (None, role.spec.learner)
        ]

    def _record(self, failure: Failure) -> None:
        """The first failure decides the reported reason and the exit code."""
        if self._failure is None:
            self._failure = failure
            found = ("user_error", 2) if failure.user else ("fault", 1)
            self._reason, self._exit_code = self._asked if failure.asked else found

    def _fail(self, failure: Failure, now_s: float) -> list[Effect]:
        self._record(failure)
        return self._begin_stop(self._reason, self._exit_code, now_s)

    def _begin_stop(self, reason: str, exit_code: int, now_s: float) -> list[Effect]:
        if self.stopping:
            return []
        self._reason, self._exit_code = reason, exit_code
        self._stop_s = now_s
        for role in self._roles.values():
            if role.life is Life.WAITING:
                role.enter(Life.GONE, now_s)
        effects = [] if self._plays_last else self._end_evaluation(now_s)
        return effects + self._enter_stage(Stage.ACTORS, now_s) + self._advance(now_s)

    def _end_evaluation(self, now_s: float) -> list[Effect]:
        """End the evaluator, which keeps nothing, without an evaluation of the last weights."""
        self._plays_last = False
        if self._stage is Stage.EVALUATOR:
            self._stage_ends_s = now_s + AGAIN_S
        return [
            Kill(role.name, signal.SIGTERM if role.life is Life.WORKING else signal.SIGKILL)
            for role in self._running(Stage.EVALUATOR)
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
        return [role for role in self._roles.values() if role.runs and role.spec.stage == stage]

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
        # Both tell actors that they did not start.
        tells = stage in (Stage.CARRIERS, Stage.LEARNER)
        over = tells and self._reason in OVER and self._failure is None
        for role in self._running(stage):
            name = role.name
            # One that starts has no state yet that could be lost. A shard waits for the learners
            # of other supervisors, which notice by its end that this one has failed.
            failed = stage is Stage.SERVER and self._reason in ("fault", "user_error")
            if role.life is Life.STARTING or (failed and role.spec.store is not None):
                effects.append(Kill(name, signal.SIGKILL))
                continue
            if over:
                effects.append(Send(name, {"kind": "over"}))
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
            Send(role.name, {"kind": "finish"})
            if role.life is Life.WORKING
            else Kill(role.name, signal.SIGKILL)
            for role in self._running(Stage.EVALUATOR)
        ]

    def _name_saver(self, *, saved: bool = False) -> list[Effect]:
        """Name the learner that writes the final checkpoint; the others wait for it. If it dies,
        the next one writes it."""
        ranks = [rank for rank, learner in self._learners.items() if learner.life is Life.WORKING]
        self._saver = self._saver if saved else min(ranks, default=0)
        message = {"kind": "saver", "rank": self._saver, "saved": saved}
        several = len(self._learners) > 1
        return [Send(self._learners[rank].name, message) for rank in ranks if several]
