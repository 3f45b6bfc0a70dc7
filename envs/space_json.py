"""Gymnasium spaces as JSON, so that a policy can be used where its environment is not installed."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.specs import plain_dtype, read_shape

Encoded = dict[str, Any]
"""A space as JSON: its kind, and what makes it."""
# `brief_spaces` writes all bounds of a Box of observations of at most as many values.
MOST_BOUNDS = 64
# The most memory that a space may take, with all of its parts.
MOST_NBYTES = 32 << 20
# The least memory that a space takes.
SPACE_NBYTES = 1 << 10
# The memory of a choice: its number, and its place in a one-hot observation.
VALUE_NBYTES = 16


class SpaceError(ValueError):
    """Input that is no space, in a sentence about its form."""


def to_json(space: spaces.Space[Any], most_bounds: int = sys.maxsize) -> Encoded:
    """Encode a space for `from_json`.

    Args:
        space: the space.
        most_bounds: of a Box with more values only the lowest and the highest bound are written.

    Raises:
        ValueError: for a kind that no policy reads.
    """
    match space:
        case spaces.Dict():
            # A list of pairs: the order of the parts is that of a packed observation.
            return {
                "Dict": [[key, to_json(inner, most_bounds)] for key, inner in space.spaces.items()]
            }
        case spaces.Tuple():
            return {"Tuple": [to_json(inner, most_bounds) for inner in space.spaces]}
        case spaces.Discrete():
            return {"Discrete": [int(space.n), int(space.start)]}
        case spaces.MultiDiscrete():
            return {"MultiDiscrete": [space.nvec.tolist(), space.start.tolist(), space.dtype.str]}
        case spaces.MultiBinary():
            return {"MultiBinary": space.n if isinstance(space.n, int) else list(space.n)}
        case spaces.Box():
            low = space.low
            high = space.high
            if low.size > most_bounds:
                low = low.min()
                high = high.max()
            return {"Box": [_brief(low), _brief(high), list(space.shape), space.dtype.str]}
    raise ValueError(f"{space} is of a kind that cannot be written down")


def brief_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> list[Encoded]:
    """Encode the spaces of an environment in a few kilobytes: an answer to attach has 128 KiB.

    Networks read no more of an observation's bounds than the lowest and the highest.
    """
    return [to_json(observation_space, MOST_BOUNDS), to_json(action_space)]


def from_json(encoded: Encoded, most_nbytes: int = MOST_NBYTES) -> spaces.Space[Any]:
    """Decode a space.

    Args:
        encoded: of `to_json`, or of anyone: a text of some bytes may claim any size.
        most_nbytes: the most memory that the space may take.

    Raises:
        ValueError, TypeError or KeyError: for invalid input, and for a larger space.
    """
    nbytes = claimed_nbytes(encoded)
    if nbytes > most_nbytes:
        raise SpaceError(f"a space that takes {nbytes:,} bytes; the most is {most_nbytes:,}")
    return _decoded(encoded)


def claimed_nbytes(encoded: Encoded) -> int:
    """Returns the memory that a space would take, with bounds for each value, without making it.

    Raises:
        ValueError, TypeError or KeyError: for invalid input.
    """
    is_object = isinstance(encoded, dict) and len(encoded) == 1
    match encoded if is_object else None:
        case {"Dict": [*parts]} if all(
            isinstance(part, list | tuple) and len(part) == 2 for part in parts
        ):
            names = [name for name, _ in parts]
            if len({*names}) < len(names):
                [(name, _)] = Counter(names).most_common(1)
                raise SpaceError(f"a Dict has the key {name} twice")
            return SPACE_NBYTES + sum(claimed_nbytes(inner) for _, inner in parts)
        case {"Tuple": [*parts]}:
            return SPACE_NBYTES + sum(map(claimed_nbytes, parts))
        case {"Discrete": [count, start]}:
            _whole_number(start)
            return SPACE_NBYTES + VALUE_NBYTES * abs(_whole_number(count))
        case {"MultiDiscrete": [nvec, start, _]}:
            # Only checked; gymnasium would read texts of digits.
            for _ in _whole_numbers(start):
                pass
            return SPACE_NBYTES + VALUE_NBYTES * sum(map(abs, _whole_numbers(nvec)))
        case {"MultiBinary": shape}:
            return SPACE_NBYTES + VALUE_NBYTES * _size(shape)
        case {"Box": [_, _, shape, dtype]}:
            # Two bounds, and whether each value has them.
            return SPACE_NBYTES + 4 * plain_dtype(dtype).itemsize * _size(shape)
    raise SpaceError(f"no space is written as {json.dumps(encoded, default=str)}")


def _decoded(encoded: Encoded) -> spaces.Space[Any]:
    """Returns the space of an input whose size has been checked."""
    ((kind, content),) = encoded.items()
    match kind:
        case "Dict":
            return spaces.Dict(OrderedDict((key, _decoded(inner)) for key, inner in content))
        case "Tuple":
            return spaces.Tuple([_decoded(inner) for inner in content])
        case "Discrete":
            count, start = content
            return spaces.Discrete(count, start=start)
        case "MultiDiscrete":
            nvec, start, dtype = content
            return spaces.MultiDiscrete(nvec, dtype=plain_dtype(dtype).type, start=start)
        case "MultiBinary":
            return spaces.MultiBinary(content)
        case "Box":
            low, high, shape, dtype_text = content
            box_dtype: Any = plain_dtype(dtype_text)
            # A bound that all values share is written as one number.
            lows = np.broadcast_to(np.array(low, box_dtype), shape)
            highs = np.broadcast_to(np.array(high, box_dtype), shape)
            return spaces.Box(lows, highs, tuple(shape), box_dtype)
    raise AssertionError(kind)  # `claimed_nbytes` has refused it


def _size(shape: int | list[int]) -> int:
    """Returns the number of values of a shape, or of a shape of one number."""
    return math.prod(read_shape([shape] if isinstance(shape, int) else shape))


def _whole_numbers(nested: Any) -> Iterator[int]:
    """Yield the numbers in lists of lists. Raises ValueError for anything else in them."""
    if isinstance(nested, list):
        for inner in nested:
            yield from _whole_numbers(inner)
    else:
        yield _whole_number(nested)


def _whole_number(value: Any) -> int:
    """Returns the value if it is a whole number.

    Raises:
        ValueError: for anything else, such as a text of digits, which gymnasium would read.
    """
    if type(value) is not int:
        raise SpaceError(f"a {type(value).__name__} where a space has whole numbers")
    return value


def _brief(bounds: npt.NDArray[Any]) -> Any:
    """Returns bounds as nested lists, or as one number if all are equal, as for pictures."""
    alike = bounds.size and (bounds == bounds.flat[0]).all()
    return bounds.flat[0].item() if alike else bounds.tolist()
