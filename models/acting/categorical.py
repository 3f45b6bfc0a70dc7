"""Samplers: they decide actions by a network's outputs, in numpy, without allocating.

    CategoricalSampler, MultiCategoricalSampler   drawn from logits, for actor-critics
    EpsilonGreedySampler                          by Q-values
    GaussianSampler, SquashedGaussianSampler      normal numbers (penstock.models.acting.gaussian)

Outputs are ``[outputs, envs]``: sums over actions are then sums of whole rows. The arrays of a
sampler are its own and stay the same; every call writes them anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.params import Float32

Int32 = npt.NDArray[np.int32]

FORBIDDEN = np.float32(-1e9)
"""The logit of a masked choice, as in penstock.models.distributions."""


class Explanation(NamedTuple):
    """Actions of E environments, and what they were decided by.

    Arrays are copies, and None where the decision was not of that kind.
    """

    actions: npt.NDArray[Any]
    """``[E, ...]``, as `ActionSampler.sample` and `greedy` return them."""
    logits: Float32 | None = None
    """Of choices, ``[E, choices]``, those of several one after another; `FORBIDDEN` if masked."""
    probabilities: Float32 | None = None
    """Of the same choices; those of each add up to 1."""
    q: Float32 | None = None
    """Values of actions, ``[E, actions]``; `FORBIDDEN` if masked."""
    mean: Float32 | None = None
    """Of normal numbers, before they are squashed, ``[E, numbers]``."""
    std: Float32 | None = None
    """Standard deviations of the same numbers."""
    log_prob: Float32 | None = None
    """Log-probability, or log-density, of each action as a whole, ``[E]``."""
    entropy: Float32 | None = None
    """Of the distribution of each action, in nats, ``[E]``."""

    def first(self, count: int) -> Explanation:
        """Returns that of the first ``count`` environments."""
        arrays = self._asdict()
        return Explanation(
            **{name: array[:count] for name, array in arrays.items() if array is not None}
        )


class ActionSampler(ABC):
    """Fill ``outputs`` (float32 ``[outputs, envs]``), then call `sample` or `greedy`."""

    recorded: Mapping[str, npt.NDArray[Any]]
    """What the learner needs to know of the actions of the last `sample`, by the name of the
    column that it is recorded in: arrays ``[envs, ...]``."""
    untrained = False
    """Whether the outputs are those of a network before its first update."""
    squashed = False
    """Whether actions are tanh of normal numbers."""

    def __init__(
        self,
        outputs: int,
        envs: int,
        rng: np.random.Generator,
        memory: Float32 | None = None,
    ) -> None:
        """Create a sampler for ``outputs`` of a network in each of ``envs`` environments.

        ``rng`` draws the actions. ``memory`` float32 ``[outputs, envs]`` is used as `outputs`; by
        default the sampler has its own.
        """
        self.outputs = np.empty((outputs, envs), np.float32) if memory is None else memory
        self._rng = rng

    def on_new_weights(self, *, untrained: bool) -> None:
        """The network has got other weights.

        ``untrained``: whether they are those before its first update.
        """
        self.untrained = untrained

    def explore_as(self, numbers: npt.NDArray[np.int64]) -> None:
        """Explore in the first environments as the seats of these ``numbers`` [B] of games do.

        A sampler whose environments all explore alike does not override it.
        """
        assert len(numbers) <= self.outputs.shape[1], numbers

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        """Forbid the marked ones of the outputs, bool ``[outputs, envs]``, in the next decision.

        In an environment where all are forbidden, all are alike.
        """
        np.copyto(self.outputs, FORBIDDEN, where=forbidden)

    @abstractmethod
    def sample(self) -> npt.NDArray[Any]:
        """Returns actions ``[envs, ...]`` as in training."""

    def draw(self) -> npt.NDArray[Any]:
        """Returns the actions that `sample` would return, by the same random numbers.

        What is `recorded` has no meaning afterwards.
        """
        return self.sample()

    @abstractmethod
    def greedy(self) -> npt.NDArray[Any]:
        """Returns the best actions ``[envs, ...]`` by the outputs."""

    def decide(self, *, sample: bool) -> npt.NDArray[Any]:
        """Returns the actions of `sample`, or those of `greedy`."""
        return self.sample() if sample else self.greedy()

    def explain(self, *, sample: bool) -> Explanation:
        """Decide as `decide` does, and return what the actions were decided by.

        A sampler that does not override this explains its actions by nothing. The network has had
        its first update.
        """
        return Explanation(self.decide(sample=sample).copy())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the random generator, JSON-ready."""
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
        """``outputs`` is the memory to decide by, float32 ``[actions, envs]``, its own if None."""
        super().__init__(actions, envs, rng, outputs)

        # Memory of the stages of `sample`.
        self._sums = np.empty((actions, envs), np.float32)
        self._below = np.empty((actions - 1, envs), np.bool_)
        self._row = np.empty(envs, np.float32)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)

        self._actions = np.empty(envs, np.int32)
        self._logp = np.empty(envs, np.float32)
        self.recorded = {"behaviour_logp": self._logp}

    def sample(self) -> Int32:
        actions = self.draw()

        # The log-probability is the action's logit, taken from the flat array, less log(total).
        chosen = self._chosen
        np.multiply(chosen, self._offsets.size, out=chosen)
        np.add(chosen, self._offsets, out=chosen)
        self.outputs.take(chosen, out=self._logp, mode="clip")
        np.log(self._sums[-1], out=self._row)
        np.subtract(self._logp, self._row, out=self._logp)
        return actions

    def draw(self) -> Int32:
        logits = self.outputs
        sums = self._sums
        row = self._row
        chosen = self._chosen

        # The exponentials of the logits, summed up over the actions. They are not divided by their
        # total, which scales the random number instead.
        np.maximum.reduce(logits, axis=0, out=row)
        np.subtract(logits, row, out=logits)
        np.exp(logits, out=sums)
        np.add.accumulate(sums, axis=0, out=sums)
        total = sums[-1]

        # The action is the number of sums that are not above the random number. Uniform numbers are
        # multiples of 2^-24 below 1, so that the product stays below the total in float32 too, and
        # an action of probability 0 is never taken.
        self._rng.random(out=row, dtype=np.float32)
        np.multiply(row, total, out=row)
        np.less_equal(sums[:-1], row, out=self._below)
        np.add.reduce(self._below, axis=0, dtype=np.intp, out=chosen)
        np.copyto(self._actions, chosen, casting="same_kind")
        return self._actions

    def greedy(self) -> Int32:
        np.copyto(self._actions, self.outputs.argmax(axis=0), casting="same_kind")
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        logits = self.outputs.T.copy()
        actions = self.decide(sample=sample).copy()
        return _explanation(actions, logits, (logits.shape[1],))


