"""Adam beside a codec that sends its momentum: the optimizer's half of 1-bit Adam and 0/1 Adam.

The codec's half is `extras.codecs.onebit_adam`.
"""

from __future__ import annotations

import torch

from penstock.core.interfaces import AdamState, OptimizerContext, UpdateStep
from penstock.learner.optimizers.rules import (
    BETAS,
    Adam,
    DecoupledDecay,
    adam_denominator,
    correction,
)


class FrozenVarianceAdam(Adam):
    """Adam of which only some steps change the variance.

    After 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv
    2202.06009). Where ``reduces_gradients`` is true for the update, a step is Adam's. In the others
    ``grads`` are the new momentum, already clipped, and the variance corrected for its start at
    zero stays as the codec left it: ``exp_avg_sq`` is multiplied by
    ``(1 - b2^t) / (1 - b2^(t-1))``, so that the state is one of Adam at any time. The momentum is
    corrected as in Adam, which the papers leave out; their warm-ups take thousands of steps.
    """

    def __init__(self, context: OptimizerContext) -> None:
        super().__init__(context)
        assert context.reduces_gradients is not None
        self._reduces_gradients = context.reduces_gradients
        self.state = AdamState(**self.moments, steps=context.steps, eps=context.cfg.eps)

    def step(self, step: UpdateStep) -> None:
        """Take Adam's step by a gradient, or the step by a new momentum."""
        if self._reduces_gradients(step.update):
            super().step(step)
            return

        # The corrected variance stays the same, so the state's follows the correction.
        previous_correction = correction(BETAS[1], self._steps)
        self._steps += 1 - step.is_bad
        self.state.exp_avg_sq.mul_(correction(BETAS[1], self._steps) / previous_correction)

        # The gradients are the new momentum. Their memory is used for the step.
        momentum = self.state.exp_avg
        torch.where(step.is_bad > 0, momentum, self._grads, out=momentum)
        direction = torch.div(momentum, adam_denominator(self.state, self._grads), out=self._grads)
        direction.mul_((1 - step.is_bad) / correction(BETAS[0], self._steps))
        self._values.add_(direction, alpha=-step.lr)


class FrozenVarianceAdamW(FrozenVarianceAdam):
    """AdamW of which only some steps change the variance; decay does not depend on the gradient."""

    def __init__(self, context: OptimizerContext) -> None:
        super().__init__(context)
        self._decay = DecoupledDecay(context)

    def step(self, step: UpdateStep) -> None:
        self._decay(step)
        super().step(step)
