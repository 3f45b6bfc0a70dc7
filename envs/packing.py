"""Packs the observations of a vector into one array per row, and checks them and rewards.

A Box is copied unchanged. Discrete, MultiDiscrete and MultiBinary become float32, a choice one-hot.
One of more than ``embed_above`` choices becomes its number, counted from 0, which networks embed. A
Dict or a Tuple becomes a row of bytes, whose parts `core.observations` describes; an array of such
numbers does too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.core.notes import note_logger
from penstock.core.observations import (
    MASK,
    ObservationPart,
    bounds_of,
    laid_out,
    open_choices,
    row_nbytes,
    views,
)

# A reward beyond this, either way, would destroy a network.
MOST_REWARD = 1e6
# From this number on, neighbours in float32 are a thousandth or more apart.
COARSE = 2.0**13
# The most choices that an observation or an action may have, as each is an input or an output.
MOST_CHOICES = 1_000_000

logger = note_logger(__name__)
Array = npt.NDArray[Any]
Write = Callable[[Array, Array], None]
"""Writes values [count, ...] to their place [count, *shape]."""
Keys = tuple[Any, ...]
"""The way from an observation to one of its arrays."""


class PackedLeaf(NamedTuple):
    """One array of an observation, and how it is packed."""

    keys: Keys
    shape: tuple[int, ...]
    """Shape of its packed values, of one environment."""
    dtype: str
    """Dtype of its packed values."""
    write: Write
    bounds: tuple[float, float] | None = None
    """The lowest and the highest bound of its space, as of `bounds_of`."""
    choices: tuple[int, ...] = ()
    """As of `ObservationPart`."""

    def of(self, observations: Any) -> Array:
        """Returns its values within observations, ``[count, ...]``."""
        return np.asarray(value_at(self.keys, observations))


class Packer:
    """Writes the observations of `count` environments, [count, ...] each, into one array."""

    def __init__(
        self, name: str, space: spaces.Space[Any], embed_above: int = MOST_CHOICES
    ) -> None:
        """Plan the packing.

        Args:
            name: of the environment, for messages.
            space: of one observation.
            embed_above: the most choices that are one-hot (`env.embed_above`).

        Raises:
            UserError: for a kind of space that networks cannot read.
        """
        leaves = [
            _packed(name, keys, leaf_space, embed_above) for keys, leaf_space in leaves_of(space)
        ]
        if not any(math.prod(leaf.shape) for leaf in leaves):
            raise UserError(
                f"environment {name} has observations that hold nothing, {space!r:.200}; give its "
                "observation space at least one number"
            )

        self._name = name
        self._leaves = leaves
        self.parts: tuple[ObservationPart, ...] = ()
        self._row_dtype = np.dtype(np.uint8)
        if isinstance(space, spaces.Box):
            self.space = space if space.dtype.isnative else _native(space)
        elif isinstance(space, spaces.Dict | spaces.Tuple) or leaves[0].choices:
            named = [
                (".".join(map(str, leaf.keys)) or "obs", leaf.shape, leaf.dtype) for leaf in leaves
            ]
            _refuse_equal_names(name, [part_name for part_name, _, _ in named])
            pairs = zip(laid_out(named), leaves, strict=True)
            self.parts = tuple(
                replace(part, bounds=leaf.bounds, choices=leaf.choices) for part, leaf in pairs
            )
            self.space = spaces.Box(0, 255, (row_nbytes(self.parts),), np.uint8)
            self._row_dtype = _row_dtype(self.parts)
        else:
            self.space = spaces.Box(0, 1, leaves[0].shape, np.float32)

        # For `watch_precision`, by the keys of an array.
        self._watched_writes = 0
        self._previous: dict[Keys, Array] = {}
        self._noted: set[Keys] = set()

    @property
    def is_watching(self) -> bool:
        """Whether numbers that networks cannot tell apart will be noted in the next write."""
        return self._watched_writes > 0

    def watch_precision(self, writes: int) -> None:
        """Note in the next ``writes`` which numbers networks cannot tell apart.

        A note comes once for each array of an observation (`lost_digits`).
        """
        self._watched_writes = writes

    def write(self, observations: Any, out: Array) -> None:
        """Write observations to ``out``.

        Args:
            observations: of all environments, in the form of their space.
            out: [count, *shape] of the packed space's dtype, contiguous.

        Raises:
            UserError: if the observations do not match their space.
        """
        if self.parts:
            rows: Array = out.view(self._row_dtype)[:, 0]
            for leaf, part in zip(self._leaves, self.parts, strict=True):
                self._write(leaf, leaf.of(observations), rows[part.name])
        else:
            values = np.asarray(observations)
            if values.shape == out.shape and values.dtype == out.dtype:
                np.copyto(out, values)  # the usual case, as fast as possible
            else:
                self._write(self._leaves[0], values, out)

        if self._watched_writes:
            self._watched_writes -= 1
            self._note_lost_digits(observations)

    def _note_lost_digits(self, observations: Any) -> None:
        """Note the arrays with numbers that networks cannot tell apart.

        The numbers are compared with those of the previous write, those of another environment,
        and, of integers, with their own value in float32.
        """
        for leaf in self._leaves:
            values = leaf.of(observations)
            is_choice = values.shape[1:] != leaf.shape or bool(leaf.choices)
            if leaf.keys in self._noted or is_choice or np.can_cast(values.dtype, np.float32):
                continue

            previous_values = self._previous.get(leaf.keys, values)
            self._previous[leaf.keys] = values.copy()
            lost = lost_digits(values, previous_values) or lost_digits(values, values[::-1])
            if values.dtype.kind in "iu":
                lost = lost or lost_digits(values, values.astype(np.float32).astype(np.float64))

            if lost:
                self._noted.add(leaf.keys)
                logger.info(
                    "environment %s shows numbers as large as %s of its observations%s, which "
                    "networks cannot tell apart, as they compute in float32; subtract an offset, "
                    "scale or split such numbers in the environment, or in a wrapper of yours "
                    "(env.wrappers)",
                    self._name,
                    lost,
                    _place_of(leaf.keys),
                )

    def _write(self, leaf: PackedLeaf, values: Array, target: Array) -> None:
        """Write the values of one array, and turn a misfit into a UserError."""
        place = _place_of(leaf.keys)
        try:
            leaf.write(values, target)
        except _OutsideError as error:
            raise UserError(
                f"environment {self._name} returned observations{place} with {error}; correct its "
                "space, or what it returns"
            ) from error
        except (TypeError, ValueError) as error:
            raise UserError(
                f"environment {self._name} returned observations {values.dtype}"
                f"{[*values.shape]}{place} where its observation space says {target.dtype}"
                f"{[*target.shape]}; correct its space, or what it returns"
            ) from error


def lost_digits(values: Array, others: Array) -> str:
    """Find the first value that differs from another one, but not in float32.

    Below `COARSE` float32 shows thousandths; a smaller difference is taken for noise.

    Args:
        values: of one array in the observations of all environments, ``[count, *shape]``.
        others: the values to compare with, of the same shape.

    Returns:
        Both values and their place in the observation, in words; empty if there is none.
    """
    large = np.abs(values) >= COARSE
    if not large.any():
        return ""

    # A large float64 becomes infinite.
    with np.errstate(over="ignore"):
        alike = values.astype(np.float32) == others.astype(np.float32)
    lost = large & alike & (values != others)
    if not lost.any():
        return ""

    index = np.unravel_index(int(np.argmax(lost)), lost.shape)
    place = ", ".join(str(i) for i in index[1:])
    smaller, larger = sorted((values[index].item(), others[index].item()))
    return f"{smaller!r} and {larger!r} at [{place}]"


def _refuse_equal_names(name: str, part_names: Sequence[str]) -> None:
    """Raise UserError if two parts of an observation have the same name."""
    repeated = [part for part, count in Counter(part_names).items() if count > 1]
    if repeated:
        raise UserError(
            f"environment {name} has two observations named {repeated[0]}, as the keys of a part "
            "are joined by dots; rename a key of its observation space"
        )


def _place_of(keys: Keys) -> str:
    """Returns where an array lies in an observation, in words; empty if it is the observation."""
    return f" in {'.'.join(map(str, keys))}" if keys else ""


class _OutsideError(ValueError):
    """A choice is none of its space; the message says which, of which space."""


def _native(space: spaces.Box) -> spaces.Box:
    """The same space in this machine's byte order, the only one that torch reads."""
    return spaces.Box(space.low, space.high, dtype=space.dtype.newbyteorder("=").type)


