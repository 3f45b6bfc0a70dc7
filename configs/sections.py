"""Every option of a run: one class per section, frozen, with a docstring per field.

The docstrings become `docs/configuration.md` (`penstock.configs.reference`). What the kinds of
value accept is in `penstock.configs.value_types`. Imports neither torch nor numpy nor gymnasium.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.configs.algorithms import ALGORITHMS, AnyAlgoConfig
from penstock.configs.model import ModelConfig
from penstock.configs.reduce import ReduceConfig
from penstock.configs.run import RunConfig
from penstock.configs.section import Section
from penstock.configs.transports import TransportConfig
from penstock.configs.value_types import (
    Count,
    Device,
    Fraction,
    Natural,
    Niceness,
    NotNegative,
    Number,
    Options,
    Positive,
    Share,
    Switch,
    Text,
    Wrappers,
)


class EnvConfig(Section):
    """The game."""

    id: Text
    """A gymnasium id such as `CartPole-v1` or `ALE/Pong-v5`, `module:EnvId-v0`, or
    `module:function` for a function that returns an environment."""
    kwargs: Options = Field(default_factory=dict)
    """Keyword arguments of the environment. `${env:PENSTOCK_KEY}` in a text stands for the value of
    an environment variable, which is written nowhere; its name begins with PENSTOCK_."""
    wrappers: Wrappers = Field(default_factory=list)
    """Wrappers around each single environment, innermost first. They turn off the environment's own
    vectorised form, which is slower."""


class ActorsConfig(Section):
    """The processes that play."""

    count: Count = 2
    """Actor processes that `penstock train` starts on this host."""
    envs: Count = 64
    """Environments that each actor steps together; one slot holds all of them."""
    unroll: Count = 32
    """Consecutive steps in one slot (T). Weights are swapped between unrolls."""
    nice: Niceness = 5
    """Niceness of actor processes, so that the learner wins the core when there are too few."""
    threads: Count = 1
    """Threads of each actor's inference."""
    inference: Literal["auto", "numpy", "torch"] = "auto"
    """What computes the policy on an actor: `numpy` is faster for a small `mlp`, and the only one
    that starts without torch; `auto` takes it where it can."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of an actor's inference; `auto` takes bf16 where the processor gains by it."""
    env_threads: Count = 1
    """Threads that step each actor's environments: those of Atari's and EnvPool's vector forms, and
    of single environments, of which each thread steps a fixed share. That pays where a step waits
    outside Python, for a simulator or a network; other vector forms have no use for it."""


class NonFiniteConfig(Section):
    """What happens where a loss or a gradient is not finite (NaN or infinite). The update is
    skipped and counted: parameters, optimizer state and normalisers stay as they are."""

    max_in_row: Count = 10
    """Skipped updates in a row at which the learner goes back to its last good state: that of a
    checkpoint, or of the start."""
    lr_factor: Share = 0.5
    """What the learning rate is multiplied by each time it goes back. It stays so, also after a
    resume, until that sets another `learner.lr`."""
    max_rollbacks: Natural = 3
    """How often it may go back until the run ends, with `exit_reason` `diverged` and exit code 1.
    With a parameter server (`learner.pace`) it ends at once."""


class ReplayConfig(Section):
    """The memory that off-policy algorithms (`dqn`, `sac`, `custom` with `algo.data=transitions`)
    learn from; the others have none."""

    capacity: Count = 1_000_000
    """Agent steps kept; the oldest go first."""
    min_size: Count = 10_000
    """Agent steps that must be there before the first optimizer step."""
    batch_size: Count = 256
    """Transitions in one optimizer step."""
    samples_per_insert: Positive | None = 8.0
    """How often each agent step is sampled on average: whoever is ahead, actors or learner, waits.
    null: nobody waits."""
    prioritized: Switch = True
    """Whether surprising transitions are drawn more often (prioritised replay), or all alike."""
    alpha: Fraction = 0.6
    """Exponent of the priorities: 0 draws all alike, 1 in proportion."""
    beta: Fraction = 0.4
    """Exponent at the start of the importance weights that correct for it; 1 corrects in full."""
    beta_steps: Count | None = None
    """Optimizer steps over which `beta` rises linearly to 1; null: it stays."""
    checkpoint: Switch = False
    """Whether checkpoints hold the replay too, so that a resumed run goes on with what it had; else
    it begins with an empty one. Takes the replay's size on disk, twice while one is written; at the
    end of a run, `run.grace_s` must be long enough for that."""


