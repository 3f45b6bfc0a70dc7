"""Where episodes begin and end in the rows of a stream, and how old each row is in its episode.

`survey` finds this out when a slot is read and its writer did not record it. NEXT_STEP: the row
after one that ended an episode resets the environment and is no decision; the row after that starts
an episode. Where the writer marked its decisions in ``alive``, those marks hold instead.

A writer that stores ``obs`` and ``next_obs`` beside each other uses `EpisodeTracker`. An episode
that was given up, by a reset without a flag or by a second use of the stream, shows in an
observation that differs from the ``next_obs`` of the step before. n-step returns and sequences stop
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Records = npt.NDArray[Any]  # structured [T, E]
Flags = npt.NDArray[np.bool_]

OLDEST = 255  # `age` saturates here; also the age where the start is not known
REPEAT, ZEROS, SIDE = 0, 1, 2  # values of `pad`; SIDE + index of the oldest side row


class Before(NamedTuple):
    """The state at the end of the previous slot of a stream."""

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
    """Fill in `age` and `side` where the records have them; which rows ``[T, E]`` are decisions."""
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
    """Which of the first ``rows`` count, where the writer filled in `alive`, `age` and `side`."""
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


class EpisodeTracker:
    """The last step of a stream of ``envs`` environments."""

    def __init__(self, envs: int) -> None:
        self._next: list[Array] = []
        self._over: Flags = np.ones(envs, bool)
        self._age: npt.NDArray[np.int64] = np.zeros(envs, np.int64)

    def ages(self, obs: Sequence[Array], next_obs: Sequence[Array], over: Flags) -> Array:
        """Steps since each environment's episode began, uint8 ``[E]``; this step is the latest.

        Args:
            obs: the observation, one array ``[E, ...]`` per leaf.
            next_obs: the next observation, alike.
            over: ``[E]``, environments whose episode this step ends.
        """
        starts = self._over.copy()
        for now, expected in zip(obs, self._next, strict=False):  # empty at the first step
            starts |= _differ(now, expected)
        self._age = np.where(starts, 0, np.minimum(self._age + 1, OLDEST))
        self._next = [np.array(value) for value in next_obs]
        self._over = np.array(over, bool)
        return self._age.astype(np.uint8)


def _differ(a: Array, b: Array) -> Flags:
    """For each environment, whether any byte of it differs: NaN equals itself."""
    if a.dtype != b.dtype:
        b = b.astype(a.dtype)
    differ: Flags = (_bytes(a) != _bytes(b)).any(axis=1)
    return differ


def _bytes(values: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
