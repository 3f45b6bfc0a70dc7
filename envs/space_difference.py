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

# Relative error of a bound after a few operations in float32.
ROUNDING = 1e-6
# The most characters of a space in a sentence.
LONGEST = 80
# Stands in a sentence for a column that one of the environments does not have.
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
    trained_columns = _all_columns(*trained)
    present_columns = _all_columns(*present)

    for column in {**trained_columns, **present_columns}:
        trained_space = trained_columns.get(column)
        present_space = present_columns.get(column)
        if not _is_same(trained_space, present_space):
            return _described(column, trained_space, present_space)
    return None


def brief(space: AnySpace) -> str:
    """Returns the space as text of at most `LONGEST` characters, in one line."""
    text = " ".join(str(space).split())  # numpy aligns the bounds of a Box in columns
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _all_columns(observation_space: AnySpace, action_space: AnySpace) -> dict[str, AnySpace]:
    return _columns("observations", observation_space) | _columns("actions", action_space)


def _columns(name: str, space: AnySpace) -> dict[str, AnySpace]:
    """Returns the space of each column of a Dict or Tuple, by names that begin with ``name``."""
    return {".".join((name, *map(str, keys))): part for keys, part in leaves_of(space)}


def _is_same(one: AnySpace | None, other: AnySpace | None) -> bool:
    """Returns whether two columns mean the same; None stands for one that is absent."""
    if one is None or other is None:
        return False
    if not isinstance(one, spaces.Box) or not isinstance(other, spaces.Box):
        try:
            return to_json(one) == to_json(other)
        except ValueError:  # a kind that no policy reads
            return False

    if one.shape != other.shape or one.dtype.newbyteorder("=") != other.dtype.newbyteorder("="):
        return False
    return not _bounds_differ(one, other).any()


def _bounds_differ(one: spaces.Box, other: spaces.Box) -> npt.NDArray[np.bool_]:
    """Returns where the bounds of two Boxes of the same shape differ, bool ``[*shape]``."""
    if one.dtype.kind != "f":
        return np.asarray((one.low != other.low) | (one.high != other.high))

    rounding = max(ROUNDING, float(np.spacing(np.ones((), one.dtype))))
    differ = np.zeros(one.shape, np.bool_)
    for bound, other_bound in ((one.low, other.low), (one.high, other.high)):
        is_close = np.isclose(
            _without_large(bound), _without_large(other_bound), rtol=rounding, atol=1e-12
        )
        differ |= ~is_close
    return differ


def _without_large(bound: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns a bound in float64, infinite where it is so large that it means unbounded."""
    values = np.asarray(bound, np.float64)
    return np.where(abs(values) >= UNBOUNDED, np.copysign(np.inf, values), values)


def _described(column: str, trained: AnySpace | None, present: AnySpace | None) -> SpaceDifference:
    """Describe a column that differs; None stands for a space that does not have it."""
    trained_text = ABSENT if trained is None else brief(trained)
    present_text = ABSENT if present is None else brief(present)

    # Both texts may end before the bound that differs, so that one is shown alone.
    has_same_text = trained_text == present_text
    if has_same_text and isinstance(trained, spaces.Box) and isinstance(present, spaces.Box):
        index = np.unravel_index(int(np.argmax(_bounds_differ(trained, present))), trained.shape)
        place = ", ".join(str(i) for i in index)
        trained_text, present_text = (
            f"[{box.low[index]}, {box.high[index]}] at [{place}]" for box in (trained, present)
        )
    return SpaceDifference(column, trained=trained_text, present=present_text)
