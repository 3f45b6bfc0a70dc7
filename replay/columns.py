"""Columns of a replay: from spaces to flat names, and between nested values and those names.

A nested observation or action is flattened: a Dict joins keys with dots ("obs.camera"), a Tuple
joins positions ("obs.0"). The names alone define the structure, so that the columns of any slot
spec can be nested again. Keys that would make the names ambiguous are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError

Array = npt.NDArray[Any]
# The structure of a nested value; its leaves are the names of columns.
Nest = str | dict[str, "Nest"] | tuple["Nest", ...]

# Names that a declared column cannot have: those of arguments of `Replay.add` and of columns that a
# replay adds itself, of further keys of a batch, and of a slot's memory for small columns.
OWN_COLUMNS = (
    *("reward", "terminated", "truncated", "next_obs"),
    *("alive", "age", "pad", "side", "priority"),
)
BATCH_KEYS = ("weights", "keys", "discount", "frames", "mask", "burn_in", "info")
BLOCK_NAMES = ("records", "slot_records")


@dataclass(frozen=True)
class Leaf:
    """One array of a nested value.

    Args:
        name: of its column.
        dtype: of its elements.
        shape: for one environment.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for one environment."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def leaves_of(columns: Mapping[str, Any]) -> list[Leaf]:
    """Returns the leaves of declared columns.

    Args:
        columns: by name a gymnasium space, ``(dtype, shape)``, or a mapping of these by key.

    Raises:
        ReplayError: a column is declared as something else, or has a name that is not possible.
    """
    if not isinstance(columns, Mapping) or not {"obs", "action"} <= columns.keys():
        names = list(columns) if isinstance(columns, Mapping) else type(columns).__name__
        raise ReplayError(
            f"columns {names} must be a mapping with at least obs and action, each a gymnasium "
            "space or (dtype, shape)"
        )

    for name in columns:
        if name in OWN_COLUMNS or name in BATCH_KEYS:
            raise ReplayError(f"column {name} is made by the replay itself; leave it out")
        if name in BLOCK_NAMES:
            raise ReplayError(
                f"a column cannot be called {name!r}, the name of the memory for small columns; "
                "choose another name"
            )
        # The keys of a batch are also attributes, beside the methods of dict.
        if not isinstance(name, str) or "." in name or "@" in name or hasattr(dict, name):
            raise ReplayError(
                f"a column cannot be called {name!r}: a batch has it under its name; use one "
                "without '.' and '@' that is no method of dict"
            )

    return [leaf for name, declared in columns.items() for leaf in _leaves(name, declared)]


def _leaves(name: str, declared: Any) -> list[Leaf]:
    """Returns the leaves of one column, or of a part of it, which is called ``name``."""
    # A caller that passes a space has imported gymnasium.
    spaces = sys.modules.get("gymnasium.spaces")
    if spaces is not None and isinstance(declared, spaces.Space):
        return _leaves_of_space(name, declared, spaces)
    if isinstance(declared, Mapping):
        return _leaves_of_children(name, declared)

    try:
        dtype, shape = declared
        leaf = Leaf(name, np.dtype(dtype), tuple(int(n) for n in shape))
    except (TypeError, ValueError):
        raise ReplayError(
            f"column {name} is declared as {declared!r}; give a gymnasium space or (dtype, shape)"
        ) from None

    if leaf.dtype.hasobject or leaf.dtype.kind in "mM" or not leaf.nbytes:
        raise ReplayError(
            f"column {name} cannot be {leaf}: give numbers, flags or bytes, of a fixed size"
        )
    return [leaf]


def _leaves_of_space(name: str, space: Any, spaces: Any) -> list[Leaf]:
    """Returns the leaves of a gymnasium space; ``spaces`` is the module `gymnasium.spaces`."""
    if isinstance(space, spaces.Dict):
        return _leaves_of_children(name, space.spaces)

    if isinstance(space, spaces.Tuple):
        leaves: list[Leaf] = []
        for i, part in enumerate(space.spaces):
            leaves += _leaves(f"{name}.{i}", part)
        return leaves

    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        assert space.shape is not None
        return [Leaf(name, np.dtype(space.dtype), tuple(space.shape))]

    raise ReplayError(
        f"column {name} has the space {space}, which has no fixed size; use Box, Discrete, "
        "MultiBinary, MultiDiscrete, or Dict and Tuple of these"
    )


def _leaves_of_children(name: str, children: Mapping[Any, Any]) -> list[Leaf]:
    """Returns the leaves of a mapping of spaces or declarations by key."""
    leaves: list[Leaf] = []
    for key, declared in children.items():
        if not isinstance(key, str) or "." in key or "@" in key or key.isdigit() or not key:
            raise ReplayError(
                f"column {name} has the key {key!r}; keys must be text without '.' and '@', and "
                "not a number: they are joined to names such as obs.camera"
            )
        leaves += _leaves(f"{name}.{key}", declared)
    return leaves


