"""The shape of a slot: named columns, and the position of each in the slot's bytes.

A slot is one unroll of ``envs`` environments over ``unroll`` steps, time-major. Both ends of every
transport compute the spec on their own from the spaces and the algorithm; its hash goes into the
handshake, so that two ends with different specs refuse each other with `SlotSpec.difference`.

A slot's payload is a list of blocks, each contiguous:

    one block per big column       [rows, envs, *shape]
    records                        [unroll, envs] of one struct: the small per-step columns
    slot_records                   [envs] of one struct: columns that hold for a whole unroll

Structs are laid out as a C compiler would: each field at a multiple of its item size. A store keeps
the same block of all slots side by side, so that a random draw from many slots is one gather.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

Rows = Literal["unroll+1", "frames", "unroll", "slot", "side"]

PAGE = 4096
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PLAIN_DTYPE = re.compile(r"[<>|=]?[biufcSUVmM?]\d{0,9}|bool|u?int\d{1,2}|float\d\d|complex\d{2,3}")
# The limit of numpy before version 2.
MAX_AXES = 32
MAX_COLUMNS = 4096
# The name of the column that tells where a column of `env.record` has a value.
GIVEN = "{}_given"
# A record of 64 bytes is gathered faster than its columns one by one.
SMALL_NBYTES = 64


@dataclass(frozen=True)
class Column:
    """A named array of a slot.

    Its shape is ``[rows, envs, *shape]``; ``[envs, *shape]`` for rows "slot"; ``[side, *shape]``
    for rows "side", which hold values of few steps, such as the final observation of an episode
    where the environment already shows the next one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    rows: Rows = "unroll"

    @property
    def cell_nbytes(self) -> int:
        """Bytes of one environment's value at one step."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """A contiguous piece of a slot's payload: a big column, or a packed group of small ones."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SlotSpec:
    """The columns of a slot and the sizes of its axes. Slots of equal specs have equal layouts."""

    unroll: int
    """Steps."""
    envs: int
    """Environments."""
    columns: tuple[Column, ...]
    side: int = 0
    """Rows of the columns with rows "side"."""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"columns {names} repeat a name; give each column its own")
        if reserved := {"records", "slot_records"} & set(names):
            raise ValueError(f"a column cannot be called {reserved.pop()}; choose another name")
        if self.unroll < 1 or self.envs < 1:
            raise ValueError(f"unroll {self.unroll} and envs {self.envs} must both be at least 1")
        has_side_rows = any(column.rows == "side" for column in self.columns)
        least_side = 1 if has_side_rows else 0
        if self.side < least_side:
            raise ValueError(f"side {self.side} must be at least 1 where a column has side rows")

    def rows_of(self, column: Column) -> tuple[int, ...]:
        """Returns the leading extents of a column, before its own shape."""
        if column.rows == "slot":
            return (self.envs,)
        if column.rows == "side":
            return (self.side,)
        if column.rows == "unroll":
            return (self.unroll, self.envs)
        return (self.unroll + 1, self.envs)

    def _block_extents(self, column: Column) -> tuple[int, ...]:
        """Returns the leading extents of a big column's block; frames are stored by environment."""
        extents = self.rows_of(column)
        return extents[::-1] if column.rows == "frames" else extents

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in order; each is a frame on the wire."""
        # Each big column has a block of its own.
        blocks: list[Block] = []
        for column in self.columns:
            if not _is_small(column):
                shape = (*self._block_extents(column), *column.shape)
                blocks.append(Block(column.name, shape, np.dtype(column.dtype)))

        # The small columns with the same rows share a block of structs.
        for name, rows in (("records", "unroll"), ("slot_records", "slot")):
            small = [column for column in self.columns if _is_small(column) and column.rows == rows]
            if small:
                fields = [(column.name, column.dtype, column.shape) for column in small]
                struct = np.dtype(fields, align=True)
                blocks.append(Block(name, self.rows_of(small[0]), struct))
        return tuple(blocks)

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of all blocks of a slot."""
        return sum(block.nbytes for block in self.blocks)

    @cached_property
    def hash(self) -> int:
        """First eight bytes of the SHA-256 of the canonical JSON, little-endian."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def zeros(self) -> list[Bytes]:
        """Allocate the blocks of one slot, each uint8 ``[nbytes]``."""
        return [np.zeros(block.nbytes, np.uint8) for block in self.blocks]

    def views(self, payload: Sequence[Bytes]) -> dict[str, np.ndarray[Any, Any]]:
        """Returns arrays over the bytes of a slot's blocks, by column name, without a copy.

        ``payload`` is the bytes of each block, as of `zeros`. The shapes are those of `Column`.
        """
        blocks = {
            block.name: raw.view(block.dtype).reshape(block.shape)
            for block, raw in zip(self.blocks, payload, strict=True)
        }
        return self.columns_of(blocks)

    def columns_of(
        self, blocks: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the columns of slots by name, without a copy.

        Args:
            blocks: some or all, by name, of one slot or of several: ``[..., *block.shape]``.

        Returns:
            Arrays whose last axes are those of `Column`, after the same axes of slots.
        """
        columns: dict[str, np.ndarray[Any, Any]] = {}
        frame_columns = {column.name for column in self.columns if column.rows == "frames"}
        for block in self.blocks:
            array = blocks.get(block.name)
            if array is None:
                continue
            if block.dtype.names:
                columns.update({name: array[name] for name in block.dtype.names})
            elif block.name in frame_columns:
                envs_axis = array.ndim - len(block.shape)
                columns[block.name] = array.swapaxes(envs_axis, envs_axis + 1)
            else:
                columns[block.name] = array
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Returns the spec as JSON values."""
        return {
            "unroll": self.unroll,
            "envs": self.envs,
            "side": self.side,
            "columns": [[c.name, c.dtype, list(c.shape), c.rows] for c in self.columns],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SlotSpec:
        """Returns the spec that `to_dict` made ``data`` of; ``data`` may come from another process.

        Sizes are not limited, so compare them before anything is allocated. Raises ValueError,
        TypeError or LookupError for an invalid spec.
        """
        if len(data["columns"]) > MAX_COLUMNS:
            raise ValueError(f"{len(data['columns'])} columns; at most {MAX_COLUMNS} are allowed")

        columns = tuple(_column(*fields) for fields in data["columns"])
        spec = cls(
            unroll=int(data["unroll"]),
            envs=int(data["envs"]),
            columns=columns,
            side=int(data["side"]),
        )

        # An array with an extent of 0 has no bytes, but numpy multiplies the other extents too.
        for column in columns:
            extents = (*spec.rows_of(column), *column.shape)
            cells = math.prod(max(1, extent) for extent in extents)
            if cells * np.dtype(column.dtype).itemsize > sys.maxsize:
                raise ValueError(f"column {column.name} of shape {extents} is too large")
        return spec

    def difference(self, other: SlotSpec, mine: str = "learner", theirs: str = "actor") -> str:
        """Returns a readable list of what differs between two specs; empty if they are equal.

        ``mine`` and ``theirs`` name the owners of this spec and of ``other``.
        """
        # Properties by name: the sizes, then the columns of either spec.
        own_columns = {column.name: column for column in self.columns}
        other_columns = {column.name: column for column in other.columns}
        pairs: list[tuple[str, object, object]] = [
            ("unroll", self.unroll, other.unroll),
            ("envs", self.envs, other.envs),
            ("side", self.side, other.side),
        ]
        for name in sorted(own_columns.keys() | other_columns.keys()):
            own_text = _describe(own_columns.get(name))
            other_text = _describe(other_columns.get(name))
            pairs.append((f"column {name}", own_text, other_text))

        differences = [
            f"{name}: {mine} {own_value}, {theirs} {other_value}"
            for name, own_value, other_value in pairs
            if own_value != other_value
        ]
        if not differences and self != other:
            differences.append(
                f"order of columns: {mine} {list(own_columns)}, {theirs} {list(other_columns)}"
            )
        return "; ".join(differences)


# The header before the payload of each slot. Times are CLOCK_MONOTONIC seconds of the writer's
# host. `produced_steps` counts the stream's agent steps up to and with this slot, so a gap in the
# sequence shows how many steps were lost. `rows` is used by replays: if the writer has marked the
# rows that count in the column `alive`, it is the number of rows [E] that were written. It is 0 if
# all rows were written, and episodes must be derived from them.
HEADER = np.dtype(
    [
        ("actor", "<u8"),
        ("incarnation", "<u4"),
        ("generation", "<u4"),
        ("sequence", "<u8"),
        ("version", "<u8"),
        ("steps", "<u8"),
        ("produced_steps", "<u8"),
        ("started_s", "<f8"),
        ("published_s", "<f8"),
        ("rows", "<u8"),
    ]
)
HEADER_NBYTES = 128


def plain_dtype(text: Any) -> np.dtype[Any]:
    """Returns the dtype that a received text names, such as "float32" or "<f4".

    Only dtypes of numbers, flags and bytes are allowed, as numpy would evaluate a text with commas
    as Python. Raises ValueError for any other.
    """
    if not isinstance(text, str) or not PLAIN_DTYPE.fullmatch(text):
        raise ValueError(
            f"no column has dtype {text!r:.80}: numbers, flags and bytes go between processes"
        )

    try:
        return np.dtype(text)
    except TypeError as error:
        raise ValueError(str(error)) from error


def read_shape(extents: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape in a received list.

    Call it before computing anything from a received shape: a message has room for a million
    extents, whose product takes minutes. Raises ValueError or TypeError for a shape that no array
    has.
    """
    if len(extents) > MAX_AXES:
        raise ValueError(f"a shape has {len(extents)} extents; an array has at most {MAX_AXES}")

    try:
        shape = tuple(int(extent) for extent in extents)
    except OverflowError as error:
        raise ValueError("a shape has an infinite extent") from error
    if not all(0 <= extent <= sys.maxsize for extent in shape):
        raise ValueError("a shape has a negative extent, or one larger than any memory")
    return shape


def _column(name: str, dtype: str, shape: Sequence[int], rows: Rows) -> Column:
    """Returns a column with received fields. Raises ValueError or TypeError for a wrong one."""
    column = Column(str(name), str(dtype), shape=read_shape(shape), rows=rows)
    if rows not in get_args(Rows):
        raise ValueError(f"no column has rows {rows!r:.80}")
    plain_dtype(dtype)
    return column


def _is_small(column: Column) -> bool:
    """Returns whether a column is stored in structs, with others that have the same rows."""
    return column.rows in ("unroll", "slot") and column.cell_nbytes <= SMALL_NBYTES


def _describe(column: Column | None) -> str:
    """Returns dtype, shape and rows of a column as text; None is a column that does not exist."""
    if column is None:
        return "absent"
    return f"{column.dtype}{list(column.shape)} per {column.rows}"
