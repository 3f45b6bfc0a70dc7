"""One supervised role in the decisions: its state, and when its crashes end the run.

Its life:   WAITING -> STARTING -> WORKING -> GONE   (-> WAITING, as a new incarnation)

A spare role is GONE from the start. It waits for its start when the run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.supervisor_messages import Effect, Failure, Note, RestartLimits
from penstock.profiling.status import Phase

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
SAVING = Phase.SAVING.name.lower()
SLOW_DISK = 10  # factor on the timeouts of a process that writes: a network disk may stall
SILENT_S = 10.0  # a step of an environment that takes longer is reported


class Life(Enum):
    """Stage in the life of a process."""

    WAITING = "waiting"
    STARTING = "starting"
    WORKING = "working"
    GONE = "gone"


@dataclass
class SupervisedRole:
    """State of a role. ``incarnation`` grows with every start, and when an actor is moved to
    another learner."""

    spec: RoleSpec
    life: Life = Life.WAITING
    incarnation: int = 0
    since_s: float = 0.0  # of its present life; while WAITING, when to start it
    alive_s: float = 0.0  # last sign of life
    told_s: float = 0.0  # the sign of life after which its silence was reported
    kill_at_s: float | None = None  # hung: when to kill it
    attempts: int = 0  # restarts since it was last healthy
    failures_without_progress: int = 0  # of these, in a row without a sample
    needed: bool = True  # whether it is replaced when it ends; a spare role is not, at first
    orphaned: bool = False  # a carrier whose learner has ended; its messages are ignored
    superseded: bool = False  # ends to be started again: from a checkpoint, at another address
    failure: Failure | None = None  # of this incarnation
    first_failure: Failure | None = None  # of the row

    def __post_init__(self) -> None:
        if self.spec.spare:
            self.life, self.needed = Life.GONE, False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def runs(self) -> bool:
        return self.life in (Life.STARTING, Life.WORKING)

    def next_delay_s(self) -> float:
        """Seconds until the restart; doubled at every attempt."""
        delay_s: float = min(FIRST_DELAY_S * 2**self.attempts, LONGEST_DELAY_S)
        self.attempts += 1
        return delay_s

    def silence(self, limits: RestartLimits, phase: str) -> tuple[float, str]:
        """Seconds without a sign of life after which it counts as hung, and the option that sets
        them."""
        timeout_s: float = getattr(limits, self._timeout_option)
        if phase == SAVING:
            return SLOW_DISK * timeout_s, f"{SLOW_DISK} times run.{self._timeout_option}"
        return timeout_s, f"run.{self._timeout_option}"

    @property
    def _timeout_option(self) -> str:
        return "start_timeout_s" if self.life is Life.STARTING else "hang_timeout_s"

    def hung(self, limit: str, phase: str) -> Failure:
        """The failure of a process without a sign of life for the ``limit``."""
        start = "while it was starting, " if self.life is Life.STARTING else ""
        cause = f"no sign of life for {limit}, {start}in phase {phase}"
        text = (
            f"{cause}; its stacks are in logs/{self.name}.stacks; if it is only slow, raise "
            f"run.{self._timeout_option}"
        )
        return Failure(self.name, text, cause=cause)

    def note_silence(self, phase: str, now_s: float, hang_timeout_s: float) -> list[Effect]:
        """Report once that a working actor has given no sign of life for long."""
        works = self.life is Life.WORKING and self.spec.stage is Stage.ACTORS
        silent_s = now_s - self.alive_s
        if not works or silent_s < SILENT_S or self.told_s == self.alive_s:
            return []
        self.told_s = self.alive_s
        text = f"{self.name}: no sign of life for {silent_s:.0f} s, in phase {phase}; penstock "
        return [
            Note(
                f"{text}stacks RUN shows where; at run.hang_timeout_s = {hang_timeout_s:g} s it is "
                "killed and restarted",
                name=self.name,
                incarnation=self.incarnation,
            )
        ]

    def enter(self, life: Life, now_s: float) -> None:
        self.life, self.since_s = life, now_s

    def wait(self, start_s: float) -> None:
        """Wait for the start of a new incarnation, to which nothing of the last one applies."""
        self.enter(Life.WAITING, start_s)
        self.incarnation += 1
        self.failure = self.kill_at_s = None
        self.orphaned = self.superseded = False


@dataclass
class Row:
    """Crashes of one role at the same place, with the same exception, each soon after its start or
    while no episode ended."""

    first: Failure
    episodes: int  # that the run had finished when the row began
    crashes: int = 0
    last_s: float = 0.0

    def goes_on(self, failure: Failure, healthy: bool, episodes: int) -> bool:
        same = _kind(self.first) == _kind(failure)
        return same and (not healthy or episodes == self.episodes)


class RestartPolicy:
    """Counts consecutive crashes: of a role that produced no sample in between, and of one that
    produces samples and always fails at the same place, soon or before any episode ends."""

    def __init__(self, max_restarts: int) -> None:
        self._most = max_restarts
        self._rows: dict[str, Row] = {}
        self._episodes = 0
        self._counted_s = 0.0

    def episodes(self, count: int | None, now_s: float) -> None:
        """Record the number of finished episodes; None if the learner does not count them."""
        if count is not None:
            self._episodes, self._counted_s = count, now_s

    def crashed(
        self, role: SupervisedRole, failure: Failure, healthy: bool, produced: bool, now_s: float
    ) -> Failure | None:
        """The failure to end the run with, if this crash exceeds the limit; otherwise None.

        Args:
            healthy: whether the role had worked for long.
            produced: whether it had produced samples.
        """
        if healthy:
            role.attempts = 0
        if healthy or produced:
            role.failures_without_progress, role.first_failure = 0, None
        role.first_failure = role.first_failure or failure
        role.failures_without_progress += 1
        same = self._same_again(role, failure, healthy, now_s)
        if role.failures_without_progress > self._most or failure.user:
            return role.first_failure
        return same

    def _same_again(
        self, role: SupervisedRole, failure: Failure, healthy: bool, now_s: float
    ) -> Failure | None:
        if role.spec.essential or not failure.place:
            self._rows.pop(role.name, None)
            return None
        row = self._rows.get(role.name)
        if row is None or not row.goes_on(failure, healthy, self._episodes):
            row = self._rows[role.name] = Row(failure, self._episodes)
        # Where it worked for long, an episode may have ended that is not counted yet.
        known = not healthy or self._counted_s >= row.last_s
        row.crashes += 1
        row.last_s = now_s
        return row.first if row.crashes > self._most and known else None


def _kind(failure: Failure) -> tuple[str, str]:
    return failure.message.partition(":")[0], failure.place
