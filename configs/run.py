"""The section `run`: the run as a whole, and the optional sinks of its metrics.

A sink is known to the config by a `SinkSpec`, registered in `SINKS` (`configs.registry`); its
options are fields of `SinkOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from penstock.configs.registry import Registry
from penstock.configs.section import Contradiction, Section, no_contradictions
from penstock.configs.value_types import (
    Classes,
    Folder,
    Natural,
    Port,
    Positive,
    Seed,
    Switch,
    Text,
)

Log = Literal["text", "json"]


@dataclass(frozen=True, eq=False)
class SinkSpec:
    """What the config knows of an optional sink without importing it."""

    name: str
    """Name of the sink and of the option that enables it; the sink is made if that is neither null
    nor false."""
    entry_point: str
    """``module:function``, a `core.interfaces.SinkFactory`."""
    library: str | None = None
    """Module that the sink imports, from an extra of Penstock; None: no module."""
    extra: str | None = None
    """Name of that extra; None: the name of the sink."""
    thinned: bool = True
    """Whether the sink receives only as many intervals of a long run as a plot can show; otherwise
    all."""
    check: Callable[[RunConfig], Iterator[Contradiction]] = no_contradictions
    """Yields invalid combinations of the sink's options."""


SINKS = Registry[SinkSpec]("sink")


class RunOptions(Section):
    """Options that depend on no sink."""

    dir: Folder | None = None
    """Folder of the run; null: `runs/<preset>-<time>`."""
    seed: Seed = 0
    """Seed of weights, environments and sampling. The same seed gives an identical run in lockstep
    mode (`transport.kind=inproc`) only; between processes the order of samples varies."""
    grace_s: Positive = 10.0
    """Seconds that all processes have to write a checkpoint and end, counted from the first stop
    signal; processes that take longer are killed. Raise it for large checkpoints or slow disks."""
    interval_s: Positive = 1.0
    """Seconds between two measurements. Each is shown, and written as a line of `metrics.jsonl`.
    After 5000 lines, lines are written every 1/5000 of the run's duration."""
    log: Log = "text"
    """Output on the terminal: `text` for people; `json` has one JSON object per line for each event
    and, every ten seconds, for the figures, for programs that collect logs."""
    callbacks: Classes = Field(default_factory=list)
    """Classes of your own, `module:Class`, whose methods are called every so many agent steps,
    after evaluations, after checkpoints and at the end of the run; see
    `penstock.launch.callbacks`."""
    hang_timeout_s: Positive = 60.0
    """Seconds without progress after which a process counts as hung. It is then killed and
    restarted. Each reset of a single environment is progress, and each step of all environments of
    an actor. Raise it where one of them is slower."""
    start_timeout_s: Positive = 60.0
    """Seconds that each part of a process's start may take: importing modules, making each single
    environment, and the rest up to its first progress. Raise it where one of them is slower."""
    restarts: Natural = 3
    """How many times in a row a run resumes from its newest checkpoint without a command when the
    process that holds the trained state has died: the only learner, all learners at once, or a
    parameter server. Actors keep running meanwhile. A checkpoint that is written after a restart
    resets the count. A run without a checkpoint fails; with 0, every run does."""
    max_restarts: Natural = 5
    """Restart policy: how many restarts without progress are tolerated before the run fails. An
    actor makes no progress if it produces no sample, or if it ends with the same exception at the
    same line every time, within 10 s of its start or while no episode ends in the run. One of
    several learners makes no progress if it ends soon after its start."""


class SinkOptions(Section):
    """The options of sinks.

    In the config of a run folder that another user may have written, values other than the defaults
    need consent (`configs.code_references`).
    """

    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard, to the folder `tensorboard` of the run;
    needs the extra `[tensorboard]`."""
    wandb: Text | None = None
    """Project of Weights & Biases to which metrics are also sent; null: none. Needs the extra
    `[wandb]`."""
    metrics_port: Port | None = None
    """Port at which the run serves `/metrics` for Prometheus, and `/healthz` and `/readyz` for
    probes; null: none, 0: one that the system chooses, which a note names. Needs the extra
    `[prometheus]`."""
    metrics_host: Text = "127.0.0.1"
    """Address of `metrics_port`. Off this host only with `metrics_insecure`."""
    metrics_insecure: Switch = False
    """Whether `metrics_host` may be an address that other hosts reach: every program there can
    read the metrics, as there are no keys. Use it on trusted networks only."""


class RunConfig(SinkOptions, RunOptions):
    """The run as a whole: its folder, seed, measurements, time limits and restart policy."""