def nest_of(root: str, names: list[str]) -> Nest:
    """Returns the structure that dotted names describe.

    Args:
        root: the name of the nested value, such as "obs".
        names: of its leaves, such as "obs.camera"; ["obs"] for a value that is not nested.
    """
    if names == [root]:
        return root

    # The keys below the root, each once and in order.
    keys = dict.fromkeys(name[len(root) + 1 :].split(".", 1)[0] for name in names)
    children = {key: _nest_below(f"{root}.{key}", names) for key in keys}
    if all(key.isdigit() for key in keys):
        return tuple(children.values())
    return children


def _nest_below(root: str, names: list[str]) -> Nest:
    """Returns the structure of those of ``names`` that are ``root`` or lie below it."""
    return nest_of(root, [name for name in names if f"{name}.".startswith(f"{root}.")])


def flatten(nest: Nest, value: Any, name: str, out: dict[str, Any]) -> None:
    """Put the leaves of a nested value into a dictionary by column name.

    Args:
        nest: the structure that the value must have.
        value: nested like a gymnasium space.
        name: of the value, for an error.
        out: the dictionary.

    Raises:
        ReplayError: the value has another structure.
    """
    if isinstance(nest, str):
        out[nest] = value
    elif isinstance(nest, dict):
        if not isinstance(value, Mapping) or value.keys() != nest.keys():
            came = type(value).__name__
            if isinstance(value, Mapping):
                came = f"keys {list(value)}"
            raise ReplayError(f"{name} came as {came}, expected a mapping with keys {list(nest)}")

        for key, child in nest.items():
            flatten(child, value[key], f"{name}.{key}", out)
    else:
        if not isinstance(value, tuple | list) or len(value) != len(nest):
            came = type(value).__name__
            if isinstance(value, tuple | list):
                came = f"{len(value)} parts"
            raise ReplayError(f"{name} came as {came}, expected a tuple of {len(nest)}")

        for i, child in enumerate(nest):
            flatten(child, value[i], f"{name}.{i}", out)


def unflatten(nest: Nest, arrays: Mapping[str, Any]) -> Any:
    """Returns arrays as a nested value.

    Args:
        nest: the structure of the value.
        arrays: by column name; a part without any array is left out of its Dict.
    """
    if isinstance(nest, str):
        return arrays[nest]
    if isinstance(nest, tuple):
        return tuple(unflatten(child, arrays) for child in nest)

    return {
        key: unflatten(child, arrays)
        for key, child in nest.items()
        if not arrays.keys().isdisjoint(names_of(child))
    }


def names_of(nest: Nest) -> list[str]:
    """Returns the names of the leaves of ``nest``, in order."""
    if isinstance(nest, str):
        return [nest]

    children = nest.values() if isinstance(nest, dict) else nest
    return [name for child in children for name in names_of(child)]


def validated(leaf: Leaf, value: Any, envs: int, name: str = "") -> Array:
    """Returns ``value`` as an array ``[envs, *leaf.shape]`` that the column can hold.

    Args:
        leaf: the column's dtype and shape.
        value: an array, a number or nested lists. With one environment the first axis may be left
            out.
        envs: number of environments.
        name: for an error; empty: that of the leaf.

    Raises:
        ReplayError: the shape is another, or the dtype cannot be cast without losing its kind.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        # Nested lists of different lengths make no array, and fit no shape.
        array = np.empty(0, object)

    shape = (envs, *leaf.shape)
    if envs == 1 and array.shape == leaf.shape:
        array = array[None]
    if array.shape != shape:
        or_without_axis = f" or {list(leaf.shape)}" if envs == 1 else ""
        raise ReplayError(
            f"{name or leaf.name} came with shape {list(array.shape)}, "
            f"expected {list(shape)}{or_without_axis}"
        )

    if not np.can_cast(array.dtype, leaf.dtype, "same_kind") and not _scalar_fits(value, leaf):
        raise ReplayError(
            f"{name or leaf.name} came with dtype {array.dtype}, expected {leaf.dtype}; "
            f"convert it with .astype('{leaf.dtype}') if no value is lost"
        )
    return array


def _scalar_fits(value: Any, leaf: Leaf) -> bool:
    """Returns whether a Python number, which has no dtype, fits; 0 and 1 fit a flag."""
    if leaf.dtype == bool:
        return isinstance(value, int | np.integer) and value in (0, 1)
    return np.isscalar(value) and np.can_cast(np.min_scalar_type(value), leaf.dtype)
