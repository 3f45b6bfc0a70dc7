"""Every option of a run: one class per section, immutable, with a docstring per field.

The docstrings become the descriptions of the fields and `docs/configuration.md`
(`penstock.configs.reference`). `penstock.configs.value_types` defines the kinds of value. Imports
neither torch nor numpy nor gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict

from penstock.configs import samplers
from penstock.configs.algorithms import ALGORITHMS, AnyAlgoConfig
from penstock.configs.league import LeagueConfig
from penstock.configs.learner import LearnerConfig as LearnerConfig
from penstock.configs.learner import NonFiniteConfig as NonFiniteConfig
from penstock.configs.model import ModelConfig
from penstock.configs.run import RunConfig
from penstock.configs.section import Section
from penstock.configs.transports import TRANSPORTS, TransportConfig
from penstock.configs.value_types import (
    Count,
    Fraction,
    Large,
    MemoryFormat,
    Names,
    Natural,
    Niceness,
    NotNegative,
    Number,
    Options,
    Positive,
    Processes,
    Range,
    Share,
    Small,
    Switch,
    Text,
    ValueDescription,
    Wrappers,
    bounds,
)

MOST_AT_FIRST = 16  # actors of each learner that `auto` starts at once, whatever a batch needs
# With `actors.envs` auto a batch has at least and at most so many agent steps, as in most presets.
BATCH_STEPS = 512, 2048
# The same for a slot with replay, where its size does not change the batch.
SLOT_STEPS = 32, 512
MOST_ENVS = 128  # most environments of an actor, with `auto`
# The metrics of a key of `env.record`: means over all agent steps, and those that ended an episode.
RECORD_MEANS = "env_{}_mean", "env_{}_final_mean"

EnvKind = Literal["auto", "vector", "continuous", "pixels", "atari"]


class EnvConfig(Section):
    """The environment that the actors play."""

    id: Text
    """A gymnasium id such as `CartPole-v1` or `ALE/Pong-v5`; `module:EnvId-v0`, which imports the
    module first; or `module:function`, a function that returns an environment."""
    kind: EnvKind = "auto"
    """The kind of environment, which decides the algorithm's defaults where no preset of it has
    settings: `vector` has observations of numbers and actions to choose from, `continuous` has
    actions of numbers, such as MuJoCo, `pixels` has images, `atari` is ale-py. `auto` finds it from
    the id, and takes `vector` for an id that is not known. With a gymnasium id for which there is a
    preset, any other value replaces all of the preset's settings but those of `env`."""
    kwargs: Options = Field(default_factory=dict)
    """Keyword arguments of the environment. `${env:PENSTOCK_KEY}` in a text is replaced, in the
    process that makes the environment, by the value of that environment variable. The value is
    never written to a file or sent. The variable's name must begin with PENSTOCK_."""
    wrappers: Wrappers = Field(default_factory=list)
    """Wrappers around each single environment, innermost first. With wrappers, the environment's
    own vectorised form is not used, which is slower."""
    record: Names = Field(default_factory=list)
    """Keys of the `info` that a step returns, whose numbers are recorded where a step has them:
    `[is_success]`. The metrics `env_KEY_mean` and `env_KEY_final_mean` are their means, and an
    algorithm of your own finds them as a column of its batch. Each costs 5 bytes a step."""
    embed_above: Large = 1000
    """The most choices of a Discrete observation, or of a part of one, that the network reads
    one-hot. One of more choices is stored as its number, and the network learns a vector for each
    choice. A smaller value saves memory of replay and slots; up to about a thousand choices it
    learns as one-hot does."""
    on_error: Literal["fail", "drop_episode"] = "fail"
    """Effect of a step that raises an exception, or that returns an observation or a reward that is
    not finite. `fail` restarts the actor after an exception, and ends the run at such a number.
    `drop_episode` resets the one environment in place of that step: the episode has no result, its
    steps before are trained on up to the last sound observation, and the step is counted as
    `dropped: env_error`. It is for rare errors, of single environments only: with it, the
    environment's own vectorised form is not used."""

    def identity(self) -> dict[str, Any]:
        """Returns the settings of the environment as JSON, for checkpoints and evaluations.

        Options that do not change the environment are left out: they decide defaults, what is
        recorded, how it is stored, and what becomes of a step that fails.
        """
        return self.model_dump(mode="json", exclude={"kind", "record", "embed_above", "on_error"})

    def is_same(self, known: Mapping[str, Any]) -> bool:
        """Whether ``known``, from `identity`, is this environment.

        Settings that an older version did not store are ignored.
        """
        return all(known.get(name, value) == value for name, value in self.identity().items())


