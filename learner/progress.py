"""The progress of a run: counters, returns, policy lag, and when the run ends.

The counters are those of all learners of the run together, and equal on each: a learner's own
growth (`growth`) counts once all have agreed on the sum (`commit`). Policy lag and rates are a
learner's own, over the interval between two calls of `interval`. The rest survives a resume through
`state_dict`.

`Progress` has the counters. It is composed of a `TrainingClock`, the `ReturnWindow` of the last
episodes, the `ReturnGoal` of `stop.return`, a `LagHistogram`, and the `LocalCounts` of this learner.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.algos.slots import UnrollSummary
from penstock.configs.sections import StopConfig
from penstock.core.params import Floats
from penstock.learner.recorded_means import RecordedMeans
from penstock.profiling.histogram import Histogram, latencies, spread
from penstock.profiling.ledger import TimeLedger, fractions, learner_parts
from penstock.replay.accounting import Accounting

# The last bin of the histogram of policy lag.
MAX_LAG = 1 << 16
# The lag of so many batches at most is counted together, with warm caches.
UNCOUNTED = 64
# With a larger share of its time with data, a learner's rate in that time is shown as its ceiling.
LEAST_FED = 0.01
# Returns and lengths are means over the last hundred episodes.
EPISODES = 100
# Counters of the run in a checkpoint.
COUNTERS = ("env_steps", "trained_steps", "learner_steps", "episodes", "version")
# Counters that each learner counts for itself, and that all add up.
BOOKED = ("env_steps", "trained_steps", "episodes")
# Values of `Progress.growth`: the counters, then a `WindowSums`.
GROWTH = len(BOOKED) + 3


class Progress:
    """Counters of one run, in agent steps; ``version`` counts published optimizer steps."""

    def __init__(self, stop: StopConfig, frames_per_step: int, record: Sequence[str] = ()) -> None:
        """``record``: the keys of `env.record`."""
        self._stop = stop
        self._frames_per_step = frames_per_step
        self.env_steps = 0
        self.trained_steps = 0
        self.learner_steps = 0
        self.episodes = 0
        self.version = 0
        self.generation = 0
        self._follows = False
        self.lr_factor = 1.0  # factor of the learning rate after rollbacks
        self.rollbacks = 0  # since the process began
        self._published_steps = 0
        self.returns: deque[float] = deque(maxlen=EPISODES)
        self.lengths: deque[int] = deque(maxlen=EPISODES)
        self._own_recent = (0.0, 0.0, 0)  # sum of returns, of lengths, number
        self._recent = (0.0, 0.0, 0.0)  # the same of all learners
        self._booked = dict.fromkeys(BOOKED, 0)
        self._own = dict.fromkeys(BOOKED, 0)  # the same since the process began
        self._recorded = RecordedMeans(record)
        self._lag: Counter[int] = Counter()
        self._uncounted: list[tuple[UnrollSummary, int, int]] = []  # each with version and updates
        self.latency: Histogram = {}
        self.reached_at_s: float | None = None
        """Seconds of training when the return in training first reached `stop.return`."""
        self.solved_at_s: float | None = None
        """The same when `stop.return` was reached: by an evaluation if `confirms`."""
        self.confirms = False
        """Whether an evaluation must confirm the return; `learner.evaluation_requests` sets it."""
        self._trained_before_s = 0.0
        self._made_s = time.monotonic()
        self._started_s: float | None = None
        self._last: tuple[float, int, int, dict[str, float]] = (0.0, 0, 0, {})

    @property
    def time_s(self) -> float:
        """Seconds of training so far: since the first unroll began, across resumes."""
        if self._started_s is None:
            return self._trained_before_s
        return self._trained_before_s + time.monotonic() - self._started_s

    def start(self, at_s: float) -> None:
        """Start the clock at the first unroll, begun at ``at_s`` (CLOCK_MONOTONIC, seconds).

        Not before this process was able to train; later calls have no effect.
        """
        if self._started_s is None:
            self._started_s = max(at_s, self._made_s)
            self._last = (self.time_s, *self._own_steps(), self._last[-1])

    def played(self, unrolls: UnrollSummary, steps: int) -> None:
        """Count unrolls of ``steps`` agent steps, which are trained on now or later from replay."""
        self._recorded.add(unrolls)
        if unrolls.returns:
            self.returns.extend(unrolls.returns)
            self.lengths.extend(unrolls.lengths)
            self._update_recent()
            self._booked["episodes"] += len(unrolls.returns)
        self._booked["trained_steps"] += steps

    def lagged(self, unrolls: UnrollSummary, updates: int = 0) -> None:
        """Note the policy lag of unrolls that are about to be trained on.

        In ``updates`` optimizer steps, or 0 where they are only stored in a replay.
        """
        self._uncounted.append((unrolls, self.version, updates))
        if len(self._uncounted) == UNCOUNTED:
            self._count_lag()

    @property
    def lag(self) -> Counter[int]:
        """Agent steps by policy lag, since the last `interval`."""
        self._count_lag()
        return self._lag

    def aged(self, started_s: float, published_s: float, steps: int) -> None:
        """Note the age of ``steps`` steps that are about to be trained on, played evenly over that
        time.
        """
        now_s = time.monotonic()
        spread(self.latency, max(0.0, now_s - published_s), now_s - started_s, steps)

    def growth(self) -> Floats:
        """Returns this learner's counts that are not agreed on yet, float64 ``[GROWTH]``.

        `commit` takes the sum over all learners.
        """
        return np.array([*self._booked.values(), *self._own_recent], np.float64)

    def commit(self, own: Floats, growth: Floats) -> None:
        """Add ``growth``, the counts of all learners, of which ``own`` are this learner's."""
        mine, values = own.tolist(), growth.tolist()
        for name, part, value in zip(BOOKED, mine, values, strict=False):
            if part or value:
                setattr(self, name, getattr(self, name) + int(value))
                self._booked[name] -= int(part)
                self._own[name] += int(part)
        self._recent = (values[-3], values[-2], values[-1])
        self._notice_solved()

    def rollback(self, growth: Floats) -> None:
        """Take back counts that the others have not received, float64 ``[BOOKED]``.

        This learner alone had agreed on them; they are sent again.
        """
        for name, value in zip(BOOKED, growth, strict=True):
            self._booked[name] += int(value)
            self._own[name] -= int(value)

    def acknowledge(self) -> None:
        """Mark all counts as received by the others; they are in the state taken from them."""
        for name in BOOKED:
            self._own[name] += self._booked[name]
            self._booked[name] = 0

    def totals(self) -> list[float]:
        """Returns the sum of all growth so far, in the same layout."""
        return [*(float(getattr(self, name)) for name in BOOKED), *self._recent]

    def follow(self, version: int) -> None:
        """Set the number of optimizer steps that all learners together have taken.

        Parameters of that ``version`` are here. From now on `count_updates` does not change the
        version, as the next parameters have to be fetched.
        """
        self.learner_steps = self.version = version
        self._follows = True

    def share_window(self, learners: int) -> None:
        """Make the last hundred episodes this learner's share of them among ``learners``."""
        most = -(-EPISODES // learners)
        self.returns = deque(self.returns, most)
        self.lengths = deque(self.lengths, most)
        self._update_recent()

    def updated(self, updates: int) -> None:
        """Count optimizer steps."""
        self.learner_steps += updates
        self.version += 0 if self._follows else updates

    def publish_due(self, every: int) -> bool:
        """Whether a multiple of ``every`` optimizer steps was reached since this last returned
        True.

        Also after weights were taken from elsewhere, which are published at once.
        """
        due = self.learner_steps // every > self._published_steps // every
        if due:
            self._published_steps = self.learner_steps
        return due

    def arrived(self, accounting: Accounting) -> None:
        """Update the count of environment steps from the accounting."""
        self._booked["env_steps"] = accounting.produced - self._own["env_steps"]

    def resumed_in_flight(self, steps: int) -> None:
        """Note that ``steps`` environment steps from before a resume arrive again, to be trained on.

        Call it before `start`.
        """
        self._own["env_steps"] += steps

    @property
    def return_mean(self) -> float | None:
        """Mean raw return of the last hundred episodes; None before the first episode."""
        returns, _, episodes = self._recent
        return returns / episodes if episodes else None

    @property
    def recent_episodes(self) -> int:
        """The number of episodes in `return_mean`."""
        return int(self._recent[2])

    def stop_reason(self) -> str | None:
        """Returns the name of the `stop` setting that is reached, or None."""
        stop = self._stop
        held_s = 0.0 if self.confirms else stop.hold_s  # else it was waited for before
        if self.solved_at_s is not None and self.time_s >= self.solved_at_s + held_s:
            return "return"
        if stop.env_steps is not None and self.trained_steps >= stop.env_steps:
            return "env_steps"
        if stop.learner_steps is not None and self.learner_steps >= stop.learner_steps:
            return "learner_steps"
        if stop.minutes is not None and self.time_s >= stop.minutes * 60:
            return "minutes"
        return None

    @property
    def awaits_confirmation(self) -> bool:
        """Whether the return in training reaches `stop.return`, and an evaluation must confirm it
        now."""
        if not self.confirms or self.solved_at_s is not None or self.reached_at_s is None:
            return False
        return self.time_s >= self.reached_at_s + self._stop.hold_s and self._reaches_goal()

    def confirm(self) -> None:
        """An evaluation has confirmed the return: `stop.return` is reached."""
        if self.solved_at_s is None:
            self.solved_at_s = self.time_s

    def stop_confirming(self) -> None:
        """There are no evaluations any more: the return in training decides."""
        self.confirms = False
        if self.solved_at_s is None:
            self.reached_at_s = None  # an evaluation may have refuted it since
            self._notice_solved()

    def interval(self, ledger: TimeLedger) -> dict[str, Any]:
        """Returns the metrics since the last call, by their names in metrics.jsonl."""
        now_s, spent = self.time_s, ledger.snapshot()
        last_s, last_env, last_trained, last_spent = self._last
        env_steps, trained_steps = self._own_steps()
        self._last = (now_s, env_steps, trained_steps, spent)
        elapsed_s = now_s - last_s
        per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0  # actors may play before the clock starts
        shares = learner_parts(fractions(spent, last_spent))
        trained_per_s = (trained_steps - last_trained) * per_s
        fed = 1.0 - shares["wait_data"] - shares["h2d_exposed"]
        lag, self._lag = self.lag, Counter()
        lag_sum = sum(updates * steps for updates, steps in lag.items())
        latency, self.latency = self.latency, {}
        return self.counts() | {
            "time_s": now_s,
            "interval_s": elapsed_s,
            "steps_per_s": (env_steps - last_env) * per_s,
            "trained_steps_per_s": trained_per_s,
            "learner_ceiling_steps_per_s": trained_per_s / fed if fed > LEAST_FED else None,
            "episode_return_mean": self.return_mean,
            "episode_length_mean": self._recent[1] / self._recent[2] if self._recent[2] else None,
            "policy_lag_mean": lag_sum / lag.total() if lag else None,
            "policy_lag_max": max(lag, default=None),
            "policy_lag_histogram": {str(k): lag[k] for k in sorted(lag)},
            **latencies(latency),
            "learner_wait_fraction": shares["wait_data"],
            "learner_compute_fraction": shares["compute"],
            "ledger": shares,
            "return_reached_at_s": self.reached_at_s,
            "solved_at_s": self.solved_at_s,
            **self._recorded.interval(),
        }

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
        counters = {name: getattr(self, name) for name in COUNTERS}
        return counters | {
            "generation": self.generation,
            "lr_factor": self.lr_factor,
            "rollbacks": self.rollbacks,
            "time_s": self.time_s,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "reached_at_s": self.reached_at_s,
            "solved_at_s": self.solved_at_s,
            "goal": self._stop.return_,
        }

    def load_state_dict(self, state: dict[str, Any], *, same_game: bool = True) -> None:
        """Continue from a checkpoint, as the next generation of the run.

        If `stop.return` is another one than it was, it is still to be reached. In another game no
        earlier return counts.
        """
        self.join({**state, "generation": state["generation"] + 1, "rollbacks": 0})
        if not same_game or state.get("goal", self._stop.return_) != self._stop.return_:
            self.reached_at_s = self.solved_at_s = None
        if same_game:
            self.returns.extend(state["returns"])
            self.lengths.extend(state["lengths"])
        self._update_recent()
        self._recent = self._own_recent

    def join(self, state: dict[str, Any]) -> None:
        """Take the position of another learner of the run, by its `state_dict`.

        The episodes stay this learner's own.
        """
        for name in (*COUNTERS, "generation", "solved_at_s"):
            setattr(self, name, state[name])
        self.reached_at_s = state.get("reached_at_s", self.solved_at_s)
        self.lr_factor, self.rollbacks = state.get("lr_factor", 1.0), state.get("rollbacks", 0)
        self._published_steps = self.learner_steps
        if self._started_s is None:
            self._trained_before_s = state["time_s"]

    def _count_lag(self) -> None:
        for unrolls, version, updates in self._uncounted:
            # Update i of a batch took the i-th share of its environments, at version + i.
            envs = unrolls.versions.shape[-1]
            at = version + np.arange(envs) * updates // envs if updates > 1 else version
            lags = np.minimum(np.maximum(at - unrolls.versions, 0), MAX_LAG)
            counts = np.bincount(lags.ravel(), unrolls.steps.ravel())
            for lag in counts.nonzero()[0].tolist():
                self._lag[lag] += int(counts[lag])
        self._uncounted.clear()

    def _update_recent(self) -> None:
        """Sum up the last episodes, once they have changed."""
        self._own_recent = (sum(self.returns), sum(self.lengths), len(self.returns))

    def _own_steps(self) -> tuple[int, int]:
        """Environment and trained steps of this process so far."""
        names = ("env_steps", "trained_steps")
        env_steps, trained_steps = (self._own[name] + self._booked[name] for name in names)
        return env_steps, trained_steps

    def _reaches_goal(self) -> bool:
        """Whether the mean of a hundred episodes in training reaches `stop.return`."""
        goal, mean = self._stop.return_, self.return_mean
        if goal is None or mean is None or self._recent[2] < EPISODES:
            return False
        return mean >= goal

    def _notice_solved(self) -> None:
        if self.reached_at_s is None and self._reaches_goal():
            self.reached_at_s = self.time_s
            if not self.confirms:
                self.solved_at_s = self.reached_at_s
