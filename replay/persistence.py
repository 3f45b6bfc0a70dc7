"""A whole replay to a folder and back: its table, its sampler, and how it was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core.specs import SlotSpec
from penstock.replay import snapshot
from penstock.replay.errors import ReplayError
from penstock.replay.samplers import Prioritized, Sampler, Uniform
from penstock.replay.schedules import Constant, Linear, Schedule
from penstock.replay.sequences import Sequences, SequenceSampler
from penstock.replay.snapshot_files import FolderReader
from penstock.replay.times_sampled import TimesSampled

if TYPE_CHECKING:
    from penstock.replay.buffer import Replay

R = TypeVar("R", bound="Replay")
COUNTERS = ("stale_updates",)


def save(
    replay: Replay, folder: str | Path, more: Callable[[], dict[str, Any]] | None = None
) -> None:
    """Replace the snapshot in ``folder``: see `penstock.replay.snapshot`. ``more``: JSON values of
    the same instant to keep with it, asked for under the buffer's lock."""

    def others() -> dict[str, Any]:
        return {
            "options": _options(replay),
            "sampler": _described(_inner(replay.sampler)),
            "state": replay.sampler.state_dict(),
            "limiter": replay.flow.state_dict() if replay.flow else None,
            "counters": {name: getattr(replay, name) for name in COUNTERS},
            "more": more() if more is not None else {},
        }

    with replay.lock:
        replay.collect()
    snapshot.save(Path(folder), replay.table, replay.lock, others)


def load(make: Callable[..., R], folder: str | Path, sampler: Sampler | None, **changes: Any) -> R:
    """The replay of a snapshot; ``make`` is its class."""
    reader = FolderReader(Path(folder))
    with reader.refusing():
        others, spec = reader.about["others"], SlotSpec.from_dict(reader.about["table"]["spec"])
        options = dict(others["options"]) | changes
        if options["sequences"] is not None:
            options["sequences"] = Sequences(**options["sequences"])
    replay = make(spec, **options, sampler=sampler or _sampler(reader, others["sampler"]))
    try:
        restore(replay, reader)
    except BaseException:
        replay.close()
        raise
    return replay


def restore(replay: Replay, reader: FolderReader) -> dict[str, Any]:
    """Fill a new replay that was made like the one of the snapshot; what `save` kept besides."""
    with replay.lock, reader.refusing():
        others = snapshot.restore(reader, replay.table)
        mine, theirs = _described(_inner(replay.sampler)), others["sampler"]
        if (mine or {}).get("kind") != (theirs or {}).get("kind"):
            raise ReplayError(
                f"{reader.folder} has the state of another sampler: {theirs or 'one of your own'}; "
                "give the sampler that the replay was made with"
            )
        replay.sampler.load_state_dict(others["state"])
        if replay.flow is not None:
            replay.flow.load_state_dict(others.get("limiter"))
        for name in COUNTERS:
            setattr(replay, name, int(others["counters"][name]))
        more: dict[str, Any] = others.get("more", {})
        return more


def _options(replay: Replay) -> dict[str, Any]:
    table = replay.table
    sequences = replay.sequences
    return {
        "capacity": replay.capacity,
        "n_step": replay.n_step,
        "discount": replay.discount,
        "frame_stack": replay.layout.frame_stack,
        "autoreset": replay.autoreset,
        "writers": replay.writers,
        "in_hand": replay.in_hand,
        "shared": table.store.arena.fd is not None,
        "sequences": None if sequences is None else asdict(sequences),
        "max_times_sampled": getattr(replay.sampler, "most", None),
        **asdict(replay.cuts),
    }


def _inner(sampler: Sampler) -> Sampler:
    return sampler.sampler if isinstance(sampler, SequenceSampler | TimesSampled) else sampler


def _described(sampler: Sampler) -> dict[str, Any] | None:
    """What `_sampler` makes it from again; None for a sampler of the user's own."""
    if type(sampler) is Uniform:
        return {"kind": "uniform"}
    if type(sampler) is Prioritized:
        beta = _described_schedule(sampler.schedule)
        return {"kind": "prioritized", "alpha": sampler.alpha, "beta": beta} | {
            "epsilon": sampler.epsilon
        }
    return None


def _described_schedule(schedule: Schedule) -> Any:
    if isinstance(schedule, Constant):
        return schedule.value
    return asdict(schedule) if isinstance(schedule, Linear) else None


def _sampler(reader: FolderReader, described: dict[str, Any] | None) -> Sampler:
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