class ActorsConfig(Section):
    """The processes that play the environments and record samples."""

    count: Processes | Range | Literal["auto"] = "auto"
    """Actor processes that `penstock train` starts. `auto` starts at least 2, and as many for each
    learner as fill a batch (`learner.batch_slots` / `transport.slots`, at most 16). Every five
    seconds the number is adapted: while the learner waits for data and cores are idle it is raised,
    up to four actors per core; actors that the learner does not need are ended. On a Ray cluster
    `auto` is one actor for each core that the learners leave. `8..40` sets bounds: on one host the
    number starts at 8 and is adapted between 8 and 40; on a Ray cluster the run begins with 8 and
    has up to 40, as hosts come and go. The number is not adapted in one process, and where
    `transport.max_policy_lag` is below the updates of a batch."""
    envs: Large | Literal["auto"] = 64
    """Environments that each actor steps together; one slot holds all of them. More make inference
    cheaper per step and batches larger, and need more memory. `auto` times a step of the
    environment with the policy before the run starts, and takes the smallest number after which a
    step becomes little cheaper; batches then have 512 to 2,048 agent steps (with replay: slots of
    32 to 512), as those of most presets. A resumed run keeps the number. In one process it is the
    smallest of these numbers."""
    unroll: Large = 32
    """Length of an unroll in agent steps (T): consecutive steps of each environment in one slot.
    Actors take new weights between unrolls only, so longer unrolls mean more policy lag, and
    shorter ones more overhead per step."""
    nice: Niceness = 5
    """Niceness of actor processes. At a higher value than `learner.nice`, the scheduler prefers the
    learner where there are fewer cores than processes."""
    threads: Small = 1
    """Threads of each actor's inference. More than 1 helps with large networks only."""
    inference: Literal["auto", "numpy", "torch"] = "auto"
    """Library that computes the policy on an actor. `numpy` is faster for a small `mlp`, and with
    it an actor does not import torch; `torch` computes every network. `auto` uses `numpy` where it
    supports the network."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of an actor's inference. `auto` times a network with convolutions in both
    formats at the start, and uses the faster; it is fp32 for an `mlp`, in one process
    (`transport.kind=inproc`) and in evaluation."""
    memory_format: MemoryFormat = "auto"
    """Order of images in memory during an actor's inference: `contiguous` has one channel after the
    other, `channels_last` one pixel after the other. `auto` times both at the start."""
    env_threads: Small = 1
    """Threads that step each actor's environments. They are used by the vectorised forms of Atari
    and EnvPool, and by single environments, of which each thread steps a fixed share. More than 1
    helps where a step waits outside Python, such as for a simulator or a network. Other vectorised
    forms ignore it."""
    games: Switch = False
    """Whether games play at the port of `penstock serve-env`, which sets this, in place of actor
    processes. `envs` is then 1, as each seat of a game has slots of its own, and `count` is the
    number of seats whose unrolls the learner has memory for at a time; more may play."""


