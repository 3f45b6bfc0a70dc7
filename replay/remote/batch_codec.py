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

# Each leaf begins at a multiple of so many bytes.
ALIGN = 64

# Leaves that a received batch may have.
MAX_FIELDS = 1024


class FieldSpec(NamedTuple):
    """A leaf as the message's meta describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


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


class PackedBatches(NamedTuple):
    """Batches of one shape, as bytes."""

    shape: Shape
    frames: Array
    """uint8 ``[count, nbytes]``, one frame for each batch."""


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
def _place_fields(specs: tuple[FieldSpec, ...]) -> Shape:
    """The places of leaves in a frame, one after the other."""
    fields = []
    start = 0
    for spec in specs:
        dtype = plain_dtype(spec.dtype)
        nbytes = math.prod(spec.shape) * dtype.itemsize
        fields.append(Field(spec.name, dtype, spec.shape, start=start, nbytes=nbytes))
        start += -(-nbytes // ALIGN) * ALIGN
    return Shape(tuple(fields), start)


def pack(batch: Batch, count: int = 1) -> PackedBatches:
    """Pack the rows of one batch as the frames of ``count`` batches.

    Rows are dealt out in turn: batch i gets rows i, i + count, i + 2 * count and so on. A number,
    such as `burn_in`, goes into each of them.
    """
    arrays = dict(leaves(batch))
    specs = []
    for name, array in arrays.items():
        shape = (len(array) // count, *array.shape[1:]) if array.ndim else ()
        specs.append(FieldSpec(name, array.dtype.str, shape))
    batch_shape = _place_fields(tuple(specs))

    frames = np.empty((count, batch_shape.nbytes), np.uint8)
    for field in batch_shape.fields:
        leaf_bytes = frames[:, field.start : field.start + field.nbytes]
        row_count = field.shape[0] if field.shape else 1
        # [rows of a batch, count, ...] with the batch as first axis.
        rows = arrays[field.name].reshape(row_count, count, *field.shape[1:]).swapaxes(0, 1)
        np.copyto(leaf_bytes.view(field.dtype).reshape(rows.shape), rows)
    return PackedBatches(batch_shape, frames)


def read_shape(meta: Any) -> Shape:
    """Read the shape of batches from a message's meta. Raises WireError."""
    if not isinstance(meta, list) or not 0 < len(meta) <= MAX_FIELDS:
        raise WireError("meta", "no list of fields")
    try:
        specs = tuple(FieldSpec(str(n), str(dtype), shape_in(s)) for n, dtype, s in meta)
        return _place_fields(specs)
    except (TypeError, ValueError) as error:
        raise WireError("meta", str(error)) from error


def unpack(shape: Shape, frame: Any) -> Batch:
    """Make views over ``frame``, nested again. Raises WireError for a frame of another size."""
    raw = np.frombuffer(frame, np.uint8)
    if raw.nbytes != shape.nbytes:
        raise WireError("size", f"a batch of {raw.nbytes} bytes instead of {shape.nbytes}")

    values: dict[str, Any] = {}
    for field in shape.fields:
        leaf_bytes = raw[field.start : field.start + field.nbytes]
        array = leaf_bytes.view(field.dtype).reshape(field.shape)
        # A leaf without axes was a number.
        values[field.name] = array if field.shape else array.item()
    return Batch({root: unflatten(nest, values) for root, nest in _nests(shape)})


@lru_cache(maxsize=64)
def _nests(shape: Shape) -> list[tuple[str, Any]]:
    """How the leaves of each column of a batch are nested, by the column's name."""
    names = [field.name for field in shape.fields]
    roots = dict.fromkeys(name.split(".", 1)[0] for name in names)
    return [
        (root, nest_of(root, [n for n in names if n == root or n.startswith(root + ".")]))
        for root in roots
    ]
