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
from typing import ClassVar, NamedTuple

from penstock.configs.sections import LearnerConfig

MAX_LAG = 1 << 16  # the histograms' last bin


class PulledParameters(NamedTuple):
    """How new the parameters are that a worker was given."""

    version: int
    """Updates of the parameters."""
    includes: int | None
    """They have each worker's pushes of clocks below this; None before the first were given."""


_NONE_PULLED = PulledParameters(version=0, includes=None)


@dataclass
class WorkerClock:
    """A living worker."""

    clock: int
    """Number of its pushes, from that of the slowest when it joined."""
    parameters: PulledParameters = _NONE_PULLED
    """Those that it works with, or has worked with last."""
    working: bool = False
    """Whether it has gone and not pushed yet."""
    ahead: PulledParameters | None = None
    """The parameters that it has for the step after its next push, if it has asked ahead."""


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
        self._begin(self.workers[worker], self._newest)

    def go_ahead(self, worker: int) -> None:
        """Note that a worker that `may_go_ahead` was given the parameters of ``version``."""
        self.workers[worker].ahead = self._newest

    def go_again(self, worker: int) -> bool:
        """Let a worker go with the parameters that it has, if they are new enough.

        Returns whether it works now.
        """
        state = self.workers[worker]
        if self.may_go_again(worker):
            self._begin(state, state.parameters)
        return state.working

    @property
    def _newest(self) -> PulledParameters:
        """The current parameters, which have each worker's pushes before the slowest's clock."""
        return PulledParameters(self.version, includes=self.slowest)

    def _begin(self, state: WorkerClock, parameters: PulledParameters) -> None:
        """Note that a worker works with ``parameters`` now."""
        self.widest = max(self.widest, state.clock - self.slowest)
        state.parameters = parameters
        state.working = True
        state.ahead = None

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
        lag = self.version - state.parameters.version
        counts = self._take(worker, samples)

        if state.ahead is not None:
            self._begin(state, state.ahead)
        if samples:
            histogram = self.lag if counts else self.late
            histogram[min(lag, MAX_LAG)] += 1
        return lag if counts else None

    def finish_step(self, *, updated: bool) -> None:
        """Note that the step that was `due` is done.

        ``updated`` tells whether it changed the parameters.
        """
        if updated:
            self.version += 1
        self._begin_step()

    @abstractmethod
    def may_go(self, worker: int) -> bool:
        """Whether a waiting worker may go now."""

    def may_go_ahead(self, worker: int) -> bool:
        """Whether a worker that works may have the parameters of its next step now."""
        return False

    def may_go_again(self, worker: int) -> bool:
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
    def _take(self, worker: int, samples: int) -> bool:
        """Count the newest push, over ``samples``; returns whether its gradient is taken."""

    @abstractmethod
    def _begin_step(self) -> None:
        """Forget the pushes of the step that is done."""


class Bounded(ServerPace):
    """Every push is an update; no worker is more than ``staleness`` clocks ahead of the slowest.

    ``staleness`` None is no bound. A worker that has pushed and waits is ahead by one more at most.
    """

    single_push = True

    def __init__(self, staleness: int | None, version: int = 0) -> None:
        super().__init__(version)
        self._staleness = staleness
        self._has_push = False  # whether there was a push since the last update

    def may_go(self, worker: int) -> bool:
        if self._staleness is None:
            return True
        return self.workers[worker].clock - self.slowest <= self._staleness

    def may_go_ahead(self, worker: int) -> bool:
        if self._staleness is None:
            return True
        next_clock = self.workers[worker].clock + 1
        return next_clock - self.slowest <= self._staleness

    def may_go_again(self, worker: int) -> bool:
        state = self.workers[worker]
        includes = state.parameters.includes
        if self._staleness is None or includes is None or state.working:
            return False
        return state.clock - includes <= self._staleness

    def spare(self, worker: int) -> int:
        """Returns the further steps that the bound allows with the newest parameters."""
        # The first step with the newest parameters is at the present clock. If the worker has asked
        # ahead, they are for the step after that.
        state = self.workers[worker]
        if state.ahead is None:
            first_clock = state.clock
            includes = state.parameters.includes
        else:
            first_clock = state.clock + 1
            includes = state.ahead.includes

        if self._staleness is None or includes is None:
            return 0
        last_clock = includes + self._staleness
        return max(0, last_clock - first_clock)

    def due(self) -> bool:
        return self._has_push

    def _take(self, worker: int, samples: int) -> bool:
        self._has_push = True
        return True

    def _begin_step(self) -> None:
        self._has_push = False


class Backup(ServerPace):
    """A step is the first ``most_gradients`` gradients of workers that went at that step.

    It has fewer gradients where fewer workers live or have samples. Later pushes are discarded, and
    their workers proceed with the current step.
    """

    single_push = False

    def __init__(self, most_gradients: int, version: int = 0) -> None:
        super().__init__(version)
        self._most_gradients = most_gradients
        self._step = 0
        self._went_at: dict[int, int] = {}  # the step at which each worker went last
        # Workers that have pushed in this step, with samples and without.
        self._pushed: set[int] = set()
        self._pushed_nothing: set[int] = set()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._went_at.pop(worker, None)

    def go(self, worker: int) -> None:
        super().go(worker)
        self._went_at[worker] = self._step

    def may_go(self, worker: int) -> bool:
        return worker not in self._pushed and worker not in self._pushed_nothing

    def due(self) -> bool:
        if not self._pushed and not self._pushed_nothing:
            return False
        # A worker that has pushed and died counts; one that lives may push, unless it has no
        # samples.
        possible = self._pushed | (self.workers.keys() - self._pushed_nothing)
        return len(self._pushed) >= min(self._most_gradients, len(possible))

    def _take(self, worker: int, samples: int) -> bool:
        if self._went_at[worker] != self._step:
            return False
        pushes = self._pushed if samples else self._pushed_nothing
        pushes.add(worker)
        return True

    def _begin_step(self) -> None:
        self._step += 1
        self._pushed.clear()
        self._pushed_nothing.clear()


def make_server_pace(cfg: LearnerConfig, version: int = 0) -> ServerPace:
    """Make the machine of `learner.pace`, for a pace that has a parameter server.

    ``version`` counts the updates of the parameters so far.
    """
    if cfg.pace == "backup":
        most_gradients = max(1, cfg.most_count - cfg.spare)
        return Backup(most_gradients, version)
    staleness = None if cfg.pace == "tap" else cfg.staleness
    return Bounded(staleness, version)
