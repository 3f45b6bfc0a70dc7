"""Encodes a batch as the bytes of one frame, and decodes it without a copy.

Leaves are named by their path, "obs.camera" for a Dict and "obs.0" for a Tuple. They lie one after
the other in the frame, each at a multiple of 64 bytes; the message's meta lists name, dtype and
shape. The reader makes views over the frame and trusts nothing: sizes must add up to the frame's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import plain_dtype
from penstock.core.specs import read_shape as shape_in
from penstock.replay.batch import Batch
from penstock.replay.columns import nest_of, unflatten
from penstock.transport.wire import WireError

Array = npt.NDArray[Any]
ALIGN = 64
MAX_FIELDS = 1024


class Field(NamedTuple):
    """The position of a leaf in the frame."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Shape(NamedTuple):
    """The fields of a batch and their total size in bytes."""

    fields: tuple[Field, ...]
    nbytes: int

    @property
    def meta(self) -> list[Any]:
        """The shape as it is sent in a message's meta."""
        return [[f.name, f.dtype.str, list(f.shape)] for f in self.fields]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a nested batch with their paths."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, f"{name}.{key}" if name else key)
    elif isinstance(value, tuple):
        for index, child in enumerate(value):
            yield from leaves(child, f"{name}.{index}")
    else:
        # An array, or `burn_in` of sequences, which is a number.
        yield name, np.asarray(value)


@lru_cache(maxsize=64)
def _placed(described: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Shape:
    fields = []
    start = 0
    for name, dtype_text, shape in described:
        dtype = plain_dtype(dtype_text)
        nbytes = math.prod(shape) * dtype.itemsize
        fields.append(Field(name, dtype, shape, start, nbytes))
        start += -(-nbytes // ALIGN) * ALIGN
    return Shape(tuple(fields), start)


def pack(batch: Batch, count: int = 1) -> tuple[Shape, Array]:
    """Pack ``count`` batches, dealt out from the rows of one, as uint8 ``[count, nbytes]``."""
    arrays = list(leaves(batch))
    described = tuple(
        (n, a.dtype.str, a.shape and (len(a) // count, *a.shape[1:])) for n, a in arrays
    )
    shape = _placed(described)
    frames = np.empty((count, shape.nbytes), np.uint8)
    for field, (_, array) in zip(shape.fields, arrays, strict=True):
        out = frames[:, field.start : field.start + field.nbytes].view(field.dtype)
        first = field.shape[0] if field.shape else 1
        rows = array.reshape(first, count, *field.shape[1:]).swapaxes(0, 1)
        np.copyto(out.reshape(rows.shape), rows)
    return shape, frames


def read_shape(meta: Any) -> Shape:
    """Read the shape of batches from a message's meta. Raises WireError."""
    if not isinstance(meta, list) or not 0 < len(meta) <= MAX_FIELDS:
        raise WireError("meta", "no list of fields")
    try:
        described = tuple((str(n), str(d), shape_in(s)) for n, d, s in meta)
        return _placed(described)
    except (TypeError, ValueError) as error:
        raise WireError("meta", str(error)) from error


def unpack(shape: Shape, frame: Any) -> Batch:
    """Make views over ``frame``, nested again. Raises WireError for a frame of another size."""
    raw = np.frombuffer(frame, np.uint8)
    if raw.nbytes != shape.nbytes:
        raise WireError("size", f"a batch of {raw.nbytes} bytes instead of {shape.nbytes}")
    arrays = {
        f.name: raw[f.start : f.start + f.nbytes].view(f.dtype).reshape(f.shape)
        for f in shape.fields
    }
    arrays |= {f.name: arrays[f.name].item() for f in shape.fields if not f.shape}
    return Batch({root: unflatten(nest, arrays) for root, nest in _nests(shape)})


@lru_cache(maxsize=64)
def _nests(shape: Shape) -> list[tuple[str, Any]]:
    """How the leaves of each column of a batch are nested, by the column's name."""
    names = [field.name for field in shape.fields]
    roots = dict.fromkeys(name.split(".", 1)[0] for name in names)
    return [
        (root, nest_of(root, [n for n in names if n == root or n.startswith(root + ".")]))
        for root in roots
    ]
