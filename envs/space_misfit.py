"""Whether a value matches its space, and if not, why, in words.

The words continue "an observation": " of shape [3] where its space says [2]".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from penstock.envs.packing import Keys, leaves_of, value_at

_MISSING = object()


def stacking_misfit(space: spaces.Space[Any], value: Any) -> str:
    """Returns why gymnasium cannot stack a value with others of ``space``.

    That is a missing part, another shape, or a dtype that cannot be cast to that of the space.
    Lists and numbers can be stacked, and float64 as float32, so none of these is a reason: an
    environment that returns them may have raised something of its own.

    Returns:
        The reason, in words; empty if the value can be stacked.
    """
    for where, part, found in _parts(space, value):
        is_array = isinstance(part, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary)
        try:
            given = np.asarray(found) if is_array and found is not _MISSING else found
        except ValueError:
            return _placed(where, " of rows that differ in length")
        reason = _shape(part, given)
        if not reason and is_array:
            assert part.dtype is not None
            if not np.can_cast(given.dtype, part.dtype, "same_kind"):
                reason = _dtype(part, given)
        if reason:
            return _placed(where, reason)
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
    found: dict[str, str] = {}
    for where, part, inside in _parts(space, value):
        reason = _shape(part, inside)
        faults = [("shape", reason)] if reason else _content(part, inside)
        for fault, why in faults:
            found.setdefault(fault, _placed(where, why))
    return found


def _parts(space: spaces.Space[Any], value: Any) -> Iterator[tuple[Keys, spaces.Space[Any], Any]]:
    for keys, part in leaves_of(space):
        try:
            yield keys, part, value_at(keys, value)
        except (KeyError, IndexError, TypeError):
            yield keys, part, _MISSING


def _placed(keys: Keys, reason: str) -> str:
    """Returns the reason with the place of the part to which the keys lead."""
    return f", in {'.'.join(map(str, keys))},{reason}" if keys else reason


def _shape(space: spaces.Space[Any], value: Any) -> str:
    if value is _MISSING:
        return " with nothing there"
    if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return ""
    if not isinstance(value, np.ndarray | np.generic):
        return f" that is a {type(value).__name__} and no numpy array"
    if value.shape != space.shape:
        return f" of shape {[*value.shape]} where its space says {[*space.shape]}"
    return ""


def _dtype(space: spaces.Space[Any], value: Any) -> str:
    return f" of dtype {value.dtype} where its space says {space.dtype}"


def _content(space: spaces.Space[Any], value: Any) -> Iterator[tuple[str, str]]:
    """Faults of a value with the right shape, and the reasons."""
    if not isinstance(space, spaces.Box):
        if not space.contains(value):
            yield "content", f" of {value!r}, which is not in {space}"
        return
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        at, worst = _at(~np.isfinite(value), value)
        yield "finite", f" with {worst}{at}"
    if not np.can_cast(value.dtype, space.dtype):
        yield "dtype", _dtype(space, value)
        return
    finite = np.isfinite(value)
    for bound, outside, word in (
        (space.low, finite & (value < space.low), "below the lower bound"),
        (space.high, finite & (value > space.high), "above the upper bound"),
    ):
        if outside.any():
            at, worst = _at(outside, value)
            yield "bounds", f" with {worst}{at}, {word} {_at(outside, bound)[1]} of its space"
            return


def _at(which: Any, values: Any) -> tuple[str, Any]:
    """The position of the first of `which`, and its value."""
    place = np.unravel_index(int(np.argmax(which)), np.shape(which))
    where = f" at [{', '.join(str(i) for i in place)}]" if place else ""
    return where, values[place] if place else values
