"""Samplers that decide actions that are numbers, in numpy, without allocating.

The base class and its rules are in `penstock.models.acting.categorical`.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from penstock.core.params import Float32
from penstock.models.acting.categorical import ActionSampler, Explanation

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
LOG_2 = math.log(2)


class GaussianSampler(ActionSampler):
    """Draws normal numbers for actor-critics: actions float32 ``[envs, *shape]``.

    Outputs are the means, then the logarithms of the standard deviations. If ``squashed``, actions
    are tanh of the numbers, and lie from -1 to 1; else the environment clips them. Records
    ``behaviour_logp``, the log-densities of the actions, and ``action``, the numbers before tanh or
    clipping.
    """

    def __init__(
        self, shape: tuple[int, ...], envs: int, squashed: bool, rng: np.random.Generator
    ) -> None:
        size = math.prod(shape)
        super().__init__(2 * size, envs, rng)
        self.squashed = squashed
        self._mean = self.outputs[:size]
        self._log_std = self.outputs[size:]
        self._noise, self._std = np.empty((2, size, envs), np.float32)

        # The numbers before tanh, and a view of them that is shaped as the outputs are.
        self._numbers = np.empty((envs, *shape), np.float32)
        self._flat = self._numbers.reshape(envs, size).T
        self._actions = np.empty_like(self._numbers) if squashed else self._numbers
        self._logp = np.empty(envs, np.float32)
        self.recorded = {"behaviour_logp": self._logp, "action": self._numbers}

    def sample(self) -> Float32:
        noise = self._noise
        std = self._std
        flat = self._flat
        self._rng.standard_normal(out=noise, dtype=np.float32)
        np.exp(self._log_std, out=std)
        np.multiply(noise, std, out=flat)
        np.add(self._mean, flat, out=flat)

        # The log-density is -noise² / 2 - log(std) - log(2 pi) / 2. The number is rounded: the
        # learner finds another noise in it than was drawn, so it is computed back.
        np.subtract(flat, self._mean, out=noise)
        np.divide(noise, std, out=noise)
        np.multiply(noise, noise, out=noise)
        np.multiply(noise, -0.5, out=noise)
        np.subtract(noise, self._log_std, out=noise)
        np.subtract(noise, np.float32(HALF_LOG_2PI), out=noise)
        if self.squashed:
            np.tanh(self._numbers, out=self._actions)
            np.subtract(noise, _log_slope(flat), out=noise)
        np.add.reduce(noise, axis=0, out=self._logp)
        return self._actions

    def greedy(self) -> Float32:
        np.copyto(self._flat, self._mean)
        if self.squashed:
            np.tanh(self._numbers, out=self._actions)
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        mean = self._mean.copy()
        log_std = self._log_std.copy()
        actions = self.decide(sample=sample).copy()
        numbers = self._flat
        return _explanation(actions, numbers, mean, log_std, squashed=self.squashed)


class TanhSampler(ActionSampler):
    """Base of the samplers of SAC and TD3: actions float32 ``[envs, *shape]``, from -1 to 1.

    Before the first update of the network actions are uniform: the first `replay.min_size` steps
    cover all of them, as published (the code of Haarnoja et al. 2018 and of Fujimoto et al. 2018).
    Records nothing.
    """

    squashed = True

    def __init__(
        self, shape: tuple[int, ...], envs: int, rng: np.random.Generator, *, of_each: int
    ) -> None:
        """``of_each`` is the number of outputs for each number of an action."""
        self._actions = np.empty((envs, *shape), np.float32)
        self._flat = self._actions.reshape(envs, -1).T  # a view, shaped as the outputs are
        super().__init__(of_each * len(self._flat), envs, rng)
        self._noise = np.empty(self._flat.shape, np.float32)
        self.recorded = {}

    def sample(self) -> Float32:
        if self.untrained:
            noise = self._noise
            self._rng.random(out=noise, dtype=np.float32)
            np.multiply(noise, 2, out=noise)
            np.subtract(noise, 1, out=self._flat)
        else:
            self._explore()
        return self._actions

    @abstractmethod
    def _explore(self) -> None:
        """Write actions with noise, by the outputs of a network that was updated."""


class SquashedGaussianSampler(TanhSampler):
    """Draws ``tanh`` of normal numbers.

    Outputs are the means, then the logarithms of the standard deviations, which are clipped to the
    bounds ``log_std``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        envs: int,
        log_std: tuple[float, float],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(shape, envs, rng, of_each=2)
        self._mean, self._log_std = np.split(self.outputs, 2)
        self.log_std_bounds = log_std

    def _explore(self) -> None:
        # The logarithms are overwritten by the standard deviations.
        std = self._log_std
        np.clip(std, *self.log_std_bounds, out=std)
        np.exp(std, out=std)
        noise = self._noise
        self._rng.standard_normal(out=noise, dtype=np.float32)
        np.multiply(noise, std, out=noise)
        np.add(noise, self._mean, out=noise)
        np.tanh(noise, out=self._flat)

    def greedy(self) -> Float32:
        np.tanh(self._mean, out=self._flat)
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        mean = self._mean.copy()
        log_std = np.clip(self._log_std, *self.log_std_bounds)
        actions = self.decide(sample=sample).copy()
        # `sample` leaves the numbers before tanh in the memory of its noise.
        numbers = self._noise if sample else mean
        return _explanation(actions, numbers, mean, log_std, squashed=True)