class ReplayConfig(Section):
    """The replay buffer of off-policy algorithms (`dqn`, `r2d2`, `sac`, `custom` with
    `algo.data=transitions`). Other algorithms do not use it."""

    capacity: Count = 1_000_000
    """Agent steps that the buffer keeps; the oldest are evicted first. A larger buffer keeps older,
    more varied samples and needs more memory."""
    min_size: Count = 10_000
    """Agent steps in the buffer before the first optimizer step. A larger value makes the first
    batches more varied, and training starts later."""
    batch_size: Large = 256
    """Transitions in one optimizer step, or sequences of `r2d2`."""
    samples_per_insert: Positive | None = 8.0
    """Average number of times that each agent step is sampled. The learner waits when it is above
    the ratio, the actors wait when it is below. A larger value learns more from each environment
    step and trains longer per step. null: neither waits."""
    prioritized: Switch = True
    """Whether transitions are drawn by their TD error (prioritised replay); false draws them
    uniformly."""
    sampler: (
        Annotated[
            str,
            Strict(),
            AfterValidator(samplers.validated_sampler),
            ValueDescription("a sampler's name"),
        ]
        | None
    ) = None
    """Name of what draws the batches; null: `prioritized` or `uniform`, by the option before. Any
    other one is given TD errors while `prioritized` is true."""
    alpha: Fraction = 0.6
    """Exponent of the priorities: 0 draws uniformly, 1 in proportion to the priority."""
    beta: Fraction = 0.4
    """Initial exponent of the importance weights that correct the bias of prioritised draws: 0 does
    not correct, 1 corrects in full."""
    beta_steps: Count | None = None
    """Optimizer steps over which `beta` rises linearly to 1; null keeps it constant."""
    checkpoint: Literal["auto"] | Switch = "auto"
    """Whether checkpoints contain the replay buffer, so that a resumed run continues with it.
    `auto`: where the disk has room for three times the buffer, as far as writing it takes little of
    the time, and at the end of the run if that takes less than three tenths of `run.grace_s`. true:
    every checkpoint does; the disk needs twice the buffer, and `run.grace_s` must be long enough.
    false: a resumed run starts with an empty buffer."""


class WeightsConfig(Section):
    """How weights travel to the actors."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Number format of weights sent between hosts; `bf16` halves the bytes. Within a host, and with
    `model.normalize_observations`, weights are always sent as fp32."""


class CheckpointConfig(Section):
    """When checkpoints are written."""

    every_s: Positive = 60.0
    """Seconds between checkpoints. A crash of the learner loses the training since the last one."""
    every_steps: Count | None = None
    """Optimizer steps between checkpoints, in addition to `every_s`; null: by time only."""
    keep: Count = 3
    """Number of checkpoints kept: `checkpoints/last`, and earlier ones as `checkpoints/step-N`. A
    resume uses the newest that is complete. `checkpoints/best` is kept in addition. The replay
    buffer is kept with the newest only."""
    store: Text | None = None
    """Where each checkpoint is also copied, in the background: a folder that all hosts reach, or a
    URL of an object store, such as `s3://bucket/pong` (`pip install 'penstock[s3]'`). The last
    `keep` of them remain. `--resume auto` and `must` take the newest from there if it is newer than
    the run folder's. Replay buffers are not copied. null: checkpoints are in the run folder
    only."""


class EvalConfig(Section):
    """Evaluation during training, in a separate process. `checkpoints/best` is the best of the
    evaluated checkpoints, or the best by the return in training before the first evaluation."""

    every_steps: Count | None = 100_000
    """Agent steps trained on between two evaluations, which are at multiples of it; null: none by
    steps. The distance is doubled as often as `share` requires, or halved, so that there is an
    evaluation within two minutes and then at least every five. Not used with `transport.kind`
    `inproc`."""
    every_s: Positive | None = None
    """Seconds between the starts of two evaluations, instead of `every_steps`; null: none by time.
    Each plays the newest checkpoint, and checkpoints are written at least as often."""
    share: Share | None = 0.05
    """Upper limit on the CPU time of evaluations by steps, as a fraction of one core, on average.
    Where one takes longer, the next ones are further apart, up to four minutes, or else have fewer
    episodes. null: no limit; all are complete, and at each multiple of `every_steps`. Games between
    members of the pool (`league`) take as much again at most; with `league.draw` `nash` half a
    core."""
    episodes: Count = 20
    """Episodes of a complete evaluation, played once with the most probable actions (greedy) and
    once with sampled ones; returns are raw scores. More make the means more precise and take
    longer. The last evaluation of a run, and one that is to confirm `stop.return`, are complete."""
    max_episode_steps: Count = 27_000
    """Agent steps after which an episode is cut; it counts with its return so far. Also the default
    of `penstock eval`, `record` and `play`. 27,000 steps are half an hour of Atari."""
    against: Names | None = None
    """Opponents of an evaluation, in a game of several sides: `bot:NAME`, `initial` (the policy
    before training), the folder of a run, or an exported file. The episodes are divided equally
    among them, and the policy plays each side in turn; these returns rank checkpoints, and reach
    `stop.return`. More opponents say more and need more `episodes`. null: `initial` in such a
    game."""
    video: bool = True
    """Whether an episode of each new best is recorded in the folder `videos` of the run, where the
    environment can be shown and the extra [video] is installed. A process at the lowest priority
    records it, of at most 5 % of a core on average, not before 10 s; the newest five are kept."""


