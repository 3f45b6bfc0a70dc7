"""Which worker may proceed, and whether a gradient counts: one pure state machine per pace.

A worker *goes* (is given the current parameters), works, *pushes*, and asks to go again. Its clock
counts its pushes. A machine holds no gradients and does no input or output. Its owner calls

    may_go(worker), go(worker)  whether a worker may go, and that it goes
    push(worker, samples)       whether the gradient counts, and how old it is
    due(), finish_step(...)     whether the pushes so far make an update of the parameters now

and repeats `due` and `may_go` after every push and after every `leave`: workers that waited for a
dead one proceed at once. A worker that joins starts at the clock of the slowest, so that neither
waits for the other.

*Staleness* of a gradient: updates of the parameters between the version that it was computed with
and its push. With `Bounded` a worker need not wait between two steps for parameters:

- It may ask *ahead*, while it works, and get parameters for the step after its next push. They do
  not have that push, so they are one clock older than those it would get afterwards.
- It may go *again* with the parameters that it has, for as many steps as the bound allows: they
  have all pushes of clocks before `PulledParameters.includes`. So reads a worker of the paper from
  its cache.

The bound is the same for both: a step at clock ``c`` needs parameters that include the pushes of
all workers up to clock ``c - s``.

- `Bounded`: stale synchronous parallel, Ho et al. 2013, "More Effective Distributed ML via a Stale
  Synchronous Parallel Parameter Server": the slowest and the fastest worker are at most ``s``
  clocks apart, else the fastest waits. ``s = 0`` is a barrier, no bound is totally asynchronous.
  The mirror clock of Gaia's approximate synchronous parallel (Hsieh et al. 2017) is the same bound.
- `Backup`: Chen et al. 2016, "Revisiting Distributed Synchronous SGD" (arXiv 1604.00981): each step
  takes the first K gradients of its own step, and drops later ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from penstock.configs.sections import LearnerConfig

MAX_LAG = 1 << 16  # the histograms' last bin


@dataclass
class WorkerClock:
    """A living worker."""

    clock: int
    pulled: int = 0
    """The version of its parameters."""
    includes: int | None = None
    """Its parameters have each worker's pushes of clocks below this; None before the first."""
    working: bool = False
    ahead: tuple[int, int] | None = None
    """``pulled`` and ``includes`` of the parameters that it has for the step after its next push.
    """


