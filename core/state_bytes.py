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
    writer = _ArrayWriter()
    text = json.dumps(writer.replaced(state)).encode()
    length = np.frombuffer(len(text).to_bytes(LENGTH_NBYTES, "little"), np.uint8)
    return np.concatenate([length, np.frombuffer(text, np.uint8), *writer.parts])


def from_bytes(packed: Bytes) -> Any:
    """Returns the state that `to_bytes` has packed; its arrays are copies.

    Raises ValueError if it is damaged.
    """
    end = LENGTH_NBYTES + int.from_bytes(packed[:LENGTH_NBYTES].tobytes(), "little")
    if len(packed) < end:
        raise ValueError(f"a state of {len(packed)} bytes, whose text ends at {end}")

    try:
        value = json.loads(packed[LENGTH_NBYTES:end].tobytes())
        return _ArrayReader(packed[end:]).restored(value)
    except (LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"no state: {error!r}") from error


class _ArrayWriter:
    """Collects the bytes of the arrays in a state."""

    def __init__(self) -> None:
        self.parts: list[Bytes] = []  # the bytes of each array so far
        self._nbytes = 0  # their sum

    def replaced(self, value: Any) -> Any:
        """Returns ``value`` as JSON values, with an object in place of each array."""
        if isinstance(value, np.ndarray):
            return {ARRAY: self._add(value)}
        if isinstance(value, dict):
            return {str(key): self.replaced(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.replaced(child) for child in value]
        return value.item() if isinstance(value, np.generic) else value

    def _add(self, array: npt.NDArray[Any]) -> list[Any]:
        """Add the bytes of an array; returns its first byte, dtype and shape."""
        plain_dtype(array.dtype.str)
        part = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        first = self._nbytes
        self.parts.append(part)
        self._nbytes += len(part)
        return [first, array.dtype.str, list(array.shape)]


class _ArrayReader:
    """Makes the arrays of a state from their bytes.

    Each byte is read once, in order. Otherwise a short text could ask for any amount of memory.
    """

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = 0  # the bytes before it were read

    def restored(self, value: Any) -> Any:
        """Returns ``value``, which was read as JSON, with an array in place of each of its objects.

        Raises ValueError, or an error of a value of the wrong type, if it is damaged.
        """
        if isinstance(value, list):
            return [self.restored(child) for child in value]
        if not isinstance(value, dict):
            return value
        if ARRAY not in value:
            return {key: self.restored(child) for key, child in value.items()}

        first, dtype_name, shape = value[ARRAY]
        dtype = plain_dtype(dtype_name)
        is_shape = all(isinstance(extent, int) and extent >= 0 for extent in shape)
        if first != self._position or not is_shape:
            raise ValueError(
                f"an array of shape {shape} at byte {first}, expected at {self._position}"
            )
        part = _part(self._data, first, dtype=dtype, shape=shape)
        self._position += len(part)
        return np.ndarray(tuple(shape), dtype, part).copy()


def _part(data: Bytes, first: int, *, dtype: np.dtype[Any], shape: list[int]) -> bytes:
    """Returns the bytes of an array that begins at byte ``first`` of ``data``.

    Raises ValueError if ``data`` ends before.
    """
    # Python's whole numbers do not overflow, as a product of numpy's would.
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if first + nbytes > len(data):
        raise ValueError(f"an array of {nbytes} bytes at byte {first} of {len(data)}")
    return data[first : first + nbytes].tobytes()
