"""How a run stops: why, in which order its processes end, and how long each may take.

    actors -> carriers -> learners -> server -> evaluator -> done

A stage ends when its processes have ended. At its deadline they are killed, so that a stop always
terminates. The evaluator plays the last weights in its stage if a limit of the run was reached; in
any other stop it ends at once. Like `decisions`, this is a pure function of events and their times.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import NamedTuple

from penstock.core.role_spec import Stage
from penstock.launch.supervised_role import Life, SupervisedRole
from penstock.launch.supervisor_messages import (
    LIMITS,
    OVER,
    Effect,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    grace_exceeded,
)

AGAIN_S = 2.0
"""Seconds between two attempts to kill a process."""
SHARES = {Stage.ACTORS: 0.2, Stage.CARRIERS: 0.6}
"""Shares of `run.grace_s` after which these stages end; the learners have until its end."""
LAST_EVALUATION_S = 600.0
"""Most seconds for the evaluation of the last weights."""


class StopReason(NamedTuple):
    """Why a run stops, as in `exit_reason` of its summary, and its exit code."""

    name: str
    exit_code: int


class StopCause(NamedTuple):
    """Why a run stops, for its log."""

    reason: str
    failure: Failure | None
    """The first failure, if any."""


class Shutdown:
    """The stop of one run, from its cause to the end of the last process."""

    def __init__(self, roles: Mapping[str, SupervisedRole], limits: RestartLimits) -> None:
        """``roles`` are all roles of the run by name, whose lives others keep up to date."""
        self._roles = roles
        self._learners = {
            role.spec.learner: role for role in roles.values() if role.spec.stage is Stage.LEARNER
        }
        self._limits = limits
        self.stage: Stage | None = None
        """The present stage; None before the stop begins."""
        self.outcome: Outcome | None = None
        """The result of the run, once all processes have ended."""
        self._began_s = 0.0
        self._deadline_s = 0.0  # end of the present stage
        self._signal_count = 0
        self._plays_last_weights = False  # whether the evaluator does, in its stage
        self._saver = 0  # rank of the learner that writes the final checkpoint
        self._reason = StopReason("", 0)
        self._signal_reason = StopReason("", 0)  # the reason if a signal ends the run
        self._failure: Failure | None = None  # the first one

    @property
    def begun(self) -> bool:
        """Whether the run is stopping or has ended."""
        return self.stage is not None

    @property
    def cause(self) -> StopCause:
        """Why the run stops."""
        return StopCause(self._reason.name, self._failure)

    def stop(self, reason: str, now_s: float, failure: Failure | None = None) -> list[Effect]:
        """Stop the run because a learner has reached a limit, or ends it after a ``failure``."""
        if failure is not None and not self.begun:
            self._failure = failure

        exit_code = 0
        if failure is not None:
            exit_code = 1
        elif reason == "terminated":
            # SIGTERM to all processes of a run may reach the learner before the supervisor.
            exit_code = 128 + signal.SIGTERM

        if failure is None and not self.begun and reason in LIMITS:
            self._plays_last_weights = True
        return self._begin(StopReason(reason, exit_code), now_s)

    def on_signal(self, signum: int, now_s: float, *, has_checkpoint: bool) -> list[Effect]:
        """Handle a signal to the supervisor: the first one stops the run, the second one kills all
        processes."""
        self._signal_count += 1
        reason = "interrupted" if signum == signal.SIGINT else "terminated"
        self._signal_reason = StopReason(reason, 128 + signum)
        if not self.begun:
            return self._begin(self._signal_reason, now_s)

        if self._signal_count == 1:
            note = Note("the run is stopping; another signal kills it")
            return [note, *self._end_evaluator(now_s)]

        for role in self._roles.values():
            role.failure = Failure.killed_by_user(role.name, has_checkpoint=has_checkpoint)
        return self._kill_all()

    def fail(self, failure: Failure, now_s: float) -> list[Effect]:
        """Stop the run because of a ``failure``; the learners still write a checkpoint."""
        self._record(failure)
        return self._begin(self._reason, now_s)

    def abandon(self, failure: Failure, now_s: float) -> list[Effect]:
        """End the run because of a ``failure``, without a checkpoint."""
        return self.fail(failure, now_s) + self._kill_all()

    def on_role_ended(
        self,
        role: SupervisedRole,
        failure: Failure,
        *,
        exit_code: int,
        was_ready: bool,
        replaceable: bool,
        now_s: float,
    ) -> list[Effect]:
        """Handle the end of a process while the run stops.

        Args:
            role: the role of the process.
            failure: how it has ended, if that was a failure.
            exit_code: of the process.
            was_ready: whether the role had been working.
            replaceable: whether other learners hold the state of the role.
            now_s: time of the end.
        """
        effects: list[Effect] = []
        # A superseded learner was killed on purpose, as its state was lost before the stop.
        holds_state = role.spec.essential and not role.superseded
        if holds_state and was_ready and exit_code != 0:
            at_fault = role.failure is not None and role.failure.fault
            if replaceable and not at_fault:
                text = f"{role.name}: {failure.message}; another learner writes the checkpoint"
                effects.append(Note(text))
            else:
                self._record(failure)

        if self.stage is Stage.LEARNER and role is self._learners.get(self._saver):
            effects += self._name_saver(saved=exit_code == 0)
        return effects + self.advance(now_s)

    def check_deadline(self, now_s: float) -> list[Effect]:
        """Kill the processes of the present stage that still run at its deadline."""
        if now_s < self._deadline_s:
            return []

        self._deadline_s = now_s + AGAIN_S
        late = self._running(self.stage)
        effects: list[Effect] = []
        for role in late:
            if role.spec.essential and not role.superseded:
                self._record(grace_exceeded(role.name, self._limits.grace_s))
            elif self._plays_last_weights and self.stage is Stage.EVALUATOR:
                text = (
                    f"{role.name} takes longer than {LAST_EVALUATION_S:g} s for the last weights "
                    "and is killed; penstock eval evaluates them"
                )
                effects.append(Note(text))
        return [*effects, *(Kill(role.name, signal.SIGKILL) for role in late)]

    def advance(self, now_s: float) -> list[Effect]:
        """Enter the next stage while no process runs in the present one; sets `outcome` after the
        last stage."""
        effects: list[Effect] = []
        while self.outcome is None and not self._running(self.stage):
            if self.stage is Stage.EVALUATOR:
                self.outcome = Outcome(self._reason.exit_code, self._reason.name, self._failure)
            elif self.stage is not None:
                effects += self._enter(Stage(self.stage + 1), now_s)
        return effects

    def _record(self, failure: Failure) -> None:
        """Let the first failure decide the reported reason and the exit code."""
        if self._failure is not None:
            return

        self._failure = failure
        if failure.ordered_by_user:
            self._reason = self._signal_reason
        elif failure.user:
            self._reason = StopReason("user_error", 2)
        else:
            self._reason = StopReason("fault", 1)

    def _begin(self, reason: StopReason, now_s: float) -> list[Effect]:
        """Begin the first stage, unless the run is stopping already."""
        if self.begun:
            return []

        self._reason = reason
        self._began_s = now_s
        for role in self._roles.values():
            if role.life is Life.WAITING:
                role.enter(Life.GONE, now_s)

        effects: list[Effect] = []
        if not self._plays_last_weights:
            effects = self._end_evaluator(now_s)
        return effects + self._enter(Stage.ACTORS, now_s) + self.advance(now_s)

    def _enter(self, stage: Stage, now_s: float) -> list[Effect]:
        """Enter a stage: set its deadline, and ask its processes to end."""
        self.stage = stage
        if stage is Stage.EVALUATOR:
            return self._enter_evaluation(now_s)

        self._deadline_s = self._deadline_of(stage, now_s)
        effects = self._name_saver() if stage is Stage.LEARNER else []
        for role in self._running(stage):
            effects += self._end_role(role, stage)
        return effects

    def _deadline_of(self, stage: Stage, now_s: float) -> float:
        """When the processes of a stage before the evaluation are killed."""
        grace_s = self._limits.grace_s
        if stage in SHARES:
            return now_s + SHARES[stage] * grace_s

        deadline_s = self._began_s + grace_s
        if stage is Stage.SERVER:
            # The learners may have used all of the grace.
            deadline_s = max(deadline_s, now_s + AGAIN_S)
        return deadline_s

    def _end_role(self, role: SupervisedRole, stage: Stage) -> list[Effect]:
        """Ask a process to end in its stage, or kill it if it has no state that could be lost."""
        # A process that is starting has no state yet. A shard waits for the learners of other
        # supervisors, which notice by its end that this run has failed.
        run_failed = self._reason.name in ("fault", "user_error")
        ends_other_runs = stage is Stage.SERVER and run_failed and role.spec.store is not None
        if role.life is Life.STARTING or ends_other_runs:
            return [Kill(role.name, signal.SIGKILL)]

        effects: list[Effect] = []
        # Connectors and learners pass on to actors that were started by hand that the run is over.
        informs_actors = stage in (Stage.CARRIERS, Stage.LEARNER)
        if informs_actors and self._reason.name in OVER and self._failure is None:
            effects.append(Send(role.name, {"kind": "over"}))
        if stage >= Stage.LEARNER:
            effects.append(Send(role.name, {"kind": "finish"}))
        effects.append(Kill(role.name, signal.SIGTERM))
        return effects

    def _enter_evaluation(self, now_s: float) -> list[Effect]:
        """Have the evaluator play the last checkpoint, which is now written, or end."""
        if not self._plays_last_weights:
            return self._end_evaluator(now_s)

        self._deadline_s = now_s + LAST_EVALUATION_S
        effects: list[Effect] = []
        for role in self._running(Stage.EVALUATOR):
            if role.life is Life.WORKING:
                effects.append(Send(role.name, {"kind": "finish"}))
            else:
                effects.append(Kill(role.name, signal.SIGKILL))
        return effects

    def _end_evaluator(self, now_s: float) -> list[Effect]:
        """End the evaluator, which holds no state, without an evaluation of the last weights."""
        self._plays_last_weights = False
        if self.stage is Stage.EVALUATOR:
            self._deadline_s = now_s + AGAIN_S
        return [
            Kill(role.name, signal.SIGTERM if role.life is Life.WORKING else signal.SIGKILL)
            for role in self._running(Stage.EVALUATOR)
        ]

    def _name_saver(self, *, saved: bool = False) -> list[Effect]:
        """Name the learner that writes the final checkpoint, for which the others wait.

        If that learner dies, this is called again and names the next one. ``saved`` tells the
        others that the checkpoint is written.
        """
        ranks = [rank for rank, learner in self._learners.items() if learner.life is Life.WORKING]
        if not saved:
            self._saver = min(ranks, default=0)
        if len(self._learners) == 1:
            return []

        message = {"kind": "saver", "rank": self._saver, "saved": saved}
        return [Send(self._learners[rank].name, message) for rank in ranks]

    def _running(self, stage: Stage | None) -> list[SupervisedRole]:
        """The roles of a stage that have a process."""
        return [role for role in self._roles.values() if role.runs and role.spec.stage == stage]

    def _kill_all(self) -> list[Effect]:
        return [Kill(role.name, signal.SIGKILL) for role in self._roles.values() if role.runs]
