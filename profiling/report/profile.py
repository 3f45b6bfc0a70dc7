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
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")  # counters of connectors, in metrics


@dataclass(frozen=True, kw_only=True)
class ProcessEvidence:
    """One process in the window. Shares are of its clock, rates are per second."""

    name: str
    ended: bool = False
    ledger: Shares
    """Of its main thread, by part."""
    unmeasured: Shares = field(default_factory=dict)
    """By thread: the share that no part of its ledger has."""
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
    threads: Mapping[str, Shares]
    gpu_kernel_busy: float | None = None
    steps_per_s: float | None
    updates_per_s: float | None
    ceiling_steps_per_s: float | None = None
    queue_fill: float | None

    def entry(self) -> dict[str, Any]:
        rate, ceiling = self.steps_per_s or 0.0, self.ceiling_steps_per_s
        return vars(self) | {
            "utilization": self.ledger.get("compute", 0.0),
            "achieved_over_ceiling": rate / ceiling if ceiling else None,
        }


@dataclass(frozen=True, kw_only=True)
class FlowEvidence:
    """What moved in the window, in agent steps and bytes per second, and what was lost."""

    produced_steps_per_s: float | None
    trained_steps_per_s: float | None
    dropped: Mapping[str, float]
    lost: Mapping[str, float]
    policy_lag: Mapping[str, float | None]
    """``mean`` and ``max``, in updates."""
    queue_fill: float | None
    replay_size: float | None
    store_nbytes_per_s: float | None = None
    latency_s: Mapping[str, float | None] = field(default_factory=dict)
    stages: Sequence[Mapping[str, Any]] = ()


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
    keys = ThreadTrial._fields
    return {**profile, "env_threads": [dict(zip(keys, t, strict=True)) for t in trials]}


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
