"""The numbers of a growing file of metrics, as a column per metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.formatting import MOST
from penstock.monitor.intervals import Floats
from penstock.monitor.metric_groups import scalars

MOST_COLUMNS = 1000
MOST_CELLS = 1 << 25  # 256 MiB; of more, every second line is dropped
NAME_LENGTH = 200
FIRST_ROWS = 1024


class MetricColumns:
    """Columns of float64 with a row per line; NaN where a line lacks the metric.

    Memory is bounded: beyond `MOST_COLUMNS` further metrics are counted in ``left_out``, and beyond
    `MOST_CELLS` every second row is dropped.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Floats] = {}
        self._capacity = FIRST_ROWS
        self.rows = 0
        self.left_out = 0

    @property
    def names(self) -> list[str]:
        """Paths of the metrics, such as `ledger/compute`, in the order of their appearance."""
        return list(self._columns)

    def extend(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append a row per line."""
        for line in lines:
            if self.rows == self._capacity:
                self._grow()
            for name, value in line.items():
                if type(value) is float or type(value) is int:  # most values, so without detours
                    if -MOST < value < MOST:
                        self._set(name, value)
                else:
                    for path, each in scalars({name: value}):
                        self._set(path, each)
            self.rows += 1

    def _set(self, name: str, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._add(name)
        if column is not None:
            column[self.rows] = value

    def column(self, name: str) -> Floats:
        """The values of a metric, float64 ``[rows]``; all NaN for an unknown one."""
        found = self._columns.get(name)
        return np.full(self.rows, np.nan) if found is None else found[: self.rows]

    def last(self, name: str) -> float | None:
        """The value of the last row; None if it has none."""
        if not self.rows or name not in self._columns:
            return None
        value = float(self._columns[name][self.rows - 1])
        return None if np.isnan(value) else value

    def _add(self, name: str) -> Floats | None:
        if len(self._columns) >= MOST_COLUMNS or len(name) > NAME_LENGTH:
            self.left_out += 1
            return None
        self._columns[name] = np.full(self._capacity, np.nan)
        return self._columns[name]

    def _grow(self) -> None:
        if self._capacity * 2 * len(self._columns) > MOST_CELLS and self.rows > FIRST_ROWS:
            for column in self._columns.values():
                column[: (self.rows + 1) // 2] = column[: self.rows : 2].copy()
                column[(self.rows + 1) // 2 :] = np.nan
            self.rows = (self.rows + 1) // 2
            return
        self._capacity *= 2
        for name, column in self._columns.items():
            grown = np.full(self._capacity, np.nan)
            grown[: self.rows] = column[: self.rows]
            self._columns[name] = grown
