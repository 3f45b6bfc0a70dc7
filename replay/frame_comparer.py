"""Frames of one observation as machine words: copied, and compared bit by bit.

Comparing every frame of a large vector of environments takes longer than storing them: 300 us to
200 us for 256 Atari frames. Up to `COMPLETE_NBYTES` of a step everything is compared: first the
frame that history continues with, then the older ones, which were compared when they were the
newest. Beyond that size, at every `EVERY`th step, the newest frame is compared for one environment
in `PARTS`, and older ones at a few words, in turn. So a frame that stays wrong is found within
`EVERY` * `PARTS` steps. Where a difference is found, everything is compared; so are steps that
begin or end an episode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array
from penstock.replay.layout import Observation
from penstock.replay.placement import FrameRows

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

COMPLETE_NBYTES = 1 << 20
EVERY, PARTS = 8, 8
LOOK = 8  # words that are compared together: a cache line
STRIDE = 37  # words by which the position moves from step to step; prime


class FrameComparer:
    """One leaf that is stored as frames. ``at`` is the row of `Table.frames` of environment 0."""

    def __init__(
        self, observation: Observation, frames: Array, sides: Array, envs: int, lie: FrameRows
    ) -> None:
        self._depth = observation.depth
        self._envs, self._stride, self._step = envs, lie.envs, lie.steps
        self._stacked = bool(observation.stack)
        self._frames, self._sides = frames, sides
        frame_nbytes = observation.leaf.nbytes // self._depth
        width = next(w for w in (8, 4, 2, 1) if frame_nbytes % w == 0)
        self._word = np.dtype(f"u{width}")
        self._count = frame_nbytes // width
        self._stored = frames.reshape(len(frames), -1).view(self._word)
        self._complete = envs * frame_nbytes <= COMPLETE_NBYTES
        self._all_complete = envs * frame_nbytes * max(1, self._depth - 2) <= COMPLETE_NBYTES
        # the newest next_obs, kept so that its memory is not reused
        self._last: Array | None = None
        self._parts, self._turn = min(PARTS, envs), 0

    # ------------------------------------------------------------------------- comparing

    def continues(self, obs: Array, after: Array, at: int) -> bool:
        """Whether ``obs`` is the last next_obs, and ``after`` its shift, as far as is compared.

        The frames of ``obs`` are stored at ``at``. False: a complete comparison is needed.
        """
        last = self._last
        if last is None or not _same_memory(obs, last) or not _alike(after, last):
            return False
        if self._turn % EVERY and not self._complete:
            return True
        given, stored = self._of(obs), self._stored[self._rows(at)]
        if self._depth == 1:
            return self._glance(given[:, -1], stored) is None
        then = self._of(after)
        if self._look(then[:, -2], stored) is not None:
            return False
        if self._depth == 2:
            return self._glance(given[:, -1], stored) is None
        return self._glance(then[:, :-2], given[:, 1:-1]) is None

    def discontinuous(self, obs: Array, at: int) -> Flags | None:
        """Environments [E] whose ``obs`` is not the last next_obs, stored at ``at``; None: no
        environment.
        """
        given, stored, last = self._of(obs), self._stored[self._rows(at)], self._last
        if last is not None and _same_memory(obs, last):
            # The same array, unless it was overwritten since.
            return self._look(given[:, -1], stored)
        broken = self._look(given[:, -1], stored)
        if last is None or self._depth == 1:
            return broken
        before = self._of(last)
        if self._look(before[:, -1], stored) is not None:
            return broken  # the array that was given then has other content now
        return either(broken, self._glance(given[:, :-1], before[:, :-1]))

    def no_shift(self, obs: Array, after: Array) -> Flags | None:
        """Environments [E] whose ``after`` does not begin with the newest frames of ``obs``."""
        before, then = self._of(obs), self._of(after)
        wrong = self._look(then[:, -2], before[:, -1])
        if self._depth > 2:
            wrong = either(wrong, self._glance(then[:, :-2], before[:, 1:-1]))
        return wrong

    def no_shift_of(self, obs: Array, after: Array) -> Flags:
        """The same, complete, for the given environments."""
        wrong: Flags = (self._of(after)[:, :-1] != self._of(obs)[:, 1:]).any(axis=(1, 2))
        return wrong

    def differ_at(self, at: int, envs: Ints, obs: Array) -> Flags:
        """Which of ``envs`` have a newest frame that differs from the stored one."""
        differ: Flags = (self._stored[at + envs * self._stride] != self._of(obs[envs])[:, -1]).any(
            axis=1
        )
        return differ

    def _look(self, left: Array, right: Array) -> Flags | None:
        """Which of the frames [E, words] differ, as far as is compared; None: none do."""
        if not self._complete:
            few = self._few()
            if _equal(left[few], right[few]):
                return None
        return _differing(left, right)

    def _glance(self, left: Array, right: Array) -> Flags | None:
        """A shorter comparison, of [E, ..., words] that were compared before."""
        if not self._all_complete:
            first = self._turn * STRIDE % max(1, self._count - LOOK + 1)
            place = self._few(), ..., slice(first, first + LOOK)
            if _equal(left[place], right[place]):
                return None
        return _differing(left, right)

    def _few(self) -> slice:
        """The environments to compare in this step."""
        return slice(self._turn // EVERY % self._parts, None, self._parts)

    # ------------------------------------------------------------------------- copying

    def put_all(self, at: int, obs: Array) -> None:
        """Store the newest frame of ``obs`` [E, ...]."""
        self._frames[self._rows(at)] = self._newest(obs)

    def put_next(self, at: int, after: Array) -> None:
        """Store the frame that a row led to, and remember it for the next row."""
        self.put_all(at, after)
        self._last = after
        self._turn += 1

    def put_first(self, at: int, after: Array) -> None:
        """The same for a slot's first row, which also needs the frame before it."""
        assert self._last is not None
        if self._stacked and self._step == 1:  # two frames that lie together on either side
            streams = self._frames.reshape(-1, self._stride, *self._frames.shape[1:])
            first = at // self._stride
            streams[first : first + self._envs, :2] = after[:, -2:]
            self._last = after
            self._turn += 1
        else:
            self.put_all(at, self._last)
            self.put_next(at + self._step, after)

    def put(self, at: int, envs: Ints, given: Array) -> None:
        """Store the newest frames of ``given`` [n, ...] for ``envs`` [n]."""
        self._frames[at + envs * self._stride] = self._newest(given)

    def save(self, at: int, envs: Ints, side_rows: Ints) -> None:
        """Copy the stored frames of ``envs`` to side rows."""
        self._sides[side_rows] = self._frames[at + envs * self._stride]

    def put_aside(self, side_rows: Ints, given: Array) -> None:
        """Store the newest frames of ``given`` [n, ...] in side rows."""
        self._sides[side_rows] = self._newest(given)

    def put_history(self, side_rows: Ints, obs: Array) -> None:
        """Store all but the newest frame of one observation in side rows."""
        self._sides[side_rows] = obs[:-1]

    def _rows(self, at: int) -> slice:
        return slice(at, at + (self._envs - 1) * self._stride + 1, self._stride)

    def _newest(self, obs: Array) -> Array:
        return obs[:, -1] if self._stacked else obs

    def _of(self, obs: Array) -> Array:
        """[n, depth, words]"""
        words: Array = obs.reshape(len(obs), self._depth, -1).view(self._word)
        return words


def _same_memory(left: Any, right: Array) -> bool:
    if left is right:
        return True
    if not _alike(left, right):
        return False
    first, second = left.__array_interface__["data"], right.__array_interface__["data"]
    return bool(first == second)


def _alike(array: Any, other: Array) -> bool:
    if type(array) is not np.ndarray or array.dtype is not other.dtype:
        return False
    return array.shape == other.shape and array.flags.c_contiguous


def _equal(left: Array, right: Array) -> bool:
    return not np.count_nonzero(left != right)


def _differing(left: Array, right: Array) -> Flags | None:
    """Which of [n, ...] differ anywhere; None: none do."""
    unequal = left != right
    if not np.count_nonzero(unequal):
        return None
    differing: Flags = unequal.reshape(len(unequal), -1).any(axis=1)
    return differing


def either(left: Flags | None, right: Flags | None) -> Flags | None:
    """The union of two sets of environments; None: empty."""
    if left is None or right is None:
        return right if left is None else left
    return left | right
