"""How observations and actions lie in messages: one row of bytes each, with a column per array.

A column has the dtype and the shape of its space, little-endian, at a multiple of its item size. So
a game in any language writes its numbers as they are, and a batch is read without a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.observations import MASK, UNBOUNDED, open_choices, views
from penstock.envs.packing import (
    MOST_CHOICES,
    Keys,
    Packer,
    find_bad_observation,
    leaves_of,
    value_at,
)
from penstock.envs.space_json import brief_spaces
from penstock.envs.vector_env import counts_of
from penstock.serving.messages import padded

ALIGN = 8  # bytes, of which a row has a multiple
# The most rows at fault of one batch that are described; each takes 20 microseconds.
MOST_DESCRIBED = 64
FURTHER_FAULT = "the observation is at fault, as others that came with it"

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.uint8]
"""Rows of bytes, ``[count, nbytes]``."""


class RowColumn(NamedTuple):
    """One array of an observation or an action, and its place in a row."""

    name: str
    dtype: str
    """As of numpy, such as "<f4"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the row."""


class RowLayout:
    """The columns of one space."""

    def __init__(self, space: spaces.Space[Any], name: str) -> None:
        """Lay out ``space``; ``name`` is that of its only column if it is a single array."""
        self.space = space
        columns: list[RowColumn] = []
        end = 0
        for keys, leaf in leaves_of(space):
            dtype = np.dtype(leaf.dtype).newbyteorder("<")
            shape = leaf.shape or ()
            offset = padded(end, dtype.itemsize)
            column_name = ".".join(map(str, keys)) or name
            columns.append(RowColumn(column_name, dtype.str, shape, offset))
            end = offset + math.prod(shape) * dtype.itemsize

        self.columns = tuple(columns)
        self.nbytes = padded(end, ALIGN)
        self._used_nbytes = end
        # Bytes that are no flag would make numpy's bool something that is neither 0 nor 1.
        self._is_flags = [column.dtype == "|b1" for column in columns]
        self.dtype = np.dtype(
            {
                "names": [column.name for column in columns],
                "formats": [
                    ("|u1" if column.dtype == "|b1" else column.dtype, column.shape)
                    for column in columns
                ],
                "offsets": [column.offset for column in columns],
                "itemsize": self.nbytes,
            }
        )

    def read(self, rows: Rows) -> Any:
        """Returns what the rows hold, in the form of the space, each array ``[count, *shape]``.

        Args:
            rows: contiguous.
        """
        records = rows.view(self.dtype)[:, 0]
        arrays = (
            records[column.name] != 0 if is_flags else records[column.name]
            for column, is_flags in zip(self.columns, self._is_flags, strict=True)
        )
        return _nested(self.space, arrays)

    def write(self, values: Any, rows: Rows) -> None:
        """Write values in the form of the space, each array ``[count, *shape]``, to rows."""
        if len(self.columns) == 1:
            array = np.ascontiguousarray(values, self.columns[0].dtype)
            rows[:, : self._used_nbytes] = array.reshape(len(rows), -1).view(np.uint8)
            return
        records = rows.view(self.dtype)[:, 0]
        for column, (keys, _) in zip(self.columns, leaves_of(self.space), strict=True):
            records[column.name] = value_at(keys, values)

    def to_json(self) -> list[list[Any]]:
        """Returns the columns as WELCOME has them."""
        return [
            [column.name, column.dtype, list(column.shape), column.offset]
            for column in self.columns
        ]


def describe_layouts(observations: RowLayout, actions: RowLayout) -> dict[str, Any]:
    """Returns the spaces and the layouts of rows, as WELCOME has them."""
    observation, action = brief_spaces(observations.space, actions.space)
    return {
        "observation": _with_finite_bounds(observation),
        "action": _with_finite_bounds(action),
        "row": observations.to_json(),
        "row_nbytes": observations.nbytes,
        "action_row": actions.to_json(),
        "action_nbytes": actions.nbytes,
    }


def _with_finite_bounds(encoded: Any) -> Any:
    """Returns a space as JSON without infinity, which JavaScript does not read."""
    if isinstance(encoded, dict):
        return {kind: _with_finite_bounds(content) for kind, content in encoded.items()}
    if isinstance(encoded, list):
        return [_with_finite_bounds(inner) for inner in encoded]
    if isinstance(encoded, float):
        return min(max(encoded, -UNBOUNDED), UNBOUNDED)
    return encoded


class ObservationReader:
    """Reads rows into the packed observations that a network takes, and finds bad ones."""

    def __init__(
        self,
        name: str,
        space: spaces.Space[Any],
        action: spaces.Space[Any],
        embed_above: int = MOST_CHOICES,
    ) -> None:
        """Plan the reading.

        Args:
            name: of the environment, for messages.
            space: of one observation.
            action: the space of its actions.
            embed_above: as of `Packer`.
        """
        self.layout = RowLayout(space, "obs")
        self._packer = Packer(name, space, embed_above)
        self._dtype = (
            np.float32 if self._packer.space.dtype.kind == "f" else self._packer.space.dtype
        )
        """As in slots."""
        self._counts = counts_of(action)
        self._choices = [
            (keys, leaf)
            for keys, leaf in leaves_of(space)
            if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
        ]

    def read(self, rows: Rows, acts: Bools | None = None) -> tuple[Array, dict[int, str]]:
        """Returns the packed observations ``[count, *shape]``, and what is wrong with which rows.

        Rows with a fault are packed as anything.

        Args:
            rows: contiguous.
            acts: the rows in which an action is chosen, bool ``[count]``, so that a mask must allow
                one; all if it is None.
        """
        observations = self.layout.read(rows)
        faults = self._mend_choices(observations) if self._choices else {}

        space = self._packer.space
        packed = np.empty((len(rows), *space.shape), self._dtype)
        # A float64 may be too large for float32; it becomes infinite, which is found below.
        with np.errstate(over="ignore", invalid="ignore"):
            self._packer.write(observations, packed)

        needs_action = None if acts is None else acts[None]
        if find_bad_observation(packed[None], self._packer.parts, needs_action, self._counts):
            bad_rows = np.flatnonzero(~self._are_sound(packed, acts))
            _note(
                faults, bad_rows, lambda row: self._describe(packed[row], acts is None or acts[row])
            )
        return packed, faults

    def _mend_choices(self, observations: Any) -> dict[int, str]:
        """Replace choices that are none of their space, which cannot be packed.

        Returns: what is wrong, by row.
        """
        faults: dict[int, str] = {}
        for keys, space in self._choices:
            values = value_at(keys, observations)
            low, high = _range_of(space)
            inside = (values >= low) & (values <= high)
            if inside.all():
                continue
            bad_rows = np.flatnonzero(~inside.reshape(len(values), -1).all(1))
            outside = partial(_describe_choice, keys, space, values, inside)
            _note(faults, bad_rows, outside)
            np.copyto(values, np.broadcast_to(low, values.shape), where=~inside)
        return faults

    def _are_sound(self, packed: Array, acts: Bools | None) -> Bools:
        """Returns which rows are finite, and have masks that allow something where a seat
        ``acts``, bool ``[count]``."""
        parts = self._packer.parts
        arrays = views(parts, packed) if parts else {"": packed}
        sound = np.ones(len(packed), np.bool_)
        for name, array in arrays.items():
            if name == MASK:
                is_open = open_choices(array, self._counts).all(-1)
                sound &= is_open if acts is None else is_open | ~acts
            elif array.dtype.kind == "f":
                sound &= np.isfinite(array).reshape(len(packed), -1).all(1)
        return sound

    def _describe(self, packed_row: Array, acts: bool) -> str:
        """Returns what is wrong with one packed row, in which a seat ``acts`` or not, in words."""
        row = packed_row[None, None]
        words = find_bad_observation(row, self._packer.parts, np.array([[acts]]), self._counts)
        assert words is not None
        # The words name the place in a vector of environments, which a game does not know.
        words = words.replace("environment 0's", "its").removesuffix(" in row 0")
        return f"the observation has {words}"


def _note(faults: dict[int, str], rows: Array, describe: Callable[[int], str]) -> None:
    """Note what is wrong with rows, of the first ones in detail: it takes time."""
    for row in rows.tolist():
        if row not in faults:
            faults[row] = describe(row) if len(faults) < MOST_DESCRIBED else FURTHER_FAULT


def _describe_choice(
    keys: Keys, space: spaces.Space[Any], values: Array, inside: Array, row: int
) -> str:
    """Returns which choice of a row is none of its space, in words."""
    value = values[row][~inside[row]].flat[0]
    return f"{_place(keys)} has {value}, which is not in {space}"


def _range_of(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Returns the least and the greatest choice, of each component."""
    match space:
        case spaces.Discrete(n=n, start=start):
            return start, start + n - 1
        case spaces.MultiDiscrete(nvec=nvec, start=start):
            return start, start + nvec - 1
    return 0, 1


def _place(keys: Keys) -> str:
    """Returns the subject of a sentence on one array of an observation."""
    return f"{'.'.join(map(str, keys))} of the observation" if keys else "the observation"


def _nested(space: spaces.Space[Any], arrays: Iterator[Array]) -> Any:
    """Returns arrays in the form of ``space``, in the order of `leaves_of`."""
    if isinstance(space, spaces.Dict):
        return {key: _nested(part, arrays) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple([_nested(part, arrays) for part in space.spaces])
    return next(arrays)
