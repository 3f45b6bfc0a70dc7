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
from penstock.profiling.ledger import learner_parts
from penstock.profiling.verdict import findings

Profile = dict[str, Any]
Shares = Mapping[str, float]
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")  # counters of what connectors took in


@dataclass(frozen=True, kw_only=True)
class ProcessEvidence:
    """One process in the window. Shares are of its clock, rates are per second."""

    name: str
    parts: Shares
    """Of its main thread; of a learner on a GPU those of the GPU's stream."""
    cpu: float | None
    """Cores that it keeps busy."""
    coreless: float | None = None
    """Share in which its main thread was ready to run and had no core."""
    unmeasured: Shares = field(default_factory=dict)
    """By thread: the share that no part of its ledger has."""
    ended: bool = False

    def entry(self) -> dict[str, Any]:
        """What a profile has of every process."""
        return {
            "name": self.name,
            "ended": self.ended,
            "ledger": self.parts,
            "unmeasured": self.unmeasured,
            "cpu": self.cpu,
            "coreless": self.coreless,
        }


@dataclass(frozen=True, kw_only=True)
class ActorEvidence(ProcessEvidence):
    """An actor, which plays for the learner of rank ``learner``."""

    learner: int
    steps_per_s: float

    def entry(self) -> dict[str, Any]:
        return super().entry() | {"learner": self.learner, "steps_per_s": self.steps_per_s}


@dataclass(frozen=True, kw_only=True)
class ConnectorEvidence(ProcessEvidence):
    """A connector; ``received`` are the figures `RECEIVED` of all connectors of its learner."""

    learner: int
    received: Mapping[str, float | None]

    def entry(self) -> dict[str, Any]:
        rates = {f"{name}_per_s": rate for name, rate in self.received.items()}
        return super().entry() | {"learner": self.learner} | rates


@dataclass(frozen=True, kw_only=True)
class LearnerEvidence(ProcessEvidence):
    """A learner. ``ledger`` are the shares by the names of `LearnerPart` where they do not follow
    from the parts; ``ceiling_steps_per_s`` is the rate of a learner that never waits."""

    rank: int
    threads: Mapping[str, Shares]
    steps_per_s: float | None
    updates_per_s: float | None
    queue_fill: float | None
    ledger: Shares = field(default_factory=dict)
    ceiling_steps_per_s: float | None = None
    gpu_kernel_busy: float | None = None

    def entry(self) -> dict[str, Any]:
        ledger = self.ledger or learner_parts(self.parts)
        ceiling, rate = self.ceiling_steps_per_s, self.steps_per_s
        return super().entry() | {
            "rank": self.rank,
            "ledger": ledger,
            "parts": self.parts,
            "threads": self.threads,
            "utilization": ledger.get("compute", 0.0),
            "gpu_kernel_busy": self.gpu_kernel_busy,
            "steps_per_s": rate,
            "updates_per_s": self.updates_per_s,
            "ceiling_steps_per_s": ceiling,
            "achieved_over_ceiling": rate / ceiling if ceiling and rate is not None else None,
            "queue_fill": self.queue_fill,
        }


@dataclass(frozen=True, kw_only=True)
class FlowEvidence:
    """What moved in the window: agent steps and bytes per second, and what was lost on the way."""

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
) -> Profile:
    """The profile of a window, but for its verdict.

    Args:
        seconds: the length of the window.
        cores: how many the run may use.
        device: what learners train on, "cpu" or "cuda".
        options: those of the run, with what `judged_options` adds.
        target: what was profiled.
    """
    return {
        "target": target,
        "seconds": seconds,
        "cores": cores,
        "device": device,
        "learner": [learner.entry() for learner in learners],
        "actors": [actor.entry() for actor in actors],
        "connectors": [connector.entry() for connector in connectors],
        "others": [process.entry() for process in others],
        "flow": {**vars(flow)},
        "config": options,
    }


def with_verdict(profile: Profile) -> Profile:
    """``profile`` with its verdict, and with ``also``: the further findings, costliest first."""
    verdict, *also = map(asdict, findings(profile))
    return {**profile, "verdict": verdict, "also": also}


def judged_options(config: Config) -> dict[str, Any]:
    """All options, and what follows from them that the rules read."""
    options = config.model_dump(mode="json")
    options["algo"] |= {"trains_on": config.algo.trains_on, "passes": config.algo.passes}
    options["learner"] |= {"prefetch": batches_ahead(config)}  # a number, where the option is null
    options["transport"] |= {
        "lent_by_batch": lent_by_batch(config),
        "least_lag": lag_of(config, config.learner.batch_slots),
    }
    return options