def _row_dtype(parts: tuple[ObservationPart, ...]) -> np.dtype[Any]:
    """A struct whose fields lie at the parts' positions."""
    return np.dtype(
        {
            "names": [part.name for part in parts],
            "formats": [(part.dtype, part.shape) for part in parts],
            "offsets": [part.offset for part in parts],
            "itemsize": row_nbytes(parts),
        }
    )


def leaves_of(
    space: spaces.Space[Any], keys: Keys = ()
) -> Iterator[tuple[Keys, spaces.Space[Any]]]:
    """Yield the keys and the space of each array within a space.

    A Dict or a Tuple holds several, however deep; any other space is one itself. ``keys`` lead to
    ``space`` where that is a part of another one.
    """
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield keys, space
        return

    inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for key, part in inner:
        yield from leaves_of(part, (*keys, key))


def value_at(keys: Keys, value: Any) -> Any:
    """Returns the part of a value to which the keys lead.

    Raises:
        KeyError, IndexError or TypeError: if there is no such part.
    """
    for key in keys:
        value = value[key]
    return value


def _packed(name: str, keys: Keys, space: spaces.Space[Any], embed_above: int) -> PackedLeaf:
    """Plan the packing of one array of an observation.

    Args:
        name: of the environment, for messages.
        keys: of the array within an observation.
        space: of the array.
        embed_above: the most choices that are one-hot.

    Raises:
        UserError: if no network reads such a space.
    """
    match space:
        case spaces.Discrete(n=n):
            _check_choices(name, keys, int(n))
            if n > embed_above:
                return _numbered_choices(space, keys, np.array([space.n]))
            return PackedLeaf(keys, shape=(int(n),), dtype="<f4", write=_one_hot(space))
        case spaces.MultiDiscrete():
            _check_choices(name, keys, int(space.nvec.sum(dtype=np.int64)))
            if space.nvec.max(initial=0) > embed_above:
                return _numbered_choices(space, keys, space.nvec.ravel())
            return _several_choices(space, keys)
        case spaces.MultiBinary() | spaces.Box():
            return _numbers(space, keys)

    raise UserError(
        f"environment {name} has observations{_place_of(keys)} of {type(space).__name__}, which no "
        "network here reads; set env.wrappers to a wrapper of yours that makes them a Box, "
        "Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of these"
    )


