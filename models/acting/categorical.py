"""Samplers: they decide actions by a network's outputs, in numpy, without allocating.

    CategoricalSampler, MultiCategoricalSampler   drawn from logits, for actor-critics
    EpsilonGreedySampler, MultiEpsilonGreedySampler
                                                  by Q-values, some at random
    GaussianSampler, SquashedGaussianSampler      normal numbers (penstock.models.acting.gaussian)
    NoisySampler                                  numbers with normal noise (the same file)

Outputs are ``[outputs, envs]``: sums over actions are then sums of whole rows. The arrays of a
sampler are its own and stay the same; every call writes them anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
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
    """Values of actions, ``[E, actions]``, those of several choices one after another; `FORBIDDEN`
    if masked."""
    q_max: Float32 | None = None
    """The value of the best action, ``[E]``; of several choices the mean over them."""
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

    def on_new_epsilon(self, epsilon: float) -> None:
        """Weights have brought another rate of exploration.

        Only samplers of networks whose weights have one override it.
        """
        raise AssertionError(f"{type(self).__name__} has no rate of exploration")

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


LEAST_EXPLORING = 0.25
"""The share of the environments of a `Ladder` that counts as exploring least."""


@dataclass(frozen=True)
class Ladder:
    """Rates of exploration of some environments, which are different powers of one rate.

    Of N environments, number i explores at ``base ** (1 + i / (N - 1) * alpha)``: Horgan et al.
    2018, arXiv 1803.00933, section 4. With an alpha of 0 all explore at the base.
    """

    base: float
    """The largest of the rates."""
    alpha: float
    first: int
    """Number of the first of these environments among all; those beyond ``total`` begin anew."""
    count: int
    """Number of these environments."""
    total: int
    """Number of all environments."""

    def rates(self, base: float) -> npt.NDArray[np.float64]:
        """Returns the rates of the environments, float64 ``[count]``, for a base."""
        return np.asarray(base ** (1 + self._rungs() * self.alpha))

    def explores_least(self) -> npt.NDArray[np.bool_]:
        """Returns whether environments are in the quarter that explores least, bool ``[count]``."""
        return np.asarray(self._rungs() >= 1 - LEAST_EXPLORING)

    def seat_rates(self, base: float, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Returns the rates, float64 ``[B]``, of the seats of games with these ``numbers``.

        How many seats will play is not known, so seat i has the place that the van der Corput
        sequence gives it, 0, 1/2, 1/4, 3/4, 1/8 and so on: the seats in use, however many, are
        spread over the ladder evenly. Numbers beyond 65,535 begin anew.
        """
        places = _van_der_corput()
        return np.asarray(base ** (1 + places[numbers % len(places)] * self.alpha))

    def _rungs(self) -> npt.NDArray[np.float64]:
        """Returns the places of the environments on the ladder, from 0 to 1."""
        numbers = self.first + np.arange(self.count)
        return np.asarray(numbers % self.total / max(self.total - 1, 1))


class ExploringSampler(ActionSampler):
    """Base of the samplers that take some actions at random, whatever the outputs are.

    Each environment does so with its own probability ``epsilon``, and with certainty before the
    network's first update, as published (Mnih et al. 2015).

    Records ``q_taken`` and ``q_max``, the values of the action and of the best one, float32.
    """

    def __init__(
        self, outputs: int, epsilon: npt.NDArray[np.float64] | Ladder, rng: np.random.Generator
    ) -> None:
        """Create a sampler.

        Args:
            outputs: number of Q-values.
            epsilon: the probability of each environment, float64 ``[envs]``, or a ladder, whose
                base may come with weights. Only with a ladder can seats of games explore.
            rng: draws the actions.
        """
        self._ladder: Ladder | None = None
        self._base = 1.0
        if isinstance(epsilon, Ladder):
            self._ladder = epsilon
            self._base = epsilon.base
            self._epsilon = epsilon.rates(epsilon.base)
        else:
            self._epsilon = epsilon.copy()
        envs = len(self._epsilon)
        super().__init__(outputs, envs, rng)

        self._uniform = np.empty(envs)
        self._explores = np.empty(envs, np.bool_)
        self._q_taken, self._q_max = np.empty((2, envs), np.float32)
        self.recorded = {"q_taken": self._q_taken, "q_max": self._q_max}

    def on_new_epsilon(self, epsilon: float) -> None:
        assert self._ladder is not None
        self._base = epsilon
        self._explore_at(self._ladder.rates(epsilon))

    def explore_as(self, numbers: npt.NDArray[np.int64]) -> None:
        assert self._ladder is not None
        self._explore_at(self._ladder.seat_rates(self._base, numbers))

    def _explore_at(self, rates: npt.NDArray[np.float64]) -> None:
        """Explore at these probabilities in the first environments, float64 ``[B]``."""
        self._epsilon[: len(rates)] = rates

    def _draw_explorers(self) -> npt.NDArray[np.bool_]:
        """Returns the environments that explore now, bool ``[envs]``."""
        self._rng.random(out=self._uniform)
        epsilon = 1.0 if self.untrained else self._epsilon
        return np.less(self._uniform, epsilon, out=self._explores)

    def explain(self, *, sample: bool) -> Explanation:
        q = self.outputs.T.copy()
        q_max = self._best_value().copy()
        return Explanation(self.decide(sample=sample).copy(), q=q, q_max=q_max)

    @abstractmethod
    def _best_value(self) -> Float32:
        """Returns the value of the best action, float32 ``[envs]``."""


