"""Which steps of a stream follow the one before, where observations are stored beside each other.

An episode that was given up, by a reset without a flag or a second use of the stream, shows in an
observation that is not the one that came next before. n-step returns and sequences stop there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array
from penstock.replay.history import OLDEST

Flags = npt.NDArray[np.bool_]


class EpisodeTracker:
    """The last step of a stream of ``envs`` environments."""

    def __init__(self, envs: int) -> None:
        self._next: list[Array] = []
        self._over: Flags = np.ones(envs, bool)
        self._age: npt.NDArray[np.int64] = np.zeros(envs, np.int64)

    def ages(self, obs: Sequence[Array], next_obs: Sequence[Array], over: Flags) -> Array:
        """Steps of each environment since its episode began, uint8 [E], this one being the latest.

        ``obs`` and ``next_obs``: its observations, a leaf each, [E, ...]; ``over``: whose episode
        it ends.
        """
        starts = self._over.copy()
        for now, expected in zip(obs, self._next, strict=False):  # nothing came before the first
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
