"""What a supervisor reports about a run to its sinks: events, metrics, the count of steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.core.control import Message
from penstock.core.interfaces import Handle, MetricSink, RoleStatus, RunEvent
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.shutdown import StopCause
from penstock.launch.supervisor_messages import End, describe_exit, signal_name
from penstock.monitor.ranks import Metrics, RankPhase, Ranks, whereabouts
from penstock.profiling.status import Phase

COUNTED = {  # counters by reason in the metrics: the kind of event when one grows, and its text
    "dropped": ("drop", "agent steps were dropped: {}"),
    "lost": ("lost", "agent steps were lost: {}"),
    "rejected": ("rejected", "messages were rejected: {}"),
}
STEP_COUNTS = ("dropped", "lost")
"""The counters of `COUNTED` that are terms of the accounting."""
WAITING = Phase.WAITING.name.lower()
REDUCING = Phase.REDUCING.name.lower()


class RunReport:
    """Merges what the roles of a run report, and passes it on to the sinks.

    It also counts the steps of processes that have ended, so that the accounting is known as far as
    possible if no learner sends the final one.
    """

    def __init__(self, sinks: MetricSink, learners: Sequence[RoleSpec]) -> None:
        """``learners`` are all learners of the run, spare ones included."""
        first_ranks = [spec.learner for spec in learners if not spec.spare]
        self._sinks = sinks
        self.has_learner = len(learners) > 0
        self.has_several_learners = len(learners) > 1
        self.ranks = Ranks(first_ranks, several=self.has_several_learners)
        self.began = False
        """Whether an unroll was played or trained on by a process that has ended."""
        self._stop_logged = False
        self._has_final_report = False  # whether a learner has sent its last report
        self._step_counts: dict[str, dict[str, int]] = {}  # `STEP_COUNTS` of the last metrics
        self._logged_counts: dict[tuple[str, str], int] = {}  # keys: counter of `COUNTED`, reason
        self._truncated_logs: set[str] = set()  # roles whose logs lack a part of their output
        # Final counters of processes that have ended: those of actors, and two of learners.
        self._played_steps = 0
        self._produced_steps = 0
        self._trained_steps = 0

    # Events.

    def event(self, event: RunEvent) -> bool:
        """Pass on an event; returns whether a callback ends the run."""
        return bool(self._sinks.event(event))

    def log(self, handle: Handle, kind: str, text: str, **data: Any) -> None:
        """Report an event of a process."""
        self.event(_event_of(handle, kind, text, data))

    def log_result(self, handle: Handle, kind: str, message: Message) -> bool:
        """Report an "evaluation" or a "checkpoint" of a role; returns whether a callback ends the
        run."""
        text = ""
        data: Message = {}
        if kind == "checkpoint":
            text = f"{message['folder']} was written"
            data = {key: message[key] for key in ("trained_steps", "learner_steps", "best")}
        return self.event(replace(_event_of(handle, kind, text, data), result=message))

    def log_reported(self, handle: Handle, message: Message) -> None:
        """Report a "note" or an "event" that a role has sent."""
        kind = str(message.get("event", "note"))
        text = str(message.get("text"))
        event = _event_of(handle, kind, text, message.get("data") or {})
        self.event(replace(event, reported=True))

    def log_stop(self, cause: StopCause) -> None:
        """Report once why the run stops."""
        if self._stop_logged:
            return

        self._stop_logged = True
        text = f"the run stops: {cause.reason}"
        role = None
        if cause.failure is not None:
            role = cause.failure.name
            text += f"; {role}: {cause.failure.describe()}"
        self.event(RunEvent("stop", text, role, data={"reason": cause.reason}))

    def log_exit(self, handle: Handle, end: End, *, expected: bool) -> None:
        """Report the end of a process, and whether the run had ``expected`` it."""
        code = end.exit_code
        data = {
            "exit_code": code if code >= 0 else None,
            "signal": signal_name(-code) if code < 0 else None,
            "expected": expected,
        }
        text = "ended as requested" if expected else describe_exit(code, end.out_of_memory)
        role = handle.spec.name
        self.event(RunEvent("exit", text, role=role, incarnation=end.incarnation, data=data))

    def log_group_failure(self, epoch: int, message: str, learners: Sequence[Handle]) -> None:
        """Report that the group ``epoch`` of learners has failed, and what each learner does."""
        phases = {handle.spec.learner: _rank_phase(handle.status()) for handle in learners}
        text = f"group {epoch} of learners: {message}; {whereabouts(phases)}"
        self.event(RunEvent("note", text, data={"epoch": epoch}))

    def log_missing_output(self, handle: Handle, log: object) -> None:
        """Report once that a part of a role's output is missing in its ``log``."""
        name = handle.spec.name
        if name in self._truncated_logs:
            return
        self._truncated_logs.add(name)
        self.log(
            handle,
            "note",
            f"{name}: a part of its output is missing in {log}, which contains the reason; the run "
            "continues",
        )

    # Metrics.

    def merge(self, rank: int, message: Metrics, *, final: bool) -> Metrics | None:
        """Add the figures of the learner ``rank``; returns those of the run when they are whole."""
        if final:
            return self.ranks.final(rank, message)
        return self.ranks.metrics(rank, message)

    def metrics(
        self, metrics: Metrics, supervisor_metrics: Mapping[str, Any], *, final: bool
    ) -> bool:
        """Pass on the merged ``metrics`` of the learners with those that only the supervisor knows.

        Returns:
            Whether a callback ends the run.
        """
        self._log_grown_counts(metrics)
        self._step_counts = {key: metrics[key] for key in STEP_COUNTS if key in metrics}
        self._has_final_report = self._has_final_report or final
        return bool(self._sinks.metrics({**supervisor_metrics, **metrics}, final=final))

    def _log_grown_counts(self, metrics: Metrics) -> None:
        """Report an event for each count of dropped, lost or rejected data that has grown."""
        for counter, (kind, text) in COUNTED.items():
            for reason, total in (metrics.get(counter) or {}).items():
                if total > self._logged_counts.get((counter, reason), 0):
                    data = {"reason": reason, "total": total}
                    self.event(RunEvent(kind, text.format(reason), data=data))
                self._logged_counts[counter, reason] = total

    # Accounting.

    def add_progress(self, spec: RoleSpec, status: RoleStatus) -> None:
        """Add the final counters of a process that has ended to the run's accounting."""
        if spec.stage is Stage.ACTORS:
            self._played_steps += status.played_steps
        elif spec.stage is Stage.LEARNER:
            self._produced_steps += status.produced_steps
            self._trained_steps += status.trained_steps
        else:
            return
        if status.produced_steps > 0 or status.trained_steps > 0:
            self.began = True

    def add_to_ranks(self, spec: RoleSpec, status: RoleStatus) -> None:
        """Add the final counters of a process that has ended to the merged metrics of the learners.

        If the final metrics were reported before, they are reported again with these counters.
        """
        if spec.stage is Stage.ACTORS:
            self.ranks.actor_ended(status.played_steps)
        elif spec.stage is Stage.LEARNER:
            merged = self.ranks.learner_ended(
                spec.learner, status.produced_steps, status.trained_steps
            )
            if merged is not None:
                self._sinks.metrics(merged, final=True)

    def report_accounting(self) -> None:
        """Report the known part of the accounting if no learner has sent the final one.

        The status pages of the processes contain the produced and trained steps, the last metrics
        the dropped and lost ones. The steps in flight are unknown.
        """
        if self._has_final_report or not self.began or not self.has_learner:
            return

        counts = {key: self._step_counts.get(key, {}) for key in STEP_COUNTS}
        booked_steps = self._trained_steps
        for count_by_reason in counts.values():
            booked_steps += sum(count_by_reason.values())
        accounting = {
            "produced": max(self._played_steps, self._produced_steps, booked_steps),
            "trained": self._trained_steps,
            **counts,
            "in_flight": None,
        }
        self._sinks.metrics({"accounting": accounting, "accounting_complete": False}, final=True)


def _event_of(handle: Handle, kind: str, text: str, data: Message) -> RunEvent:
    """An event of a process, with the incarnation of its present stream."""
    incarnation = handle.status().incarnation
    return RunEvent(kind, text, role=handle.spec.name, incarnation=incarnation, data=data)


def _rank_phase(status: RoleStatus) -> RankPhase:
    """The phase of a learner and its duration."""
    seconds = time.monotonic() - status.phase_s if status.phase_s else 0.0
    if status.phase == REDUCING:
        return RankPhase("all-reduce", seconds, status.reduction)
    if status.phase == WAITING:
        return RankPhase("wait_data", seconds)
    return RankPhase(status.phase, seconds)
