"""Observations of several parts, packed into one row of bytes.

An environment whose observation is a single array stores it unchanged. Where there are several, in
a Dict or a Tuple, each has its own place in a row of bytes, so that slots, replay and wire always
hold one column "obs". Numbers are stored as float32, pixels and flags as uint8; a flag is 0 or 255,
as white and black pixels are. Only `action_mask` holds 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Each part begins at a multiple of so many bytes.
ALIGN = 8
MASK = "action_mask"
# Bounds as large as that are written in place of infinity.
UNBOUNDED = 1e30
# float32 holds every whole number below it.
COUNTED = 2**24


@dataclass(frozen=True)
class ObservationPart:
    """One array of an observation, and its position in the row."""

    name: str
    """Its key; for a nested one the keys, joined by "."."""
    shape: tuple[int, ...]
    dtype: str
    """"<f4" or "|u1"."""
    offset: int
    """Bytes from the row's beginning, a multiple of 8."""
    bounds: tuple[float, float] | None = None
    """`bounds_of` its space; None also for flags, choices and masks."""
    choices: tuple[int, ...] = ()
    """The number of choices for each of its numbers, if these are choices counted from 0; empty for
    other numbers, and for choices that are one-hot."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def laid_out(arrays: Sequence[tuple[str, tuple[int, ...], str]]) -> tuple[ObservationPart, ...]:
    """Returns the parts of an observation, whose arrays lie one after another in the row.

    ``arrays`` are the name, the shape and the dtype of each.
    """
    parts: list[ObservationPart] = []
    for name, shape, dtype in arrays:
        parts.append(ObservationPart(name, shape, dtype, offset=row_nbytes(parts)))
    return tuple(parts)


def row_nbytes(parts: Sequence[ObservationPart]) -> int:
    """Returns the bytes of a row with these parts, a multiple of 8."""
    if not parts:
        return 0
    end = parts[-1].offset + parts[-1].nbytes
    return math.ceil(end / ALIGN) * ALIGN


def views(parts: Sequence[ObservationPart], packed: npt.NDArray[np.uint8]) -> dict[str, Array]:
    """Returns the arrays in packed rows, by the name of their part, without a copy.

    Rows are uint8 ``[..., nbytes]``; each array is ``[..., *shape]``.
    """
    leading_axes = packed.shape[:-1]
    arrays: dict[str, Array] = {}
    for part in parts:
        nbytes = packed[..., part.offset : part.offset + part.nbytes]
        arrays[part.name] = nbytes.view(part.dtype).reshape(*leading_axes, *part.shape)
    return arrays


def open_choices(mask: Array, counts: Sequence[int] = ()) -> Array:
    """Returns whether each component of an action has an allowed choice.

    Args:
        mask: which choices are allowed, ``[..., sum of counts]``.
        counts: the number of choices of each component; by default there is one component.

    Returns:
        bool ``[..., components]``.
    """
    if len(counts) < 2:
        return np.asarray(mask.any(-1, keepdims=True))
    first_choices = np.cumsum((0, *counts[:-1]))
    return np.asarray(np.logical_or.reduceat(mask, first_choices, axis=-1))


def is_bounded(box: Any, most: float = UNBOUNDED) -> bool:
    """Returns whether all bounds of a Box are below ``most`` in magnitude.

    The largest number of a float type is no bound: it is written in place of infinity.
    """
    if box.dtype.kind == "f":
        most = min(most, float(np.finfo(box.dtype).max))
    return all(
        bool((np.abs(bounds.astype(np.float64)) < most).all()) for bounds in (box.low, box.high)
    )


def bounds_of(box: Any) -> tuple[float, float] | None:
    """Returns the least and the greatest number of an observation's Box.

    None if it has no bounds, or some from `COUNTED` on, which tell nothing of its numbers.
    """
    if not box.low.size or not is_bounded(box, COUNTED):
        return None
    return float(box.low.min()), float(box.high.max())


class Spaces(Protocol):
    """The spaces of a single environment, as a network needs them.

    ``parts`` lists the parts of an observation that has several.
    """

    @property
    def observation_space(self) -> Any: ...
    @property
    def action_space(self) -> Any: ...
