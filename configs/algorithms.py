"""The section `algo`: the options that all algorithms share, and the registry of algorithms.

Each algorithm has a config class of its own (`penstock.algos`). It is known to the config by an
`AlgorithmSpec`, registered in `ALGORITHMS` (`configs.registry`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, SerializeAsAny, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.configs.registry import Registry
from penstock.configs.schedules import Weight
from penstock.configs.section import Contradiction, Section
from penstock.configs.value_types import Folder, Fraction, Positive, Switch

DEFAULT = "impala"

Data = Literal["unrolls", "transitions"]

Q_TEMPERATURE = 0.01
"""Default of what the Q-values of a teacher are divided by (Rusu et al. 2015)."""


class Teaching(NamedTuple):
    """The policies that teach a run."""

    option: str
    """The option that names them, for messages."""
    policies: tuple[str, ...]
    """Exported policies and folders of runs."""
    part: str | None = None
    """The part of an observation that tells which of them teaches a row; None: all together."""
    q_temperature: float = Q_TEMPERATURE
    """What Q-values are divided by to be logits."""


class AlgoConfig(Section):
    """Base of an algorithm's config, which gives `name` its own name as the only value.

    The properties are read by the config checks.
    """

    name: str = DEFAULT
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma). Values nearer to 1 weigh later rewards more."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this value for training; null does not clip. Returns are shown
    unclipped."""
    reward_scale: Positive = 1.0
    """Factor on rewards for training, applied after clipping. Set it so that returns are of the
    order of 1 to 100. Returns are shown unscaled."""

    modules: ClassVar[tuple[str, ...]] = ()
    """Options whose values name modules, which every process imports."""
    learner_files: ClassVar[tuple[str, ...]] = ()
    """Options whose values are files or folders, which only learners open."""

    @property
    @abstractmethod
    def trains_on(self) -> Data:
        """Fresh unrolls, or transitions from replay."""

    @property
    def can_remember(self) -> bool:
        """Whether its network may have a recurrent core (`model.core`)."""
        return self.trains_on == "unrolls"

    @property
    def must_remember(self) -> bool:
        """Whether its network must have one."""
        return False

    @property
    def is_actor_critic(self) -> bool:
        """Whether its network has heads for a policy and a value."""
        return self.trains_on == "unrolls"

    @property
    def passes(self) -> int:
        """Epochs over each batch of unrolls."""
        return 1

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are divided by the running deviation of the discounted return."""
        return False

    @property
    def teaching(self) -> Teaching | None:
        """The policies that teach the present batch; None where none does."""
        return None

    def by_steps(self, has_core: bool) -> bool:
        """Whether minibatches are of steps instead of whole unrolls.

        ``has_core`` says whether the network is recurrent.
        """
        return False

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields invalid combinations of the algorithm's own options."""
        yield from ()


class OnPolicyConfig(AlgoConfig):
    """Base of the config of an algorithm that trains on fresh unrolls."""

    normalize_rewards: Switch = False
    """Whether rewards are divided by the running standard deviation of the discounted return."""

    @property
    def trains_on(self) -> Data:
        return "unrolls"

    @property
    def normalizes_rewards(self) -> bool:
        return self.normalize_rewards


class ActorCriticConfig(OnPolicyConfig):
    """Base of the config of an actor-critic that learns by rewards, and may be kick-started."""

    teacher: Folder | None = None
    """A policy that teaches this one beside the rewards (kick-starting): a file that `penstock
    export` wrote, or the folder of a run. The environment has the same observations and actions.
    Only learners read it."""
    teacher_cost: Weight = 0.0
    """Weight in the loss of the divergence of `teacher` from the policy, in nats. Larger values
    keep the policy nearer to its teacher. At 0 the teacher is not computed. With a teacher the
    default is the schedule `{from: 1, to: 0}`: give it `steps` of the order of those in which the
    student should reach its teacher, as it takes `stop.env_steps` otherwise."""

    learner_files: ClassVar[tuple[str, ...]] = ("teacher",)

    @model_validator(mode="before")
    @classmethod
    def _with_falling_cost(cls, options: Any) -> Any:
        """Add the default weight of a teacher to the options that name one."""
        if isinstance(options, dict) and options.get("teacher") is not None:
            return {"teacher_cost": {"from": 1.0, "to": 0.0}, **options}
        return options

    @property
    def teaching(self) -> Teaching | None:
        if self.teacher is None or self.teacher_cost == 0:
            return None
        return Teaching("algo.teacher", (self.teacher,))


class OffPolicyConfig(AlgoConfig):
    """Base of the config of an algorithm that trains on transitions from replay."""

    hindsight: Fraction = 0.0
    """Fraction of the sampled transitions whose goal is replaced by one that was achieved later in
    the same episode (hindsight replay; 0.8 as published). Only for environments with
    `achieved_goal`, `desired_goal` and `compute_reward`, and not with r2d2. Larger values train
    more on goals that were reached, and less on those that were asked for."""

    @property
    def trains_on(self) -> Data:
        return "transitions"

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the options that contradict each other, with the message for the user."""
        n_step = getattr(self, "n_step", 1)
        if self.hindsight and n_step != 1:
            yield Contradiction(
                ("algo.hindsight", "algo.n_step"),
                f"algo.hindsight {self.hindsight:g} computes the reward of a single step for "
                f"another goal, and algo.n_step {n_step} sums several; set algo.n_step=1 or "
                "algo.hindsight=0",
            )


@dataclass(frozen=True, eq=False)
class AlgorithmSpec:
    """What the config knows of an algorithm without importing torch or numpy."""

    config: type[AlgoConfig]
    """Its options; the default of ``name`` is the algorithm's name."""
    entry_point: str
    """``module:object`` of the algorithm (`algos.base.AlgorithmFactory`), imported where it
    runs."""
    defaults: Path | None = None
    """A file with defaults for each kind of environment (`configs.kinds`); None: those of
    ``config`` are for all."""

    @property
    def name(self) -> str:
        """The value of `algo.name`."""
        return str(self.config.model_fields["name"].default)


class AlgorithmRegistry(Registry[AlgorithmSpec]):
    """The registered algorithms; the first is the default."""

    def has_defaults(self, name: str) -> bool:
        """Whether the algorithm is known, and has defaults for each kind of environment."""
        spec = self.specs.get(name)
        return spec is not None and spec.defaults is not None

    def parse(self, value: Any) -> Any:
        """Returns the config of the algorithm that a map names, and other values unchanged.

        Without a name it is the default algorithm.

        Raises:
            ValidationError: of pydantic, for a name of no algorithm, and for invalid options.
        """
        if not isinstance(value, dict):
            return value

        name = value.get("name", DEFAULT)
        spec = self.specs.get(name) if isinstance(name, str) else None
        if spec is None:
            unknown = PydanticCustomError("algorithm", "no algorithm has this name")
            line = InitErrorDetails(type=unknown, loc=("name",), input=name)
            raise ValidationError.from_exception_data("algo", [line])

        return spec.config.model_validate({**value, "name": name})


ALGORITHMS = AlgorithmRegistry("algorithm")

AnyAlgoConfig = Annotated[SerializeAsAny[AlgoConfig], BeforeValidator(ALGORITHMS.parse)]
