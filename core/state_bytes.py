"""Nested state as one array of bytes: JSON values and numpy arrays of plain numbers, nothing else.

Reading it makes no other objects and runs no code, so it may come from a file of anyone. The array
begins with the length of a JSON text as 8 bytes, little-endian; the text and the arrays' bytes
follow, without gaps. In the text, an object {"$array": [first byte, dtype, shape]} stands for each
array; bytes are counted from the end of the text. A tuple is read as a list.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.specs import plain_dtype

Bytes = npt.NDArray[np.uint8]

# The key of an object that stands for an array.
ARRAY = "$array"
LENGTH_NBYTES = 8


def to_bytes(state: Any) -> Bytes:
    """Returns a state as bytes, uint8 ``[n]``.

    Args:
        state: nested dicts (with names as keys), lists, JSON values and arrays.

    Raises:
        TypeError: the state has another object.
        ValueError: an array has a dtype that is not of plain numbers.
    """
    parts: list[Bytes] = []
    text = json.dumps(_with_places(state, parts, [0])).encode()
    length = np.frombuffer(len(text).to_bytes(LENGTH_NBYTES, "little"), np.uint8)
    return np.concatenate([length, np.frombuffer(text, np.uint8), *parts])


def from_bytes(given: Bytes) -> Any:
    """The state of `to_bytes`; its arrays are copies. Raises ValueError where it is damaged."""
    end = LENGTH_NBYTES + int.from_bytes(given[:LENGTH_NBYTES].tobytes(), "little")
    if len(given) < end:
        raise ValueError(f"a state of {len(given)} bytes, whose text ends at {end}")
    try:
        return _with_arrays(json.loads(given[LENGTH_NBYTES:end].tobytes()), given[end:], [0])
    except (LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"no state: {error!r}") from error


def _with_places(value: Any, parts: list[Bytes], size: list[int]) -> Any:
    if isinstance(value, np.ndarray):
        plain_dtype(value.dtype.str)
        part = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        parts.append(part)
        size[0] += len(part)
        return {ARRAY: [size[0] - len(part), value.dtype.str, list(value.shape)]}
    if isinstance(value, dict):
        return {str(key): _with_places(child, parts, size) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_with_places(child, parts, size) for child in value]
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any, data: Bytes, read: list[int]) -> Any:
    """``read`` bytes belong to earlier arrays. Each byte is read once, or a short text could ask
    for any amount of memory."""
    if isinstance(value, list):
        return [_with_arrays(child, data, read) for child in value]
    if not isinstance(value, dict):
        return value
    if ARRAY not in value:
        return {key: _with_arrays(child, data, read) for key, child in value.items()}
    first, name, shape = value[ARRAY]
    dtype = plain_dtype(name)
    if first != read[0] or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"an array of shape {shape} at byte {first}, expected at {read[0]}")
    part = _part(data, first, dtype, shape)
    read[0] += len(part)
    return np.ndarray(tuple(shape), dtype, part).copy()


def _part(data: Bytes, first: int, dtype: np.dtype[Any], shape: list[int]) -> bytes:
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if first + nbytes > len(data):
        raise ValueError(f"an array of {nbytes} bytes at byte {first} of {len(data)}")
    return data[first : first + nbytes].tobytes()
