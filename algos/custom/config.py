"""The options of a custom algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from penstock.configs.algorithms import AlgoConfig, Data
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Module, Options, Small, Switch


class CustomConfig(AlgoConfig):
    """A custom algorithm: it trains on fresh unrolls, as `impala` and `ppo` do, or samples from
    replay, as `dqn` and `sac` do; see `examples/own_algorithm.py` and
    `examples/own_offpolicy.py`."""

    name: Literal["custom"] = "custom"
    entry: Module
    """The module of the algorithm, or `module:name` of a class or function that is called without
    arguments and returns the algorithm."""
    settings: Options = Field(default_factory=dict)
    """Keyword arguments of the algorithm's `Settings`, a dataclass or a pydantic model."""
    data: Data = "unrolls"
    """The data that the algorithm trains on: fresh `unrolls`, or `transitions` sampled from
    replay."""
    epochs: Small = 1
    """Passes over each batch of unrolls; each pass has `learner.updates_per_batch` minibatches.
    Only for `unrolls`."""
    normalize_rewards: Switch = False
    """Whether rewards are divided by the running standard deviation of the discounted return. Only
    for `unrolls`."""
    n_step: Small = 1
    """Number of rewards summed in a transition (n-step return). Only for `transitions`."""

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
        """Yields the options that contradict each other, with the message for the user."""
        if self.data == "unrolls":
            other_data = "transitions"
            other_options: tuple[str, ...] = ("n_step",)
        else:
            other_data = "unrolls"
            other_options = ("epochs", "normalize_rewards")

        for option in other_options:
            value = getattr(self, option)
            default = type(self).model_fields[option].default
            if value != default:
                yield Contradiction(
                    (f"algo.{option}", "algo.data"),
                    f"algo.{option} {str(value).lower()} is for algo.data {other_data}, and "
                    f"algo.data is {self.data}; set algo.data={other_data} or "
                    f"algo.{option}={str(default).lower()}",
                )
