"""The optimizers of most runs: Adam, AdamW, RMSprop and SGD.

They work on one flat vector with torch's functional interface: its optimizer classes would import
torch._dynamo, which takes longer than everything else at the start of a learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from penstock.core.interfaces import AdamState, OptimizerContext, UpdateStep
from penstock.core.params import Arrays

BETAS = (0.9, 0.999)  # decays of Adam's momentum and variance
ALPHA = 0.99  # decay of RMSprop's average of squares


class BaseOptimizer(ABC):
    """A `core.interfaces.Optimizer`; subclasses implement `step`."""

    kinds: ClassVar[tuple[str, ...]]
    """Names of the moments that are laid out like the values."""

    def __init__(self, context: OptimizerContext) -> None:
        self._values = context.values
        self._grads = context.grads
        self._steps = context.steps
        self._cfg = context.cfg
        self.moments = {kind: torch.zeros_like(context.values) for kind in self.kinds}

    @abstractmethod
    def step(self, step: UpdateStep) -> None:
        """Change the values by one step, unless ``step.is_bad``."""

    def convert_state(self, state: Arrays) -> Arrays:
        return state


class Adam(BaseOptimizer):
    """Kingma & Ba 2015 (arXiv 1412.6980)."""

    kinds = ("exp_avg", "exp_avg_sq")

    def step(self, step: UpdateStep) -> None:
        """Take Adam's step, in one fused call for all parameters."""
        # This is what torch's functional adam calls with fused=True. On a small network its checks
        # and its grouping by devices would take five times as long.
        self._steps += 1
        torch._fused_adam_(
            [self._values],
            [self._grads],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self._steps],
            amsgrad=False,
            lr=step.lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=0.0,
            eps=self._cfg.eps,
            maximize=False,
            grad_scale=step.scale,
            found_inf=step.is_bad,
        )
        self._steps -= step.is_bad


def adam_denominator(state: AdamState, out: Tensor) -> Tensor:
    """Returns ``sqrt(v) + eps`` of Adam's step, with v corrected for its start at zero.

    It is written to ``out``, float32 ``[size]``.
    """
    weight = correction(BETAS[1], state.steps)
    return torch.div(state.exp_avg_sq, weight, out=out).sqrt_().add_(state.eps)


def correction(beta: float, steps: Tensor) -> Tensor:
    """Returns ``1 - beta^steps``, at least that of one step: float64 ``[]``.

    A moment with decay ``beta`` is divided by it, since it started at zero.
    """
    return 1 - beta ** steps.double().clamp(min=1.0)


class AdamW(Adam):
    """Adam with decoupled weight decay: Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.

    Every step first multiplies the weights by ``1 - lr weight_decay``, as in torch. Biases, and
    other parameters with fewer than two dimensions, do not decay.
    """

    def __init__(self, context: OptimizerContext) -> None:
        super().__init__(context)
        self._decay = DecoupledDecay(context)

    def step(self, step: UpdateStep) -> None:
        self._decay(step)
        super().step(step)


class DecoupledDecay:
    """``x *= 1 - lr weight_decay`` for the weights x, in a step that is not skipped."""

    def __init__(self, context: OptimizerContext) -> None:
        self._weight_decay = context.cfg.weight_decay
        self._weights = [
            context.values[part.start : part.stop] for part in context.parts if not part.is_bias
        ]

    def __call__(self, step: UpdateStep) -> None:
        if self._weight_decay and self._weights:
            rate = step.lr * self._weight_decay
            torch._foreach_mul_(self._weights, 1 - rate * (1 - step.is_bad))


class RmsProp(BaseOptimizer):
    """Tieleman & Hinton 2012, with the operations of torch's RMSprop, which cannot skip a step."""

    kinds = ("square_avg",)

    def step(self, step: UpdateStep) -> None:
        """Take RMSprop's step; a skipped one changes nothing."""
        self._steps += 1 - step.is_bad
        grads = self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)

        squares = self.moments["square_avg"]
        squares.mul_((step.is_bad * (1 - ALPHA)).add_(ALPHA))  # 1 where the step is skipped
        squares.addcmul_(grads, grads, value=1 - ALPHA)
        self._values.addcdiv_(grads, squares.sqrt().add_(self._cfg.eps), value=-step.lr)


class Sgd(BaseOptimizer):
    """``u = momentum u + g + weight_decay x; x -= lr u``, as in torch.

    Where the codec applies momentum to the gradients (dgc), a step's momentum is 0 and g is a
    velocity already. The decay then has a velocity of its own, ``w = momentum w + weight_decay x``,
    and ``x -= lr (g + w)``: the sum is the same.
    """

    kinds = ("momentum_buffer",)

    def step(self, step: UpdateStep) -> None:
        """Take the step of SGD; where a codec applies momentum, the decay has its own."""
        self._steps += 1 - step.is_bad

        # The step's momentum is 0 where a codec applies it.
        by_codec = step.momentum != self._cfg.momentum
        decay_velocity: Tensor | None = None
        if by_codec and self._cfg.weight_decay:
            decay_velocity = self._update_decay_velocity(step)

        sgd(
            [self._values],
            [self._grads],
            [self.moments["momentum_buffer"]],
            fused=True,
            grad_scale=step.scale,
            found_inf=step.is_bad,
            weight_decay=0.0 if by_codec else self._cfg.weight_decay,
            momentum=step.momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if decay_velocity is not None:
            self._values.addcmul_(decay_velocity, 1 - step.is_bad, value=-step.lr)

    def _update_decay_velocity(self, step: UpdateStep) -> Tensor:
        """Update the velocity of the decay, w, unless the step is skipped; returns it."""
        momentum = self._cfg.momentum
        velocity = self.moments["momentum_buffer"]
        velocity.mul_(step.is_bad * (1 - momentum) + momentum)
        return velocity.addcmul_(self._values, 1 - step.is_bad, value=self._cfg.weight_decay)
