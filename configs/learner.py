"""The section `learner`: the processes that train, their pace and their optimizer.

A pace and an optimizer are known to the config by a `PaceSpec` and an `OptimizerSpec`, registered
in `PACES` and `OPTIMIZERS` (`configs.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from penstock.configs.reduce import ReduceConfig
from penstock.configs.registry import Registry
from penstock.configs.schedules import Rate
from penstock.configs.section import Contradiction, Section, no_contradictions
from penstock.configs.value_types import (
    Count,
    Device,
    Fraction,
    Large,
    MemoryFormat,
    Natural,
    Niceness,
    NotNegative,
    Positive,
    Processes,
    Range,
    Share,
    Small,
    SmallNatural,
    Switch,
    bounds,
    either,
)

Pull = Literal["newest", "ahead", "cached"]


@dataclass(frozen=True, eq=False)
class PaceSpec:
    """What the config knows of a pace without importing torch or zmq."""

    name: str
    means: str
    """What it does, for the docs: the end of the sentence "`name` ..."."""
    entry_point: str
    """``module:Class`` that makes it (`core.interfaces.PaceFactory`), imported in a learner."""
    server: str = ""
    """``module:function``, the main function of a parameter server's role, of which there is one
    for each of `learner.server_shards`. Empty: the learners form a group, without a server."""
    sums_gradients: bool = False
    """Whether every update is made of the gradients of all learners. Learners of other paces share
    no statistics of their samples, and cannot train from replay."""
    codecs: tuple[str, ...] | None = ("none",)
    """The values of `learner.reduce.codec` that it can use; None: all."""
    pulls: tuple[Pull, ...] = ("newest",)
    """The values of `learner.pull` that it can use."""
    check: Callable[[LearnerConfig], Iterator[Contradiction]] = no_contradictions
    """Yields invalid combinations of options with this pace, besides those of all paces
    (`configs.group`)."""


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """What the config knows of an optimizer without importing torch.

    Codecs and paces choose by its properties, not by its name, whether they go with it.
    """

    name: str
    entry_point: str
    """``module:Class`` that makes it (`core.interfaces.OptimizerFactory`), imported in a
    learner."""
    long_name: str = ""
    options: tuple[str, ...] = ()
    """The options of `learner` that it uses and others do not: `momentum`, `weight_decay`, its
    own."""
    is_elementwise: bool = False
    """Whether a step changes every value in the same way, by the value, its gradient and its state
    alone. So a parameter server may take it, which does not know where a parameter begins."""
    divides_by_variance: bool = False
    """Whether a step is divided by a root of the mean square of each value's gradients. A codec
    that changes their size ruins it."""
    leaves_momentum: bool = False
    """Whether its momentum is a sum ``u = momentum u + g`` that a codec may form in its place."""
    scales_layers: bool = False
    """Whether the length of each layer's step depends on the norm of its weights."""
    frozen_variance: str = ""
    """``module:Class`` of a form of it whose variance changes in some updates only: in the others
    it takes its momentum from a codec. Empty: it has none."""


class PaceRegistry(Registry[PaceSpec]):
    """The paces; the first is the default."""

    def is_served(self, name: str) -> bool:
        """Whether the pace has a parameter server."""
        return bool(self.specs[name].server)

    def using_codec(self, codec: str) -> list[str]:
        """Returns the paces that can use a codec."""
        specs = self.specs.values()
        return [spec.name for spec in specs if spec.codecs is None or codec in spec.codecs]

    def listed(self) -> str:
        """Returns two sentences: what each pace does, and which have a parameter server."""
        means = "; ".join(f"`{spec.name}` {spec.means}" for spec in self.specs.values())
        served = ", ".join(f"`{name}`" for name in self.specs if self.is_served(name))
        return f"How several learners are synchronised: {means}. With a parameter server: {served}."


class OptimizerRegistry(Registry[OptimizerSpec]):
    """The optimizers; the first is the default."""

    def using(self, option: str) -> list[str]:
        """Returns the optimizers that use an option of `OptimizerSpec.options`."""
        return [spec.name for spec in self.specs.values() if option in spec.options]

    def listed(self) -> str:
        """Returns a sentence with the optimizers, and the long names of those that have another."""
        titles = []
        for spec in self.specs.values():
            title = f"`{spec.name}`"
            if spec.long_name and spec.long_name.lower() != spec.name:
                title += f" ({spec.long_name})"
            titles.append(title)
        return f"The optimizer: {either(titles)}."


