"""A window over the processes of a living run, as evidence of a profile.

Shares, rates and processor time are differences of two readings of a process; drops, latency,
policy lag and queue fill are of the metrics that learners sent meanwhile. So the edges of the
latter may lie up to `run.interval_s` beside those of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from penstock.configs.schema import Config
from penstock.core.role_spec import Stage
from penstock.profiling.histogram import quantile
from penstock.profiling.ledger import by_learner_part, shares_between
from penstock.profiling.report.profile import (
    RECEIVED,
    ActorEvidence,
    ConnectorEvidence,
    FlowEvidence,
    LearnerEvidence,
    ProcessEvidence,
    Profile,
    build,
    judged_options,
)
from penstock.profiling.report.readings import MAIN, Reading
from penstock.profiling.report.stage_rates import Rate, WindowRates, stage_rates

Metrics = Mapping[str, Any]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# The lane of the GPU's stream, which a learner on a GPU has beside that of its main thread.
GPU = "gpu"
# The names of histograms in metrics.
LAG = "policy_lag_histogram"
LATENCY = "latency_histogram"


class MetricsGrowth(NamedTuple):
    """Two reports of metrics, and the seconds between them."""

    first: Metrics
    last: Metrics
    seconds: float

    def of_rank(self, rank: int) -> MetricsGrowth:
        """Returns the growth of the metrics of one learner."""
        return MetricsGrowth(_of_rank(self.first, rank), _of_rank(self.last, rank), self.seconds)

    def rate(self, name: str) -> float | None:
        """Returns the growth of a counter per second.

        None if one of the two reports lacks it, or if it is less in the last one: a learner began
        anew, from a checkpoint.
        """
        return _rate(self.first, self.last, name, seconds=self.seconds)

    def received(self) -> dict[str, float | None]:
        """Returns the rates of the counters of connectors, by their names in `RECEIVED`."""
        first = self.first.get("received") or {}
        last = self.last.get("received") or {}
        return {name: _rate(first, last, name, seconds=self.seconds) for name in RECEIVED}

    def counts(self, name: str) -> dict[str, int]:
        """Returns by how much the counters below ``name`` grew, by their reason.

        One that did not grow is left out; it is less where a learner began anew.
        """
        first = self.first.get(name, {})
        increases = {
            reason: count - first.get(reason, 0)
            for reason, count in self.last.get(name, {}).items()
        }
        return {reason: increase for reason, increase in increases.items() if increase > 0}


@dataclass(frozen=True)
class ProfileWindow:
    """The readings and metrics of all processes in a window."""

    begin: Mapping[str, Reading]
    """Readings at the begin of the window, by the name of the process."""
    end: Mapping[str, Reading]
    """Readings at its end."""
    begin_ns: int
    end_ns: int
    metrics: Sequence[tuple[int, Metrics]]
    """Messages of metrics with the time in ns at which each came; some came before the begin."""
    ended: Sequence[Reading] = ()
    """Last readings of processes that ended in the window."""

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.end_ns - self.begin_ns) * 1e-9

    @property
    def within(self) -> list[Metrics]:
        """The metrics that came in the window."""
        return [metrics for at_ns, metrics in self.metrics if self.begin_ns < at_ns <= self.end_ns]

    @property
    def growth(self) -> MetricsGrowth:
        """From the last metrics before the window, or else its first, to its last."""
        reports = [(at_ns, metrics) for at_ns, metrics in self.metrics if at_ns <= self.end_ns]
        if not reports:
            return MetricsGrowth({}, {}, 0.0)
        earlier = [report for report in reports if report[0] <= self.begin_ns]
        first_ns, first = earlier[-1] if earlier else reports[0]
        last_ns, last = reports[-1]
        return MetricsGrowth(first, last, (last_ns - first_ns) * 1e-9)


def make_profile(
    target: str,
    config: Config,
    window: ProfileWindow,
    *,
    cores: float,
    device: str,
    idle_cores: float | None = None,
    ceiling: float | None = None,
    slot_nbytes: int | None = None,
    weights_nbytes: int | None = None,
    convolutional: bool = False,
    kernel_busy: float | None = None,
) -> Profile:
    """Returns the profile, but for its verdict and the paths of its files.

    Args:
        target: what was profiled.
        config: of the run.
        window: what was read.
        cores: how many the run may use.
        device: what learners train on.
        idle_cores: as of `build`.
        ceiling: trained agent steps per second of a learner that never waits.
        slot_nbytes: size of a slot of the run.
        weights_nbytes: size of the parameters in the memory of this host.
        convolutional: whether the network has convolutions.
        kernel_busy: share of the time in which the first learner's GPU ran kernels.

    None stands for what is not known.
    """
    if config.algo.trains_on == "transitions" and config.replay.samples_per_insert is None:
        ceiling = None  # it counts drawn transitions, and the run's rate counts inserted steps

    changes = [
        *(ProcessChange(reading, window) for reading in window.end.values()),
        *(ProcessChange(reading, window, ended=True) for reading in window.ended),
    ]
    learners = [change for change in changes if change.stage is Stage.LEARNER]
    actors = [change for change in changes if change.stage is Stage.ACTORS]
    connectors = [change for change in changes if change.last.spec.role == "connector"]
    listed = {change.name for change in (*learners, *actors, *connectors)}
    others = [change for change in changes if change.name not in listed]

    rates = _rates(window, learners, _played(actors, slot_nbytes), wire=bool(connectors))
    stages = stage_rates(config, rates, on_gpu=device == "cuda", weights_nbytes=weights_nbytes)
    options = judged_options(config)
    options["model"] |= {"convolutional": convolutional}
    return build(
        target=target,
        seconds=window.seconds,
        cores=cores,
        idle_cores=idle_cores,
        device=device,
        learners=[
            _learner(change, window, ceiling=ceiling, kernel_busy=kernel_busy if i == 0 else None)
            for i, change in enumerate(learners)
        ],
        actors=[_actor(change) for change in actors],
        connectors=[_connector(change, window) for change in connectors],
        others=[ProcessEvidence(**change.figures()) for change in others],
        flow=_flow(window, rates, stages),
        options=options,
    )


class ProcessChange:
    """One process in the window: what it did between two readings.

    Without a first reading it was started within the window, and all it has done belongs there.
    Rates of one that has ``ended`` are over all of the window too.
    """

    def __init__(self, last: Reading, window: ProfileWindow, *, ended: bool = False) -> None:
        self.last = last
        """The last reading."""
        self.ended = ended
        first = window.begin.get(last.spec.name)
        self._first = first if first is not None and first.pid == last.pid else None
        """The reading of the same process at the begin of the window."""

        since_ns = self._first.at_ns if self._first else window.begin_ns
        until_ns = window.end_ns if ended else last.at_ns
        self.seconds = max(1, until_ns - since_ns) * 1e-9
        """The time to which rates refer."""

    @property
    def name(self) -> str:
        """Name of the process."""
        return self.last.spec.name

    @property
    def stage(self) -> Stage:
        """What the process does in the run."""
        return self.last.spec.stage

    def figures(self) -> dict[str, Any]:
        """Returns the arguments of `ProcessEvidence`."""
        return {
            "name": self.name,
            "ended": self.ended,
            "ledger": self.shares(MAIN),
            "unmeasured": self.unmeasured(),
            "cpu": self.rate("cpu_s"),
            "coreless": self.rate("coreless_s"),
        }

    def shares(self, lane: str) -> dict[str, float]:
        """Returns the share of each part in the time of the thread of a lane."""
        first_s = self._first.lanes.get(lane, {}) if self._first else {}
        last_s = self.last.lanes.get(lane, {})
        return shares_between(last_s, first_s)

    def unmeasured(self) -> dict[str, float]:
        """Returns the share of the clock that no part of a thread's ledger has, by thread.

        That is between the two readings, for threads that were there at both; below 0 where the
        parts have more than the clock.
        """
        first = self._first
        if first is None:
            return {}

        wall_s = max(1, self.last.at_ns - first.at_ns) * 1e-9
        shares = {}
        for lane, parts in self.last.lanes.items():
            if lane in first.lanes:
                measured_s = sum(parts.values()) - sum(first.lanes[lane].values())
                shares[lane] = 1.0 - measured_s / wall_s
        return shares

    def rate(self, counter: str) -> float:
        """Returns by how much a counter of `Reading` grew, per second."""
        last = getattr(self.last, counter)
        first = getattr(self._first, counter) if self._first else 0
        # A counter that began anew meanwhile has counted from 0.
        growth = last - first if last >= first else last
        return float(growth) / self.seconds


def _learner(
    change: ProcessChange,
    window: ProfileWindow,
    *,
    ceiling: float | None,
    kernel_busy: float | None,
) -> LearnerEvidence:
    """Returns the evidence of a learner; further arguments are those of `make_profile`."""
    rank = change.last.spec.learner
    lanes = change.last.lanes
    main_lane = GPU if GPU in lanes else MAIN
    parts = change.shares(main_lane)
    queue_fills = [_of_rank(metrics, rank).get("queue_fill") for metrics in window.within]
    return LearnerEvidence(
        **change.figures() | {"ledger": by_learner_part(parts)},
        rank=rank,
        parts=parts,
        threads={lane: change.shares(lane) for lane in lanes if lane != main_lane},
        gpu_kernel_busy=kernel_busy,
        steps_per_s=change.rate("trained_steps"),
        updates_per_s=window.growth.rate("learner_steps"),
        ceiling_steps_per_s=ceiling,
        queue_fill=_mean_of_known(queue_fills),
    )


def _actor(change: ProcessChange) -> ActorEvidence:
    """Returns the evidence of an actor."""
    return ActorEvidence(
        **change.figures(),
        learner=change.last.spec.learner,
        steps_per_s=change.rate("played_steps"),
    )


def _connector(change: ProcessChange, window: ProfileWindow) -> ConnectorEvidence:
    """Returns the evidence of a connector."""
    rank = change.last.spec.learner
    received = window.growth.of_rank(rank).received()
    rates: Any = {f"{name}_per_s": rate for name, rate in received.items()}
    return ConnectorEvidence(**change.figures(), learner=rank, **rates)


def _played(actors: Sequence[ProcessChange], slot_nbytes: int | None) -> Rate | None:
    """Returns the rate of the actors of this host; None without any.

    Of other actors only the received samples are known.
    """
    if not actors:
        return None
    steps_per_s = sum(actor.rate("played_steps") for actor in actors)
    if not slot_nbytes:
        return Rate(steps_per_s, None)
    slots_per_s = sum(actor.rate("slots") for actor in actors)
    return Rate(steps_per_s, slots_per_s * slot_nbytes)


def _rates(
    window: ProfileWindow, learners: Sequence[ProcessChange], played: Rate | None, *, wire: bool
) -> WindowRates:
    """Returns the rates in the window; ``wire`` tells whether there are connectors."""
    growth = window.growth
    return WindowRates(
        played=played,
        received=growth.received() if wire else None,
        produced=growth.rate("env_steps"),
        trained=sum(learner.rate("trained_steps") for learner in learners),
        updates=growth.rate("learner_steps"),
        learners=len({learner.last.spec.learner for learner in learners}),
    )


def _flow(
    window: ProfileWindow, rates: WindowRates, stages: Sequence[Mapping[str, Any]]
) -> FlowEvidence:
    """Returns what moved in the window; ``stages`` as `stage_rates` returns them."""
    growth = window.growth
    latency = _histogram(window.within, LATENCY)
    lags = _histogram(window.within, LAG)
    mean_lag = None
    if lags:
        mean_lag = sum(lag * count for lag, count in lags.items()) / sum(lags.values())

    produced_steps_per_s = rates.produced
    store_nbytes_per_s = None
    if rates.played is not None:
        produced_steps_per_s = rates.played.steps
        store_nbytes_per_s = rates.played.nbytes
    return FlowEvidence(
        produced_steps_per_s=produced_steps_per_s,
        trained_steps_per_s=rates.trained,
        store_nbytes_per_s=store_nbytes_per_s,
        dropped=growth.counts("dropped"),
        lost=growth.counts("lost"),
        latency_s={name: quantile(latency, q) for name, q in QUANTILES.items()},
        policy_lag={"mean": mean_lag, "max": max(lags, default=None)},
        queue_fill=_mean_of_known(metrics.get("queue_fill") for metrics in window.within),
        replay_size=growth.last.get("replay_size"),
        stages=stages,
    )


def _of_rank(metrics: Metrics, rank: int) -> Metrics:
    """Returns the metrics of one learner; all of them where there is only one."""
    ranks: Sequence[Metrics] = metrics.get("ranks", ())
    if not ranks:
        return metrics
    return next((of_learner for of_learner in ranks if of_learner["rank"] == rank), {})


def _rate(first: Metrics, last: Metrics, name: str, *, seconds: float) -> float | None:
    """Returns the growth of a counter per second, as `MetricsGrowth.rate`."""
    if name not in first or name not in last or not seconds or last[name] < first[name]:
        return None
    return float(last[name] - first[name]) / seconds


def _histogram(reports: Iterable[Metrics], name: str) -> dict[int, float]:
    """Returns several reports of a histogram as one; JSON has made its bins text."""
    total: dict[int, float] = {}
    for report in reports:
        for key, count in (report.get(name) or {}).items():
            bin_ = int(key)
            total[bin_] = total.get(bin_, 0.0) + count
    return total


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are known; None without one."""
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None
