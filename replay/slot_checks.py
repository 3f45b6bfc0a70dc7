"""What the columns of a slot from elsewhere may hold, checked before any of its rows count.

`side`, `pad` and `age` of a row name other rows, and flags index tables of two. A value out of
range would end whoever draws the row, or give back another slot's frames. Ages grow by one or begin
anew: only then a row that is drawn, and those that follow it, reach back to rows that are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.history import OLDEST, REPEAT, SIDE, ZEROS

FLAGS = ("terminated", "truncated")


class SlotChecks:
    """For slots of ``spec``, whose frame stacks reach ``history`` rows back."""

    def __init__(self, spec: SlotSpec, history: int) -> None:
        fields = {c.name: np.dtype(c.dtype) for c in spec.columns if c.rows == "unroll"}
        self._flags = [name for name in FLAGS if fields.get(name) == np.bool_]
        most_pad = max(ZEROS, SIDE + spec.side - history)
        ranges = {"pad": (REPEAT, most_pad), "side": (-1, spec.side - 1), "age": (0, 1 << 62)}
        self._has_age = "age" in fields
        self._ranges = [
            (name, low, high)
            for name, (low, high) in ranges.items()
            if name in fields and (name != "age" or fields[name].kind == "i")
        ]

    def fault(self, rows: npt.NDArray[Any], *, told: bool) -> str | None:
        """What is wrong with ``rows``, a slot's records [T, E], or None.

        ``told``: the writer filled in `age` and `side` itself; else they are worked out later.
        """
        for name in self._flags:
            if (largest := int(rows[name].view(np.uint8).max())) > 1:
                return f"column {name} holds the byte {largest}, and a flag is 0 or 1"
        for name, low, high in self._ranges:
            if not told and name != "pad":
                continue
            values = rows[name]
            least, most = int(values.min()), int(values.max())
            if least < low or most > high:
                return f"column {name} holds {least} to {most}, and must be {low} to {high}"
        if told and self._has_age and not continues(rows["age"][:-1], rows["age"][1:]):
            return "column age holds steps that are neither 0 nor one more than the step before"
        return None


def continues(before: npt.NDArray[Any], ages: npt.NDArray[Any]) -> bool:
    """Whether every one of ``ages`` is 0, or one more than that of the same place in ``before``."""
    older = np.minimum(before.astype(np.int64) + 1, OLDEST)
    return bool(((ages == 0) | (ages == older)).all())
