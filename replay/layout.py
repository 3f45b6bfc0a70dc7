"""Which columns a replay stores for the spaces of an environment, and how each is stored.

A small observation is stored *inline*: it lies beside its successor in the same row, and one gather
reads both. A big one is stored as a *frame*: one per row, and a row's next observation is the frame
of the row after it. Of a frame stack only the newest frame is stored. *Side rows* hold the frames
that this cannot express: the final observation of an episode whose next row already shows a reset,
or the older frames of a stack at an episode's start that are neither zeros nor repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.specs import Column, SlotSpec
from penstock.replay.columns import Leaf, Nest, leaves_of, nest_of
from penstock.replay.errors import ReplayError

# An observation of at most so many bytes is stored inline.
INLINE_NBYTES = 256
# The range of steps of a slot from which `choose_unroll` chooses.
LEAST_STEPS = 4
MOST_STEPS = 256
# Memory of at most so many times the least is as good, so that longer slots are preferred.
NEARLY_LEAST = 1.005

# The column `age` is the row's step within its episode. It stays at this value from there on, and
# has it where the episode's start is not known.
OLDEST = 255
# Values of the column `pad`: what stands for the frames before an episode's first one. Either that
# frame is repeated, or they are zeros, or they are side rows: then `pad` is SIDE plus the index of
# the oldest of them.
REPEAT = 0
ZEROS = 1
SIDE = 2

# The column of an observation's side rows has the name of the observation with this suffix.
SIDE_SUFFIX = "@side"
# The values of `Column.rows` of columns that are stored as frames.
FRAMED = ("frames", "unroll+1")
# Columns besides observations that a batch does not have as further columns.
BOOKKEEPING = ("reward", "terminated", "truncated", "alive", "age", "pad", "side", "priority")


@dataclass(frozen=True)
class Observation:
    """One leaf of the observation, and how it is stored.

    Args:
        leaf: as the user sees it.
        framed: whether it is stored as frames, and not inline.
        stack: the number of frames in its first axis, for a frame stack; 0 for a leaf that is
            inline or one frame a row.
    """

    leaf: Leaf
    framed: bool
    stack: int

    @property
    def name(self) -> str:
        """The name of the leaf and of its column."""
        return self.leaf.name

    @property
    def next_name(self) -> str:
        """The name of the column with an inline leaf's next observation."""
        return "next_" + self.leaf.name

    @property
    def side_name(self) -> str:
        """The name of the column with the side rows of a leaf that is stored as frames."""
        return self.leaf.name + SIDE_SUFFIX

    @property
    def depth(self) -> int:
        """The number of frames in one observation."""
        return self.stack or 1