class ServerPace(ABC):
    """The common part of all paces. ``version`` counts updates of the parameters."""

    single_push: ClassVar[bool]
    """Whether each push is a separate update."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.workers: dict[int, WorkerClock] = {}
        self.lag: Counter[int] = Counter()
        """Gradients applied, by staleness."""
        self.late: Counter[int] = Counter()
        """Gradients discarded, by staleness."""
        self.widest = 0
        """The largest lead of a worker over the slowest when it went, in clocks."""

    @property
    def slowest(self) -> int:
        """Clock of the slowest living worker; 0 where there is none."""
        return min((worker.clock for worker in self.workers.values()), default=0)

    def join(self, worker: int, clock: int | None = None) -> None:
        """Add a worker, whose number no worker had before.

        Args:
            worker: its number.
            clock: where it starts; None: at the clock of the slowest.
        """
        self.workers[worker] = WorkerClock(self.slowest if clock is None else clock)

    def leave(self, worker: int) -> None:
        """Remove a worker that has died or left."""
        self.workers.pop(worker, None)

    def go(self, worker: int) -> None:
        """Note that a worker that `may_go` was given the parameters of ``version``."""
        self._begin(self.workers[worker], self.version, self.slowest)

    def go_ahead(self, worker: int) -> None:
        """Note that a worker that `may_go_ahead` was given the parameters of ``version``."""
        self.workers[worker].ahead = self.version, self.slowest

    def keep(self, worker: int) -> bool:
        """Let a worker go with the parameters that it has; False where they are too old."""
        state = self.workers[worker]
        if self.may_keep(worker):
            self._begin(state, state.pulled, state.includes)
        return state.working

    def _begin(self, state: WorkerClock, pulled: int, includes: int | None) -> None:
        self.widest = max(self.widest, state.clock - self.slowest)
        state.pulled, state.includes = pulled, includes
        state.working, state.ahead = True, None

    def push(self, worker: int, samples: int) -> int | None:
        """Take a gradient. Only a worker that has gone may push, and once.

        Args:
            worker: whose gradient it is.
            samples: over which it is summed; 0 for no gradient.

        Returns:
            Its staleness in updates; None to discard it.
        """
        state = self.workers[worker]
        state.working = False
        state.clock += 1
        lag = self.version - state.pulled
        counts = self._counts(worker, samples)
        if state.ahead is not None:
            self._begin(state, *state.ahead)
        if samples:
            (self.lag if counts else self.late)[min(lag, MAX_LAG)] += 1
        return lag if counts else None

    def stepped(self, updated: bool) -> None:
        """Note that the `due` step is done; ``updated`` where it changed the parameters."""
        self.version += updated
        self._stepped()

    @abstractmethod
    def may_go(self, worker: int) -> bool:
        """Whether a waiting worker may go now."""

    def may_go_ahead(self, worker: int) -> bool:
        """Whether a worker that works may have the parameters of its next step now."""
        return False

    def may_keep(self, worker: int) -> bool:
        """Whether a worker that has pushed may go once more with the parameters that it has."""
        return False

    def spare(self, worker: int) -> int:
        """Returns the further steps, after the next one, for which its newest parameters will
        do."""
        return 0

    @abstractmethod
    def due(self) -> bool:
        """Whether the gradients taken since the last step must be applied now, as one update."""

    @abstractmethod
    def _counts(self, worker: int, samples: int) -> bool:
        """Whether the newest push, over ``samples``, is taken."""

    @abstractmethod
    def _stepped(self) -> None: ...


class Bounded(ServerPace):
    """Every push is an update; no worker is more than ``staleness`` clocks ahead of the slowest.

    ``staleness`` None is no bound. A worker that has pushed and waits is ahead by one more at most.
    """

    single_push = True

    def __init__(self, staleness: int | None, version: int = 0) -> None:
        super().__init__(version)
        self._staleness = staleness
        self._taken = False

    def may_go(self, worker: int) -> bool:
        if self._staleness is None:
            return True
        return self.workers[worker].clock - self.slowest <= self._staleness

    def may_go_ahead(self, worker: int) -> bool:
        if self._staleness is None:
            return True
        return self.workers[worker].clock + 1 - self.slowest <= self._staleness

    def may_keep(self, worker: int) -> bool:
        state = self.workers[worker]
        if self._staleness is None or state.includes is None or state.working:
            return False
        return state.clock - state.includes <= self._staleness

    def spare(self, worker: int) -> int:
        state = self.workers[worker]
        first, includes = state.clock, state.includes
        if state.ahead is not None:
            first, includes = state.clock + 1, state.ahead[1]
        if self._staleness is None or includes is None:
            return 0
        return max(0, includes + self._staleness - first)

    def due(self) -> bool:
        return self._taken

    def _counts(self, worker: int, samples: int) -> bool:
        self._taken = True
        return True

    def _stepped(self) -> None:
        self._taken = False


class Backup(ServerPace):
    """A step is the first ``wanted`` gradients of workers that went at that step.

    It has fewer gradients where fewer workers live or have samples. Later pushes are discarded, and
    their workers proceed with the current step.
    """

    single_push = False

    def __init__(self, wanted: int, version: int = 0) -> None:
        super().__init__(version)
        self._wanted = wanted
        self._step = 0
        self._began: dict[int, int] = {}  # the step at which a worker went
        self._arrived: set[int] = set()
        self._empty: set[int] = set()  # pushed no samples in this step

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._began.pop(worker, None)

    def go(self, worker: int) -> None:
        super().go(worker)
        self._began[worker] = self._step

    def may_go(self, worker: int) -> bool:
        return worker not in self._arrived | self._empty

    def due(self) -> bool:
        could_come = len(self.workers.keys() - self._empty | self._arrived)
        has_pushes = bool(self._arrived or self._empty)
        return has_pushes and len(self._arrived) >= min(self._wanted, could_come)

    def _counts(self, worker: int, samples: int) -> bool:
        if self._began[worker] != self._step:
            return False
        (self._arrived if samples else self._empty).add(worker)
        return True

    def _stepped(self) -> None:
        self._step += 1
        self._arrived.clear()
        self._empty.clear()


def make_server_pace(cfg: LearnerConfig, version: int = 0) -> ServerPace:
    """Make the machine of `learner.pace`, for a pace that has a parameter server.

    ``version`` counts the updates of the parameters so far.
    """
    if cfg.pace == "backup":
        return Backup(max(1, cfg.most_count - cfg.spare), version)
    return Bounded(None if cfg.pace == "tap" else cfg.staleness, version)
