"""LAMB beside a codec that sends its momentum: the optimizer's half of 1-bit LAMB.

After Li et al. 2021, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with
LAMB's Convergence Speed" (arXiv 2104.06069, algorithm 1). The codec's half is
`extras.codecs.onebit_adam.OneBitMomentum`: LAMB's moments are Adam's.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import torch
from torch import Tensor

from penstock.core.interfaces import AdamState, GradientPart, OptimizerContext, UpdateStep
from penstock.core.params import Array, Arrays
from penstock.learner.optimizers.rules import BETAS, BaseOptimizer, adam_denominator, correction

COEFFICIENTS = (0.01, 10.0)
"""Bounds of a layer's coefficient |x| / |u|: c_min and c_max."""
COEFFICIENT_BETA = 0.9
"""Decay of the average of the coefficients: b3."""
FACTORS = (0.5, 4.0)
"""Bounds of the factor of a coefficient: r_min and r_max."""
FACTOR_CHANGE = 0.1
"""Most relative change of a factor in one step: r_threshold."""

FRESH_VARIANCE = "exp_avg_sq_fresh"
"""Name of the fresh variance w in the state, ``[size]``."""
LAYER_STATE = ("lamb_coefficient", "lamb_factor")
"""Names of the average coefficient and of its factor in the state, ``[layers]`` each."""
CODEC_STATE = (FRESH_VARIANCE, *LAYER_STATE)
"""State that LAMB without a codec does not have."""


class FrozenVarianceLamb(BaseOptimizer):
    """LAMB whose variance is constant after a warm-up, with layerwise rates that still adapt.

    x is the values of one layer, m and v its moments, u = m / (sqrt(v) + eps) + weight_decay x.
    A step is ``x -= lr c u``.

    Where ``reduces_gradients`` is true for the update (the warm-up), it is LAMB's: c is |x| / |u|
    within `COEFFICIENTS`, or 1 where one of these is zero. The average of c is recorded.

    In the other updates ``grads`` are the new momentum, already clipped, and v stays the same. The
    gradient that leads from the last momentum to it, ``(m - b1 m') / (1 - b1)``, updates a fresh
    variance w. c is the recorded average times ``max((sqrt(v) + eps) / (sqrt(w) + eps))`` over the
    layer, within `FACTORS`, and within `FACTOR_CHANGE` of the factor before. With decay that factor
    counts only for the part of u that is not decay. The constants are those of the authors.

    Differences from the paper: moments are corrected for their start at zero as in Adam, since a
    warm-up may be shorter than the memory of the variance; the average begins with the first c, not
    with zero; and a layer that has none, as it was zero in the whole warm-up, records its first.
    """

    kinds = ("exp_avg", "exp_avg_sq", FRESH_VARIANCE)

    def __init__(self, context: OptimizerContext) -> None:
        """Begin with moments of zero, and no recorded coefficients."""
        super().__init__(context)
        assert context.reduces_gradients is not None
        self._reduces_gradients = context.reduces_gradients
        self._weight_decay = context.cfg.weight_decay
        self._parts = context.parts
        self._sizes = [part.size for part in context.parts]

        self.state = AdamState(
            self.moments["exp_avg"],
            self.moments["exp_avg_sq"],
            steps=context.steps,
            eps=context.cfg.eps,
        )
        self._coefficient = context.values.new_zeros(len(self._sizes))  # 0: not recorded yet
        self._factor = context.values.new_ones(len(self._sizes))
        layer_state = (self._coefficient, self._factor)
        self.moments |= dict(zip(LAYER_STATE, layer_state, strict=True))

    def step(self, step: UpdateStep) -> None:
        """Take LAMB's step by a gradient, or the step by a new momentum."""
        is_warmup = self._reduces_gradients(step.update)
        if is_warmup:
            self._take_gradient(step)
        else:
            self._take_momentum(step)

        denominator = adam_denominator(self.state, self._grads)
        update = self.state.exp_avg / denominator / correction(BETAS[0], self._steps)
        decayed = torch.add(update, self._values, alpha=self._weight_decay)

        # The coefficient of each layer: LAMB's in the warm-up, later the recorded average times its
        # factor.
        lamb_coefficient = self._lamb_coefficient(decayed)
        if is_warmup:
            coefficient = lamb_coefficient.where(lamb_coefficient > 0, 1.0)
            self._record(lamb_coefficient, step.is_bad)
        else:
            # Only a layer that has none records one now.
            first = torch.where(self._coefficient > 0, 0.0, lamb_coefficient)
            self._record(first, step.is_bad)
            factor = self._next_factor(denominator, update, decayed, step.is_bad)
            coefficient = self._coefficient * factor
            coefficient = coefficient.where(self._coefficient > 0, 1.0)

        # A skipped step adds zeros: moments are finite, whatever the gradient was.
        coefficient = coefficient * (1 - step.is_bad)
        for layer, layer_coefficient in zip(
            self._layers(decayed), coefficient.unbind(), strict=True
        ):
            layer.mul_(layer_coefficient)
        self._values.add_(decayed, alpha=-step.lr)

    def convert_state(self, state: Arrays) -> Arrays:
        return convert_lamb(state, {*self.moments, "steps"}, self._parts)

    def _take_gradient(self, step: UpdateStep) -> None:
        """Update the moments as LAMB does, by the gradient; the fresh variance begins with v."""
        momentum = self.state.exp_avg
        variance = self.state.exp_avg_sq
        grads = self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)
        momentum.mul_(_decay(BETAS[0], step.is_bad)).add_(grads, alpha=1 - BETAS[0])
        variance.mul_(_decay(BETAS[1], step.is_bad)).addcmul_(grads, grads, value=1 - BETAS[1])
        self._steps += 1 - step.is_bad
        self.moments[FRESH_VARIANCE].copy_(variance)

    def _take_momentum(self, step: UpdateStep) -> None:
        """Take the new momentum, and update the fresh variance by the gradient that leads to it.

        The corrected variance stays the same.
        """
        momentum = self.state.exp_avg
        new_momentum = torch.where(step.is_bad > 0, momentum, self._grads)
        gradient = torch.sub(new_momentum, momentum, alpha=BETAS[0], out=self._grads)
        gradient.div_(1 - BETAS[0]).masked_fill_(step.is_bad > 0, 0.0)

        fresh_variance = self.moments[FRESH_VARIANCE]
        fresh_variance.mul_(_decay(BETAS[1], step.is_bad))
        fresh_variance.addcmul_(gradient, gradient, value=1 - BETAS[1])
        momentum.copy_(new_momentum)

        previous_correction = correction(BETAS[1], self._steps)
        self._steps += 1 - step.is_bad
        self.state.exp_avg_sq.mul_(correction(BETAS[1], self._steps) / previous_correction)

    def _lamb_coefficient(self, update: Tensor) -> Tensor:
        """Returns LAMB's coefficient of each layer, float32 ``[layers]``; 0 where a norm is
        zero."""
        weight_norms = self._norms(self._values)
        update_norms = self._norms(update)
        coefficients = (weight_norms / update_norms).clamp(*COEFFICIENTS)
        return torch.where((weight_norms > 0) & (update_norms > 0), coefficients, 0.0)

    def _record(self, coefficients: Tensor, is_bad: Tensor) -> None:
        """Take coefficients, float32 ``[layers]``, into the average; one of 0 is none."""
        average = self._coefficient
        mean = COEFFICIENT_BETA * average + (1 - COEFFICIENT_BETA) * coefficients
        mean = torch.where(average > 0, mean, coefficients)
        average.copy_(torch.where((coefficients > 0) & (is_bad == 0), mean, average))

    def _next_factor(
        self, denominator: Tensor, update: Tensor, decayed: Tensor, is_bad: Tensor
    ) -> Tensor:
        """Compute the factor of each layer's coefficient for this step, and record it.

        Args:
            denominator: sqrt(v) + eps, float32 ``[size]``.
            update: u without decay, float32 ``[size]``.
            decayed: u, float32 ``[size]``.
            is_bad: 1 where the step is skipped, which leaves the factors as they are.

        Returns:
            The factors, float32 ``[layers]``.
        """
        fresh = self.moments[FRESH_VARIANCE] / correction(BETAS[1], self._steps)
        ratio = denominator / fresh.sqrt_().add_(self.state.eps)
        factor = torch.stack([layer.max() for layer in self._layers(ratio)])
        if self._weight_decay:
            share = (self._norms(update) / self._norms(decayed)).nan_to_num(1.0).clamp(max=1.0)
            factor = factor * share + (1 - share)

        previous_factor = self._factor.clone()
        factor = factor.clamp(*FACTORS)
        factor = factor.clamp(
            previous_factor * (1 - FACTOR_CHANGE), previous_factor * (1 + FACTOR_CHANGE)
        )
        return self._factor.copy_(torch.where(is_bad > 0, previous_factor, factor))

    def _layers(self, values: Tensor) -> tuple[Tensor, ...]:
        """Returns the part of a flat vector that belongs to each layer."""
        return torch.split(values, self._sizes)

    def _norms(self, values: Tensor) -> Tensor:
        """Returns the norm of each layer of a flat vector, float32 ``[layers]``."""
        return torch.stack([torch.linalg.vector_norm(layer) for layer in self._layers(values)])