def _check_choices(name: str, keys: Keys, count: int) -> None:
    """Raise UserError if there are too many choices to be inputs of a network."""
    if count > MOST_CHOICES:
        raise UserError(
            f"environment {name} has observations{_place_of(keys)} of {count:,} choices, each of "
            f"which is an input of the network, and at most {MOST_CHOICES:,} are allowed; show "
            "them as numbers, in a Box"
        )


def _numbers(space: spaces.Box | spaces.MultiBinary, keys: Keys) -> PackedLeaf:
    """Plan the packing of numbers, flags or an action mask.

    Flags and bytes keep one byte each if they are a part of an observation; all else is float32.
    """
    assert space.dtype is not None
    if keys == (MASK,):
        return PackedLeaf(keys, space.shape, dtype="|u1", write=_write_mask)
    if not isinstance(space, spaces.Box):
        return PackedLeaf(keys, space.shape, dtype="<f4", write=_copy)
    if keys and space.dtype == np.bool_:
        return PackedLeaf(keys, space.shape, dtype="|u1", write=_write_flags)

    dtype = "|u1" if keys and space.dtype == np.uint8 else "<f4"
    return PackedLeaf(keys, space.shape, dtype=dtype, write=_copy, bounds=bounds_of(space))


def _numbered_choices(
    space: spaces.Discrete | spaces.MultiDiscrete, keys: Keys, counts: Array
) -> PackedLeaf:
    """Plan the packing of choices as numbers from 0, of which there are ``counts``."""

    def write(values: Array, target: Array) -> None:
        _expect(values, (len(target), *(space.shape or ())))
        numbers = values - space.start
        is_one = (numbers >= 0) & (numbers % 1 == 0)
        is_one &= numbers < counts.reshape(space.shape or ())
        if not is_one.all():
            raise _OutsideError(f"{values[~is_one][0]}, which is not in {space}")
        np.copyto(target, numbers.reshape(target.shape), casting="same_kind")

    choices = tuple(int(count) for count in counts)
    return PackedLeaf(keys, shape=(len(choices),), dtype="<f4", write=write, choices=choices)


def _several_choices(space: spaces.MultiDiscrete, keys: Keys) -> PackedLeaf:
    """Plan the packing of several choices, one-hot each and one after another."""
    counts = space.nvec.ravel()
    component = np.repeat(np.arange(len(counts)), counts)  # of each output
    choices = np.concatenate([np.arange(n) for n in counts]) + space.start.ravel()[component]

    def write(values: Array, target: Array) -> None:
        _expect(values, (len(target), *space.shape))
        np.equal(values.reshape(len(values), -1)[:, component], choices, out=target)

        if np.count_nonzero(target) != values.size:
            is_below = values < space.start
            is_above = values >= space.start + space.nvec
            is_fraction = values % 1 != 0
            outside = is_below | is_above | is_fraction
            raise _OutsideError(f"{values[outside][0]}, which is not in {space}")

    return PackedLeaf(keys, shape=(len(component),), dtype="<f4", write=write)


