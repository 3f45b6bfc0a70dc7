"""Whether a policy that was trained on some spaces can play an environment, and if not, why.

The spaces of observations and actions are compared column by column: each part of a Dict or Tuple
by its name, kind, shape, dtype and bounds. The same spaces are those that mean the same:
- in another order of a Dict's keys, as parts are found by name;
- with bounds that are equal but for the rounding of float32, in which networks compute;
- with a bound as large as `UNBOUNDED` where the other has none: both mean unbounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.observations import UNBOUNDED
from penstock.envs.packing import leaves_of
from penstock.envs.space_json import to_json

ROUNDING = 1e-6  # relative error of a bound after a few operations in float32
LONGEST = 80  # most characters of a space in a sentence
ABSENT = "absent"

AnySpace = spaces.Space[Any]


class SpaceDifference(NamedTuple):
    """The first column that differs."""

    column: str
    """ "observations" or "actions", and the name of the part behind a dot."""
    trained: str
    """Description of the column in training."""
    present: str
    """Description of the environment's column."""


def difference(trained: Sequence[AnySpace], present: Sequence[AnySpace]) -> SpaceDifference | None:
    """Returns the first difference between the spaces of training and those of an environment.

    Args:
        trained: the spaces of observations and of actions in training.
        present: those of the environment.

    Returns:
        None if a policy that was trained on the first can play the second.
    """
    trained_columns, present_columns = (
        _columns("observations", pair[0]) | _columns("actions", pair[1])
        for pair in (trained, present)
    )
    for column in {**trained_columns, **present_columns}:
        one, other = trained_columns.get(column), present_columns.get(column)
        if one is None or other is None or not _is_same(one, other):
            return SpaceDifference(column, *_described(one, other))
    return None


def brief(space: AnySpace) -> str:
    """Returns the space as text of at most `LONGEST` characters, in one line."""
    text = " ".join(str(space).split())  # numpy aligns the bounds of a Box in columns
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _columns(name: str, space: AnySpace) -> dict[str, AnySpace]:
    """Returns the space of each column of a Dict or Tuple, by names that begin with ``name``."""
    return {".".join((name, *map(str, keys))): part for keys, part in leaves_of(space)}


def _is_same(one: AnySpace, other: AnySpace) -> bool:
    if not isinstance(one, spaces.Box) or not isinstance(other, spaces.Box):
        try:
            return to_json(one) == to_json(other)
        except ValueError:  # a kind that no policy reads
            return False

    if one.shape != other.shape or one.dtype.newbyteorder("=") != other.dtype.newbyteorder("="):
        return False
    return not _apart(one, other).any()


def _apart(one: spaces.Box, other: spaces.Box) -> npt.NDArray[np.bool_]:
    """Which bounds of two Boxes differ, bool ``[*shape]``."""
    if one.dtype.kind != "f":
        return np.asarray((one.low != other.low) | (one.high != other.high))
    rounding = max(ROUNDING, float(np.spacing(np.ones((), one.dtype))))
    apart = np.zeros(one.shape, np.bool_)
    for bound, other_bound in ((one.low, other.low), (one.high, other.high)):
        pair = (np.asarray(each, np.float64) for each in (bound, other_bound))
        a, b = (np.where(abs(each) >= UNBOUNDED, np.copysign(np.inf, each), each) for each in pair)
        apart |= ~np.isclose(a, b, rtol=rounding, atol=1e-12)
    return apart


def _described(one: AnySpace | None, other: AnySpace | None) -> tuple[str, str]:
    texts = tuple(ABSENT if space is None else brief(space) for space in (one, other))
    if texts[0] != texts[1] or not isinstance(one, spaces.Box) or not isinstance(other, spaces.Box):
        return texts[0], texts[1]

    # Both are cut before the bound that differs.
    at = np.unravel_index(int(np.argmax(_apart(one, other))), one.shape)
    place = ", ".join(str(i) for i in at)
    texts = tuple(f"[{box.low[at]}, {box.high[at]}] at [{place}]" for box in (one, other))
    return texts[0], texts[1]