class Layout:
    """The role of each column of a slot spec, whether `make_layout` or an algorithm made the spec.

    Args:
        spec: of the slots.
        frame_stack: frames per observation, for each column that stores only the newest frame.

    Raises:
        ReplayError: a column is missing that a replay needs.
    """

    def __init__(self, spec: SlotSpec, frame_stack: Mapping[str, int]) -> None:
        self.spec = spec
        self.frame_stack = dict(frame_stack)

        columns = {column.name: column for column in spec.columns}
        for name in ("obs", "action", "reward", "terminated", "truncated"):
            if not any(_is_below(column, name) for column in columns):
                raise ReplayError(f"columns {list(columns)} have no {name}; a replay needs it")

        # The leaves of the observation, and their structure.
        obs_names = [
            name for name in columns if _is_below(name, "obs") and not name.endswith(SIDE_SUFFIX)
        ]
        self.obs: Nest = nest_of("obs", obs_names)
        self.observations = [self._observation(columns[name]) for name in obs_names]
        self.framed = [leaf for leaf in self.observations if leaf.framed]
        self.inline = [leaf for leaf in self.observations if not leaf.framed]
        missing = {"age", "pad"} - columns.keys()
        if self.history and missing:
            raise ReplayError(
                f"frames are to be stacked, but the slots have no {' and '.join(sorted(missing))}; "
                "add Column('age', '|u1') and Column('pad', '<i2')"
            )

        # The leaves of the action and of further columns, and the structure of each by its name.
        next_names = [leaf.next_name for leaf in self.inline]
        handled = {*obs_names, *next_names, *BOOKKEEPING}
        self.other_leaves = [
            Leaf(column.name, np.dtype(column.dtype), column.shape)
            for column in spec.columns
            if column.rows == "unroll" and column.name not in handled
        ]
        other_names = [leaf.name for leaf in self.other_leaves]
        roots = dict.fromkeys(name.split(".", 1)[0] for name in other_names)
        self.other_nests: dict[str, Nest] = {}
        for root in roots:
            names_of_root = [name for name in other_names if _is_below(name, root)]
            self.other_nests[root] = nest_of(root, names_of_root)

    @property
    def has_ages(self) -> bool:
        """Whether rows store their step within the episode."""
        return any(column.name == "age" for column in self.spec.columns)

    @property
    def history(self) -> int:
        """The number of earlier rows that a row's observation may need."""
        return max((leaf.depth - 1 for leaf in self.framed), default=0)

    def _observation(self, column: Column) -> Observation:
        """Returns the leaf of the observation that ``column`` stores."""
        stack = self.frame_stack.get(column.name, 0)
        shape = (stack, *column.shape) if stack else column.shape
        leaf = Leaf(column.name, np.dtype(column.dtype), shape)
        return Observation(leaf, column.rows in FRAMED, stack)


def layout_of_spec(spec: SlotSpec, frame_stack: int | Mapping[str, int]) -> Layout:
    """Returns the layout of slots that other processes fill.

    Args:
        spec: of the slots.
        frame_stack: frames per stacked observation, by column name, or for all observations that
            are stored as frames.
    """
    if isinstance(frame_stack, Mapping):
        return Layout(spec, frame_stack)

    framed = [
        column.name
        for column in spec.columns
        if column.rows in FRAMED and _is_below(column.name, "obs")
    ]
    return Layout(spec, dict.fromkeys(framed, frame_stack) if frame_stack > 1 else {})


def make_layout(
    columns: Mapping[str, Any],
    capacity: int,
    envs: int,
    frame_stack: int | Mapping[str, int],
    unroll: int | None,
    *,
    shared: bool = False,
    follow: bool = False,
) -> Layout:
    """Returns the layout of declared columns.

    Args:
        columns: as for `leaves_of`.
        capacity: rows of the replay.
        envs: environments per step.
        frame_stack: frames per stacked observation, for all or by name.
        unroll: steps per slot; None: `choose_unroll` decides.
        shared: add columns for writers in other processes.
        follow: add columns that tell which rows follow each other.
    """
    leaves = leaves_of(columns)
    observed = [leaf for leaf in leaves if _is_below(leaf.name, "obs")]
    stacks = _stacks(observed, frame_stack)
    depth = max(stacks.values(), default=1)
    steps = unroll
    if not steps:
        inline = not stacks and all(leaf.nbytes <= INLINE_NBYTES for leaf in observed)
        steps = choose_unroll(capacity, envs, depth, inline=inline)

    # The columns that were declared, and those that every row has.
    stored: list[Column] = []
    for leaf in leaves:
        if leaf in observed:
            stored += _observation_columns(leaf, stacked=leaf.name in stacks)
        else:
            stored.append(Column(leaf.name, leaf.dtype.str, leaf.shape))
    stored += [Column("reward", "<f4"), Column("terminated", "|b1"), Column("truncated", "|b1")]
    if shared:
        stored += [Column("priority", "<f4"), Column("alive", "|u1")]

    # The columns that tell which rows follow each other, and which frames a row's stack has.
    side = 0
    if any(column.rows == "side" for column in stored):
        side = _side_rows(steps * envs, depth)
        stored += [Column("side", "<i2"), Column("age", "|u1")]
        if stacks:
            stored.append(Column("pad", "<i2"))
    elif follow:
        stored.append(Column("age", "|u1"))
    return Layout(SlotSpec(steps, envs, tuple(stored), side), stacks)


