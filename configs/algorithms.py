"""The section `algo`: what the configs of all algorithms have, and the registry of algorithms.

An algorithm brings its config (`penstock.algos`). What a config knows of it is its `AlgorithmSpec`,
registered in `ALGORITHMS` (`configs.registry`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.configs.registry import Registry
from penstock.configs.section import Contradiction, Section
from penstock.configs.value_types import Fraction, Positive, Switch

DEFAULT = "impala"

Data = Literal["unrolls", "transitions"]


class AlgoConfig(Section):
    """Base of an algorithm's config, which gives `name` its own name as the only value.

    The properties are read by the config checks.
    """

    name: str = DEFAULT
    """The algorithm."""
    discount: Fraction = 0.99
    """Discount of rewards per agent step (gamma)."""
    reward_clip: Positive | None = None
    """Rewards are clipped to ± this for training; null leaves them. Shown returns stay raw."""
    reward_scale: Positive = 1.0
    """Rewards are multiplied by this for training, after clipping. Shown returns stay raw."""

    modules: ClassVar[tuple[str, ...]] = ()
    """Options whose values are modules that every process imports."""

    @property
    @abstractmethod
    def trains_on(self) -> Data:
        """Fresh unrolls, or transitions from replay."""

    @property
    def passes(self) -> int:
        """How often each batch of unrolls is trained on."""
        return 1

    @property
    def normalizes_rewards(self) -> bool:
        """Whether rewards are divided by the deviation of the discounted return so far."""
        return False

    def contradictions(self) -> Iterator[Contradiction]:
        """Combinations of its own options that are invalid."""
        yield from ()


class OnPolicyConfig(AlgoConfig):
    """Base of the config of an actor-critic that trains on fresh unrolls."""

    normalize_rewards: Switch = False
    """Whether rewards are divided by the deviation of the discounted return so far."""

    @property
    def trains_on(self) -> Data:
        return "unrolls"

    @property
    def normalizes_rewards(self) -> bool:
        return self.normalize_rewards


class OffPolicyConfig(AlgoConfig):
    """Base of the config of an algorithm that trains on transitions from replay."""

    @property
    def trains_on(self) -> Data:
        return "transitions"


@dataclass(frozen=True, eq=False)
class AlgorithmSpec:
    """What can be known of an algorithm without importing torch or numpy."""

    config: type[AlgoConfig]
    """Its options; the default of ``name`` is the algorithm's name."""
    entry_point: str
    """``module:object`` of the algorithm (`algos.base.AlgorithmFactory`), imported where it
    runs."""

    @property
    def name(self) -> str:
        """The value of `algo.name`."""
        return str(self.config.model_fields["name"].default)


class AlgorithmRegistry(Registry[AlgorithmSpec]):
    """The algorithms; the first one is the default."""

    def parse(self, value: Any) -> Any:
        """The config of the algorithm that a map names; one that names none means the default."""
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
