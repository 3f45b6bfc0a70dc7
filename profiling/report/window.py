"""A window over the processes of a living run, as evidence of a profile.

Shares, rates and processor time are differences of two readings of a process; drops, latency,
policy lag and queue fill are of the metrics that learners sent meanwhile. So the edges of the
latter may lie up to `run.interval_s` beside those of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from penstock.configs.schema import Config
from penstock.core.role_spec import Stage
from penstock.profiling.histogram import quantile
from penstock.profiling.ledger import fractions, learner_parts
from penstock.profiling.report import flow
from penstock.profiling.report.flow import Rate, Seen
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

Metrics = Mapping[str, Any]
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
GPU = "gpu"  # the lane of a learner on a GPU: where its seconds go
LAG, LATENCY = "policy_lag_histogram", "latency_histogram"


@dataclass(frozen=True)
class ProfileWindow:
    """The readings and metrics of all processes in a window."""

    begin: Mapping[str, Reading]
    end: Mapping[str, Reading]
    begin_ns: int
    end_ns: int
    metrics: Sequence[tuple[int, Metrics]]
    ended: Sequence[Reading] = ()

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-9

    @property
    def within(self) -> list[Metrics]:
        """The metrics that came in the window."""
        return [m for at_ns, m in self.metrics if self.begin_ns < at_ns <= self.end_ns]

    @property
    def growth(self) -> tuple[Metrics, Metrics, float]:
        """From the last metrics before the window, or else its first, to its last."""
        seen = [(at_ns, m) for at_ns, m in self.metrics if at_ns <= self.end_ns]
        if not seen:
            return {}, {}, 0.0
        before = [pair for pair in seen if pair[0] <= self.begin_ns]
        (from_ns, first), (to_ns, last) = (before or seen[:1])[-1], seen[-1]
        return first, last, (to_ns - from_ns) * 1e-9


def make(
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
    learners = [c for c in changes if c.stage is Stage.LEARNER]
    actors = [c for c in changes if c.stage is Stage.ACTORS]
    connectors = [c for c in changes if c.now.spec.role == "connector"]
    named = {c.now.spec.name for c in (*learners, *actors, *connectors)}

    seen = _seen(window, learners, _played(actors, slot_nbytes), wire=bool(connectors))
    stages = flow.stages(config, seen, on_gpu=device == "cuda", weights_nbytes=weights_nbytes)
    options = judged_options(config)
    options["model"] |= {"convolutional": convolutional}
    return build(
        target=target,
        seconds=window.seconds,
        cores=cores,
        idle_cores=idle_cores,
        device=device,
        learners=[
            _learner(c, window, ceiling, None if i else kernel_busy) for i, c in enumerate(learners)
        ],
        actors=[
            ActorEvidence(
                **c.figures(), learner=c.now.spec.learner, steps_per_s=c.rate("played_steps")
            )
            for c in actors
        ],
        connectors=[_connector(c, window) for c in connectors],
        others=[ProcessEvidence(**c.figures()) for c in changes if c.now.spec.name not in named],
        flow=_flow(window, seen, stages),
        options=options,
    )


class ProcessChange:
    """One process in the window: what it did between two readings.

    Without a first reading it was started within the window, and all it has done belongs there.
    Rates of one that has ``ended`` are over all of the window too.
    """

    def __init__(self, now: Reading, window: ProfileWindow, *, ended: bool = False) -> None:
        before = window.begin.get(now.spec.name)
        self.now = now
        self.ended = ended
        self._before = before if before is not None and before.pid == now.pid else None

        since_ns = self._before.at_ns if self._before else window.begin_ns
        until_ns = window.end_ns if ended else now.at_ns
        self.seconds = max(1, until_ns - since_ns) * 1e-9

    @property
    def stage(self) -> Stage:
        return self.now.spec.stage

    def figures(self) -> dict[str, Any]:
        """Returns the arguments of `ProcessEvidence`."""
        return {
            "name": self.now.spec.name,
            "ended": self.ended,
            "ledger": self.shares(MAIN),
            "unmeasured": self.unmeasured(),
            "cpu": self.rate("cpu_s"),
            "coreless": self.rate("coreless_s"),
        }

    def shares(self, lane: str) -> dict[str, float]:
        """Returns the share of each part in the time of the thread of a lane."""
        before = self._before.lanes.get(lane, {}) if self._before else {}
        return fractions(self.now.lanes.get(lane, {}), before)

    def unmeasured(self) -> dict[str, float]:
        """Returns the share of the clock that no part of a thread's ledger has, by thread.

        That is between the two readings, for threads that were there at both; below 0 where the
        parts have more than the clock.
        """
        before = self._before
        if before is None:
            return {}

        wall_s = max(1, self.now.at_ns - before.at_ns) * 1e-9
        return {
            lane: 1.0 - (sum(parts.values()) - sum(before.lanes[lane].values())) / wall_s
            for lane, parts in self.now.lanes.items()
            if lane in before.lanes
        }

    def rate(self, counter: str) -> float:
        """Returns by how much a counter of `Reading` grew, per second."""
        before = getattr(self._before, counter) if self._before else 0
        now = getattr(self.now, counter)
        return float(now - before if now >= before else now) / self.seconds


def _learner(
    change: ProcessChange, window: ProfileWindow, ceiling: float | None, kernel_busy: float | None
) -> LearnerEvidence:
    spec = change.now.spec
    own = GPU if GPU in change.now.lanes else MAIN
    parts = change.shares(own)
    first, last, seconds = window.growth
    return LearnerEvidence(
        **change.figures() | {"ledger": learner_parts(parts)},
        rank=spec.learner,
        parts=parts,
        threads={name: change.shares(name) for name in change.now.lanes if name != own},
        gpu_kernel_busy=kernel_busy,
        steps_per_s=change.rate("trained_steps"),
        updates_per_s=_growth(first, last, "learner_steps", seconds),
        ceiling_steps_per_s=ceiling,
        queue_fill=_mean(_own(m, spec.learner).get("queue_fill") for m in window.within),
    )


def _connector(change: ProcessChange, window: ProfileWindow) -> ConnectorEvidence:
    rank = change.now.spec.learner
    first, last, seconds = window.growth
    received = _received(_own(first, rank), _own(last, rank), seconds)
    rates: Any = {f"{name}_per_s": rate for name, rate in received.items()}
    return ConnectorEvidence(**change.figures(), learner=rank, **rates)


def _received(first: Metrics, last: Metrics, seconds: float) -> dict[str, float | None]:
    before, now = (metrics.get("received") or {} for metrics in (first, last))
    return {name: _growth(before, now, name, seconds) for name in RECEIVED}


def _played(actors: Sequence[ProcessChange], slot_nbytes: int | None) -> Rate | None:
    """Returns the rate of the actors of this host; None without any.

    Of other actors only the received samples are known.
    """
    if not actors:
        return None
    nbytes = sum(c.rate("slots") for c in actors) * slot_nbytes if slot_nbytes else None
    return Rate(sum(c.rate("played_steps") for c in actors), nbytes)


def _seen(
    window: ProfileWindow, learners: Sequence[ProcessChange], played: Rate | None, *, wire: bool
) -> Seen:
    first, last, seconds = window.growth
    return Seen(
        played=played,
        received=_received(first, last, seconds) if wire else None,
        arrived=_growth(first, last, "env_steps", seconds),
        trained=sum(c.rate("trained_steps") for c in learners),
        updates=_growth(first, last, "learner_steps", seconds),
        learners=len({c.now.spec.learner for c in learners}),
    )


def _flow(window: ProfileWindow, seen: Seen, stages: Sequence[Mapping[str, Any]]) -> FlowEvidence:
    first, last, _ = window.growth
    lags = _histogram(window.within, LAG)
    latency = _histogram(window.within, LATENCY)
    return FlowEvidence(
        produced_steps_per_s=seen.arrived if seen.played is None else seen.played.steps,
        trained_steps_per_s=seen.trained,
        store_nbytes_per_s=None if seen.played is None else seen.played.nbytes,
        dropped=_growths(first, last, "dropped"),
        lost=_growths(first, last, "lost"),
        latency_s={name: quantile(latency, q) for name, q in QUANTILES.items()},
        policy_lag={
            "mean": sum(lag * n for lag, n in lags.items()) / sum(lags.values()) if lags else None,
            "max": max(lags, default=None),
        },
        queue_fill=_mean(m.get("queue_fill") for m in window.within),
        replay_size=last.get("replay_size"),
        stages=stages,
    )


def _own(metrics: Metrics, rank: int) -> Metrics:
    """What belongs to one learner; where there is only one, it is all of it."""
    ranks: Sequence[Metrics] = metrics.get("ranks", ())
    return next((own for own in ranks if own["rank"] == rank), {} if ranks else metrics)


def _growth(first: Metrics, last: Metrics, name: str, seconds: float) -> float | None:
    """Growth of a counter per second; None if one of the two reports lacks it, or if it is less in
    the last one: a learner began anew, from a checkpoint."""
    if name not in first or name not in last or not seconds or last[name] < first[name]:
        return None
    return float(last[name] - first[name]) / seconds


def _growths(first: Metrics, last: Metrics, name: str) -> dict[str, int]:
    """Of counters by reason: those that grew."""
    before = first.get(name, {})
    grown = {reason: n - before.get(reason, 0) for reason, n in last.get(name, {}).items()}
    return {reason: n for reason, n in grown.items() if n > 0}  # less: a learner began anew


def _histogram(reports: Iterable[Metrics], name: str) -> dict[int, float]:
    """Returns several reports of a histogram as one; JSON has made its bins text."""
    total: dict[int, float] = {}
    for report in reports:
        for key, count in (report.get(name) or {}).items():
            total[int(key)] = total.get(int(key), 0.0) + count
    return total


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
