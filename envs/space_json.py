"""Gymnasium spaces as JSON, so that a policy can be used where its environment is not installed."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.specs import plain_dtype, read_shape

Told = dict[str, Any]
MOST_BOUNDS = 64  # of a Box of observations in `brief_spaces`
MOST_NBYTES = 32 << 20  # most memory that a space may take, with all of its parts
SPACE_NBYTES = 1 << 10  # least memory that a space takes
VALUE_NBYTES = 16  # memory of a choice: its number, and its place in a one-hot observation


def to_json(space: spaces.Space[Any], most_bounds: int = sys.maxsize) -> Told:
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
            low, high = space.low, space.high
            if low.size > most_bounds:
                low, high = low.min(), high.max()
            bounds = [_brief(low), _brief(high)]
            return {"Box": [*bounds, list(space.shape), space.dtype.str]}
    raise ValueError(f"{space} is of a kind that cannot be written down")


def brief_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> list[Told]:
    """Encode the spaces of an environment in a few kilobytes: an answer to attach has 128 KiB.

    Networks read no more of an observation's bounds than the lowest and the highest.
    """
    return [to_json(observation_space, MOST_BOUNDS), to_json(action_space)]


def from_json(encoded: Told, most_nbytes: int = MOST_NBYTES) -> spaces.Space[Any]:
    """Decode a space.

    Args:
        encoded: of `to_json`, or of anyone: a text of some bytes may claim any size.
        most_nbytes: the most memory that the space may take.

    Raises:
        ValueError, TypeError or KeyError: for invalid input, and for a larger space.
    """
    nbytes = claimed_nbytes(encoded)
    if nbytes > most_nbytes:
        raise ValueError(f"a space that takes {nbytes:,} bytes; the most is {most_nbytes:,}")
    return _decoded(encoded)


def claimed_nbytes(encoded: Told) -> int:
    """Returns the memory that a space would take, with bounds for each value, without making it.

    Raises:
        ValueError, TypeError or KeyError: for invalid input.
    """
    ((kind, about),) = encoded.items()
    match kind:
        case "Dict":
            return SPACE_NBYTES + sum(claimed_nbytes(inner) for _, inner in about)
        case "Tuple":
            return SPACE_NBYTES + sum(map(claimed_nbytes, about))
        case "Discrete":
            count, _ = map(_whole_number, about)
            return SPACE_NBYTES + VALUE_NBYTES * abs(count)
        case "MultiDiscrete":
            nvec, start, _ = about
            sum(_whole_numbers(start))  # raises ValueError where it has something else
            return SPACE_NBYTES + VALUE_NBYTES * sum(map(abs, _whole_numbers(nvec)))
        case "MultiBinary":
            return SPACE_NBYTES + VALUE_NBYTES * _size(about)
        case "Box":
            return SPACE_NBYTES + 4 * plain_dtype(about[3]).itemsize * _size(about[2])
    raise ValueError(f"there is no space {kind}")


def _decoded(encoded: Told) -> spaces.Space[Any]:
    ((kind, about),) = encoded.items()
    match kind:
        case "Dict":
            return spaces.Dict(OrderedDict((key, _decoded(inner)) for key, inner in about))
        case "Tuple":
            return spaces.Tuple([_decoded(inner) for inner in about])
        case "Discrete":
            return spaces.Discrete(about[0], start=about[1])
        case "MultiDiscrete":
            nvec, start, dtype = about
            return spaces.MultiDiscrete(nvec, dtype=plain_dtype(dtype).type, start=start)
        case "MultiBinary":
            return spaces.MultiBinary(about)
        case "Box":
            low, high, shape, dtype = about
            plain: Any = plain_dtype(dtype)
            least, most = (np.broadcast_to(np.array(b, plain), shape) for b in (low, high))
            return spaces.Box(least, most, tuple(shape), plain)
    raise ValueError(f"there is no space {kind}")


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
        raise ValueError(f"a {type(value).__name__} where a space has whole numbers")
    return value


def _brief(bounds: npt.NDArray[Any]) -> Any:
    """Returns bounds as nested lists, or as one number if all are equal, as for pictures."""
    alike = bounds.size and (bounds == bounds.flat[0]).all()
    return bounds.flat[0].item() if alike else bounds.tolist()
