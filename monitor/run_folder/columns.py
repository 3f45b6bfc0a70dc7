"""The numbers of a growing file of metrics as a column per metric, and the points that two columns
make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from penstock.core.formatting import MOST, finite
from penstock.monitor.intervals import Floats
from penstock.monitor.metric_groups import HISTOGRAM, by_rank

MOST_COLUMNS = 8000  # 300 processes have some 3,000
MOST_ROWS = 1 << 13  # ten times the points of a chart, so that its parts can be enlarged
MOST_CELLS = 1 << 25  # 256 MiB, which a run of many processes may need
# A metric with a longer name is left out.
NAME_LENGTH = 200
FIRST_ROWS = 1024  # capacity at the beginning
AROUND = 2  # intervals on either side with which one is compared

Points = tuple[Floats, Floats]
"""The coordinates of the points of a curve."""


class MetricColumns:
    """Columns of float64 with a row per line; NaN where a line lacks the metric.

    Memory does not grow with the length of a file: with more than `MOST_ROWS` lines only every
    ``stride``-th remains, a power of two, and the newest eighth of the rows without gaps. The same
    holds beyond `MOST_CELLS`. Metrics named ``_max`` keep the highest value of the lines since the
    row before, others that of the row's own line. Beyond `MOST_COLUMNS` further metrics are counted
    in ``left_out``.
    """

    def __init__(self, only: Iterable[str] | None = None) -> None:
        """Begin without lines.

        Args:
            only: the paths of the metrics whose columns are wanted, of every line as far as
                `MOST_CELLS` allows, also those of single bins of histograms; None: all metrics.
        """
        self._most_rows = MOST_ROWS if only is None else MOST_CELLS
        self._kept = None if only is None else _with_parents(only)
        self._columns: dict[str, Floats] = {}
        self._below: dict[str, list[str]] = {}
        self._full: NDArray[np.bool_] | None = None
        self._capacity = FIRST_ROWS
        self._numbers = np.zeros(FIRST_ROWS, np.int64)  # of the line of each row
        self.rows = 0
        self.lines = 0
        """Lines so far, also those without a row."""
        self.stride = 1
        self.left_out = 0

    @property
    def names(self) -> list[str]:
        """Paths of the metrics, such as `ledger/compute`, in the order of their appearance."""
        return list(self._columns)

    def below(self, prefix: str) -> list[str]:
        """Returns the names that consist of ``prefix``, such as `ledger/`, and a last part."""
        return self._below.get(prefix, [])

    def extend(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append a row per line; if there are too many rows, some are removed."""
        self._full = None
        while lines:
            while self.rows == self._capacity:
                self._grow()
            fitting = lines[: self._capacity - self.rows]
            try:
                self._write("", range(self.rows, self.rows + len(fitting)), fitting)
            except _ThinnedError:
                continue  # at other rows
            self._numbers[self.rows : self.rows + len(fitting)] = range(
                self.lines, self.lines + len(fitting)
            )
            self.rows += len(fitting)
            self.lines += len(fitting)
            lines = lines[len(fitting) :]

    def _write(
        self, prefix: str, rows: Sequence[int], objects: Sequence[Mapping[Any, Any]]
    ) -> None:
        """Write the figures of objects, each into its row of ``rows``.

        Objects with the same names are written together, a column at a time: assigning single cells
        takes several times as long as parsing the lines. Nested objects come last, so that those of
        many processes do not take the room of others.

        Args:
            prefix: the beginning of the figures' names.
            rows: rising.
            objects: one for each row.

        Raises:
            _ThinnedError: if a new column needed room, so that rows have moved.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, each in enumerate(objects):
            alike.setdefault(tuple(each), []).append(i)
        for names, chosen in alike.items():
            at = [rows[i] for i in chosen]
            is_range = at[-1] - at[0] < len(at)
            where: Any = slice(at[0], at[-1] + 1) if is_range else np.array(at)
            values = zip(*[objects[i].values() for i in chosen], strict=True)
            nested: list[tuple[str, Sequence[Any]]] = []
            for name, cells in zip(names, values, strict=True):
                path, kinds = f"{prefix}{name}", {*map(type, cells)}
                if self._kept is not None and path not in self._kept:
                    continue
                numbers = _numbers(cells, kinds)
                if numbers is not None:
                    column = self._columns.get(path)
                    column = self._add(path) if column is None else column
                    if column is not None:
                        column[where] = numbers
                is_open = self._kept is not None or not path.endswith(HISTOGRAM)
                if is_open and not kinds.isdisjoint((dict, list)):
                    nested.append((f"{path}/", cells))
            for path, inside in nested:
                parts = [(row, _parts(cell)) for row, cell in zip(at, inside, strict=True)]
                inner = [(row, figures) for row, figures in parts if figures]
                self._write(path, [row for row, _ in inner], [figures for _, figures in inner])

    def column(self, name: str) -> Floats:
        """Returns the values of a metric, float64 ``[rows]``; all NaN for an unknown one."""
        column = self._columns.get(name)
        return np.full(self.rows, np.nan) if column is None else column[: self.rows]

    def points(self, x: str, y: str) -> Points:
        """Returns the points that two metrics make, by rising ``x``."""
        return rising_points(self.column(x), self.column(y))

    def full_intervals(self) -> NDArray[np.bool_]:
        """Returns which rows cover a whole interval, bool ``[rows]``.

        They are compared with their neighbours, because each start of a run may set another
        `run.interval_s`. Rates of the other rows, at the end of a run and around a restart, are
        unreliable.
        """
        if self._full is None:
            seconds, times = self.column("interval_s"), self.column("time_s")
            # Lines of an older version lack the interval, and are not further apart than it.
            seconds = np.where(np.isnan(seconds), np.diff(times, prepend=0.0), seconds)
            self._full = _full(seconds)
        return self._full

    def last(self, name: str) -> float | None:
        """Returns the value of the last row; None if it has none."""
        if not self.rows or name not in self._columns:
            return None
        value = float(self._columns[name][self.rows - 1])
        return None if np.isnan(value) else value

    def _add(self, name: str) -> Floats | None:
        """Add a column, and return it; None where there is no room for it.

        Raises:
            _ThinnedError: if the others had to make room, so that rows have moved.
        """
        if len(self._columns) >= MOST_COLUMNS or len(name) > NAME_LENGTH:
            self.left_out += 1
            return None
        previous_capacity = self._capacity
        while self._capacity > FIRST_ROWS and not self._fits(self._capacity, 1):
            self._thin(self._capacity // 2)
        self._columns[name] = np.full(self._capacity, np.nan)
        self._below.setdefault(name[: name.rfind("/") + 1], []).append(name)
        if self._capacity < previous_capacity:
            raise _ThinnedError
        return self._columns[name]

    def _grow(self) -> None:
        """Make room for a row: by a larger capacity where there is memory, or by removing rows."""
        larger = 2 * self._capacity
        if larger <= self._most_rows and (self._fits(larger, 0) or self._capacity <= FIRST_ROWS):
            self._reallocate(larger, np.arange(self.rows))
        else:
            self._thin(self._capacity)

    def _fits(self, capacity: int, more: int) -> bool:
        """Whether the columns and new ones may have so many rows."""
        return capacity * (len(self._columns) + more) <= MOST_CELLS

    def _thin(self, capacity: int) -> None:
        """Remove rows, so that at most three quarters of ``capacity`` are used.

        The newest eighth of the capacity remains, and of the lines before, those at even distances.
        """
        numbers = self._numbers[: self.rows]
        newest = numbers >= self.lines - capacity // 8
        while np.count_nonzero(chosen := (numbers % self.stride == 0) | newest) > capacity * 3 // 4:
            self.stride *= 2
        self._reallocate(capacity, np.nonzero(chosen)[0])

    def _reallocate(self, capacity: int, chosen: NDArray[np.intp]) -> None:
        """Copy the rows ``chosen`` to columns of ``capacity`` rows.

        One column is copied at a time, so that the memory of each old column is free again.
        """
        rows, first = self.rows, np.append(0, chosen[:-1] + 1)  # of the rows that become one
        self._capacity, self.rows = capacity, len(chosen)
        numbers = np.zeros(capacity, np.int64)
        numbers[: len(chosen)] = self._numbers[chosen]
        self._numbers = numbers
        for name, column in self._columns.items():
            self._columns[name] = np.full(capacity, np.nan)
            values = column[chosen]
            if name.endswith("_max") and len(chosen) < rows:
                values = np.fmax.reduceat(column[:rows], first)  # a number rather than NaN
            self._columns[name][: len(chosen)] = values


class _ThinnedError(Exception):
    """A new metric needed room, so the rows were thinned while lines were written."""


def rising_points(xs: Floats, ys: Floats) -> Points:
    """Returns the points that have both coordinates, by rising ``xs``; see `rising`."""
    is_complete = ~(np.isnan(xs) | np.isnan(ys))
    xs, ys = xs[is_complete], ys[is_complete]
    chosen = rising(xs)
    return xs[chosen], ys[chosen]


def rising(xs: Floats) -> NDArray[np.bool_]:
    """Returns which points remain, so that ``xs`` rises; bool ``[points]``.

    A resume from an older checkpoint repeats a part, and the repetition replaces it.
    """
    later = np.minimum.accumulate(xs[::-1])[::-1]
    remains = np.ones(len(xs), np.bool_)
    remains[:-1] = xs[:-1] < later[1:]
    return remains


def _full(seconds: Floats) -> NDArray[np.bool_]:
    """Returns which of the intervals are at least half as long as the median of those around
    them."""
    if not len(seconds) or np.isnan(seconds).all():
        return np.ones(len(seconds), np.bool_)
    seconds = np.where(np.isnan(seconds), np.nanmedian(seconds), seconds)
    padded = np.pad(seconds, AROUND, constant_values=np.nan)
    middle = np.nanmedian(sliding_window_view(padded, 2 * AROUND + 1), -1)
    is_full: NDArray[np.bool_] = seconds >= middle / 2
    return is_full


def _with_parents(paths: Iterable[str]) -> set[str]:
    """Returns the paths, and those of the figures in which these are nested: of `a/b/c` also `a/b`
    and `a`."""
    parts = [path.split("/") for path in paths]
    return {"/".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}


def _parts(cell: Any) -> Mapping[Any, Any] | None:
    """Returns nested figures by their names, those in a list as `by_rank`; None for anything
    else."""
    kind = type(cell)
    return cell if kind is dict else by_rank(cell) if kind is list else None


def _numbers(cells: Sequence[Any], kinds: set[type]) -> Floats | None:
    """Returns the numbers among values, NaN for others; None if there are none.

    Args:
        cells: the values.
        kinds: their types.
    """
    if kinds.isdisjoint((float, int)):
        return None
    if not kinds <= {float, int}:
        cells = [cell if type(cell) is float else _number(cell) for cell in cells]
    try:
        numbers = np.array(cells, np.float64)
    except OverflowError:
        numbers = np.array([_number(cell) for cell in cells], np.float64)
    usable = np.abs(numbers) < MOST  # false for NaN
    if usable.all():
        return numbers
    return np.where(usable, numbers, np.nan) if usable.any() else None


def _number(cell: Any) -> float:
    """Returns a number, or NaN: numpy takes None too, but ten times as long."""
    number = finite(cell)
    return np.nan if number is None else number
