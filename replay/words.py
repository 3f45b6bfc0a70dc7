"""Frames of one observation as machine words: copied, and compared bit by bit.

Comparing all that a large vector of environments gives takes longer than storing it: 300 us to
140 us for 256 Atari frames. Up to `COMPLETE_NBYTES` a step everything is compared; beyond, the
frame that history continues with is compared in parts that take turns, and older ones at a few
words, also in turn: what goes on being wrong is found within `PARTS` steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array
from penstock.replay.layout import Observation

Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

COMPLETE_NBYTES = 1 << 20
PARTS = 16
SAMPLES = 8  # words of a frame that was already compared once
MANY = 64  # environments from which on not each one's frames are sampled at each step
STRIDE = 37  # by which the sampled words move from step to step


class Words:
    """One leaf that is stored as frames. ``at`` is the row of `Table.frames` of environment 0."""

    def __init__(
        self, observation: Observation, frames: Array, sides: Array, envs: int, stride: int
    ) -> None:
        """``stride``: rows of ``frames`` from one environment to the next."""
        self._depth = observation.depth
        self._envs, self._stride = envs, stride
        self._stacked = bool(observation.stack)
        self._frames, self._sides = frames, sides
        frame_nbytes = observation.leaf.nbytes // self._depth
        width = next(w for w in (8, 4, 2, 1) if frame_nbytes % w == 0)
        self._word = np.dtype(f"u{width}")
        self._count = frame_nbytes // width
        self._stored = frames.reshape(len(frames), -1).view(self._word)
        self._complete = envs * frame_nbytes <= COMPLETE_NBYTES
        self._all_complete = envs * frame_nbytes * max(1, self._depth - 2) <= COMPLETE_NBYTES
        self._last: Array | None = None  # the newest next_obs, kept so that its memory stays its

    # ------------------------------------------------------------------------- comparing

    def discontinuous(self, obs: Array, at: int, t: int) -> Flags | None:
        """Environments [E] whose ``obs`` is not the last next_obs, whose frame lies at ``at``;
        None: it is everywhere."""
        given, last = self._of(obs), self._last
        if last is not None and _same_memory(obs, last):
            # The same array, unless it was written over since.
            return self._sampled(given[:, -1], self._stored[self._rows(at)], t)
        part = self._part(t)
        stored = self._stored[self._rows(at), part]
        broken = _differing(given[:, -1, part], stored)
        if last is None or self._depth == 1:
            return broken
        before = self._of(last)
        if _differing(before[:, -1, part], stored) is not None:
            return broken  # the array that was given then holds something else now
        return either(broken, self._older(given[:, :-1], before[:, :-1], t))

    def no_shift(self, obs: Array, after: Array, t: int) -> Flags | None:
        """Environments [E] whose ``after`` does not begin with the newest frames of ``obs``."""
        before, then = self._of(obs), self._of(after)
        part = self._part(t)
        wrong = _differing(then[:, -2, part], before[:, -1, part])
        if self._depth > 2:
            wrong = either(wrong, self._older(then[:, :-2], before[:, 1:-1], t))
        return wrong

    def no_shift_of(self, obs: Array, after: Array) -> Flags:
        """The same, completely, for the environments that are given."""
        wrong: Flags = (self._of(after)[:, :-1] != self._of(obs)[:, 1:]).any(axis=(1, 2))
        return wrong

    def differ_at(self, at: int, envs: Ints, obs: Array) -> Flags:
        """Which of ``envs`` have another newest frame than is stored for them."""
        differ: Flags = (self._stored[at + envs * self._stride] != self._of(obs[envs])[:, -1]).any(
            axis=1
        )
        return differ

    def _part(self, t: int) -> slice:
        if self._complete:
            return slice(None)
        length = -(-self._count // PARTS)
        first = t % PARTS * length
        return slice(first, first + length)

    def _older(self, left: Array, right: Array, t: int) -> Flags | None:
        return _differing(left, right) if self._all_complete else self._sampled(left, right, t)

    def _sampled(self, left: Array, right: Array, t: int) -> Flags | None:
        """As `_differing`, after a look at a few words; they move from step to step."""
        envs = PARTS if self._envs > MANY else 1
        step = max(1, self._count // SAMPLES)
        few = slice(t % envs, None, envs), ..., slice(t * STRIDE % step, None, step)
        return None if _differing(left[few], right[few]) is None else _differing(left, right)

    # ------------------------------------------------------------------------- copying

    def put_all(self, at: int, obs: Array) -> None:
        """Store the newest frame of ``obs`` [E, ...]."""
        self._frames[self._rows(at)] = self._newest(obs)

    def put_next(self, at: int, after: Array) -> None:
        """Store what a row led to, and remember it as what the next one should continue."""
        self.put_all(at, after)
        self._last = after

    def put(self, at: int, envs: Ints, given: Array) -> None:
        """Store the newest frames of ``given`` [n, ...] for ``envs`` [n]."""
        self._frames[at + envs * self._stride] = self._newest(given)

    def save(self, at: int, envs: Ints, side_rows: Ints) -> None:
        """Copy what is stored for ``envs`` to side rows."""
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


def _same_memory(left: Array, right: Array) -> bool:
    if left is right:
        return True
    first, second = left.__array_interface__["data"], right.__array_interface__["data"]
    return bool(first == second) and left.strides == right.strides


def _differing(left: Array, right: Array) -> Flags | None:
    """Which of [n, ...] differ anywhere; None: none do."""
    unequal = left != right
    if not np.count_nonzero(unequal):
        return None
    differing: Flags = unequal.reshape(len(unequal), -1).any(axis=1)
    return differing


def either(left: Flags | None, right: Flags | None) -> Flags | None:
    """Their union; None: nobody."""
    if left is None or right is None:
        return right if left is None else left
    return left | right
