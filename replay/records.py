"""Reads the records of a table: the small columns of a row, which lie side by side.

Records of a batch are read whole, in one gather, and then each field is copied into an array of its
own. numpy copies a field of several numbers element by element, row after row; here such a field is
one opaque word, which it copies in one piece, in a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class RecordReader:
    """Reads ``records`` [rows], a structured array."""

    def __init__(self, records: Array) -> None:
        fields = records.dtype.fields
        assert fields is not None
        self._plain = records.view(f"V{records.dtype.itemsize}")
        self._words = {name: f[0].subdtype for name, f in fields.items() if f[0].subdtype}
        formats = [f"V{f[0].itemsize}" if f[0].subdtype else f[0] for f in fields.values()]
        offsets = [f[1] for f in fields.values()]
        self._dtype = np.dtype(
            {
                "names": list(fields),
                "formats": formats,
                "offsets": offsets,
                "itemsize": records.dtype.itemsize,
            }
        )

    def take(self, rows: Rows) -> Array:
        """The records of ``rows`` [n], in which a field of several numbers is one word."""
        return self._plain.take(rows, mode="clip").view(self._dtype)

    def column(self, records: Array, name: str) -> Array:
        """A field of ``records`` [n] from `take`, as a new array [n, *shape]."""
        made: dict[str, Array] = {}
        self.copy(records, (name,), made)
        return made[name]

    def copy(self, records: Array, names: Iterable[str], into: dict[str, Any]) -> None:
        """Put each field of ``records`` [n] from `take` ``into`` a dict, as `column` returns it."""
        words = self._words
        for name in names:
            copied = records[name].copy()
            if name in words:
                dtype, shape = words[name]
                copied = np.ndarray((len(copied), *shape), dtype, copied)
            into[name] = copied

    def write(self, records: Array, name: str, out: Array) -> None:
        """Copy a field of ``records`` from `take` to ``out`` [*records.shape, *shape].

        ``out`` must be contiguous.
        """
        if name in self._words:
            out = out.reshape(*records.shape, -1).view(records.dtype[name])[..., 0]
        out[...] = records[name]
