"""What the columns of a slot from elsewhere may hold, checked before any of its rows count.

`side`, `pad` and `age` of a row name other rows, and flags index tables of two. A value out of
range would end whoever draws the row, or give back another slot's frames.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.history import REPEAT, SIDE, ZEROS

FLAGS = ("terminated", "truncated")


class SlotChecks:
    """For slots of ``spec``, whose frame stacks reach ``history`` rows back."""

    def __init__(self, spec: SlotSpec, history: int) -> None:
        fields = {c.name: np.dtype(c.dtype) for c in spec.columns if c.rows == "unroll"}
        self._flags = [name for name in FLAGS if fields.get(name) == np.bool_]
        most_pad = max(ZEROS, SIDE + spec.side - history)
        ranges = {"pad": (REPEAT, most_pad), "side": (-1, spec.side - 1), "age": (0, 1 << 62)}
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
            if (largest := rows[name].view(np.uint8).max()) > 1:
                return f"column {name} holds the byte {largest}, and a flag is 0 or 1"
        for name, low, high in self._ranges:
            if not told and name != "pad":
                continue
            values = rows[name]
            least, most = int(values.min()), int(values.max())
            if least < low or most > high:
                return f"column {name} holds {least} to {most}, and must be {low} to {high}"
        return None
