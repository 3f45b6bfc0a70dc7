"""Numbers, durations and counts as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# A number that is larger than any figure of a run.
MOST = 1e300
# The smallest share of a ledger that is shown.
LEAST = 0.005


def finite(value: Any) -> float | None:
    """Returns a number that was read from a file; None if it is no number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < MOST else None  # NaN is not less


def clock(seconds: float | None) -> str:
    """75.2 -> "1:15", 3661 -> "1:01:01"."""
    minutes, s = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def count(value: float | None) -> str:
    """12345.6 -> "12,346"; None -> "-"."""
    return "-" if value is None else f"{value:,.0f}"


def number(value: float | None) -> str:
    """0.123456 -> "0.1235", 12345.6 -> "12,346"; None -> "-"."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def falls_short(mean: float, half: float, goal: float) -> str:
    """0.8279, 0.0085, 0.82 -> "0.8279 ± 0.0085 (95 %), whose lower end 0.8194 must reach 0.82"."""
    lower_end = mean - half
    lower_text = number(lower_end)
    goal_text = number(goal)

    # Four digits may not tell the two numbers apart.
    if lower_text == goal_text:
        lower_text = f"{lower_end:.10g}"
        goal_text = f"{goal:.10g}"

    interval = f"{number(mean)} ± {number(half)} (95 %)"
    return f"{interval}, whose lower end {lower_text} must reach {goal_text}"


def percent(fraction: float | None) -> str:
    """0.414 -> "41%"; None -> "-"."""
    return "-" if fraction is None else f"{fraction:.0%}"


def duration(seconds: float | None) -> str:
    """0.0123 -> "12 ms"."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(nbytes: int) -> str:
    """3 << 29 -> "1.5 GiB"; a number below 0, which stands for no limit -> "unlimited"."""
    if nbytes < 0:
        return "unlimited"
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def shares(parts: Mapping[str, float | None]) -> str:
    """Returns the larger parts of a ledger, the largest first: "compute 91%, wait_data 3%"."""
    large_parts = {
        name: share for name, share in parts.items() if share is not None and share >= LEAST
    }
    names = sorted(large_parts, key=lambda name: -large_parts[name])
    return ", ".join(f"{name} {percent(large_parts[name])}" for name in names)


def reasons(counts: Mapping[str, int]) -> str:
    """Returns a total with its parts: "12 (stale 12)", or "0"."""
    parts = ", ".join(f"{name} {n:,}" for name, n in counts.items() if n)
    return f"{sum(counts.values()):,}" + (f" ({parts})" if parts else "")


def aligned(rows: Sequence[Sequence[str]], numbers_from: float = math.inf) -> list[str]:
    """Returns the rows of a table as lines of text with columns of equal width.

    Columns from index ``numbers_from`` on are aligned to the right, by default none.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i >= numbers_from else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