def _one_hot(space: spaces.Discrete) -> Write:
    """Returns the function that writes choices one-hot."""
    choices = np.arange(space.n) + space.start

    def write(values: Array, target: Array) -> None:
        _expect(values, target.shape[:1])
        np.equal(values[:, None], choices, out=target)

        # A network learns nothing of a row of zeros.
        if np.count_nonzero(target) != len(values):
            outside = values[~target.any(axis=1)][0]
            raise _OutsideError(f"{outside}, which is not in {space}")

    return write


def _expect(values: Array, shape: tuple[int, ...]) -> None:
    """Raise ValueError for another shape; numpy would repeat a smaller array."""
    if values.shape != shape:
        raise ValueError(f"shape {values.shape} is not {shape}")


def _copy(values: Array, target: Array) -> None:
    _expect(values, target.shape)
    np.copyto(target, values)


def _write_flags(values: Array, target: Array) -> None:
    _copy(values, target)
    np.multiply(target, np.uint8(255), out=target)


def _write_mask(values: Array, target: Array) -> None:
    _expect(values, target.shape)
    np.not_equal(values, 0, out=target.view(np.bool_))


def find_bad_observation(
    observations: Array,
    parts: Sequence[ObservationPart] = (),
    alive: Array | None = None,
    counts: Sequence[int] = (),
) -> str | None:
    """Find the first NaN or infinity, or the first action mask that allows nothing.

    Args:
        observations: [rows, count, *shape] of any dtype, or of bytes if there are `parts`.
        parts: of a packed observation; empty if it is one array.
        alive: bool [rows or fewer, count], where an action is chosen, so that a mask must allow
            one; everywhere if it is None.
        counts: the number of choices of each component of an action, in each of which a mask must
            allow something; one component if it is empty.

    Returns:
        Words for an error's sentence, or None if all observations are sound.
    """
    if not parts:
        return _find_not_finite(observations, "observation")

    for name, array in views(parts, observations).items():
        if name == MASK:
            needs_action = np.ones(array.shape[:2], np.bool_) if alive is None else alive
            bad = _find_closed(array, needs_action, counts)
        else:
            bad = _find_not_finite(array, f"observation {name}")
        if bad:
            return bad
    return None


def find_bad_reward(reward: Array) -> str | None:
    """Find a reward that would destroy the network: NaN, or beyond ±`MOST_REWARD`.

    Actors check the rewards of their environments, and connectors those of received slots.

    Args:
        reward: floats of any shape, before they are clipped and scaled.

    Returns:
        The reward and the rule, in words for an error's sentence; None if all rewards are sound.
    """
    sound = np.abs(reward) <= MOST_REWARD
    # Counting takes a third of the time that asking whether all are needs.
    if np.count_nonzero(sound) == reward.size:
        return None

    wrong = reward[~sound][0]
    return (
        f"a reward of {wrong:.9g}, and rewards must lie between {-MOST_REWARD:g} and "
        f"{MOST_REWARD:g}"
    )


def _find_not_finite(array: Array, what: str) -> str | None:
    """Find the first NaN or infinity in an array ``[rows, count, *shape]``, called ``what``."""
    if array.dtype.kind != "f":
        return None
    finite = np.isfinite(array)
    if finite.all():
        return None

    row, env, *index = np.unravel_index(int(np.argmin(finite)), finite.shape)
    place = ", ".join(str(i) for i in index)
    value = array[(row, env, *index)]
    return f"{value} at [{place}] of environment {env}'s {what} in row {row}"


def _find_closed(mask: Array, alive: Array, counts: Sequence[int]) -> str | None:
    """Find the first action mask that allows nothing where an action is chosen.

    Args:
        mask: [rows, count, choices].
        alive: [rows or fewer, count], where an action is chosen.
        counts: the number of choices of each component of an action.
    """
    is_open = open_choices(mask[: len(alive)], counts)
    closed = alive & ~is_open.all(-1)
    if not closed.any():
        return None

    row, env = np.unravel_index(int(np.argmax(closed)), closed.shape)
    component = int(np.argmin(is_open[row, env]))
    part = f" for choice {component} of {len(counts)}, counted from 0," if len(counts) > 1 else ""
    return f"no action allowed{part} by environment {env}'s {MASK} in row {row}"
