"""Whether a value matches its space, and if not, why, in words.

The words continue "an observation": " of shape [3] where its space says [2]".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.packing import Keys, leaves_of, value_at

# Spaces whose values are numpy arrays.
ARRAY_SPACES = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
# Stands for a part of a value that is not there.
_MISSING = object()


def stacking_misfit(space: spaces.Space[Any], value: Any) -> str:
    """Returns why gymnasium cannot stack a value with others of ``space``.

    That is a missing part, another shape, or a dtype that cannot be cast to that of the space.
    Lists and numbers can be stacked, and float64 as float32, so none of these is a reason: an
    environment that returns them may have raised something of its own.

    Returns:
        The reason, in words; empty if the value can be stacked.
    """
    for keys, part_space, part in _parts(space, value):
        is_array = isinstance(part_space, ARRAY_SPACES)
        if is_array and part is not _MISSING:
            try:
                part = np.asarray(part)
            except ValueError:
                return _placed(keys, " of rows that differ in length")

        reason = _shape_misfit(part_space, part)
        if not reason and is_array:
            assert part_space.dtype is not None
            if not np.can_cast(part.dtype, part_space.dtype, "same_kind"):
                reason = _dtype_misfit(part_space, part)
        if reason:
            return _placed(keys, reason)
    return ""


def misfit(space: spaces.Space[Any], value: Any) -> str:
    """Returns why ``space`` does not contain ``value``, or why it cannot be trained on.

    A NaN or an infinity cannot be trained on. The text is empty if all is well.
    """
    return next(iter(misfits(space, value).values()), "")


def misfits(space: spaces.Space[Any], value: Any) -> dict[str, str]:
    """Returns the faults of a value, the first of each kind.

    Returns:
        The reasons, in words, by the kind: "shape", "finite", "dtype", "bounds" or "content".
    """
    reasons: dict[str, str] = {}
    for keys, part_space, part in _parts(space, value):
        shape_reason = _shape_misfit(part_space, part)
        if shape_reason:
            faults = [("shape", shape_reason)]
        else:
            faults = [*_content_misfits(part_space, part)]
        for kind, reason in faults:
            reasons.setdefault(kind, _placed(keys, reason))
    return reasons


def _parts(space: spaces.Space[Any], value: Any) -> Iterator[tuple[Keys, spaces.Space[Any], Any]]:
    """Yield the keys, the space and the value of each part; `_MISSING` if there is no value."""
    for keys, part_space in leaves_of(space):
        try:
            part = value_at(keys, value)
        except (KeyError, IndexError, TypeError):
            part = _MISSING
        yield keys, part_space, part


def _placed(keys: Keys, reason: str) -> str:
    """Returns the reason with the place of the part to which the keys lead."""
    return f", in {'.'.join(map(str, keys))},{reason}" if keys else reason


def _shape_misfit(space: spaces.Space[Any], value: Any) -> str:
    """Returns why the value is no array of the right shape; empty if it is one, or need not be."""
    if value is _MISSING:
        return " with nothing there"
    if not isinstance(space, ARRAY_SPACES):
        return ""
    if not isinstance(value, np.ndarray | np.generic):
        return f" that is a {type(value).__name__} and no numpy array"
    if value.shape != space.shape:
        return f" of shape {[*value.shape]} where its space says {[*space.shape]}"
    return ""


def _dtype_misfit(space: spaces.Space[Any], value: Any) -> str:
    return f" of dtype {value.dtype} where its space says {space.dtype}"


def _content_misfits(space: spaces.Space[Any], value: Any) -> Iterator[tuple[str, str]]:
    """Yield the faults of a value with the right shape, each with its kind and the reason."""
    if not isinstance(space, spaces.Box):
        if not space.contains(value):
            yield "content", f" of {value!r}, which is not in {space}"
        return

    if value.dtype.kind == "f" and not np.isfinite(value).all():
        place, number = _first_of(~np.isfinite(value), value)
        yield "finite", f" with {number}{place}"

    if not np.can_cast(value.dtype, space.dtype):
        yield "dtype", _dtype_misfit(space, value)
        return

    finite = np.isfinite(value)
    for bound, outside, relation in (
        (space.low, finite & (value < space.low), "below the lower bound"),
        (space.high, finite & (value > space.high), "above the upper bound"),
    ):
        if outside.any():
            place, number = _first_of(outside, value)
            _, bound_there = _first_of(outside, bound)
            yield "bounds", f" with {number}{place}, {relation} {bound_there} of its space"
            return


def _first_of(which: Any, values: Any) -> tuple[str, Any]:
    """Returns the place of the first true element of ``which``, in words, and the value there."""
    index = np.unravel_index(int(np.argmax(which)), np.shape(which))
    if not index:
        return "", values
    return f" at [{', '.join(str(i) for i in index)}]", values[index]