class MultiCategoricalSampler(ActionSampler):
    """Draws several choices at once, each as `CategoricalSampler` does.

    Actions are int32 ``[envs, *shape]``. Records the sum of the log-probabilities of the choices as
    ``behaviour_logp``, float32.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        shape: tuple[int, ...],
        envs: int,
        rng: np.random.Generator,
    ) -> None:
        """``counts`` has the number of actions of each choice, in the order of ``shape``."""
        super().__init__(sum(counts), envs, rng)
        self._counts = counts

        # A sampler for each choice, which decides by its part of the outputs.
        parts = np.split(self.outputs, np.cumsum(counts[:-1]))
        self._samplers = [
            CategoricalSampler(count, envs, rng, outputs=part)
            for count, part in zip(counts, parts, strict=True)
        ]

        # The actions, and a view of them with a row for each choice.
        self._actions = np.empty((envs, *shape), np.int32)
        self._columns = self._actions.reshape(envs, -1).T
        self._logp = np.empty(envs, np.float32)
        self.recorded = {"behaviour_logp": self._logp}

    def sample(self) -> Int32:
        self._logp[:] = 0
        for column, sampler in zip(self._columns, self._samplers, strict=True):
            column[:] = sampler.sample()
            self._logp += sampler.recorded["behaviour_logp"]
        return self._actions

    def draw(self) -> Int32:
        for column, sampler in zip(self._columns, self._samplers, strict=True):
            column[:] = sampler.draw()
        return self._actions

    def greedy(self) -> Int32:
        for column, sampler in zip(self._columns, self._samplers, strict=True):
            column[:] = sampler.greedy()
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        logits = self.outputs.T.copy()
        actions = self.decide(sample=sample).copy()
        return _explanation(actions, logits, self._counts)


def _explanation(actions: Int32, logits: Float32, counts: tuple[int, ...]) -> Explanation:
    """Returns how choices were made.

    Args:
        actions: the choices, ``[envs, *shape]``.
        logits: of all choices, ``[envs, sum of counts]``.
        counts: the number of actions of each choice, in the order of ``shape``.
    """
    rows = np.arange(len(actions))
    log_prob = np.zeros(len(actions), np.float32)
    parts = []
    choices = actions.reshape(len(actions), -1).T
    logits_of_each = np.split(logits, np.cumsum(counts[:-1]), axis=1)
    for choice, choice_logits in zip(choices, logits_of_each, strict=True):
        shifted = choice_logits - choice_logits.max(axis=1, keepdims=True)
        choice_log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        log_prob += choice_log_probs[rows, choice]
        parts.append(choice_log_probs)

    log_probs = np.concatenate(parts, axis=1)
    probabilities = np.exp(log_probs)
    return Explanation(
        actions,
        logits=logits,
        probabilities=probabilities,
        log_prob=log_prob,
        entropy=-(probabilities * log_probs).sum(axis=1),
    )


class EpsilonGreedySampler(ActionSampler):
    """Takes the action of the highest Q-value, or one at random: actions int32 ``[envs]``.

    Each environment explores with its own probability ``epsilon``, and with certainty before the
    network's first update, as published (Mnih et al. 2015).

    Records ``q_taken`` and ``q_max``, the values of the action and of the best one, float32. What
    `forbid` marks is neither the best nor taken at random. An environment in which it leaves no
    action, as between two episodes, has nothing forbidden, so that ``q_max`` is a value of the
    network.
    """

    def __init__(
        self,
        actions: int,
        epsilon: npt.NDArray[np.float64],
        rng: np.random.Generator,
        seat_epsilon: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]] | None = None,
    ) -> None:
        """Create a sampler.

        Args:
            actions: number of actions.
            epsilon: the probability of each environment, float64 ``[envs]``.
            rng: draws the actions.
            seat_epsilon: returns the probabilities of seats of games, given their numbers; None if
                it is not used for games.
        """
        envs = len(epsilon)
        super().__init__(actions, envs, rng)
        self._epsilon = epsilon.copy()
        self._seat_epsilon = seat_epsilon
        # A number u below epsilon, spread over the actions: one draw decides whether and which.
        self._spread = actions / np.maximum(self._epsilon, 1e-300)

        # Memory of the stages of `sample`.
        self._uniform = np.empty(envs)
        self._explores = np.empty(envs, np.bool_)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)
        # The actions that may be taken by the present outputs; None allows all.
        self._allowed: npt.NDArray[np.bool_] | None = None

        self._actions = np.empty(envs, np.int32)
        self._q_taken, self._q_max = np.empty((2, envs), np.float32)
        self.recorded = {"q_taken": self._q_taken, "q_max": self._q_max}

    def explore_as(self, numbers: npt.NDArray[np.int64]) -> None:
        assert self._seat_epsilon is not None
        count = len(numbers)
        self._epsilon[:count] = self._seat_epsilon(numbers)
        self._spread[:count] = len(self.outputs) / np.maximum(self._epsilon[:count], 1e-300)

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        self._allowed = ~forbidden | forbidden.all(axis=0)
        np.copyto(self.outputs, FORBIDDEN, where=~self._allowed)

    def sample(self) -> Int32:
        chosen = self._chosen
        uniform = self._uniform
        actions = len(self.outputs)

        # The best actions.
        np.maximum.reduce(self.outputs, axis=0, out=self._q_max)
        self.outputs.argmax(axis=0, out=chosen)

        # Random ones, in the environments that explore.
        self._rng.random(out=uniform)
        epsilon = 1.0 if self.untrained else self._epsilon
        if np.less(uniform, epsilon, out=self._explores).any():
            spread = actions if self.untrained else self._spread
            np.multiply(uniform, spread, out=uniform)
            if self._allowed is not None:
                uniform = _spread_over(self._allowed, uniform)
            np.minimum(uniform, actions - 1, out=uniform)
            np.copyto(chosen, uniform, casting="unsafe", where=self._explores)
        np.copyto(self._actions, chosen, casting="same_kind")

        # Their values, taken from the flat array.
        np.multiply(chosen, self._offsets.size, out=chosen)
        np.add(chosen, self._offsets, out=chosen)
        self.outputs.take(chosen, out=self._q_taken, mode="clip")
        return self._actions

    def greedy(self) -> Int32:
        np.copyto(self._actions, self.outputs.argmax(axis=0), casting="same_kind")
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        q = self.outputs.T.copy()
        return Explanation(self.decide(sample=sample).copy(), q=q)


def _spread_over(
    allowed: npt.NDArray[np.bool_], uniform: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Returns an allowed action for each random number, each with an equal share: ``[envs]``.

    ``allowed`` is ``[actions, envs]``; the ``uniform`` numbers ``[envs]`` are at least 0 and below
    the number of actions.
    """
    # The allowed actions of an environment are counted from 0. The one of this number is as far
    # down as there are actions with at most so many allowed ones up to them.
    allowed_so_far = allowed.cumsum(axis=0)
    allowed_count = allowed_so_far[-1]
    number = np.minimum(uniform * allowed_count / len(allowed), allowed_count - 1).astype(np.intp)
    return np.asarray((allowed_so_far <= number).sum(axis=0), np.float64)


