"""The state of one supervised role, and the policy by which its crashes end the run.

The life of a role:

    WAITING -> STARTING -> WORKING -> GONE   (-> WAITING, as a new incarnation)

A spare role is GONE from the start. It waits for its start when the run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.core.role_spec import RoleSpec
from penstock.launch.supervisor_messages import Failure

FIRST_DELAY_S = 0.1
"""Seconds from a role's crash to its first restart; doubled at every further attempt."""
LONGEST_DELAY_S = 10.0
"""Most seconds from a crash to the restart."""


class Life(Enum):
    """Stage in the life of a process."""

    WAITING = "waiting"
    STARTING = "starting"
    WORKING = "working"
    GONE = "gone"


@dataclass
class SupervisedRole:
    """The state of one role, across all processes that are started for it."""

    spec: RoleSpec
    life: Life = Life.WAITING
    incarnation: int = 0
    """Number of the process; it grows with every start, and when an actor is moved to another
    learner."""
    since_s: float = 0.0
    """When the present life began; of a role that is WAITING, when it is to be started."""
    alive_s: float = 0.0
    """Time of the last sign of life."""
    reported_alive_s: float = 0.0
    """`alive_s` when a silence was last reported, so that each silence is reported once."""
    kill_at_s: float | None = None
    """When the process is killed because it hangs; None if it does not."""
    attempts: int = 0
    """Restarts since the role last worked for long."""
    failures_without_progress: int = 0
    """Consecutive crashes without a sample in between."""
    needed: bool = True
    """Whether the role is started again when its process ends. A spare role is not, at first."""
    orphaned: bool = False
    """Whether it carries data for a learner that has ended; its messages are then ignored."""
    superseded: bool = False
    """Whether its process was ordered to end and is to be replaced: the new one resumes from a
    checkpoint, or has another address."""
    failure: Failure | None = None
    """Why the present incarnation ends, where that is known before its end."""
    first_failure: Failure | None = None
    """The first of the consecutive crashes without a sample."""

    def __post_init__(self) -> None:
        if self.spec.spare:
            self.life = Life.GONE
            self.needed = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def runs(self) -> bool:
        """Whether the role has a process, as far as is known."""
        return self.life in (Life.STARTING, Life.WORKING)

    def next_delay_s(self) -> float:
        """Counts a restart and returns the seconds until then, which double at every attempt."""
        delay_s: float = min(FIRST_DELAY_S * 2**self.attempts, LONGEST_DELAY_S)
        self.attempts += 1
        return delay_s

    def enter(self, life: Life, now_s: float) -> None:
        """Begin a stage of the role's life."""
        self.life = life
        self.since_s = now_s

    def schedule_start(self, start_s: float) -> None:
        """Wait until ``start_s`` for a new incarnation, which inherits no state of the last one."""
        self.enter(Life.WAITING, start_s)
        self.incarnation += 1
        self.failure = None
        self.kill_at_s = None
        self.orphaned = False
        self.superseded = False


@dataclass
class CrashSeries:
    """Crashes of one role with the same exception at the same place in the user's code.

    Each of them came soon after a start of the role, or before the run finished another episode.
    """

    first: Failure
    episodes: int
    """Episodes that the run had finished when the series began."""
    crashes: int = 0
    last_s: float = 0.0
    """Time of the last crash."""

    def continues_with(self, failure: Failure, *, healthy: bool, episodes: int) -> bool:
        """Whether a crash is one more of the series; see `RestartPolicy.on_crash`."""
        same_error = _error_and_place(self.first) == _error_and_place(failure)
        return same_error and (not healthy or episodes == self.episodes)


class RestartPolicy:
    """Counts the crashes of every role, and decides when another one ends the run.

    A role may crash ``max_restarts`` times in a row in two ways: without producing a sample in
    between; or, if it does produce samples, with the same exception at the same place, each time
    soon after its start or before any episode ends.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._series: dict[str, CrashSeries] = {}  # the present one of each role, by name
        self._episodes = 0
        self._counted_s = 0.0  # time of the count in `_episodes`

    def on_episodes(self, count: int | None, now_s: float) -> None:
        """Record how many episodes the run has finished; None if the learner does not count."""
        if count is not None:
            self._episodes = count
            self._counted_s = now_s

    def on_crash(
        self,
        role: SupervisedRole,
        failure: Failure,
        *,
        healthy: bool,
        produced: bool,
        now_s: float,
    ) -> Failure | None:
        """Count a crash of ``role``.

        Args:
            role: the role, whose counters are updated.
            failure: the reason of this crash.
            healthy: whether the process had worked for long.
            produced: whether the process had produced samples.
            now_s: time of the crash.

        Returns:
            The failure to end the run with, if the crash exceeds a limit or the user must correct
            its cause; otherwise None.
        """
        if healthy:
            role.attempts = 0
        if healthy or produced:
            role.failures_without_progress = 0
            role.first_failure = None

        role.first_failure = role.first_failure or failure
        role.failures_without_progress += 1
        first_of_series = self._extend_series(role, failure, healthy=healthy, now_s=now_s)

        if failure.user or role.failures_without_progress > self._max_restarts:
            return role.first_failure
        return first_of_series

    def _extend_series(
        self, role: SupervisedRole, failure: Failure, *, healthy: bool, now_s: float
    ) -> Failure | None:
        """Count a crash at a known place; returns the first failure of a series that is too long.

        Essential roles have no series: other rules decide what their end means.
        """
        if role.spec.essential or not failure.place:
            self._series.pop(role.name, None)
            return None

        series = self._series.get(role.name)
        episodes = self._episodes
        if series is None or not series.continues_with(failure, healthy=healthy, episodes=episodes):
            series = CrashSeries(failure, episodes)
            self._series[role.name] = series

        # If the role worked for long, an episode may have ended that is not counted yet.
        count_is_current = not healthy or self._counted_s >= series.last_s
        series.crashes += 1
        series.last_s = now_s
        if count_is_current and series.crashes > self._max_restarts:
            return series.first
        return None


def _error_and_place(failure: Failure) -> tuple[str, str]:
    """The name of the exception, and where the user's code raised it."""
    exception = failure.message.partition(":")[0]
    return exception, failure.place