class EpsilonGreedySampler(ExploringSampler):
    """Takes the action of the highest Q-value, or one at random: actions int32 ``[envs]``.

    What `forbid` marks is neither the best nor taken at random. An environment in which it leaves
    no action, as between two episodes, has nothing forbidden, so that ``q_max`` is a value of the
    network.
    """

    def __init__(
        self, actions: int, epsilon: npt.NDArray[np.float64] | Ladder, rng: np.random.Generator
    ) -> None:
        """``actions`` is the number of actions; the others are those of `ExploringSampler`."""
        super().__init__(actions, epsilon, rng)
        # A number u below epsilon, spread over the actions: one draw decides whether and which.
        self._spread = actions / np.maximum(self._epsilon, 1e-300)

        # Memory of the stages of `sample`.
        envs = len(self._epsilon)
        self._chosen = np.empty(envs, np.intp)
        self._offsets = np.arange(envs)
        # The actions that may be taken by the present outputs; None allows all.
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._actions = np.empty(envs, np.int32)

    def _explore_at(self, rates: npt.NDArray[np.float64]) -> None:
        super()._explore_at(rates)
        self._spread[: len(rates)] = len(self.outputs) / np.maximum(rates, 1e-300)

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        self._allowed = ~forbidden | forbidden.all(axis=0)
        np.copyto(self.outputs, FORBIDDEN, where=~self._allowed)

    def sample(self) -> Int32:
        chosen = self._chosen
        uniform = self._uniform
        actions = len(self.outputs)

        # The best actions.
        self._best_value()
        self.outputs.argmax(axis=0, out=chosen)

        # Random ones, in the environments that explore.
        if self._draw_explorers().any():
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

    def _best_value(self) -> Float32:
        np.maximum.reduce(self.outputs, axis=0, out=self._q_max)
        return self._q_max


class MultiEpsilonGreedySampler(ExploringSampler):
    """Takes of several choices the action of the highest Q-value each, or all at random.

    Actions are int32 ``[envs, *shape]``. The value of an action is the mean over its choices
    (Tavakoli et al. 2018, arXiv 1711.08946). `forbid` has the meaning that it has in
    `EpsilonGreedySampler`, for each choice.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        shape: tuple[int, ...],
        epsilon: npt.NDArray[np.float64] | Ladder,
        rng: np.random.Generator,
    ) -> None:
        """``counts`` has the number of actions of each choice, in the order of ``shape``."""
        super().__init__(sum(counts), epsilon, rng)
        self.counts = counts
        self._parts = np.split(self.outputs, np.cumsum(counts[:-1]))
        self._allowed = np.ones(self.outputs.shape, np.bool_)
        self._allowed_parts = np.split(self._allowed, np.cumsum(counts[:-1]))

        # The actions, and a view of them with a row for each choice.
        envs = len(self._epsilon)
        self._actions = np.empty((envs, *shape), np.int32)
        self._columns = self._actions.reshape(envs, -1).T
        self._envs = np.arange(envs)

    def forbid(self, forbidden: npt.NDArray[np.bool_]) -> None:
        np.logical_not(forbidden, out=self._allowed)
        for allowed in self._allowed_parts:
            allowed |= ~allowed.any(axis=0)
        np.copyto(self.outputs, FORBIDDEN, where=~self._allowed)

    def sample(self) -> Int32:
        self.greedy()
        self._best_value()

        explores = self._draw_explorers()
        if explores.any():
            uniform = self._rng.random((len(self.counts), len(explores)))
            for column, allowed, numbers in zip(
                self._columns, self._allowed_parts, uniform, strict=True
            ):
                actions = _spread_over(allowed, numbers * len(allowed))
                np.copyto(column, actions, casting="unsafe", where=explores)

        self._q_taken[:] = 0
        for column, part in zip(self._columns, self._parts, strict=True):
            self._q_taken += part[column, self._envs]
        self._q_taken /= len(self.counts)
        return self._actions

    def greedy(self) -> Int32:
        for column, part in zip(self._columns, self._parts, strict=True):
            column[:] = part.argmax(axis=0)
        return self._actions

    def _best_value(self) -> Float32:
        np.add.reduce([part.max(axis=0) for part in self._parts], axis=0, out=self._q_max)
        self._q_max /= len(self.counts)
        return self._q_max


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


@lru_cache(maxsize=1)
def _van_der_corput() -> npt.NDArray[np.float64]:
    """Returns the first 65,536 numbers of the sequence in base 2: bits mirrored at the point."""
    fractions = np.zeros(1)
    for bit in range(1, 17):
        fractions = np.concatenate([fractions, fractions + 2.0**-bit])
    return fractions