class LearnerConfig(Section):
    """The processes that train."""

    count: Count = 1
    """Learners that train one agent together, each on the samples of its share of the actors."""
    pace: Literal["bsp", "local_sgd", "ssp", "asp", "tap", "backup"] = "bsp"
    """How several learners keep step. `bsp` averages gradients in every step; `local_sgd` averages
    parameters every `local_steps`. With a parameter server: `ssp` lets nobody be more than
    `staleness` steps ahead, `asp` sends only what has changed by more than `significance`, `tap`
    never waits, `backup` goes on without the last `spare` gradients of a step."""
    local_steps: Count = 8
    """Optimizer steps between two averages under `local_sgd`."""
    staleness: Natural = 3
    """Steps that the fastest learner may be ahead of the slowest under `ssp` and `asp`."""
    significance: Positive = 0.01
    """Relative change from which an update is sent under `asp`."""
    spare: Count = 1
    """Gradients of each step that `backup` does not wait for."""
    reduce: ReduceConfig = Field(default_factory=ReduceConfig)
    device: Device = "auto"
    """`auto` takes a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of forward and backward pass; weights and optimizer stay fp32. `auto` takes bf16
    for convolutions where the device gains by it."""
    threads: Count = 1
    """Threads of the learner's torch on a CPU."""
    optimizer: Literal["adam", "rmsprop", "sgd", "lars", "lamb"] = "adam"
    """The optimizer. `lars` and `lamb` are for large batches and need the extra `[large]`."""
    momentum: Fraction = 0.9
    """Momentum of `sgd` and `lars`."""
    weight_decay: NotNegative = 0.0
    """Weight decay of `sgd`, `lars` and `lamb`."""
    lr: Positive = 3e-4
    """Learning rate at the start, of one learner."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """What `lr` is multiplied by for several learners: nothing, the root of `count`, or `count`."""
    lr_warmup_updates: Natural = 0
    """Optimizer steps over which the learning rate rises linearly to its start, from the rate of
    one learner where it is scaled, else from 0."""
    lr_end_fraction: Fraction = 1.0
    """The learning rate falls linearly to this fraction of `lr`; 1 keeps it constant."""
    lr_decay_steps: Count | None = None
    """Agent steps over which the learning rate falls; it stays at its end value from then on."""
    eps: Positive = 1e-5
    """The optimizer's epsilon."""
    grad_clip: Positive | None = 0.5
    """Bound on the norm of the gradient of all parameters together; null: none."""
    nonfinite: NonFiniteConfig = Field(default_factory=NonFiniteConfig)
    batch_slots: Count = 1
    """Slots in one batch."""
    updates_per_batch: Count = 1
    """Optimizer steps per batch and epoch, each on its share of the batch's environments: every
    sample is used once in each of `algo.epochs`. Of no use with replay."""
    accumulate: Count = 1
    """Batches whose gradients add up to one optimizer step."""
    micro_batch: Count = 256
    """Observations in one forward and backward pass; gradients of a larger update are summed."""
    prefetch: Natural = 1
    """Batches gathered ahead while one is trained; 0 gathers between the steps, so that the learner
    waits for it."""
    gather_threads: Count | None = None
    """Threads that copy slots into a batch together; null: one, for a learner on a GPU a quarter of
    the cores, at most 4."""
    publish_every: Count = 1
    """Optimizer steps from one publication of weights to the next."""
    nice: Niceness = 0
    """Niceness of the learner process."""


class WeightsConfig(Section):
    """How weights reach the actors."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """What weights are sent as between hosts; within a host, and with
    `model.normalize_observations`, it is always fp32."""


class CheckpointConfig(Section):
    """When the run is saved."""

    every_s: Positive = 60.0
    """Seconds between checkpoints."""
    every_steps: Count | None = None
    """Optimizer steps between checkpoints, besides those by time; null: only by time."""
    keep: Count = 3
    """Checkpoints that are kept: `checkpoints/last`, and those before it as `checkpoints/step-N`. A
    resume takes the newest that is whole. The best is kept besides, and a replay only with the
    newest."""


class EvalConfig(Section):
    """Evaluation while the run goes on, in a process of its own."""

    every_s: Positive | None = None
    """Seconds from the begin of one evaluation to the next, each of the newest checkpoint, which
    are written as often; null: none. `checkpoints/best` is then the best by evaluation, not by the
    return in training."""
    episodes: Count = 20
    """Episodes in each, played with the likeliest actions; returns are raw scores."""
    max_episode_steps: Count = 27_000
    """Agent steps at which an episode that goes on is cut, and counts with its return so far; also
    for `penstock eval`, `record` and `play`. It is an Atari game of half an hour."""


class StopConfig(Section):
    """When the run is done: at whichever comes first; with none, it goes on until interrupted."""

    return_: Number | None = Field(default=None, alias="return")
    """Mean raw return of the last 100 episodes."""
    env_steps: Count | None = None
    """Agent steps trained."""
    learner_steps: Count | None = None
    """Optimizer steps."""
    minutes: Positive | None = None
    """Minutes of training, from the first unroll that is played; starting up does not count. A
    resumed run goes on counting."""
    hold_s: NotNegative = 0.0
    """Seconds to go on after `stop.return` was first reached."""


class Sections(Section):
    """A whole run, each section valid by itself; `schema.Config` is valid as a whole."""

    env: EnvConfig
    algo: AnyAlgoConfig = Field(default_factory=lambda: ALGORITHMS.parse({}))
    model: ModelConfig = Field(default_factory=ModelConfig)
    actors: ActorsConfig = Field(default_factory=ActorsConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