def convert_lamb(state: Arrays, names: Set[str], parts: Sequence[GradientPart]) -> Arrays:
    """Convert a state of LAMB to that of LAMB with or without a codec of its own.

    So a run continues with another codec. Where a state of an earlier version has one number for
    all towers of a parameter, each tower gets it.

    Args:
        state: arrays by name.
        names: the names that the result must have.
        parts: the layers.

    Returns:
        The converted state; a state of another optimizer as it is.
    """
    missing = names - state.keys()
    unknown = state.keys() - names

    if not missing and unknown == set(CODEC_STATE):
        return {name: state[name] for name in names}
    if not missing and not unknown and set(CODEC_STATE) <= names:
        return {**state, **{name: _by_part(state[name], parts) for name in LAYER_STATE}}
    if missing == set(CODEC_STATE) and not unknown:
        coefficients = np.zeros(len(parts))
        factors = np.ones(len(parts))
        codec_state = (state["exp_avg_sq"], coefficients, factors)
        return {**state, **dict(zip(CODEC_STATE, codec_state, strict=True))}
    return state


def _by_part(numbers: Array, parts: Sequence[GradientPart]) -> Array:
    """Returns a number for each part; ``numbers`` has that, or one for each parameter."""
    # The parts of a parameter follow one another, and the first one is of tower 0.
    parameter_of_part = np.cumsum([part.tower == 0 for part in parts]) - 1
    parameters = parameter_of_part[-1] + 1
    return numbers[parameter_of_part] if numbers.shape == (parameters,) else numbers


def _decay(beta: float, is_bad: Tensor) -> Tensor:
    """Returns ``beta``, or 1 where the step is skipped, float32 ``[]``."""
    return is_bad * (1 - beta) + beta