def choose_unroll(capacity: int, envs: int, depth: int, *, inline: bool) -> int:
    """Choose the number of steps of a slot.

    A slot of small rows has about 3 % of the capacity. With frames, it has the length that takes
    the least memory: shorter slots repeat more frames that the next slot stores too, longer ones
    leave more of the open slot empty. Of the lengths that take at most `NEARLY_LEAST` times the
    least, it is the longest.

    Args:
        capacity: rows of the replay.
        envs: environments per step.
        depth: frames of the deepest stack; 1: no stacks.
        inline: whether all observations are stored inline.
    """
    if inline:
        steps_of_all = capacity // envs
        root = min(math.isqrt(max(1, steps_of_all)), MOST_STEPS)
        three_percent = min(steps_of_all // 32, 2 * MOST_STEPS)
        return max(LEAST_STEPS, root, three_percent)

    # The frames that all slots hold, by the steps of a slot. One slot more is being written.
    kept_steps = -(-capacity // envs) + depth - 1
    frames: dict[int, int] = {}
    for steps in range(LEAST_STEPS, MOST_STEPS + 1):
        slots = max(2, -(-kept_steps // steps)) + 1
        frames[steps] = slots * ((steps + 1) * envs + _side_rows(steps * envs, depth))

    limit = NEARLY_LEAST * min(frames.values())
    return max(steps for steps, count in frames.items() if count <= limit)


def _side_rows(rows: int, depth: int) -> int:
    """Returns how many side rows a slot of ``rows`` rows has.

    They are enough for the ends of episodes of a hundred steps, and for two separate histories of
    ``depth`` frames.
    """
    return max(8, 2 * depth, rows // 100)


def _observation_columns(leaf: Leaf, *, stacked: bool) -> list[Column]:
    """Returns the columns that store a leaf of the observation, inline or as frames."""
    dtype = leaf.dtype.str
    if leaf.nbytes <= INLINE_NBYTES and not stacked:
        return [
            Column(leaf.name, dtype, leaf.shape),
            Column("next_" + leaf.name, dtype, leaf.shape),
        ]

    shape = leaf.shape[1:] if stacked else leaf.shape
    return [
        Column(leaf.name, dtype, shape, "frames"),
        Column(leaf.name + SIDE_SUFFIX, dtype, shape, "side"),
    ]


def _stacks(observed: list[Leaf], frame_stack: int | Mapping[str, int]) -> dict[str, int]:
    """Returns the number of frames of each observation that is a frame stack, by name.

    Args:
        observed: the leaves of the observation.
        frame_stack: frames by name, or for all observations with so many frames; 1: no stacks.

    Raises:
        ReplayError: an observation has another number of frames, or none has that number.
    """
    shapes = ", ".join(f"{leaf.name} {leaf}" for leaf in observed)
    if isinstance(frame_stack, Mapping):
        leaves = {leaf.name: leaf for leaf in observed}
        for name, frames in frame_stack.items():
            if name not in leaves or leaves[name].shape[:1] != (frames,):
                raise ReplayError(f"frame_stack says {name}: {frames}; there are {shapes}")
        return {name: frames for name, frames in frame_stack.items() if frames > 1}

    if frame_stack <= 1:
        return {}
    stacks = {
        leaf.name: frame_stack
        for leaf in observed
        if len(leaf.shape) >= 2 and leaf.shape[0] == frame_stack
    }
    if not stacks:
        raise ReplayError(
            f"frame_stack={frame_stack} but no observation has that many frames on its first axis "
            f"({shapes}); move the axis of the stack to the front, or leave frame_stack out"
        )
    return stacks


def _is_below(name: str, root: str) -> bool:
    """Returns whether a column belongs to the nested value called ``root``."""
    return name == root or name.startswith(root + ".")