# The share of the environments of a `ladder` that counts as exploring least.
LEAST_EXPLORING = 0.25


def ladder(
    base: float, alpha: float, first: int, count: int, total: int
) -> npt.NDArray[np.float64]:
    """Returns epsilons, float64 ``[count]``, for the environments from number ``first`` on.

    Environment i of ``total`` explores at ``base ** (1 + i / (total - 1) * alpha)``: Horgan et al.
    2018, arXiv 1803.00933, section 4. Numbers beyond ``total`` begin anew.
    """
    return np.asarray(base ** (1 + _rungs(first, count, total) * alpha))


def explores_least(first: int, count: int, total: int) -> npt.NDArray[np.bool_]:
    """Returns whether environments are in the quarter of `ladder` that explores least: bool
    ``[count]``, for the environments from number ``first`` on."""
    return np.asarray(_rungs(first, count, total) >= 1 - LEAST_EXPLORING)


def _rungs(first: int, count: int, total: int) -> npt.NDArray[np.float64]:
    """Returns the places of environments in `ladder`, from 0 to 1, float64 ``[count]``."""
    return np.asarray((first + np.arange(count)) % total / max(total - 1, 1))


def seat_ladder(
    base: float, alpha: float, numbers: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns epsilons, float64 ``[B]``, for the seats of games with these ``numbers``.

    How many seats will play is not known, so seat i has the place in `ladder` that the van der
    Corput sequence gives it, 0, 1/2, 1/4, 3/4, 1/8 and so on: the seats in use, however many, are
    spread over the ladder evenly. Numbers beyond 65,535 begin anew.
    """
    return np.asarray(base ** (1 + _van_der_corput()[numbers % len(_van_der_corput())] * alpha))


@lru_cache(maxsize=1)
def _van_der_corput() -> npt.NDArray[np.float64]:
    """Returns the first 65,536 numbers of the sequence in base 2: bits mirrored at the point."""
    fractions = np.zeros(1)
    for bit in range(1, 17):
        fractions = np.concatenate([fractions, fractions + 2.0**-bit])
    return fractions