class StopConfig(Section, validate_by_name=True):
    """When the run ends: at the limit that is reached first. Without limits it runs until
    interrupted."""

    return_: Number | None = Field(
        default=None, validation_alias="return", serialization_alias="return"
    )
    """Mean raw return to reach. When the mean of the last 100 episodes in training reaches it, an
    evaluation must confirm it (`confirm_episodes`). Where environments explore at different rates,
    as with `dqn`, it is that of the last 25 episodes of the quarter that explores least."""
    confirm_episodes: Natural = 100
    """Episodes of the evaluation that confirms `return`: the run ends if the lower end of the 95 %
    confidence interval of their mean reaches it, and otherwise continues. 0: the run ends by the
    return in training, as it does with `transport.kind` `inproc`."""
    env_steps: Count | None = None
    """Agent steps trained on."""
    learner_steps: Count | None = None
    """Optimizer steps."""
    minutes: Positive | None = None
    """Minutes of training, counted from the first unroll and across resumes; start-up does not
    count."""
    hold_s: NotNegative = 0.0
    """Seconds that the run continues after the return in training first reached `stop.return`,
    before that is confirmed."""


class Sections(Section):
    """The sections of a run's config, each validated alone; `schema.Config` validates them
    together."""

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
    league: LeagueConfig = Field(default_factory=LeagueConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    stop: StopConfig = Field(default_factory=StopConfig)

    @property
    def first_actors(self) -> int:
        """Actors of this host at the start of a run."""
        count = self.actors.count
        if count == "auto":
            return max(2, min(self.least_actors, MOST_AT_FIRST * self.learner.most_count))
        return bounds(count)[0] if isinstance(count, str) else count

    @property
    def least_actors(self) -> int:
        """The fewest actors to which `actors.count` may shrink.

        These are the actors without which the learners would have too few slots for a batch, or the
        first number of a range.
        """
        if self.actors.count != "auto":
            return self.first_actors

        actors_per_learner = 1
        if self.algo.trains_on == "unrolls":
            actors_per_learner = -(-self.learner.batch_slots // self.transport.slots)
        return actors_per_learner * self.learner.most_count

    @property
    def envs_choices(self) -> list[int]:
        """The numbers of environments among which `actors.envs` auto chooses.

        Each is twice the one before. The first, the smallest, is taken where nothing is timed.
        """
        # Bounds on the steps of a batch, or with replay on those of a slot.
        envs = 1
        steps_per_env = self.actors.unroll
        least_steps, most_steps = SLOT_STEPS
        if self.algo.trains_on == "unrolls":
            steps_per_env *= self.learner.batch_slots
            least_steps, most_steps = BATCH_STEPS
            # Each update has an equal share of the environments, unless it takes single steps.
            if not self.algo.by_steps(self.model.core != "none"):
                envs = self.learner.updates_per_batch

        while envs * steps_per_env < least_steps and 2 * envs <= MOST_ENVS:
            envs *= 2
        choices = [envs]
        while 2 * choices[-1] * steps_per_env <= most_steps and 2 * choices[-1] <= MOST_ENVS:
            choices.append(2 * choices[-1])
        return choices

    @property
    def actor_envs(self) -> int:
        """Environments of each actor.

        With `auto` this is the smallest allowed number; a run's config has the timed number instead
        of `auto`.
        """
        envs = self.actors.envs
        return self.envs_choices[0] if envs == "auto" else envs

    @property
    def evaluates_by_steps(self) -> bool:
        """Whether evaluations are at multiples of `eval.every_steps`."""
        by_steps = self.eval.every_steps is not None and self.eval.every_s is None
        return by_steps and not TRANSPORTS.one_process(self.transport.kind)

    @property
    def confirms_return(self) -> bool:
        """Whether an evaluation must confirm that `stop.return` is reached."""
        is_wanted = self.stop.return_ is not None and self.stop.confirm_episodes > 0
        return is_wanted and not TRANSPORTS.one_process(self.transport.kind)

    @property
    def has_evaluator(self) -> bool:
        """Whether the run has an evaluator, a process that evaluates checkpoints."""
        by_time = self.eval.every_s is not None
        return by_time or self.evaluates_by_steps or self.confirms_return
