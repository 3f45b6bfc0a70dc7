"""Sampling actions from logits, in numpy, without allocating.

Logits are ``[actions, envs]``: sums over actions are then sums of whole rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


class Sampler:
    """Draws one action for each environment, by the inverse of the cumulative distribution.

    ``logits`` (float32 ``[actions, envs]``) is its input: fill it, then call `sample` or `greedy`.
    The arrays that these return are reused by the next call.
    """

    def __init__(self, actions: int, envs: int, rng: np.random.Generator) -> None:
        self.logits = np.empty((actions, envs), np.float32)
        self._rng = rng
        self._sums = np.empty((actions, envs), np.float32)
        self._below = np.empty((actions - 1, envs), np.bool_)
        self._row = np.empty(envs, np.float32)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)
        self._actions = np.empty(envs, np.int32)
        self._logp = np.empty(envs, np.float32)

    def sample(self) -> tuple[Int32, Float32]:
        """Actions int32 ``[envs]`` and their log-probabilities float32 ``[envs]``."""
        logits, sums, row, chosen = self.logits, self._sums, self._row, self._chosen
        np.maximum.reduce(logits, axis=0, out=row)
        np.subtract(logits, row, out=logits)
        np.exp(logits, out=sums)
        np.add.accumulate(sums, axis=0, out=sums)
        total = sums[-1]
        # Uniform numbers are multiples of 2^-24 below 1, so that the product stays below the total
        # in float32 too, and an action of probability 0 is never taken.
        self._rng.random(out=row, dtype=np.float32)
        np.multiply(row, total, out=row)
        np.less_equal(sums[:-1], row, out=self._below)
        np.add.reduce(self._below, axis=0, dtype=np.intp, out=chosen)
        np.copyto(self._actions, chosen, casting="same_kind")
        np.multiply(chosen, self._offsets.size, out=chosen)
        np.add(chosen, self._offsets, out=chosen)
        logits.take(chosen, out=self._logp, mode="clip")
        np.log(total, out=row)
        np.subtract(self._logp, row, out=self._logp)
        return self._actions, self._logp

    def greedy(self) -> Int32:
        """The likeliest actions, int32 ``[envs]``."""
        np.copyto(self._actions, self.logits.argmax(axis=0), casting="same_kind")
        return self._actions

    def state_dict(self) -> dict[str, Any]:
        """State of the random generator, JSON-ready."""
        return dict(self._rng.bit_generator.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state
