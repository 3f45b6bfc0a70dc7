"""Detects processes that give no sign of life, by the heartbeats that their engine reports.

A process that is silent for longer than its timeout is asked to write the stacks of its threads,
and is killed `DUMP_S` later. Like `decisions`, this is a pure function of events and their times.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from penstock.core.role_spec import Stage
from penstock.launch.supervised_role import Life, SupervisedRole
from penstock.launch.supervisor_messages import Effect, Failure, Kill, Note, RestartLimits
from penstock.profiling.status import Phase

SAVING = Phase.SAVING.name.lower()
SLOW_DISK = 10
"""Factor on the timeouts of a process that writes a checkpoint: a network disk may stall."""
SILENT_S = 10.0
"""An actor that works and is silent for so many seconds is reported: one of its environments' steps
takes long."""
DUMP_S = 0.5
"""Seconds that a hung process gets to write its stacks before it is killed."""
BLINK_S = 5.0
"""After a pause of the supervisor itself that is this long, all processes count as just seen."""


class HangWatch:
    """Watches the heartbeats of all roles of a run."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._last_record_s: float | None = None

    def record_heartbeats(
        self, roles: Iterable[SupervisedRole], heartbeats: Mapping[str, float], now_s: float
    ) -> None:
        """Record the last signs of life; ``heartbeats`` are their times by the name of the role."""
        paused = self._last_record_s is not None and now_s - self._last_record_s > BLINK_S
        self._last_record_s = now_s

        for role in roles:
            alive_s = now_s if paused else heartbeats.get(role.name, 0.0)
            role.alive_s = max(role.alive_s, alive_s)

    def check(self, role: SupervisedRole, phase: str, now_s: float) -> list[Effect]:
        """Report a role that is silent, and end one that hangs.

        Args:
            role: any role.
            phase: its present phase, a `profiling.status.Phase` in lower case.
            now_s: the present time.
        """
        if not role.runs:
            return []

        # A process that was found to hang has time to write its stacks.
        if role.kill_at_s is not None:
            if now_s < role.kill_at_s:
                return []
            return [Kill(role.name, signal.SIGKILL)]

        option = _timeout_option(role)
        timeout_s: float = getattr(self._limits, option)
        limit = f"run.{option}"
        if phase == SAVING:
            timeout_s *= SLOW_DISK
            limit = f"{SLOW_DISK} times {limit}"

        if now_s - role.alive_s < timeout_s:
            return _report_silence(role, phase, now_s, timeout_s)

        role.kill_at_s = now_s + DUMP_S
        role.failure = _hang_failure(role, f"{limit} = {timeout_s:g} s", phase)
        return [Kill(role.name, signal.SIGUSR1, role.failure.message)]


def _timeout_option(role: SupervisedRole) -> str:
    """The field of `RestartLimits` that limits the silence of a role."""
    return "start_timeout_s" if role.life is Life.STARTING else "hang_timeout_s"


def _hang_failure(role: SupervisedRole, limit: str, phase: str) -> Failure:
    """The failure of a process without a sign of life for the ``limit``."""
    while_starting = "while it was starting, " if role.life is Life.STARTING else ""
    cause = f"no sign of life for {limit}, {while_starting}in phase {phase}"
    text = (
        f"{cause}; its stacks are in logs/{role.name}.stacks; if it is only slow, raise "
        f"run.{_timeout_option(role)}"
    )
    return Failure(role.name, text, cause=cause)


def _report_silence(
    role: SupervisedRole, phase: str, now_s: float, timeout_s: float
) -> list[Effect]:
    """Report a working actor that has been silent for `SILENT_S`, once for each silence."""
    works = role.life is Life.WORKING and role.spec.stage is Stage.ACTORS
    silent_s = now_s - role.alive_s
    if not works or silent_s < SILENT_S or role.reported_alive_s == role.alive_s:
        return []

    role.reported_alive_s = role.alive_s
    text = (
        f"{role.name}: no sign of life for {silent_s:.0f} s, in phase {phase}; penstock stacks RUN "
        f"shows where; at run.hang_timeout_s = {timeout_s:g} s it is killed and restarted"
    )
    return [Note(text, name=role.name, incarnation=role.incarnation)]
