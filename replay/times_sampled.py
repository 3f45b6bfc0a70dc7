"""Removes rows once they were sampled a given number of times."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError
from penstock.replay.samplers import Prioritized, Sampler, Valid, Weights, load_moved, moved
from penstock.replay.table import Rows, Table

REASON = "max_times_sampled"


class SampleCountLimit:
    """A `Sampler` that draws as ``sampler`` does, and each row at most ``most`` times.

    A row that would exceed its limit within one batch is drawn anew.
    """

    def __init__(self, sampler: Sampler, most: int) -> None:
        if most < 1:
            raise ReplayError(f"max_times_sampled {most} must be at least 1; None has no limit")
        self.sampler = sampler
        self.most = most

    def place(self, table: Table) -> None:
        """Set the table that rows are removed from; called once, before `bind`."""
        self._table = table

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        self._used: npt.NDArray[np.int32] = np.zeros(len(valid), np.int32)
        self.sampler.bind(valid, rng)

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        self._used[start:stop] = 0
        self.sampler.insert(start, stop, priorities)

    def remove(self, start: int, stop: int) -> None:
        self.sampler.remove(start, stop)

    def remove_rows(self, rows: Rows) -> None:
        self.sampler.remove_rows(rows)

    def sample(self, count: int) -> tuple[Rows, Weights | None]:
        """Draw up to as many rows as are valid: each has a draw left."""
        parts: list[Rows] = []
        weights: list[npt.NDArray[np.float64]] = []
        missing = count
        while missing:
            beta = self.sampler.beta if isinstance(self.sampler, Prioritized) else 0.0
            rows, given = self.sampler.sample(missing)
            kept = self._within_limit(rows)
            parts.append(rows[kept])
            if given is not None:
                weights.append(self._undivided(given, beta)[kept])
            missing -= len(parts[-1])
        if not weights:
            return np.concatenate(parts), None
        joined = np.concatenate(weights)
        return np.concatenate(parts), (joined / joined.max()).astype(np.float32)

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        self.sampler.update(rows, priorities)

    def state_dict(self) -> dict[str, Any]:
        return {"used": self._used.copy(), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_used(state["used"])
        self.sampler.load_state_dict(state["sampler"])

    def load_moved(self, state: dict[str, Any], origin: Rows) -> None:
        self._load_used(moved(state["used"], origin, len(self._valid)))
        load_moved(self.sampler, state["sampler"], origin)

    def _load_used(self, used: npt.NDArray[Any]) -> None:
        if used.shape != self._used.shape or not (used >= 0).all():
            raise ReplayError("the snapshot's counts of draws are damaged; load another")
        if not (used[self._valid] < self.most).all():  # else `sample` would search without end
            raise ReplayError(
                f"the snapshot has rows that were sampled {self.most} times or more, and "
                "max_times_sampled removes them; load another"
            )
        self._used[...] = used

    def _within_limit(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Positions of the allowed draws; counts them, and removes rows that are used up."""
        order = np.argsort(rows, kind="stable")
        drawn = rows[order]
        first = np.searchsorted(drawn, drawn)
        rank = np.arange(len(rows)) - first  # how often the row occurred before in this draw
        kept = np.sort(order[self._used[drawn] + rank < self.most])
        np.add.at(self._used, rows[kept], 1)
        spent = np.unique(rows[kept])
        spent = spent[self._used[spent] >= self.most]
        if len(spent):
            self._table.remove_rows(spent, REASON)
        return kept

    def _undivided(self, weights: Weights, beta: float) -> npt.NDArray[np.float64]:
        """Weights of one draw before they were divided by the largest."""
        if not isinstance(self.sampler, Prioritized):
            return weights.astype(np.float64)
        undivided: npt.NDArray[np.float64] = self.sampler.probabilities**-beta
        return undivided