class NoisySampler(TanhSampler):
    """Adds normal noise to ``tanh`` of the outputs, and clips the sum to the bounds."""

    def __init__(
        self, shape: tuple[int, ...], envs: int, noise: float, rng: np.random.Generator
    ) -> None:
        """Create a sampler whose noise has the standard deviation ``noise``."""
        super().__init__(shape, envs, rng, of_each=1)
        self._noise_std = np.float32(noise)

    def _explore(self) -> None:
        noise = self._noise
        np.tanh(self.outputs, out=self._flat)
        self._rng.standard_normal(out=noise, dtype=np.float32)
        np.multiply(noise, self._noise_std, out=noise)
        np.add(self._flat, noise, out=self._flat)
        np.clip(self._actions, -1, 1, out=self._actions)

    def greedy(self) -> Float32:
        np.tanh(self.outputs, out=self._flat)
        return self._actions

    def explain(self, *, sample: bool) -> Explanation:
        mean = self.outputs.T.copy()
        return Explanation(self.decide(sample=sample).copy(), mean=mean)


def _explanation(
    actions: Float32, numbers: Float32, mean: Float32, log_std: Float32, *, squashed: bool
) -> Explanation:
    """Returns how actions ``[envs, *shape]`` were decided.

    Args:
        actions: what was decided.
        numbers: the actions before tanh, ``[size, envs]``.
        mean: of the numbers, ``[size, envs]``.
        log_std: logarithms of their standard deviations, ``[size, envs]``.
        squashed: whether the actions are tanh of the numbers. The entropy of these has no closed
            form, and is None.
    """
    std = np.exp(log_std)
    densities = -0.5 * np.square((numbers - mean) / std) - log_std - np.float32(HALF_LOG_2PI)
    if squashed:
        densities -= _log_slope(numbers)
    entropy = None if squashed else (log_std + np.float32(0.5 + HALF_LOG_2PI)).sum(axis=0)
    return Explanation(
        actions,
        mean=mean.T,
        std=std.T,
        log_prob=densities.sum(axis=0),
        entropy=entropy,
    )


def _log_slope(numbers: Float32) -> Float32:
    """Returns ``log(1 - tanh(x)^2)`` for each of the ``numbers`` x, never the log of 0."""
    return np.float32(2 * LOG_2) - 2 * (numbers + np.logaddexp(np.float32(0), -2 * numbers))
