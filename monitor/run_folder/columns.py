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
        self._wanted = None if only is None else _with_parents(only)
        self._columns: dict[str, Floats] = {}  # each of `_capacity` rows
        self._below: dict[str, list[str]] = {}  # names by what is before their last part
        self._full: NDArray[np.bool_] | None = None  # `full_intervals`, once it was computed
        self._capacity = FIRST_ROWS
        self._numbers = np.zeros(FIRST_ROWS, np.int64)  # number of the line of each row
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
            end = self.rows + len(fitting)
            try:
                self._write("", range(self.rows, end), fitting)
            except _ThinnedError:
                # There are fewer rows now, so the lines are written again, behind these.
                continue

            self._numbers[self.rows : end] = range(self.lines, self.lines + len(fitting))
            self.rows = end
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
        places_by_names: dict[tuple[Any, ...], list[int]] = {}
        for i, each in enumerate(objects):
            places_by_names.setdefault(tuple(each), []).append(i)

        for names, places in places_by_names.items():
            group = [objects[i] for i in places]
            group_rows = [rows[i] for i in places]
            self._write_alike(prefix, group_rows, names, group)

    def _write_alike(
        self,
        prefix: str,
        rows: Sequence[int],
        names: Sequence[Any],
        objects: Sequence[Mapping[Any, Any]],
    ) -> None:
        """Write the figures of objects that all have these ``names``, in this order; see
        `_write`."""
        # Rows without gaps are written as a slice.
        is_range = rows[-1] - rows[0] < len(rows)
        target: Any = slice(rows[0], rows[-1] + 1) if is_range else np.array(rows)

        nested: list[tuple[str, Sequence[Any]]] = []
        values = zip(*[each.values() for each in objects], strict=True)
        for name, cells in zip(names, values, strict=True):
            path = f"{prefix}{name}"
            if self._wanted is not None and path not in self._wanted:
                continue

            kinds = {*map(type, cells)}
            numbers = _numbers(cells, kinds)
            if numbers is not None:
                column = self._columns.get(path)
                if column is None:
                    column = self._add(path)
                if column is not None:
                    column[target] = numbers

            # The bins of a histogram have columns only where they are asked for.
            is_open = self._wanted is not None or not path.endswith(HISTOGRAM)
            if is_open and not kinds.isdisjoint((dict, list)):
                nested.append((f"{path}/", cells))

        for inner_prefix, inner_cells in nested:
            inner_rows = []
            inner_objects = []
            for row, cell in zip(rows, inner_cells, strict=True):
                figures = _parts(cell)
                if figures:
                    inner_rows.append(row)
                    inner_objects.append(figures)
            self._write(inner_prefix, inner_rows, inner_objects)

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
            seconds = self.column("interval_s")
            times = self.column("time_s")
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
        while self._capacity > FIRST_ROWS and not self._fits(self._capacity, new_columns=1):
            self._thin(self._capacity // 2)

        self._columns[name] = np.full(self._capacity, np.nan)
        self._below.setdefault(name[: name.rfind("/") + 1], []).append(name)
        if self._capacity < previous_capacity:
            raise _ThinnedError
        return self._columns[name]

    def _grow(self) -> None:
        """Make room for a row: by a larger capacity where there is memory, or by removing rows."""
        larger = 2 * self._capacity
        has_memory = self._fits(larger, new_columns=0) or self._capacity <= FIRST_ROWS
        if larger <= self._most_rows and has_memory:
            self._reallocate(larger, np.arange(self.rows))
        else:
            self._thin(self._capacity)

    def _fits(self, capacity: int, *, new_columns: int) -> bool:
        """Whether the columns and new ones may have so many rows."""
        return capacity * (len(self._columns) + new_columns) <= MOST_CELLS

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
        previous_rows = self.rows
        self._capacity = capacity
        self.rows = len(chosen)
        numbers = np.zeros(capacity, np.int64)
        numbers[: self.rows] = self._numbers[chosen]
        self._numbers = numbers

        # A chosen row stands for itself and for the removed rows before it, from this one on.
        first = np.append(0, chosen[:-1] + 1)
        for name, column in self._columns.items():
            self._columns[name] = np.full(capacity, np.nan)
            values = column[chosen]
            if name.endswith("_max") and self.rows < previous_rows:
                # `fmax` gives a number rather than NaN.
                values = np.fmax.reduceat(column[:previous_rows], first)
            self._columns[name][: self.rows] = values


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
    # A point remains if all later ones are greater.
    least_from_here = np.minimum.accumulate(xs[::-1])[::-1]
    remains = np.ones(len(xs), np.bool_)
    remains[:-1] = xs[:-1] < least_from_here[1:]
    return remains


def _full(seconds: Floats) -> NDArray[np.bool_]:
    """Returns which of the intervals are at least half as long as the median of those around
    them."""
    if not len(seconds) or np.isnan(seconds).all():
        return np.ones(len(seconds), np.bool_)

    seconds = np.where(np.isnan(seconds), np.nanmedian(seconds), seconds)
    padded = np.pad(seconds, AROUND, constant_values=np.nan)
    medians = np.nanmedian(sliding_window_view(padded, 2 * AROUND + 1), -1)
    is_full: NDArray[np.bool_] = seconds >= medians / 2
    return is_full


def _with_parents(paths: Iterable[str]) -> set[str]:
    """Returns the paths, and those of the figures in which these are nested: of `a/b/c` also `a/b`
    and `a`."""
    parents: set[str] = set()
    for path in paths:
        parts = path.split("/")
        parents.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return parents


def _parts(cell: Any) -> Mapping[Any, Any] | None:
    """Returns nested figures by their names, those in a list as `by_rank`; None for anything
    else."""
    if type(cell) is dict:
        return cell
    if type(cell) is list:
        return by_rank(cell)
    return None


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
    except OverflowError:  # an integer is too large for a float
        numbers = np.array([_number(cell) for cell in cells], np.float64)

    is_usable = np.abs(numbers) < MOST  # false for NaN
    if is_usable.all():
        return numbers
    return np.where(is_usable, numbers, np.nan) if is_usable.any() else None


def _number(cell: Any) -> float:
    """Returns a number, or NaN: numpy takes None too, but ten times as long."""
    number = finite(cell)
    return np.nan if number is None else number
