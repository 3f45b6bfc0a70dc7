"""The progress of a run: counters, returns, policy lag, and when the run ends.

The counters are those of all learners of the run together, and equal on each: a learner's own
growth (`growth`) counts once all have agreed on the sum (`commit`). Policy lag and rates are a
learner's own, over the interval between two calls of `interval`. The rest survives a resume through
`state_dict`.

`Progress` has the counters. It is composed of a `TrainingClock`, the `ReturnWindow` of the last
episodes, the `ReturnGoal` of `stop.return`, a `LagHistogram` and this learner's `LocalCounts`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.slots import UnrollSummary
from penstock.configs.sections import StopConfig
from penstock.core.params import Floats
from penstock.league.results import GameCounts
from penstock.learner.latency_histogram import LatencyHistogram
from penstock.learner.recorded_means import RecordedMeans
from penstock.profiling.histogram import latency_figures
from penstock.profiling.ledger import TimeLedger, by_learner_part, shares_between
from penstock.replay.accounting import Accounting

# The last bin of the histogram of policy lag.
MAX_LAG = 1 << 16
# The lag of so many batches at most is counted together, with warm caches.
UNCOUNTED = 64
# With a larger share of its time with data, a learner's rate in that time is shown as its ceiling.
LEAST_FED = 0.01
# Returns and lengths are means over the last hundred episodes, of environments that explore alike.
EPISODES = 100
# Counters of the run in a checkpoint.
COUNTERS = ("env_steps", "trained_steps", "learner_steps", "episodes", "version")
# Counters that each learner counts for itself, and that all add up.
BOOKED = ("env_steps", "trained_steps", "episodes")
# Values of `Progress.growth`: the counters, then a `WindowSums`.
GROWTH = len(BOOKED) + 3


class WindowSums(NamedTuple):
    """Sums over the last episodes, of one learner or of all."""

    returns: float
    lengths: float
    episodes: float


class ReturnWindow:
    """The last episodes of this learner, and the means over those of all learners."""

    def __init__(self) -> None:
        self._most = EPISODES
        """The episodes of all learners in the window."""
        self.returns: deque[float] = deque(maxlen=EPISODES)
        """Raw returns of this learner's last episodes."""
        self.lengths: deque[int] = deque(maxlen=EPISODES)
        """Lengths of the same episodes, in agent steps."""
        self.local = WindowSums(0.0, 0.0, 0)
        """Sums over this learner's episodes, which are sent to the others."""
        self.agreed = WindowSums(0.0, 0.0, 0.0)
        """Sums over the episodes of all learners, by their last messages."""

    def add(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Add episodes of this learner, the newest last."""
        self.returns.extend(returns)
        self.lengths.extend(lengths)
        self._sum_up()

    def agree(self, sums: WindowSums) -> None:
        """Take the sums over all learners' windows."""
        self.agreed = sums

    def limit(self, most: int) -> None:
        """Shorten the window to ``most`` episodes of all learners; called before `share`."""
        self._most = most
        self.share(learners=1)

    def share(self, learners: int) -> None:
        """Shorten the window to this learner's share of its episodes among ``learners``."""
        most = -(-self._most // learners)
        self.returns = deque(self.returns, most)
        self.lengths = deque(self.lengths, most)
        self._sum_up()

    @property
    def is_full(self) -> bool:
        """Whether there are as many episodes as the window holds: the mean of fewer may be luck."""
        return self.agreed.episodes >= self._most

    @property
    def mean(self) -> float | None:
        """Mean raw return of all learners' last episodes; None before the first one."""
        return self.agreed.returns / self.agreed.episodes if self.agreed.episodes else None

    @property
    def length_mean(self) -> float | None:
        """Mean length of the same episodes, in agent steps; None before the first one."""
        return self.agreed.lengths / self.agreed.episodes if self.agreed.episodes else None

    def _sum_up(self) -> None:
        self.local = WindowSums(sum(self.returns), sum(self.lengths), len(self.returns))


class TrainingClock:
    """Seconds of training so far: since the first unroll began, across resumes."""

    def __init__(self) -> None:
        self._made_s = time.monotonic()
        """When this process was able to train."""
        self._started_s: float | None = None
        """When its first unroll began; None before that."""
        self._previous_s = 0.0
        """Seconds of training before this process began."""

    @property
    def now_s(self) -> float:
        if self._started_s is None:
            return self._previous_s
        return self._previous_s + time.monotonic() - self._started_s

    @property
    def runs(self) -> bool:
        """Whether the first unroll has begun."""
        return self._started_s is not None

    def start(self, at_s: float) -> None:
        """Start at ``at_s`` (CLOCK_MONOTONIC, seconds), but not before this clock was made.

        That limit keeps a remote actor's clock from mattering.
        """
        self._started_s = max(at_s, self._made_s)

    def resume(self, time_s: float) -> None:
        """Continue from ``time_s`` seconds of training, unless this process trains already."""
        if not self.runs:
            self._previous_s = time_s


class ReturnGoal:
    """Whether the run has reached `stop.return`, in training or, if needed, by an evaluation.

    Where the policy plays several sides of a game, its returns in training say nothing of its
    strength. There the last evaluation takes their place.
    """

    def __init__(self, stop: StopConfig, returns: ReturnWindow, clock: TrainingClock) -> None:
        """``returns`` and ``clock`` are those of the run's progress."""
        self._return = stop.return_
        self._hold_s = stop.hold_s
        self._returns = returns
        self._clock = clock
        self.needs_confirmation = False
        """Whether an evaluation must confirm the return; `learner.evaluation_requests` sets it."""
        self.by_evaluations = False
        """Whether evaluations take the place of returns in training; it is set there too."""
        self.evaluated_mean: float | None = None
        """Mean return of the last evaluation, in the better way to play."""
        self.reached_at_s: float | None = None
        """Seconds of training when the return in training first reached `stop.return`; of an
        evaluation with `by_evaluations`."""
        self.solved_at_s: float | None = None
        """Seconds of training when `stop.return` was reached: by an evaluation if one must confirm
        it."""

    def update(self) -> None:
        """Note the time at which the return reaches `stop.return` first."""
        if self.reached_at_s is None and self._is_met():
            self.reached_at_s = self._clock.now_s
            if not self.needs_confirmation:
                self.solved_at_s = self.reached_at_s

    @property
    def ends_run(self) -> bool:
        """Whether `stop.return` was reached, and `stop.hold_s` has passed since."""
        if self.solved_at_s is None:
            return False
        # Before an evaluation confirms the return, the run has waited for `hold_s` already.
        hold_s = 0.0 if self.needs_confirmation else self._hold_s
        return self._clock.now_s >= self.solved_at_s + hold_s

    @property
    def awaits_confirmation(self) -> bool:
        """Whether the return reaches `stop.return`, and an evaluation must confirm it now."""
        if not self.needs_confirmation:
            return False
        if self.solved_at_s is not None or self.reached_at_s is None:
            return False
        return self._clock.now_s >= self.reached_at_s + self._hold_s and self._is_met()

    def confirm(self) -> None:
        """Note that an evaluation has confirmed the return: `stop.return` is reached."""
        if self.solved_at_s is None:
            self.solved_at_s = self._clock.now_s

    def stop_confirming(self) -> None:
        """Let the return in training decide, as there are no evaluations any more."""
        self.needs_confirmation = False
        if self.solved_at_s is None:
            self.reached_at_s = None  # an evaluation may have refuted it since
            self.update()

    def forget(self) -> None:
        """Forget when the goal was reached: it was another one, or in another environment."""
        self.reached_at_s = None
        self.solved_at_s = None

    def _is_met(self) -> bool:
        """Whether the mean of the last episodes in training, once enough have ended, reaches
        `stop.return`, or that of the last evaluation."""
        mean = self.evaluated_mean if self.by_evaluations else self._returns.mean
        if self._return is None or mean is None:
            return False
        if not self.by_evaluations and not self._returns.is_full:
            return False
        return mean >= self._return


class UncountedLag(NamedTuple):
    """Unrolls whose policy lag is counted later."""

    unrolls: UnrollSummary
    version: int
    """The policy version at which the training on them began."""
    updates: int
    """Optimizer steps in which they are trained on."""


class LagHistogram:
    """Agent steps by policy lag, in optimizer steps."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._uncounted: list[UncountedLag] = []

    def add(self, unrolls: UnrollSummary, version: int, updates: int) -> None:
        """Add unrolls that are trained on at ``version`` and after, in ``updates`` steps.

        They are counted later, `UNCOUNTED` batches at a time.
        """
        self._uncounted.append(UncountedLag(unrolls, version, updates))
        if len(self._uncounted) == UNCOUNTED:
            self._count()

    @property
    def counts(self) -> Counter[int]:
        """Agent steps by policy lag since the last `take`."""
        self._count()
        return self._counts

    def take(self) -> Counter[int]:
        """Returns `counts`, and begins anew."""
        counts = self.counts
        self._counts = Counter()
        return counts

    def _count(self) -> None:
        """Add the unrolls that wait to be counted."""
        for unrolls, version, updates in self._uncounted:
            # Update i of a batch took the i-th share of its environments, at version + i.
            envs = unrolls.versions.shape[-1]
            trained_at: int | npt.NDArray[np.int64] = version
            if updates > 1:
                trained_at = version + np.arange(envs) * updates // envs

            lags = np.minimum(np.maximum(trained_at - unrolls.versions, 0), MAX_LAG)
            steps_by_lag = np.bincount(lags.ravel(), unrolls.steps.ravel())
            for lag in steps_by_lag.nonzero()[0].tolist():
                self._counts[lag] += int(steps_by_lag[lag])
        self._uncounted.clear()


class LocalCounts:
    """What this learner's process has counted, by the names of `BOOKED`.

    A count is pending until all learners have agreed on the sum of their counts.
    """

    def __init__(self) -> None:
        self._pending = dict.fromkeys(BOOKED, 0)
        self._agreed = dict.fromkeys(BOOKED, 0)
        """Counts since the process began that are part of the sum."""

    def add(self, name: str, count: int) -> None:
        """Count something new."""
        self._pending[name] += count

    def pending(self) -> list[int]:
        """The counts that are not agreed on yet, in the order of `BOOKED`."""
        return list(self._pending.values())

    def agree(self, name: str, count: int) -> None:
        """Note that ``count`` of what was pending is part of the sum."""
        self._pending[name] -= count
        self._agreed[name] += count

    def agree_on_all(self) -> None:
        """Note that all that was pending is part of the sum."""
        for name in BOOKED:
            self.agree(name, self._pending[name])

    def set_total(self, name: str, total: int) -> None:
        """Set the number counted since the process began; what is new of it is pending."""
        self._pending[name] = total - self._agreed[name]

    def count_earlier(self, name: str, count: int) -> None:
        """Expect that ``count`` of the next total is part of the sum already."""
        self._agreed[name] += count

    def total(self, name: str) -> int:
        """The number counted since the process began."""
        return self._agreed[name] + self._pending[name]


class IntervalStart(NamedTuple):
    """The state in which an interval of metrics began."""

    time_s: float
    """Seconds of training."""
    env_steps: int
    """Environment steps of this process."""
    trained_steps: int
    """Trained steps of this process."""
    spent_s: dict[str, float]
    """The time ledger: seconds by part."""


class Progress:
    """Counters of one run, in agent steps; ``version`` counts published optimizer steps."""

    def __init__(self, stop: StopConfig, frames_per_step: int, record: Sequence[str] = ()) -> None:
        """``record``: the keys of `env.record`."""
        self._stop = stop
        self._frames_per_step = frames_per_step

        # The counters of the run, which are equal on all learners.
        self.env_steps = 0
        self.trained_steps = 0
        self.learner_steps = 0
        self.episodes = 0
        self.version = 0
        self.generation = 0
        """How often the run was resumed."""
        self.lr_factor = 1.0
        """Factor of the learning rate after rollbacks."""
        self.rollbacks = 0
        """Rollbacks since the process began."""

        self.clock = TrainingClock()
        self.returns = ReturnWindow()
        """The last episodes, of the environments that explore least where these differ."""
        self.all_returns: deque[float] | None = None
        """Raw returns of this learner's last episodes in all environments; None where all explore
        alike."""
        self.goal = ReturnGoal(stop, self.returns, self.clock)
        self.lag = LagHistogram()
        """Policy lag of what was trained on since the last `interval`."""
        self.latency = LatencyHistogram()
        """Time from an environment's step to its gradient, since the last `interval`."""

        self._local = LocalCounts()
        self._recorded = RecordedMeans(record)
        self._results: dict[int, GameCounts] = {}
        """Games that `take_results` has not returned yet."""
        self._follows_server = False
        """Whether a parameter server counts the optimizer steps (`follow`)."""
        self._published_steps = 0
        """Optimizer steps at the last `publish_due`."""
        self._interval_start = IntervalStart(0.0, 0, 0, {})

    @property
    def time_s(self) -> float:
        """Seconds of training so far: since the first unroll began, across resumes."""
        return self.clock.now_s

    @property
    def return_mean(self) -> float | None:
        """Mean raw return of the last episodes; None before the first episode."""
        return self.returns.mean

    def follow_least_exploring(self) -> None:
        """Take the return of the environments that explore least for that of the run.

        These are a quarter of all, so the window has a quarter of the episodes: it covers about as
        many agent steps as in other runs.
        """
        self.returns.limit(EPISODES // 4)
        self.all_returns = deque(maxlen=EPISODES)

    def start(self, at_s: float) -> None:
        """Start the clock at the first unroll, begun at ``at_s`` (CLOCK_MONOTONIC, seconds).

        Not before this process was able to train; later calls have no effect.
        """
        if not self.clock.runs:
            self.clock.start(at_s)
            self._interval_start = self._interval_start._replace(
                time_s=self.time_s,
                env_steps=self._local.total("env_steps"),
                trained_steps=self._local.total("trained_steps"),
            )

    def count_unrolls(self, unrolls: UnrollSummary, steps: int) -> None:
        """Count unrolls of ``steps`` agent steps, which are trained on now or later from replay."""
        self._recorded.add(unrolls)
        if unrolls.returns:
            returns, lengths = unrolls.returns, unrolls.lengths
            if self.all_returns is not None and unrolls.least_exploring is not None:
                self.all_returns.extend(returns)
                returns = list(compress(returns, unrolls.least_exploring))
                lengths = list(compress(lengths, unrolls.least_exploring))
            self.returns.add(returns, lengths)
            self._local.add("episodes", len(unrolls.returns))
        for number, counts in unrolls.results.items():
            earlier = self._results.get(number)
            self._results[number] = counts if earlier is None else earlier.plus(counts)
        self._local.add("trained_steps", steps)

    def take_results(self) -> Mapping[int, GameCounts]:
        """Returns the games of this learner's unrolls since the last call, as
        `UnrollSummary.results`."""
        results, self._results = self._results, {}
        return results

    def count_lag(self, unrolls: UnrollSummary, updates: int = 0) -> None:
        """Count the policy lag of unrolls that are about to be trained on.

        ``updates`` is the number of optimizer steps, or 0 if they are only stored in a replay.
        """
        self.lag.add(unrolls, self.version, updates)

    def count_ages(self, headers: npt.NDArray[np.void]) -> None:
        """Count the ages of agent steps that are about to be trained on.

        ``headers`` are the HEADER records of their slots, and are not changed any more.
        """
        self.latency.add(headers, time.monotonic())

    def count_updates(self, updates: int) -> None:
        """Count optimizer steps."""
        self.learner_steps += updates
        if not self._follows_server:
            self.version += updates

    def count_env_steps(self, accounting: Accounting) -> None:
        """Update the count of environment steps from the accounting."""
        self._local.set_total("env_steps", accounting.produced)

    def resumed_in_flight(self, steps: int) -> None:
        """Note that ``steps`` steps from before a resume arrive again, to be trained on.

        Call it before `start`.
        """
        self._local.count_earlier("env_steps", steps)

    def growth(self) -> Floats:
        """Returns this learner's counts that are not agreed on yet, float64 ``[GROWTH]``.

        `commit` takes the sum over all learners.
        """
        return np.array([*self._local.pending(), *self.returns.local], np.float64)

    def commit(self, own: Floats, growth: Floats) -> None:
        """Add ``growth``, the counts of all learners, of which ``own`` are this learner's."""
        own_counts = own.tolist()
        counts = growth.tolist()
        for name, own_count, count in zip(BOOKED, own_counts, counts, strict=False):
            if own_count or count:
                setattr(self, name, getattr(self, name) + int(count))
                self._local.agree(name, int(own_count))
        self.returns.agree(WindowSums(*counts[-3:]))
        self.goal.update()

    def rollback(self, growth: Floats) -> None:
        """Take back counts that the others have not received, float64 ``[BOOKED]``.

        This learner alone had agreed on them; they are sent again.
        """
        for name, count in zip(BOOKED, growth, strict=True):
            self._local.agree(name, -int(count))

    def acknowledge(self) -> None:
        """Mark all counts as received by the others; they are in the state taken from them."""
        self._local.agree_on_all()

    def totals(self) -> list[float]:
        """Returns the sum of all growth so far, in the same layout."""
        return [*(float(getattr(self, name)) for name in BOOKED), *self.returns.agreed]

    def follow(self, version: int) -> None:
        """Set the number of optimizer steps that all learners together have taken.

        Parameters of that ``version`` are here. From now on `count_updates` does not change the
        version, as the next parameters have to be fetched.
        """
        self.learner_steps = self.version = version
        self._follows_server = True

    def share_window(self, learners: int) -> None:
        """Shorten the window to this learner's share of its episodes among ``learners``."""
        self.returns.share(learners)

    def publish_due(self, every: int) -> bool:
        """Returns whether a multiple of ``every`` optimizer steps was reached since this last did.

        That includes steps of others: weights that were taken from elsewhere are published at once.
        """
        due = self.learner_steps // every > self._published_steps // every
        if due:
            self._published_steps = self.learner_steps
        return due

    def stop_reason(self) -> str | None:
        """Returns the name of the `stop` setting that is reached, or None."""
        stop = self._stop
        if self.goal.ends_run:
            return "return"
        if stop.env_steps is not None and self.trained_steps >= stop.env_steps:
            return "env_steps"
        if stop.learner_steps is not None and self.learner_steps >= stop.learner_steps:
            return "learner_steps"
        if stop.minutes is not None and self.time_s >= stop.minutes * 60:
            return "minutes"
        return None

    def interval(self, ledger: TimeLedger) -> dict[str, Any]:
        """Returns the metrics since the last call, by their names in metrics.jsonl."""
        start = self._interval_start
        end = IntervalStart(
            time_s=self.time_s,
            env_steps=self._local.total("env_steps"),
            trained_steps=self._local.total("trained_steps"),
            spent_s=ledger.snapshot(),
        )
        self._interval_start = end

        # Actors may play before the clock starts: then no time has passed, and there is no rate.
        elapsed_s = end.time_s - start.time_s
        per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
        trained_per_s = (end.trained_steps - start.trained_steps) * per_s

        # The ceiling is the rate in the time with data in place.
        shares = by_learner_part(shares_between(end.spent_s, start.spent_s))
        fed = 1.0 - shares["wait_data"] - shares["h2d_exposed"]
        ceiling_per_s = trained_per_s / fed if fed > LEAST_FED else None

        lag = self.lag.take()
        lag_sum = sum(updates * steps for updates, steps in lag.items())
        return self.counts() | {
            "time_s": end.time_s,
            "interval_s": elapsed_s,
            "steps_per_s": (end.env_steps - start.env_steps) * per_s,
            "trained_steps_per_s": trained_per_s,
            "learner_ceiling_steps_per_s": ceiling_per_s,
            "episode_return_mean": self.returns.mean,
            "episode_length_mean": self.returns.length_mean,
            **self._all_returns(),
            "policy_lag_mean": lag_sum / lag.total() if lag else None,
            "policy_lag_max": max(lag, default=None),
            "policy_lag_histogram": {str(k): lag[k] for k in sorted(lag)},
            **latency_figures(self.latency.take()),
            "learner_wait_fraction": shares["wait_data"],
            "learner_compute_fraction": shares["compute"],
            "ledger": shares,
            "return_reached_at_s": self.goal.reached_at_s,
            "solved_at_s": self.goal.solved_at_s,
            **self._recorded.interval(),
        }

    def _all_returns(self) -> dict[str, float | None]:
        """Returns the mean over all environments where only those that explore least count."""
        if self.all_returns is None:
            return {}
        count = len(self.all_returns)
        return {"episode_return_all_mean": sum(self.all_returns) / count if count else None}

    def counts(self) -> dict[str, int]:
        """Returns the counters of the run, by their names in metrics.jsonl."""
        return {
            "env_steps": self.env_steps,
            "env_frames": self.env_steps * self._frames_per_step,
            "trained_steps": self.trained_steps,
            "learner_steps": self.learner_steps,
            "episodes": self.episodes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values for `load_state_dict`."""
        state = {name: getattr(self, name) for name in COUNTERS}
        state |= {
            "generation": self.generation,
            "lr_factor": self.lr_factor,
            "rollbacks": self.rollbacks,
            "time_s": self.time_s,
            "returns": list(self.returns.returns),
            "lengths": list(self.returns.lengths),
            "reached_at_s": self.goal.reached_at_s,
            "solved_at_s": self.goal.solved_at_s,
            "goal": self._stop.return_,
        }

        if self.all_returns is not None:
            state["all_returns"] = list(self.all_returns)
        return state

    def load_state_dict(self, state: dict[str, Any], *, same_env: bool = True) -> None:
        """Continue from a checkpoint, as the next generation of the run.

        If `stop.return` is another one than it was, it is still to be reached. In another game no
        earlier return counts.
        """
        self.join({**state, "generation": state["generation"] + 1, "rollbacks": 0})
        if not same_env or state.get("goal", self._stop.return_) != self._stop.return_:
            self.goal.forget()

        if same_env:
            self.returns.add(state["returns"], state["lengths"])
            if self.all_returns is not None:
                self.all_returns.extend(state.get("all_returns", ()))
        self.returns.agree(self.returns.local)

    def join(self, state: dict[str, Any]) -> None:
        """Take the position of another learner of the run, by its `state_dict`.

        The episodes stay this learner's own.
        """
        for name in (*COUNTERS, "generation"):
            setattr(self, name, state[name])
        self.lr_factor = state.get("lr_factor", 1.0)
        self.rollbacks = state.get("rollbacks", 0)
        self._published_steps = self.learner_steps

        # States of earlier versions have no time at which training reached the return: it was
        # solved then.
        self.goal.solved_at_s = state["solved_at_s"]
        self.goal.reached_at_s = state.get("reached_at_s", self.goal.solved_at_s)
        self.clock.resume(state["time_s"])
