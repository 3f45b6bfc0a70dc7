"""Columns that a recorder of the actors fills: which a run has, and who fills them.

`RECORDED` is their registry; an algorithm may have more of its own. Learners, connectors and actors
compute the spec of a slot by both on their own, and actors fill the columns. Imports no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.algos.base import RecordedColumns
from penstock.algos.registry import algorithm
from penstock.algos.slots import RETURN
from penstock.configs.schema import Config
from penstock.core.interfaces import Environments, Recorder, Step
from penstock.core.observations import Spaces
from penstock.core.params import Array
from penstock.core.specs import Column


class ActiveRecorder(NamedTuple):
    """A recorder of an actor, and the columns that it fills."""

    name: str
    columns: tuple[str, ...]
    recorder: Recorder


class DiscountedReturns:
    """Discounted sums of raw rewards since each episode began, by which rewards are normalised."""

    def __init__(self, config: Config, env: Environments) -> None:
        self._discount = config.algo.discount
        self._sums = np.zeros(env.count)
        self._returns = np.zeros(env.count)

    def record(self, step: Step) -> tuple[Array, ...]:
        self._sums *= self._discount
        self._sums += step.rewards
        np.copyto(self._returns, self._sums)
        self._sums[step.ended] = 0.0
        return (self._returns,)

    def state_dict(self) -> Any:
        return self._sums.copy()

    def load_state_dict(self, state: Any) -> None:
        self._sums[...] = state


class EnvironmentColumns:
    """What the environments say of each row: `EnvInfo.recorded`."""

    def __init__(self, config: Config, env: Environments) -> None:
        self._values = tuple(env.recorded[column.name] for column in env.info.recorded)

    def record(self, step: Step) -> tuple[Array, ...]:
        return self._values

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        """They are of the last step alone."""


def columns_of(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    """All columns that a run has of the registry and of its algorithm."""
    entries = _entries(config).values()
    return tuple(column for entry in entries for column in entry.columns(config, spaces))


def make_recorders(config: Config, env: Environments) -> list[ActiveRecorder]:
    """The recorders of one actor."""
    recorders = []
    for name, entry in _entries(config).items():
        columns = tuple(column.name for column in entry.columns(config, env.info))
        if columns:
            recorders.append(ActiveRecorder(name, columns, entry.make(config, env)))
    return recorders


def _entries(config: Config) -> dict[str, RecordedColumns]:
    return RECORDED | dict(algorithm(config.algo).recorded)


def _returns(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    return (Column(RETURN, "<f4"),) if config.algo.normalizes_rewards else ()


def _of_environment(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    columns: tuple[Column, ...] = getattr(spaces, "recorded", ())
    return columns


RECORDED: dict[str, RecordedColumns] = {
    "discounted": RecordedColumns(_returns, DiscountedReturns),
    "environment": RecordedColumns(_of_environment, EnvironmentColumns),
}
"""By name, which is also that of its state in a saved run."""
