"""A sampler in a snapshot's description: what it is made of, and made of again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.replay.errors import ReplayError
from penstock.replay.samplers import Prioritized, Sampler, Uniform
from penstock.replay.schedules import Constant, Linear, Schedule
from penstock.replay.sequences import SequenceSampler
from penstock.replay.snapshot_files import FolderReader
from penstock.replay.times_sampled import SampleCountLimit


def _inner(sampler: Sampler) -> Sampler:
    return sampler.sampler if isinstance(sampler, SequenceSampler | SampleCountLimit) else sampler


def describe_sampler(sampler: Sampler) -> dict[str, Any] | None:
    """JSON of which `read_sampler` makes it again; None for a sampler of the user's own. What
    wraps a sampler follows from the replay's other options."""
    sampler = _inner(sampler)
    if type(sampler) is Uniform:
        return {"kind": "uniform"}
    if type(sampler) is Prioritized:
        beta = _describe_schedule(sampler.schedule)
        return {"kind": "prioritized", "alpha": sampler.alpha, "beta": beta} | {
            "epsilon": sampler.epsilon
        }
    return None


def _describe_schedule(schedule: Schedule) -> Any:
    if isinstance(schedule, Constant):
        return schedule.value
    return asdict(schedule) if isinstance(schedule, Linear) else None


def read_sampler(reader: FolderReader, described: dict[str, Any] | None) -> Sampler:
    with reader.refusing():
        if described is not None and described["kind"] == "uniform":
            return Uniform()
        if described is not None and described.get("beta") is not None:
            beta = described["beta"]
            schedule = Linear(**beta) if isinstance(beta, dict) else beta
            return Prioritized(described["alpha"], schedule, described["epsilon"])
    raise ReplayError(
        f"{reader.folder} was saved with a sampler or schedule of your own; make it and give it as "
        "Replay.load(folder, sampler=...)"
    )
