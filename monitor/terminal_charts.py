"""Charts of a line of text, for the view of a live run: a sparkline and a bar.

A stream that can encode ASCII only gets its characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

# A longer history is merged in pairs.
MOST_POINTS = 512
TICKS = "▁▂▃▄▅▆▇█"
ASCII_TICKS = "_.-=+*%#"
# The characters of a bar: of the first part, of the second, of all others.
FILLS = "█░▒"
ASCII_FILLS = "#.="


class History:
    """A figure over the whole run, in at most `MOST_POINTS` points of equal numbers of values."""

    def __init__(self) -> None:
        self.points: list[float] = []
        """Means of successive values."""
        self._values_per_point = 1
        self._waiting: list[float] = []  # values of the next point

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

    least = min(shown, default=0.0)
    greatest = max(shown, default=0.0)
    ticks_per_unit = (len(ticks) - 1) / (greatest - least) if greatest > least else 0.0
    return "".join(ticks[round((value - least) * ticks_per_unit)] for value in shown)


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
    total_share = 0.0
    begin = 0
    for number, (name, share) in enumerate(shares.items()):
        # The ends are rounded, not the lengths, so that errors do not add up.
        total_share += max(0.0, share)
        end = min(columns, round(total_share * columns))
        fill = fills[min(number, len(fills) - 1)]
        parts.append((name, fill * (end - begin)))
        begin = end
    return parts
