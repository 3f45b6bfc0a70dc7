"""The profile of a run as plain data: what `penstock profile --json` prints, what the rules of
`penstock.profiling.verdict` judge, and what terminal and page show.

`build` is the only place where a profile is made. Its evidence has two sources: readings of living
processes (`penstock.profiling.report.window`), and the metrics in the folder of a run
(`penstock.watch.verdicts`). What a source cannot know is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.configs.policy_lag import batches_ahead, lag_of, lent_by_batch
from penstock.configs.schema import Config
from penstock.profiling.evidence import ThreadTrial
from penstock.profiling.verdict import findings

Profile = dict[str, Any]
Shares = Mapping[str, float]
"""Shares of a thread's time, by part."""
# The counters of connectors in metrics.
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")


@dataclass(frozen=True, kw_only=True)
class ProcessEvidence:
    """One process in the window. Shares are of its clock, rates are per second."""

    name: str
    ended: bool = False
    """Whether the process ended in the window."""
    ledger: Shares
    """Shares of its main thread."""
    unmeasured: Shares = field(default_factory=dict)
    """The share of each thread that no part of its ledger has."""
    cpu: float | None
    """Cores that it keeps busy."""
    coreless: float | None = None
    """Share in which its main thread was ready to run and had no core."""


@dataclass(frozen=True, kw_only=True)
class ActorEvidence(ProcessEvidence):
    """An actor, which plays for the learner of rank ``learner``."""

    learner: int
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class ConnectorEvidence(ProcessEvidence):
    """A connector, and what all connectors of its learner receive."""

    learner: int
    slots_per_s: float | None
    steps_per_s: float | None
    raw_nbytes_per_s: float | None
    coded_nbytes_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class LearnerEvidence(ProcessEvidence):
    """A learner, whose ``ledger`` has the names of `LearnerPart`."""

    rank: int
    parts: Shares
    """Shares of its main thread, or with a GPU of the GPU's stream."""
    threads: Mapping[str, Shares]
    """Shares of its other threads, by name."""
    gpu_kernel_busy: float | None = None
    """Share in which its GPU ran kernels."""
    steps_per_s: float | None
    updates_per_s: float | None
    ceiling_steps_per_s: float | None = None
    """The rate of a learner that never waits."""
    queue_fill: float | None
    """How full its queue is, as a share."""

    def entry(self) -> dict[str, Any]:
        """Returns the learner as plain data, with what follows from the other figures."""
        achieved = None
        if self.ceiling_steps_per_s:
            achieved = (self.steps_per_s or 0.0) / self.ceiling_steps_per_s
        return vars(self) | {
            "utilization": self.ledger.get("compute", 0.0),
            "achieved_over_ceiling": achieved,
        }


@dataclass(frozen=True, kw_only=True)
class FlowEvidence:
    """What moved in the window, in agent steps and bytes per second, and what was lost."""

    produced_steps_per_s: float | None
    trained_steps_per_s: float | None
    dropped: Mapping[str, float]
    """Steps that were dropped in the window, by reason."""
    lost: Mapping[str, float]
    """Steps that were lost in the window, by reason."""
    policy_lag: Mapping[str, float | None]
    """``mean`` and ``max``, in updates."""
    queue_fill: float | None
    """How full the learners' queues are, as a share."""
    replay_size: float | None
    """Steps in replay."""
    store_nbytes_per_s: float | None = None
    latency_s: Mapping[str, float | None] = field(default_factory=dict)
    """Quantiles of the time from an environment's step to its gradient, by name."""
    stages: Sequence[Mapping[str, Any]] = ()
    """As `stage_rates` returns them."""


def build(
    *,
    seconds: float,
    cores: float,
    device: str,
    learners: Sequence[LearnerEvidence],
    actors: Sequence[ActorEvidence],
    connectors: Sequence[ConnectorEvidence],
    others: Sequence[ProcessEvidence],
    flow: FlowEvidence,
    options: Mapping[str, Any],
    target: str = "",
    idle_cores: float | None = None,
) -> Profile:
    """Returns the profile of a window, but for its verdict.

    Args:
        seconds: the length of the window.
        cores: how many the run may use.
        device: what learners train on, "cpu" or "cuda".
        learners, actors, connectors, others: all processes in the window.
        flow: what moved in it.
        options: those of the run, with what `judged_options` adds.
        target: what was profiled.
        idle_cores: of ``cores``, how many no process of the host kept busy.
    """
    return {
        "target": target,
        "seconds": seconds,
        "cores": cores,
        "idle_cores": idle_cores,
        "device": device,
        "learner": [learner.entry() for learner in learners],
        "actors": [{**vars(actor)} for actor in actors],
        "connectors": [{**vars(connector)} for connector in connectors],
        "others": [{**vars(process)} for process in others],
        "flow": {**vars(flow)},
        "env_threads": None,
        "config": options,
    }


def with_thread_trials(profile: Profile, trials: Sequence[Sequence[float]]) -> Profile:
    """Returns ``profile`` with what `penstock.launch.measuring.thread_trials` has returned."""
    fields = ThreadTrial._fields
    entries = [dict(zip(fields, trial, strict=True)) for trial in trials]
    return {**profile, "env_threads": entries}


def with_verdict(profile: Profile) -> Profile:
    """Returns ``profile`` with its verdict, and with ``also``: the further findings.

    These are ordered by their cost, the costliest first.
    """
    verdict, *also = map(asdict, findings(profile))
    return {**profile, "verdict": verdict, "also": also}


def judged_options(config: Config) -> dict[str, Any]:
    """Returns all options as plain data, and what follows from them that the rules read."""
    options = config.model_dump(mode="json")
    options["algo"] |= {"trains_on": config.algo.trains_on, "passes": config.algo.passes}
    options["learner"] |= {"prefetch": batches_ahead(config)}  # a number, where the option is null
    options["transport"] |= {
        "lent_by_batch": lent_by_batch(config),
        "least_lag": lag_of(config, config.learner.batch_slots),
    }
    return options
