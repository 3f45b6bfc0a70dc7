"""Charts of a line of text, for the view of a live run: a sparkline and a bar.

A stream that can encode ASCII only gets its characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

# A longer history is merged in pairs.
MOST_POINTS = 512
TICKS, ASCII_TICKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
FILLS, ASCII_FILLS = "█░▒", "#.="  # of a bar: the first part, the second, all others


class History:
    """A figure over the whole run, in at most `MOST_POINTS` points of equal numbers of values."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._values_per_point = 1
        self._waiting: list[float] = []

    def add(self, value: float) -> None:
        """Add a value."""
        self._waiting.append(value)
        if len(self._waiting) == self._values_per_point:
            self.points.append(sum(self._waiting) / len(self._waiting))
            self._waiting.clear()

        if len(self.points) == MOST_POINTS:
            self.points = merged(self.points, MOST_POINTS // 2)
            self._values_per_point *= 2


def merged(values: Sequence[float], count: int) -> list[float]:
    """Returns ``values`` as ``count`` means of successive ones; as they are, if there are not
    more."""
    if len(values) <= count:
        return list(values)
    edges = [i * len(values) // count for i in range(count + 1)]
    parts = (values[first:last] for first, last in pairwise(edges))
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float], columns: int, ascii_only: bool = False) -> str:
    """Returns a curve of ``values`` between their least and greatest, one character each.

    Args:
        values: of equal distance; successive ones are merged where there are too many.
        columns: the most characters.
        ascii_only: whether the stream lacks other characters.
    """
    ticks = ASCII_TICKS if ascii_only else TICKS
    shown = merged(values, max(1, columns))
    least, most = min(shown, default=0.0), max(shown, default=0.0)
    per_value = (len(ticks) - 1) / (most - least) if most > least else 0.0
    return "".join(ticks[round((value - least) * per_value)] for value in shown)


def bar(
    shares: Mapping[str, float], columns: int, ascii_only: bool = False
) -> list[tuple[str, str]]:
    """Draws parts of a whole side by side.

    Args:
        shares: of each part, by its name; together at most 1. The first two parts have characters
            of their own.
        columns: characters of the whole.
        ascii_only: whether the stream lacks other characters.

    Returns:
        Name and characters of each part.
    """
    fills = ASCII_FILLS if ascii_only else FILLS
    parts: list[tuple[str, str]] = []
    total, drawn = 0.0, 0
    for number, (name, share) in enumerate(shares.items()):
        total += max(0.0, share)
        end = min(columns, round(total * columns))
        parts.append((name, fills[min(number, len(fills) - 1)] * (end - drawn)))
        drawn = end
    return parts
