"""The options of a custom algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from penstock.configs.algorithms import AlgoConfig, Data
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Count, Module, Options, Switch


class CustomConfig(AlgoConfig):
    """A custom algorithm: it trains on fresh unrolls, as `impala` and `ppo` do, or samples from
    replay, as `dqn` and `sac` do; see `examples/own_algorithm.py` and
    `examples/own_offpolicy.py`."""

    name: Literal["custom"] = "custom"
    entry: Module
    """Where the algorithm is: a module, or `module:name` of a class or function that is called
    without arguments and returns it."""
    settings: Options = Field(default_factory=dict)
    """Keyword arguments of the algorithm's `Settings`, a dataclass or a pydantic model."""
    data: Data = "unrolls"
    """What it trains on: fresh `unrolls`, or `transitions` from replay."""
    epochs: Count = 1
    """How often each batch of unrolls is trained on, each time in `learner.updates_per_batch`
    minibatches."""
    normalize_rewards: Switch = False
    """Whether rewards of unrolls are divided by the deviation of the discounted return so far."""
    n_step: Count = 1
    """Number of rewards summed in a transition (n-step return)."""

    modules: ClassVar[tuple[str, ...]] = ("entry",)

    @property
    def trains_on(self) -> Data:
        return self.data

    @property
    def passes(self) -> int:
        return self.epochs

    @property
    def normalizes_rewards(self) -> bool:
        return self.normalize_rewards

    def contradictions(self) -> Iterator[Contradiction]:
        of_others = ("n_step",) if self.data == "unrolls" else ("epochs", "normalize_rewards")
        other = "transitions" if self.data == "unrolls" else "unrolls"
        for option in of_others:
            value, default = getattr(self, option), type(self).model_fields[option].default
            if value != default:
                yield Contradiction(
                    (f"algo.{option}", "algo.data"),
                    f"algo.{option} {str(value).lower()} is for algo.data {other}, and algo.data "
                    f"is {self.data}; set algo.data={other} or "
                    f"algo.{option}={str(default).lower()}",
                )
