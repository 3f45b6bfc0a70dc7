"""Slots that writers elsewhere filled: whether their columns are valid, and which rows count.

A writer in another process or on another host publishes whole slots, and a table takes them in.
`SlotChecks` finds columns that no sound writer leaves. `read_marks` reads which rows are decisions
where the writer recorded that. Else `infer_marks` finds out by the rules of NEXT_STEP: the row
after one that ended an episode resets the environment and is no decision; the row after that starts
an episode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.layout import OLDEST, REPEAT, SIDE, ZEROS

Records = npt.NDArray[Any]  # structured [T, E]
Flags = npt.NDArray[np.bool_]
Ages = npt.NDArray[Any]  # integers [..., E]

FLAGS = ("terminated", "truncated")


class _ColumnRange(NamedTuple):
    """The values that a column may hold."""

    name: str
    low: int
    high: int


class SlotChecks:
    """Checks the columns of a foreign slot before any of its rows count.

    `side`, `pad` and `age` of a row refer to other rows, and flags index tables of two. A value out
    of range would crash a later draw, or return another slot's frames. Ages grow by one or restart:
    only then a drawn row, and those that follow it, refer to rows that exist.

    Args:
        spec: of the slots.
        history: rows that their frame stacks reach back.
    """

    def __init__(self, spec: SlotSpec, history: int) -> None:
        dtypes = {c.name: np.dtype(c.dtype) for c in spec.columns if c.rows == "unroll"}
        self._flags = [name for name in FLAGS if dtypes.get(name) == np.bool_]
        self._has_age = "age" in dtypes

        # A stack of frames in side rows needs ``history`` of them, one after the other. Ages of
        # unsigned dtypes cannot be out of range.
        max_pad = max(ZEROS, SIDE + spec.side - history)
        ranges = [
            _ColumnRange("pad", REPEAT, max_pad),
            _ColumnRange("side", -1, spec.side - 1),
            _ColumnRange("age", 0, 1 << 62),
        ]
        self._ranges = [
            checked
            for checked in ranges
            if checked.name in dtypes
            and (checked.name != "age" or dtypes[checked.name].kind == "i")
        ]

    def fault(self, rows: Records, *, marked: bool) -> str | None:
        """Find out what is wrong with a slot.

        Args:
            rows: its records [T, E].
            marked: whether the writer filled in `age` and `side`; else they are derived later.

        Returns:
            The fault as a sentence; None: there is none.
        """
        for name in self._flags:
            if (largest := int(rows[name].view(np.uint8).max())) > 1:
                return f"column {name} holds the byte {largest}, and a flag is 0 or 1"

        for name, low, high in self._ranges:
            if not marked and name != "pad":
                continue
            smallest = int(rows[name].min())
            largest = int(rows[name].max())
            if smallest < low or largest > high:
                return f"column {name} holds {smallest} to {largest}, and must be {low} to {high}"

        if marked and self._has_age and not ages_continue(rows["age"][:-1], rows["age"][1:]):
            return "column age holds steps that are neither 0 nor one more than the step before"
        return None


def ages_continue(previous: Ages, ages: Ages) -> bool:
    """Whether each of ``ages`` is 0, or one more than that of the same place in ``previous``.

    Ages end at `OLDEST`.
    """
    older = np.minimum(previous.astype(np.int64) + 1, OLDEST)
    return bool(((ages == 0) | (ages == older)).all())


class StreamEnd(NamedTuple):
    """How the last slot of a stream ended, by environment ``[E]``."""

    done: Flags
    """The last row ended an episode."""
    reset: Flags
    """The last row only reset the environment."""
    age: npt.NDArray[np.int64]
    """Steps of the last row since its episode began."""


def stream_start(envs: int) -> StreamEnd:
    """Before the first row of a stream: the next one starts an episode."""
    return StreamEnd(np.zeros(envs, bool), np.ones(envs, bool), np.zeros(envs, np.int64))


def unknown_end(envs: int) -> StreamEnd:
    """After a gap: how long the episodes have lasted is not known."""
    return StreamEnd(np.zeros(envs, bool), np.zeros(envs, bool), np.full(envs, OLDEST))


def infer_marks(records: Records, previous: StreamEnd) -> tuple[Flags, StreamEnd]:
    """Find out which rows of a slot are decisions, by the rules of NEXT_STEP.

    Fills in `age` and `side` where the records have them. Where the writer marked its decisions in
    `alive`, those marks hold instead of the rules.

    Args:
        records: of the slot [T, E]; changed.
        previous: how the slot before it ended.

    Returns:
        Which rows ``[T, E]`` are decisions, and how the slot ends.
    """
    # The row after one that ended an episode only resets, and the row after that begins another.
    names = records.dtype.names or ()
    done: Flags = records["terminated"] | records["truncated"]
    if "alive" in names:
        reset = records["alive"] == 0
    else:
        reset = np.concatenate([(previous.done & ~previous.reset)[None], done[:-1]])
    starts = np.concatenate([previous.reset[None], reset[:-1]])
    age = _ages(starts, previous.age)

    if "age" in names:
        records["age"] = age
    if "side" in names:
        records["side"] = -1  # no side row
    return ~reset, StreamEnd(done[-1], reset[-1], age[-1])


def read_marks(records: Records, rows: int) -> tuple[Flags, StreamEnd]:
    """Read which rows of a slot are decisions, where the writer marked them in `alive`.

    Args:
        records: of the slot [T, E], with `age` and `side` filled in.
        rows: steps that were written; later ones do not count.

    Returns:
        Which rows ``[T, E]`` are decisions, and how the slot ends.
    """
    decisions: Flags = records["alive"] != 0
    decisions[rows:] = False
    end = unknown_end(records.shape[1])
    if "age" in (records.dtype.names or ()):
        end = end._replace(age=records["age"][rows - 1].astype(np.int64))
    return decisions, end


def _ages(starts: Flags, previous: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Steps since each row's episode began, at most `OLDEST`.

    Args:
        starts: rows [T, E] that begin an episode.
        previous: the age of the row before the first, [E].
    """
    t = np.arange(len(starts))[:, None]
    last_start = np.maximum.accumulate(np.where(starts, t, -1), axis=0)
    ages: npt.NDArray[np.int64] = np.where(last_start >= 0, t - last_start, previous + 1 + t)
    return np.minimum(ages, OLDEST)
