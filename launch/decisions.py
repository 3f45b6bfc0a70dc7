"""The supervisor's decisions: which role to restart and when, when the run fails, how it stops.

A pure state machine. Its inputs are events with their times, its outputs effects; it never waits,
reads a clock or accesses a process. `penstock.launch.supervisor` performs the effects.
`Decisions` receives the events. How a run stops is in `Shutdown`, who hangs in `HangWatch`, which
crash is one too many in `RestartPolicy`, and how a run continues from its checkpoint in
`CheckpointRecovery`.

Invariants: an essential role is restarted only if other learners hold its state, or together with
all essential roles from the run's newest checkpoint. Nothing is started once stopping has begun.
The first failure is the one that is reported.

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
from penstock.launch.hang_watch import HangWatch
from penstock.launch.membership import ActorAssignment, GroupMembership, Streams
from penstock.launch.shutdown import Shutdown, StopCause
from penstock.launch.supervised_role import FIRST_DELAY_S, Life, RestartPolicy, SupervisedRole
from penstock.launch.supervisor_messages import (
    Effect,
    End,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    Start,
    describe_end_cause,
    describe_exit,
    host_notes,
)

HEALTHY_S = 10.0
"""A role that has worked for so many seconds starts again with a clean record."""


class PresumedDead(NamedTuple):
    """A process that was replaced before its end was certain."""

    since_s: float
    streams: Streams
    """The streams of an actor; empty for other roles."""


class CheckpointRecovery:
    """Decides whether a run that has lost its trained state continues from its checkpoint."""

    def __init__(self, learners: Mapping[int, SupervisedRole], limits: RestartLimits) -> None:
        """``learners`` are all learners of the run, by rank."""
        self._learners = learners
        self.max_restarts = limits.restarts
        self.has_checkpoint = False
        self.restarts = 0
        """How often the trained state was lost since a checkpoint was written."""
        self.resumes = False
        """Whether the trained state was lost during this run, so that learners that are started
        without a group resume from the checkpoint."""

    def on_checkpoint_written(self) -> None:
        """The run has a checkpoint, or a newer one."""
        self.has_checkpoint = True
        self.restarts = 0

    def on_checkpoint_found(self) -> None:
        """There is a checkpoint in the run's folder, maybe written while no report arrived."""
        self.has_checkpoint = True

    def is_possible_after(self, failure: Failure) -> bool:
        """Whether the run resumes from its checkpoint after this failure.

        Learners of several supervisors do not, as no supervisor knows the state of the others.
        """
        one_supervisor = all(learner.spec.store is None for learner in self._learners.values())
        may_restart = self.restarts < self.max_restarts
        return one_supervisor and self.has_checkpoint and may_restart and not failure.user

    def on_state_lost(self, role: SupervisedRole) -> None:
        """The trained state has ended with this role, and the run resumes from its checkpoint."""
        if self.restarts == 0:  # a checkpoint was written since the last loss
            role.attempts = 0
        self.restarts += 1
        self.resumes = True


