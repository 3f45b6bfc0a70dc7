"""One supervised process as the decisions know it.

Its life:   WAITING -> STARTING -> WORKING -> GONE   (-> WAITING, as a new incarnation)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.launch.effects import Failure
from penstock.launch.topology import RoleSpec

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0


class Life(Enum):
    """Where a worker stands."""

    WAITING = "waiting"
    STARTING = "starting"
    WORKING = "working"
    GONE = "gone"


@dataclass
class Worker:
    """``incarnation`` grows with every start, and when an actor is given to another learner."""

    spec: RoleSpec
    life: Life = Life.WAITING
    incarnation: int = 0
    since_s: float = 0.0  # of its present life; while WAITING, when to start it
    alive_s: float = 0.0  # last sign of life
    doomed_s: float | None = None  # hung: when to kill it
    attempts: int = 0  # restarts since it was last healthy
    barren: int = 0  # of these, in a row without a sample
    orphaned: bool = False  # a carrier whose learner has ended: what it says is of no use any more
    failure: Failure | None = None  # of this incarnation
    first_failure: Failure | None = None  # of the row

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def runs(self) -> bool:
        return self.life in (Life.STARTING, Life.WORKING)

    def next_delay_s(self) -> float:
        """Until it is started again: twice as long at every attempt."""
        delay_s: float = min(FIRST_DELAY_S * 2**self.attempts, LONGEST_DELAY_S)
        self.attempts += 1
        return delay_s

    def enter(self, life: Life, now_s: float) -> None:
        self.life, self.since_s = life, now_s
