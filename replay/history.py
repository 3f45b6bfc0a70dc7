"""What a slot's rows say about episodes, where its writer left that to the reader.

NEXT_STEP: the row after one that ended an episode resets it and is no decision; the row after that
is a start. Where the writer marked its decisions ``alive``, that holds instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[Any]  # structured [T, E]
Flags = npt.NDArray[np.bool_]

OLDEST = 255  # what `age` saturates at; also where the start is not known
REPEAT, ZEROS, SIDE = 0, 1, 2  # what `pad` says; SIDE + index of the oldest side row


class Before(NamedTuple):
    """The end of the slot before in a stream."""

    done: Flags  # [E] of its last row
    reset: Flags
    age: npt.NDArray[np.int64]


def start_of_stream(envs: int) -> Before:
    """Before the first row: the next one starts an episode."""
    return Before(np.zeros(envs, bool), np.ones(envs, bool), np.zeros(envs, np.int64))


def lost_sight(envs: int) -> Before:
    """After a gap: how long the episodes have lasted is not known."""
    return Before(np.zeros(envs, bool), np.zeros(envs, bool), np.full(envs, OLDEST))


def survey(records: Records, before: Before) -> tuple[Flags, Before]:
    """Fill in `age` and `side` where the records have them; which rows [T, E] are decisions."""
    names = records.dtype.names or ()
    done: Flags = records["terminated"] | records["truncated"]
    if "alive" in names:
        reset = records["alive"] == 0
    else:
        reset = np.concatenate([(before.done & ~before.reset)[None], done[:-1]])
    starts = np.concatenate([before.reset[None], reset[:-1]])
    age = _ages(starts, before.age)
    if "age" in names:
        records["age"] = age
    if "side" in names:
        records["side"] = -1
    return ~reset, Before(done[-1], reset[-1], age[-1])


def told(records: Records, rows: int) -> tuple[Flags, Before]:
    """Which of the first ``rows`` count, by one who filled in `alive`, `age` and `side` himself."""
    decisions: Flags = records["alive"] != 0
    decisions[rows:] = False
    after = lost_sight(records.shape[1])
    if "age" in (records.dtype.names or ()):
        after = after._replace(age=records["age"][rows - 1].astype(np.int64))
    return decisions, after


def _ages(starts: Flags, age_before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Steps since the last start at or before each row [T, E]."""
    t = np.arange(len(starts))[:, None]
    started = np.maximum.accumulate(np.where(starts, t, -1), axis=0)
    ages: npt.NDArray[np.int64] = np.where(started >= 0, t - started, age_before + 1 + t)
    return np.minimum(ages, OLDEST)