class Decisions:
    """The state of one supervised set of processes. Each method returns the effects of its event,
    in the order in which they are to be carried out."""

    def __init__(self, specs: Sequence[RoleSpec], limits: RestartLimits) -> None:
        learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
        actors = [spec for spec in specs if spec.stage is Stage.ACTORS]
        self._roles = {spec.name: SupervisedRole(spec) for spec in specs}
        self._learners = {spec.learner: self._roles[spec.name] for spec in learners}
        self._group = GroupMembership(learners)
        self._assignment = ActorAssignment(actors, learners)
        self._limits = limits
        self._presumed: dict[tuple[str, int], PresumedDead] = {}  # by role and incarnation
        self._unplaced: set[str] = set()  # names of the roles without a host
        self._learner_threads = 1  # threads of each learner, where that changes during the run
        self._hang_watch = HangWatch(limits)
        self._shutdown = Shutdown(self._roles, limits)
        self.recovery = CheckpointRecovery(self._learners, limits)
        self.restart_policy = RestartPolicy(limits.max_restarts)
        self.restarts = {stage: 0 for stage in Stage}
        """How often roles of each stage were restarted."""

    @property
    def outcome(self) -> Outcome | None:
        """The result of the run, once all processes have ended."""
        return self._shutdown.outcome

    @property
    def stopping(self) -> bool:
        """Whether the run is about to end."""
        return self._shutdown.begun

    @property
    def stop_cause(self) -> StopCause:
        """Why the run stops."""
        return self._shutdown.cause

    @property
    def actors_alive(self) -> int:
        """The number of actors that are ready."""
        return sum(
            1
            for role in self._roles.values()
            if role.spec.stage is Stage.ACTORS and role.life is Life.WORKING
        )

    @property
    def learners_alive(self) -> int:
        """The number of learners that are ready."""
        return sum(1 for learner in self._learners.values() if learner.life is Life.WORKING)

    @property
    def group_begun(self) -> bool:
        """Whether learners have formed a group, so that the trained state is theirs."""
        return self._group.begun

    def needs(self, name: str) -> bool:
        """Whether the process of ``name`` is to run until the run ends."""
        role = self._roles[name]
        return role.needed and not role.superseded

    def roles_in_status(self) -> list[str]:
        """Names of the roles in a status report: all but spare actors that the run does not use."""
        return [
            name
            for name, role in self._roles.items()
            if role.runs or role.needed or not (role.spec.spare and role.spec.stage is Stage.ACTORS)
        ]

    # What the run should have, by order of the supervisor or of the engine.

    def set_actors(self, count: int, now_s: float) -> list[Effect]:
        """Let the ``count`` actors with the lowest indices play; the others end after their
        unroll."""
        effects: list[Effect] = []
        for role in self._roles.values():
            if role.spec.stage is Stage.ACTORS:
                effects += self._set_needed(role, role.spec.index < count, now_s)
        return effects

    def set_learner_threads(self, threads: int) -> list[Effect]:
        """Let each learner train with so many threads."""
        self._learner_threads = threads
        return self._inform({"kind": "threads", "threads": threads})

    def on_hosts_changed(self, reasons: Mapping[str, str], now_s: float) -> list[Effect]:
        """Handle a change of the hosts on which roles run.

        Actors and relays that lose their host stop, actors at the end of their unroll, and are
        started again when they have another host. A learner saves the run at once and continues
        until its host ends. It is then restarted, like the other roles beside it, on another host;
        a spare learner leaves the group until it has one. The relays of a learner run while that
        has a host. For a part of the parameter server, a learner saves.

        Args:
            reasons: why a role has no host or is about to lose it, by the name of the role. All
                other roles have a host.
            now_s: the present time.
        """
        previously_unplaced = self._unplaced
        self._unplaced = set(reasons)
        without_host = self._unplaced - previously_unplaced
        with_host = previously_unplaced - self._unplaced
        effects = host_notes(reasons, lost=without_host, found=with_host)

        changed = without_host | with_host
        for name, role in sorted(self._roles.items()):
            spec = role.spec
            learner = self._learners.get(spec.learner) if spec.relays else None
            if name not in changed and (learner is None or learner.name not in changed):
                continue

            if spec.essential and role.runs and name not in with_host:
                is_learner = spec.stage is Stage.LEARNER
                saver = role if is_learner else self._learners[min(self._learners)]
                effects.append(Send(saver.name, {"kind": "save"}))
            if spec.joins or spec.spare:
                effects += self._set_needed(role, self._can_run(role, learner), now_s)
        return [] if self.stopping else effects

    def _can_run(self, role: SupervisedRole, learner: SupervisedRole | None) -> bool:
        """Whether a role has a host, and so has the ``learner`` whose weights it relays, if any.

        A learner that runs has a host, even if that is about to end.
        """
        if role.name in self._unplaced:
            return False
        if learner is None or learner.runs:
            return True
        return learner.needed and learner.name not in self._unplaced

    def update_specs(self, specs: Sequence[RoleSpec]) -> list[Effect]:
        """Replace the specs of all roles, whose addresses may have changed.

        A relay at another address is restarted. Actors are sent the new address of a learner when
        that is ready.
        """
        effects: list[Effect] = []
        for spec in specs:
            role = self._roles[spec.name]
            is_moved_relay = spec.relays and spec.address != role.spec.address
            role.spec = spec
            if is_moved_relay and role.runs and not self.stopping:
                role.superseded = True
                effects.append(Kill(spec.name, signal.SIGTERM))

        learners = [role.spec for role in self._learners.values()]
        self._group.set_learners(learners)
        self._assignment.set_learners(learners)
        return effects

    def _set_needed(self, role: SupervisedRole, needed: bool, now_s: float) -> list[Effect]:
        """Start a role that the run needs from now on, or end one that it needs no longer."""
        if self.stopping or role.needed == needed:
            return []

        role.needed = needed
        if not role.runs:
            if needed:
                role.schedule_start(now_s)
            else:
                role.enter(Life.GONE, now_s)
            return []

        # Only actors are ended; the other roles continue until their host ends.
        if role.spec.stage is not Stage.ACTORS:
            return []
        if needed:
            # The actor was ordered to end before; it ends, and is then replaced.
            role.superseded = True
            return []
        role.superseded = False
        return [Kill(role.name, signal.SIGTERM)]

    # What roles report.

    def on_ready(self, name: str, now_s: float) -> list[Effect]:
        """Handle the report of ``name`` that it is ready to work."""
        role = self._roles[name]
        if role.life is not Life.STARTING:
            return []
        role.enter(Life.WORKING, now_s)
        role.alive_s = now_s
        if role.spec.stage is not Stage.LEARNER:
            return self._inform_of_actors_alive()

        # Tell a new learner what the others know.
        rank = role.spec.learner
        effects = self._start_moved_streams(self._assignment.on_learner_ready(rank))
        effects += self._inform_of_actors_alive()
        for other in self._roles.values():
            if other.spec.expendable and other.life is Life.GONE:
                effects += self._inform_of_given_up(other, rank)
        if self._learner_threads > 1:
            effects += self.set_learner_threads(self._learner_threads)
        return effects

    def on_join(self, name: str) -> list[Effect]:
        """Handle the report of the learner ``name`` that it is ready to enter a group."""
        role = self._roles[name]
        return [] if role.superseded else self._group.on_join(role.spec.learner)

    def on_group_entered(self, name: str) -> list[Effect]:
        """Handle the report of the learner ``name`` that it is in a group and has its state.

        A learner that was killed because the state is lost may have sent that before; it is
        ignored, since that learner holds no state.
        """
        role = self._roles[name]
        if not role.superseded:
            self._group.on_entered(role.spec.learner)
        return []

    def on_group_failed(self, epoch: int) -> list[Effect]:
        """Handle the report that the learners' group of ``epoch`` has failed or was not formed."""
        return self._group.on_group_failed(epoch)

    def on_error(self, failure: Failure, now_s: float) -> list[Effect]:
        """Handle the report of an error by a role, whose process is about to end."""
        role = self._roles[failure.name]
        if self._predecessor_may_run(failure.name, now_s):
            # The role may have been refused because of that process, so it is no user's mistake.
            failure = replace(failure, user=False)
        role.failure = failure

        replaceable = self._is_replaceable(role)
        if self._shutdown.stage is Stage.LEARNER and not failure.fault and replaceable:
            return []  # another learner writes the checkpoint

        continues = not self.stopping and (replaceable or self.recovery.is_possible_after(failure))
        loses_state = role.spec.essential and not role.superseded and not continues
        dispensable = role.spec.expendable or self._can_leave_out(role)
        user_must_act = failure.user and not self.stopping and not dispensable
        if loses_state or user_must_act:
            return self._shutdown.fail(failure, now_s)
        return []

    def forward(self, name: str, message: dict[str, Any]) -> list[Effect]:
        """Forward a message of the role ``name`` to its learner, such as a connector's counts.

        An expendable role evaluates for all learners, so its messages go to each of them.
        """
        role = self._roles[name]
        if role.spec.expendable:
            return self._inform(message)
        if role.orphaned:
            return []
        return self._inform(message, role.spec.learner)

    # How processes end.

    def on_start_failed(self, name: str, incarnation: int, why: str, now_s: float) -> list[Effect]:
        """Handle that the process of ``name`` could not be started, for the reason ``why``.

        That counts as a crash, also of an essential role, which has lost no state.
        """
        role = self._roles[name]
        role.enter(Life.GONE, now_s)
        effects: list[Effect] = []
        if role.spec.stage is not Stage.LEARNER:
            effects = self._on_confirmed_end(role, End(1, incarnation=incarnation))

        if self.stopping:
            return effects + self._shutdown.advance(now_s)
        if not role.needed:
            return effects
        failure = Failure(name, why)
        return effects + self._on_crash(role, failure, healthy=False, produced=False, now_s=now_s)

    def on_ended(self, name: str, end: End, now_s: float) -> list[Effect]:
        """Handle the confirmed end of the process of ``name``."""
        failure = Failure(
            name,
            describe_exit(end.exit_code, end.out_of_memory),
            end.log,
            cause=describe_end_cause(end.exit_code),
        )
        return self._on_gone(name, end, failure=failure, now_s=now_s)

    def on_presumed_dead(
        self, name: str, incarnation: int, host: str, produced: int, now_s: float
    ) -> list[Effect]:
        """Handle that the host of ``name`` does not answer.

        Args:
            name: the role.
            incarnation: the number under which its process was started.
            host: name of the host.
            produced: agent steps of its present stream, as last known.
            now_s: the present time.
        """
        failure = Failure(name, f"is presumed dead: its host {host} does not answer")
        end = End(1, produced)
        return self._on_gone(name, end, failure=failure, now_s=now_s, presumed=incarnation)

    def on_found_alive(self, name: str, incarnation: int) -> list[Effect]:
        """Handle that a process that was presumed dead runs, and its host answers again."""
        why = f"is killed, because it was presumed dead as incarnation {incarnation} and still runs"
        return [Kill(name, signal.SIGKILL, why, incarnation)]

    def on_confirmed_dead(self, name: str, incarnation: int, end: End) -> list[Effect]:
        """Handle the confirmed end of a process that was presumed dead."""
        presumed = self._presumed.pop((name, incarnation))
        role = self._roles[name]
        if role.spec.stage is not Stage.ACTORS:
            return []
        return self._inform_of_stream_end(role, presumed.streams, end)

    def _on_gone(
        self,
        name: str,
        end: End,
        *,
        failure: Failure,
        now_s: float,
        presumed: int | None = None,
    ) -> list[Effect]:
        """Handle the end of a process, or its presumed death.

        Args:
            name: its role.
            end: how it has ended.
            failure: the reason, if the role has reported none.
            now_s: the present time.
            presumed: the incarnation of the process, if its death is only presumed.
        """
        role = self._roles[name]
        was_ready = role.life is Life.WORKING
        # A process that hung has worked until its last sign of life.
        worked_until_s = now_s if role.kill_at_s is None else role.alive_s
        healthy = was_ready and worked_until_s - role.since_s >= HEALTHY_S
        role.enter(Life.GONE, now_s)

        # This is decided while the role still belongs to the group of learners.
        replaceable = self._is_replaceable(role)
        if presumed is None:
            effects = self._on_confirmed_end(role, end)
        else:
            effects = self._on_presumed_end(role, presumed, now_s)

        failure = role.failure or failure
        if self.stopping:
            return effects + self._shutdown.on_role_ended(
                role,
                failure,
                exit_code=end.exit_code,
                was_ready=was_ready,
                replaceable=replaceable,
                now_s=now_s,
            )

        if role.superseded:
            # The end was ordered, so it is no further loss of the trained state.
            role.superseded = False
            if role.needed:
                self._schedule_restart(role, FIRST_DELAY_S, now_s)
            return effects

        # The trained state is lost with the last process that holds it.
        if role.spec.essential and not replaceable:
            if self.recovery.is_possible_after(failure):
                return effects + self._restart_from_checkpoint(role, failure, now_s)
            return effects + self._shutdown.fail(failure, now_s)

        # Any other role is started again if the run needs it.
        if not role.needed:
            return effects
        if end.exit_code == EXIT_REJOIN:
            self._schedule_restart(role, FIRST_DELAY_S, now_s)
            return effects

        produced = end.produced > 0 and not role.spec.essential
        return effects + self._on_crash(
            role, failure, healthy=healthy, produced=produced, now_s=now_s
        )

    def _on_confirmed_end(self, role: SupervisedRole, end: End) -> list[Effect]:
        """Tell the other learners that a learner has ended, and its learner that an actor has."""
        if role.spec.stage is Stage.LEARNER:
            return self._on_learner_gone(role)
        if role.spec.stage is not Stage.ACTORS:
            return []
        streams = self._assignment.on_actor_end(role.name)
        effects = self._inform_of_stream_end(role, streams, end)
        return effects + self._inform_of_actors_alive()

    def _on_presumed_end(
        self, role: SupervisedRole, incarnation: int, now_s: float
    ) -> list[Effect]:
        """Tell learners that another learner is gone, or how many actors remain.

        An actor's streams are kept until its death is confirmed.
        """
        is_actor = role.spec.stage is Stage.ACTORS
        streams = self._assignment.on_actor_end(role.name) if is_actor else {}
        self._presumed[role.name, incarnation] = PresumedDead(now_s, streams)
        if role.spec.stage is Stage.LEARNER:
            return self._on_learner_gone(role)
        return self._inform_of_actors_alive() if is_actor else []

    def _on_learner_gone(self, role: SupervisedRole) -> list[Effect]:
        """Let the group and the actors continue without a learner."""
        rank = role.spec.learner
        for other in self._roles.values():
            is_its_carrier = other.spec.stage is Stage.CARRIERS and other.spec.learner == rank
            if is_its_carrier and other.life is Life.WORKING:
                other.orphaned = True
        effects = self._group.on_leave(rank)
        return effects + self._start_moved_streams(self._assignment.on_learner_end(rank))

    def _predecessor_may_run(self, name: str, now_s: float) -> bool:
        """Whether an earlier process of ``name`` may still hold resources of its successor, such as
        an actor's stream. After the timeout for hangs it is assumed not to."""
        return any(
            role == name and now_s - presumed.since_s < self._limits.hang_timeout_s
            for (role, _), presumed in self._presumed.items()
        )

    # Restarts.

    def _on_crash(
        self,
        role: SupervisedRole,
        failure: Failure,
        *,
        healthy: bool,
        produced: bool,
        now_s: float,
    ) -> list[Effect]:
        """Restart a role that has crashed, or fail the run if that happens too often.

        Args:
            role: the role.
            failure: the reason of the crash.
            healthy: whether the process had worked for long.
            produced: whether the process had produced samples.
            now_s: time of the crash.
        """
        last_straw = None
        if not self._predecessor_may_run(role.name, now_s):
            last_straw = self.restart_policy.on_crash(
                role, failure, healthy=healthy, produced=produced, now_s=now_s
            )
        elif healthy:
            # Beside an earlier process its failures say nothing about the role.
            role.attempts = 0

        if last_straw is not None:
            if role.spec.expendable:
                text = f"{failure.name}: {failure.describe()}; the run continues without it"
                return [Note(text), *self._inform_of_given_up(role)]
            if failure.user and self._can_leave_out(role):
                return self._leave_out(role, failure, now_s)
            return self._shutdown.fail(last_straw, now_s)

        delay_s = role.next_delay_s()
        text = f"{failure.name}: {failure.describe()}; it is restarted in {delay_s:g} s"
        if role.spec.essential:
            reaction = "continue without" if self._group.begun else "wait for"
            text += f"; the other learners {reaction} it"
        note = _restart_note(text, role, failure, {"delay_s": delay_s})
        self._schedule_restart(role, delay_s, now_s)
        return [note]

    def _schedule_restart(self, role: SupervisedRole, delay_s: float, now_s: float) -> None:
        """Start the role again ``delay_s`` from now."""
        role.schedule_start(now_s + delay_s)
        self.restarts[role.spec.stage] += 1

    def _can_leave_out(self, role: SupervisedRole) -> bool:
        """Whether a role belongs to a spare learner, without which the run continues."""
        learner = self._learners.get(role.spec.learner)
        if learner is None or not learner.spec.spare or role.spec.joins:
            return False
        return not learner.runs or self._is_replaceable(learner)

    def _leave_out(self, role: SupervisedRole, failure: Failure, now_s: float) -> list[Effect]:
        """End a spare learner with its connectors and relays until it has another host, as the user
        must correct something on this one."""
        rank = role.spec.learner
        learner = self._learners[rank].name
        # The failures were those of the host that is left.
        role.failures_without_progress = 0
        role.first_failure = None

        text = (
            f"{failure.name}: {failure.describe()}; the run continues without {learner} until it "
            "has another host"
        )
        effects: list[Effect] = [Note(text)]
        for other in self._roles.values():
            is_learner = other.spec.stage is Stage.LEARNER
            is_carrier = other.spec.stage is Stage.CARRIERS
            if other.spec.learner != rank or not (is_learner or is_carrier):
                continue

            other.needed = False
            if other.runs:
                # SIGTERM would have the learner end the run.
                signum = signal.SIGKILL if is_learner else signal.SIGTERM
                effects.append(Kill(other.name, signum, f"ends, as {failure.name} has failed"))
            else:
                other.enter(Life.GONE, now_s)
        return effects

    def _restart_from_checkpoint(
        self, lost: SupervisedRole, failure: Failure, now_s: float
    ) -> list[Effect]:
        """Restart all essential roles from the newest checkpoint, as the trained state has ended
        with ``lost``. The other roles keep running."""
        self._group.dissolve()
        self.recovery.on_state_lost(lost)
        delay_s = lost.next_delay_s()
        text = (
            f"{failure.name}: {failure.describe()}; the run continues from its newest checkpoint "
            f"in {delay_s:g} s (restart {self.recovery.restarts} of run.restarts = "
            f"{self.recovery.max_restarts})"
        )
        data = {"delay_s": delay_s, "from": "checkpoint"}
        effects: list[Effect] = [_restart_note(text, lost, failure, data)]

        for role in self._roles.values():
            if role.spec.essential and role.runs:
                role.superseded = True
                why = "is restarted, as the run continues from its newest checkpoint"
                effects.append(Kill(role.name, signal.SIGKILL, why))
        self._schedule_restart(lost, delay_s, now_s)
        return effects

    def _is_replaceable(self, role: SupervisedRole) -> bool:
        """Whether a role is a learner whose trained state other running learners hold as well."""
        if role.spec.stage is not Stage.LEARNER:
            return False
        running = {rank for rank, learner in self._learners.items() if learner.runs}
        return self._group.holds_run(role.spec.learner, running)

    # Time, signals and the end of the run.

    def tick(
        self, now_s: float, heartbeats: Mapping[str, float], phases: Mapping[str, str]
    ) -> list[Effect]:
        """Do what is due at ``now_s``: start roles, check for hangs, enforce deadlines of a stop.

        Args:
            now_s: the present time.
            heartbeats: times of the last heartbeats, by the name of the role.
            phases: the present phases, by the name of the role.
        """
        self._hang_watch.record_heartbeats(self._roles.values(), heartbeats, now_s)
        if self.stopping:
            return self._shutdown.check_deadline(now_s)

        effects = self._start_due(now_s)
        for role in self._roles.values():
            effects += self._hang_watch.check(role, phases.get(role.name, ""), now_s)
        return effects

    def _start_due(self, now_s: float) -> list[Effect]:
        """Start the roles that have waited for their time and have a host."""
        effects: list[Effect] = []
        for name, role in self._roles.items():
            is_due = role.life is Life.WAITING and now_s >= role.since_s
            if not is_due or self._lacks_host(role):
                continue

            role.enter(Life.STARTING, now_s)
            role.alive_s = now_s
            effects.append(Start(name, role.incarnation))
            if role.spec.stage is Stage.ACTORS:
                effects += self._begin_stream(role)
        return effects

    def _lacks_host(self, role: SupervisedRole) -> bool:
        """Whether a role, or a part of the parameter server that it needs, has no host."""
        required = {role.name}
        if role.spec.servers:
            # A part that runs has a host, even if that is about to end.
            required |= {
                server.name
                for server in self._roles.values()
                if server.spec.stage is Stage.SERVER and (not server.runs or server.superseded)
            }
        return not required.isdisjoint(self._unplaced)

    def stop(self, reason: str, now_s: float, failure: Failure | None = None) -> list[Effect]:
        """Stop the run, because a learner has reached a limit or ends it after a ``failure``."""
        return self._shutdown.stop(reason, now_s, failure)

    def on_signal(self, signum: int, now_s: float) -> list[Effect]:
        """Handle a signal to the supervisor: the first one stops the run, the second one kills all
        processes."""
        has_checkpoint = self.recovery.has_checkpoint
        return self._shutdown.on_signal(signum, now_s, has_checkpoint=has_checkpoint)

    def abandon(self, failure: Failure, now_s: float) -> list[Effect]:
        """End the run because of a ``failure``, without a checkpoint."""
        return self._shutdown.abandon(failure, now_s)

    # Messages to learners and actors.

    def _start_moved_streams(self, actors: Sequence[str]) -> list[Effect]:
        """Start new streams of actors that were moved to other learners.

        An actor that does not run starts its stream when it is started.
        """
        effects: list[Effect] = []
        for name in actors:
            role = self._roles[name]
            if role.runs:
                role.incarnation += 1
                effects += self._begin_stream(role)
        return effects

    def _begin_stream(self, role: SupervisedRole) -> list[Effect]:
        """Record a new stream of an actor, and tell it the learner if that is not obvious to it."""
        effect = self._assignment.begin_stream(role.name, role.incarnation)
        return [] if effect is None else [effect]

    def _inform_of_stream_end(
        self, role: SupervisedRole, streams: Streams, end: End
    ) -> list[Effect]:
        """Tell the learner of an actor's last stream how many steps that has produced."""
        message = {
            "kind": "actor_ended",
            "actor": role.spec.index,
            "incarnation": end.incarnation,
            "produced_steps": end.produced,
            "sequence": end.sequence,
        }
        learner = self._assignment.learner_of(streams, end.incarnation)
        return [] if learner is None else self._inform(message, learner)

    def _inform_of_actors_alive(self) -> list[Effect]:
        """Tell all learners how many actors are ready."""
        return self._inform({"kind": "actors", "alive": self.actors_alive})

    def _inform_of_given_up(self, role: SupervisedRole, rank: int | None = None) -> list[Effect]:
        """Tell learner ``rank``, or all, that the run continues without an expendable role."""
        return self._inform({"kind": "gone", "role": role.spec.role}, rank)

    def _inform(self, message: dict[str, Any], rank: int | None = None) -> list[Effect]:
        """Send ``message`` to the informed roles of learner ``rank``, or of all learners."""
        return [
            Send(name, message)
            for name, role in self._roles.items()
            if role.spec.informed and role.runs and rank in (None, role.spec.learner)
        ]


def _restart_note(
    text: str, role: SupervisedRole, failure: Failure, data: Mapping[str, Any]
) -> Note:
    """A note that the process of a role has ended by ``failure`` and is restarted."""
    return Note(
        text,
        "restart",
        name=role.name,
        data={**data, "cause": failure.cause or failure.message},
        incarnation=role.incarnation,
    )