PACES = PaceRegistry("pace")
OPTIMIZERS = OptimizerRegistry("optimizer")


class NonFiniteConfig(Section):
    """What happens when a loss or a gradient is not finite (NaN or infinite). The update is skipped
    and counted: parameters, optimizer state and normalisers stay unchanged."""

    max_in_row: Count = 10
    """Consecutive skipped updates after which the learner rolls back to its last good state: that
    of the last checkpoint, or of the start."""
    lr_factor: Share = 0.5
    """Factor on the learning rate, applied at every rollback. It stays in effect after a resume,
    unless the resume sets another `learner.lr`."""
    max_rollbacks: Natural = 3
    """Rollbacks after which the run ends, with `exit_reason` `diverged` and exit code 1. With a
    parameter server (`learner.pace`) there are no rollbacks, and the run ends at once."""


class LearnerConfig(Section):
    """The processes that train."""

    count: Processes | Range = 1
    """Data-parallel learners that train one set of weights, each on the samples of its share of the
    actors. `1..4`, on a Ray cluster only: the run begins with 1 and has up to 4, as hosts come and
    go; each learner that joins takes the state of the others, and its share of the actors."""
    pace: Annotated[str, PACES] = "bsp"
    """Any other than `bsp` is for algorithms that train on fresh unrolls."""
    local_steps: Count = 8
    """Optimizer steps between two averages under `local_sgd`. More send less and let the learners'
    parameters drift further apart."""
    staleness: Natural = 3
    """Optimizer steps that the fastest learner may be ahead of the slowest, under `ssp` and `asp`.
    0 synchronises every step."""
    significance: Positive = 0.01
    """Relative change of a parameter above which `asp` sends it. A larger value sends less."""
    pull: Pull = "newest"
    """When a learner fetches parameters from a parameter server. `newest`: before each step, and it
    waits for them. `ahead` (for `ssp`, `tap`): during the step before, so the parameters lack the
    others' gradients of that time. `cached` (for `ssp`): as `ahead`, but only when the learner's
    copy would exceed `staleness`. The learner's own steps are in its copy at once. `ahead` and
    `cached` wait less on a slow network, but gradients are staler."""
    spare: Count = 1
    """Gradients of each step that `backup` does not wait for."""
    server_shards: Processes = 1
    """Processes of the parameter server, each with a range of the parameters. More divide its work,
    and its traffic, where `learner.pace` is `ssp`, `asp` or `tap`."""
    server_spread: Switch = False
    """Whether the processes of the parameter server are on other hosts than the learners, each on
    one of its own as far as there are enough. They then listen on the network, with the keys of
    `transport.curve`, at the ports after those of the connectors. It has an effect with `--engine
    ray` on several hosts, where learners may then be on several hosts too. Learners that are
    started by hand always have the shards beside them."""
    reduce: ReduceConfig = Field(default_factory=ReduceConfig)
    device: Device = "auto"
    """Device of the learner; `auto` uses a GPU if one is available."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the forward and backward pass; weights and optimizer state stay fp32. `auto`
    takes bf16 where it is faster, for convolutions and for an actor-critic `mlp` over at least 256
    numbers with discrete actions: on a CPU both formats are timed at the start. In one process
    (`transport.kind=inproc`) it is fp32 on a CPU."""
    memory_format: MemoryFormat = "auto"
    """Order of images in memory during training: `contiguous` has one channel after the other,
    `channels_last` one pixel after the other. On a CPU `auto` times both at the start; a GPU
    computes faster with `channels_last`."""
    threads: Small | Literal["auto"] = "auto"
    """Threads of torch in each learner, on a CPU. `auto` begins with 1. Every five seconds it adds
    one if actors are ahead of the learner and a core is idle, and takes it back if the learner does
    not train faster with it. In one process it stays at 1."""
    optimizer: Annotated[str, OPTIMIZERS] = "adam"
    """`lars` and `lamb` are for large batches and need the extra `[large]`."""
    momentum: Fraction = 0.9
    """Momentum of `sgd` and `lars`."""
    weight_decay: NotNegative = 0.0
    """Weight decay of `adamw`, `sgd`, `lars` and `lamb`. `sgd` and `lamb` add it to the gradient or
    to the step of every parameter; `lars` and `adamw` leave out biases and other parameters with
    fewer than two dimensions."""
    lr: Rate = 3e-4
    """Learning rate of one learner; see `lr_scaling` for several. A schedule such as
    `{from: 3e-4, to: 0, steps: 1e6}` changes it linearly over so many agent steps; without `steps`,
    over `stop.env_steps`, and it stays at its first value if that is null."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Factor on `lr` with several learners: `none` 1, `sqrt` the square root of their number,
    `linear` their number. Learners that have died, or have no host yet, do not count."""
    lr_warmup_updates: Natural = 0
    """Optimizer steps over which the learning rate rises linearly to its initial value. It rises
    from the rate of one learner if `lr_scaling` is set, otherwise from 0."""
    lr_end_fraction: Fraction = 1.0
    """Final learning rate as a fraction of `lr`; the rate falls linearly over `lr_decay_steps`. 1
    keeps it constant. A short form of a schedule of `lr`, which an override of `lr` does not
    replace."""
    lr_decay_steps: Count | None = None
    """Agent steps over which the learning rate falls; afterwards it stays at its final value."""
    eps: Positive = 1e-5
    """The optimizer's epsilon, added to the denominator of its step. A larger value makes steps
    smaller where gradients are small."""
    grad_clip: Positive | None = 0.5
    """Upper bound on the global norm of the gradient; larger gradients are scaled down. null: no
    bound."""
    nonfinite: NonFiniteConfig = Field(default_factory=NonFiniteConfig)
    batch_slots: Count = 1
    """Slots in one batch. More make batches larger, and the learner waits longer for each."""
    updates_per_batch: Large = 1
    """Optimizer steps (minibatches) per batch and epoch, each on an equal share of the batch's
    environments, or of its steps (`algo.minibatches` of PPO). Every sample is used once in each of
    `algo.epochs`. Not used with replay."""
    accumulate: Count = 1
    """Batches whose gradients are added up for one optimizer step. It makes the effective batch
    larger without more memory."""
    micro_batch: Count | None = None
    """Observations in one forward and backward pass; the gradients of a larger update are summed.
    null: on a CPU 256, as about that many images fit its cache, or a number that was timed as
    faster at the start; in one process (`transport.kind=inproc`) always 256. On a GPU the whole
    update, if it fits a quarter of the free memory, otherwise as many as do. It has no effect where
    the loss needs a whole update at once, as with `algo.normalize_advantages` by minibatches."""
    compile: bool = False
    """Compile the network with `torch.compile`; PPO and IMPALA only. On a GPU, fused kernels move
    less memory; the first updates take a minute or more. It needs a C++ compiler."""
    prefetch: SmallNatural | None = None
    """Batches that a thread gathers ahead, or draws from replay, while one is trained. More hide
    that work, and add policy lag, or priorities that are as many updates old. null: 1, and from
    replay 2: one is in reserve, so that the next is drawn during a backward pass, which leaves the
    interpreter to the thread. 0 does it between the steps, while the learner waits, and is faster
    with a small network on few cores."""
    gather_threads: Small | None = None
    """Threads that copy slots into one batch together. null: 1 on a CPU; on a GPU a quarter of the
    cores, at most 4."""
    publish_every: Count = 1
    """Optimizer steps between two publications of weights to the actors. A larger value costs less
    time and adds policy lag."""
    nice: Niceness = 0
    """Niceness of the learner process."""

    @property
    def served(self) -> bool:
        """Whether a parameter server updates the parameters, by `pace`."""
        return PACES.is_served(self.pace)

    @property
    def first_count(self) -> int:
        """Learners without which a run does not begin."""
        return bounds(self.count)[0] if isinstance(self.count, str) else self.count

    @property
    def most_count(self) -> int:
        """The most learners that a run has at a time."""
        return bounds(self.count)[1] if isinstance(self.count, str) else self.count

    @property
    def first_threads(self) -> int:
        """Threads of torch in each learner at its start."""
        return 1 if self.threads == "auto" else self.threads
