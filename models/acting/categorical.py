"""Deciding actions by a network's outputs, in numpy, without allocating.

    Categorical, Categoricals    drawn from logits, for actor-critics
    EpsilonGreedy                by Q-values
    Gaussian, SquashedGaussian   normal numbers (penstock.models.acting.gaussian)

Outputs are ``[outputs, envs]``: sums over actions are then sums of whole rows. A decider's arrays
are its own and stay the same; every call writes them anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.params import Float32

Int32 = npt.NDArray[np.int32]

FORBIDDEN = np.float32(-1e9)  # the logit of a masked choice, as in penstock.models.distributions


class ActionSampler(ABC):
    """Fill ``outputs`` (float32 ``[outputs, envs]``), then call `sample` or `greedy`."""

    recorded: Mapping[str, npt.NDArray[Any]]
    """By column, what the last `sample` knows of its actions that the learner needs: ``[envs]``."""
    untrained = False
    """Whether the outputs are those of a network before its first update."""

    def __init__(
        self,
        outputs: int,
        envs: int,
        rng: np.random.Generator,
        memory: Float32 | None = None,
    ) -> None:
        self.outputs = np.empty((outputs, envs), np.float32) if memory is None else memory
        self._rng = rng

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        """Never decide for those of the outputs, ``[outputs, envs]``. Where that leaves none, all
        are alike."""
        np.copyto(self.outputs, FORBIDDEN, where=forbidden)

    @abstractmethod
    def sample(self) -> npt.NDArray[Any]:
        """Actions ``[envs, ...]`` as in training."""

    @abstractmethod
    def greedy(self) -> npt.NDArray[Any]:
        """The best actions ``[envs, ...]`` by the outputs."""

    def basis(self) -> dict[str, Float32]:
        """What the outputs mean, for a display; call it before `sample` or `greedy`.

        Copies, float32 ``[values, envs]``, by name: "probabilities" of choices, those of several
        choices one after another; "q", the values of actions; or "mean" and "std" of numbers.
        Empty where that is not known.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State of the random generator, JSON-ready."""
        return dict(self._rng.bit_generator.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state


class CategoricalSampler(ActionSampler):
    """Draws actions int32 ``[envs]`` from logits, by the inverse of the cumulative distribution.

    Records ``behaviour_logp``, the log-probabilities of the actions, float32.
    """

    def __init__(
        self,
        actions: int,
        envs: int,
        rng: np.random.Generator,
        outputs: Float32 | None = None,
    ) -> None:
        """``outputs`` is the memory to decide by, its own if not given."""
        super().__init__(actions, envs, rng, outputs)
        self._sums = np.empty((actions, envs), np.float32)
        self._below = np.empty((actions - 1, envs), np.bool_)
        self._row = np.empty(envs, np.float32)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)
        self._actions = np.empty(envs, np.int32)
        self._logp = np.empty(envs, np.float32)
        self.recorded = {"behaviour_logp": self._logp}

    def sample(self) -> Int32:
        logits, sums, row, chosen = self.outputs, self._sums, self._row, self._chosen
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
        return self._actions

    def greedy(self) -> Int32:
        np.copyto(self._actions, self.outputs.argmax(axis=0), casting="same_kind")
        return self._actions

    def basis(self) -> dict[str, Float32]:
        shares = np.exp(self.outputs - self.outputs.max(axis=0))
        return {"probabilities": shares / shares.sum(axis=0)}


class MultiCategoricalSampler(ActionSampler):
    """Several choices, each as `CategoricalSampler`: actions int32 ``[envs, *shape]``, and the sum
    of their log-probabilities as ``behaviour_logp``."""

    def __init__(
        self,
        counts: tuple[int, ...],
        shape: tuple[int, ...],
        envs: int,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(sum(counts), envs, rng)
        parts = np.split(self.outputs, np.cumsum(counts[:-1]))
        self._each = [
            CategoricalSampler(count, envs, rng, part)
            for count, part in zip(counts, parts, strict=True)
        ]
        self._actions = np.empty((envs, *shape), np.int32)
        self._columns = self._actions.reshape(envs, -1).T
        self._logp = np.empty(envs, np.float32)
        self.recorded = {"behaviour_logp": self._logp}

    def sample(self) -> Int32:
        self._logp[:] = 0
        for column, each in zip(self._columns, self._each, strict=True):
            column[:] = each.sample()
            self._logp += each.recorded["behaviour_logp"]
        return self._actions

    def greedy(self) -> Int32:
        for column, each in zip(self._columns, self._each, strict=True):
            column[:] = each.greedy()
        return self._actions

    def basis(self) -> dict[str, Float32]:
        found = [each.basis()["probabilities"] for each in self._each]
        return {"probabilities": np.concatenate(found)}


class EpsilonGreedySampler(ActionSampler):
    """Takes the action int32 ``[envs]`` of the highest Q-value, or one at random: each environment
    with its own probability ``epsilon`` (``[envs]``), and with certainty before the network's first
    update, as published (Mnih et al. 2015).

    Records ``q_taken`` and ``q_max``, the values of the action and of the best one, float32. What
    `forbid` names is neither the best nor taken at random; an environment that it leaves nothing,
    as between two episodes, has nothing forbidden, so that ``q_max`` is a value of the network.
    """

    def __init__(
        self, actions: int, epsilon: npt.NDArray[np.float64], rng: np.random.Generator
    ) -> None:
        envs = len(epsilon)
        super().__init__(actions, envs, rng)
        self._epsilon = epsilon
        # A number u below epsilon, spread over the actions: one draw decides whether and which.
        self._spread = actions / np.maximum(epsilon, 1e-300)
        self._uniform = np.empty(envs)
        self._curious = np.empty(envs, np.bool_)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)
        self._actions = np.empty(envs, np.int32)
        self._q_taken, self._q_max = np.empty((2, envs), np.float32)
        self._allowed: npt.NDArray[np.bool_] | None = None  # of the outputs at hand
        self.recorded = {"q_taken": self._q_taken, "q_max": self._q_max}

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        self._allowed = ~forbidden | forbidden.all(axis=0)
        np.copyto(self.outputs, FORBIDDEN, where=~self._allowed)

    def sample(self) -> Int32:
        chosen, uniform = self._chosen, self._uniform
        np.maximum.reduce(self.outputs, axis=0, out=self._q_max)
        self.outputs.argmax(axis=0, out=chosen)
        self._rng.random(out=uniform)
        epsilon = 1.0 if self.untrained else self._epsilon
        if np.less(uniform, epsilon, out=self._curious).any():
            spread = len(self.outputs) if self.untrained else self._spread
            np.multiply(uniform, spread, out=uniform)
            if self._allowed is not None:
                uniform = _spread_over(self._allowed, uniform)
            np.minimum(uniform, len(self.outputs) - 1, out=uniform)
            np.copyto(chosen, uniform, casting="unsafe", where=self._curious)
        np.copyto(self._actions, chosen, casting="same_kind")
        np.multiply(chosen, self._offsets.size, out=chosen)
        np.add(chosen, self._offsets, out=chosen)
        self.outputs.take(chosen, out=self._q_taken, mode="clip")
        return self._actions

    def greedy(self) -> Int32:
        np.copyto(self._actions, self.outputs.argmax(axis=0), casting="same_kind")
        return self._actions

    def basis(self) -> dict[str, Float32]:
        return {"q": self.outputs.copy()}


def _spread_over(
    allowed: npt.NDArray[np.bool_], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The allowed action for each of ``uniform`` numbers ``[envs]`` from 0 to below the number of
    actions: each of the ``allowed``, ``[actions, envs]``, for an equal share."""
    so_far = allowed.cumsum(axis=0)
    number = np.minimum(uniform * so_far[-1] / len(allowed), so_far[-1] - 1).astype(np.intp)
    return np.asarray((so_far <= number).sum(axis=0), np.float64)


def ladder(
    base: float, alpha: float, first: int, count: int, total: int
) -> npt.NDArray[np.float64]:
    """Epsilons ``[count]`` of the environments from number ``first`` on, of ``total`` in all.

    Environment i explores at ``base ** (1 + i / (total - 1) * alpha)``: Horgan et al. 2018,
    arXiv 1803.00933, section 4. Numbers beyond ``total`` begin anew.
    """
    rung = (first + np.arange(count)) % total / max(total - 1, 1)
    return np.asarray(base ** (1 + rung * alpha))
