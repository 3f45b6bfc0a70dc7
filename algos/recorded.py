"""Columns that recorders fill on the actors: which a run has, and which recorder fills them.

`RECORDED` is their registry; an algorithm may have more of its own. Learners, connectors and actors
each compute the spec of a slot from both, and actors fill the columns. Imports no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.algos.base import RecordedColumns
from penstock.algos.registry import algorithm
from penstock.algos.slots import OPPONENT, OUTCOME, RETURN
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import Environments, Recorder, Step
from penstock.core.observations import Spaces
from penstock.core.params import Array
from penstock.core.specs import Column

LEAGUE = (Column(OPPONENT, "<u8"), Column(OUTCOME, "|i1"))
"""The columns of a run in which others than the newest weights play some seats."""


class ActiveRecorder(NamedTuple):
    """A recorder of one actor with the columns that it fills."""

    name: str
    """Name of its entry in the registry."""
    columns: tuple[str, ...]
    """Names of its columns, in the order of the arrays that `Recorder.record` returns."""
    recorder: Recorder


class DiscountedReturns:
    """Records the discounted sum of raw rewards since each episode began.

    Learners normalise rewards by the deviation of these sums.
    """

    def __init__(self, config: Config, env: Environments) -> None:
        self._discount = config.algo.discount
        self._sums = np.zeros(env.count)
        self._returns = np.zeros(env.count)

    def record(self, step: Step) -> tuple[Array, ...]:
        self._sums *= self._discount
        self._sums += step.rewards

        # The row that ends an episode still has its return; the next row begins at 0.
        np.copyto(self._returns, self._sums)
        self._sums[step.ended] = 0.0
        return (self._returns,)

    def state_dict(self) -> Any:
        return self._sums.copy()

    def load_state_dict(self, state: Any) -> None:
        self._sums[...] = state


class EnvironmentColumns:
    """Records the values that environments report for each row (`EnvInfo.recorded`)."""

    def __init__(self, config: Config, env: Environments) -> None:
        # The environments write each step's values into these arrays.
        self._values = tuple(env.recorded[column.name] for column in env.info.recorded)

    def record(self, step: Step) -> tuple[Array, ...]:
        return self._values

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        """Does nothing, since the values are those of the last step alone."""


class LeagueColumns:
    """Records who played against each row, and how its episodes ended (penstock.actors.matches)."""

    def __init__(self, config: Config, env: Environments) -> None:
        # The environments write each step's values into these arrays.
        self._opponent = env.recorded[OPPONENT]
        self._outcome = env.recorded[OUTCOME]
        self._name = config.env.id

    def record(self, step: Step) -> tuple[Array, ...]:
        if not self._outcome.any():
            return self._opponent, self._outcome  # nobody has won or lost

        outcome = np.sign(self._outcome)
        if np.isnan(outcome).any():
            raise UserError(
                f"environment {self._name} ends the seats of a game apart, and does not say in "
                'info["outcome"] who has won, which an opponent is chosen by; return it, or let '
                "the policy play all seats: league.mirror=null, league.bots={}"
            )
        return self._opponent, outcome

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        """Does nothing, since the values are those of the last step alone."""


def columns_of(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    """Returns all recorded columns of a run: those of the registry and of its algorithm."""
    entries = _entries(config).values()
    return tuple(column for entry in entries for column in entry.columns(config, spaces))


def make_recorders(config: Config, env: Environments) -> list[ActiveRecorder]:
    """Makes the recorders of one actor; those that have no columns in this run are left out."""
    recorders = []
    for name, entry in _entries(config).items():
        columns = tuple(column.name for column in entry.columns(config, env.info))
        if columns:
            recorders.append(ActiveRecorder(name, columns, entry.make(config, env)))
    return recorders


def _entries(config: Config) -> dict[str, RecordedColumns]:
    """Returns the entries of the registry and of the run's algorithm, by name."""
    return RECORDED | dict(algorithm(config.algo).recorded)


def _return_column(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    return (Column(RETURN, "<f4"),) if config.algo.normalizes_rewards else ()


def _environment_columns(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    columns: tuple[Column, ...] = getattr(spaces, "recorded", ())
    return columns


def _league_columns(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    return LEAGUE if config.league.has_matches else ()


RECORDED: dict[str, RecordedColumns] = {
    "discounted": RecordedColumns(_return_column, DiscountedReturns),
    "environment": RecordedColumns(_environment_columns, EnvironmentColumns),
    "league": RecordedColumns(_league_columns, LeagueColumns),
}
"""The recorders of all algorithms by name; a saved run stores a recorder's state under its name."""
