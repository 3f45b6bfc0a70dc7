"""The section `run`: the run as a whole, and the optional sinks of its metrics.

What a config knows of a sink is its `SinkSpec`, registered in `SINKS` (`configs.registry`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from penstock.configs.registry import ExtraOptions, OpenSection, OptionsRegistry
from penstock.configs.section import Section
from penstock.configs.value_types import Classes, Natural, Positive, Seed, Text


@dataclass(frozen=True, eq=False)
class SinkSpec:
    """What can be known of an optional sink without importing it."""

    name: str
    """Name of the sink and of its option; the sink is made if that is neither null nor false."""
    entry_point: str
    """``module:function``, a `core.interfaces.SinkFactory`."""
    options: type[ExtraOptions]
    library: str | None = None
    """Module that the sink imports, from Penstock's extra named after the sink; None: no module."""


class RunOptions(Section):
    """Options that depend on no sink."""

    dir: Text | None = None
    """Folder of the run; null: `runs/<preset>-<time>`."""
    seed: Seed = 0
    """Seed of weights, environments and sampling. The same seed gives the same run only in the
    lockstep mode; between processes the order of samples varies."""
    grace_s: Positive = 10.0
    """Seconds from the first stop signal within which all processes must checkpoint and end; those
    that do not are killed."""
    interval_s: Positive = 1.0
    """Seconds between two measurements. Each is shown and written as a line of `metrics.jsonl`;
    from 5000 lines on, lines are 1/5000 of the run's duration apart."""
    callbacks: Classes = Field(default_factory=list)
    """Your classes whose methods are called after evaluations and checkpoints and at the end of the
    run; see `penstock.launch.callbacks`."""
    hang_timeout_s: Positive = 60.0
    """Seconds without progress after which a process counts as hung."""
    start_timeout_s: Positive = 60.0
    """Seconds that a process may take until its first progress."""
    max_restarts: Natural = 5
    """Restart policy: how many restarts without progress are tolerated before the run fails. An
    actor makes no progress if it produces no sample, or always ends with the same exception at the
    same line while no episode ends in the run; one of several learners, if it does not last."""


SINKS = OptionsRegistry[SinkSpec]("sink", "run", RunOptions)


class RunConfig(RunOptions, OpenSection):
    """The run as a whole: where it writes, how it starts, watches and ends."""

    registry = SINKS
