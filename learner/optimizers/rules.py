"""Update rules over one flat vector: what a step does once its gradient is summed and measured.

They are torch's own functions; its classes would import torch._dynamo, which takes longer than
everything else at the start of a learner.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from penstock.configs.sections import LearnerConfig

BETAS = (0.9, 0.999)
ALPHA = 0.99


class UpdateStep(NamedTuple):
    """What a rule needs to know besides the gradient; tensors are float32 ``[]``, on the device."""

    lr: float
    momentum: float
    scale: Tensor
    """What the gradient is divided by first."""
    is_bad: Tensor
    """1 where some gradient is not finite, and then nothing may change; else 0."""


class UpdateRule(Protocol):
    """Changes ``values`` by ``grads``, and may leave anything in ``grads``."""

    moments: dict[str, Tensor]
    """What it remembers, each ``[N]`` as the values are."""

    def __call__(self, step: UpdateStep) -> None:
        """Take one step, and count it in the ``steps`` that the rule was made with."""


class Adam:
    """Kingma & Ba 2015 (arXiv 1412.6980)."""

    def __init__(self, values: Tensor, grads: Tensor, steps: Tensor, cfg: LearnerConfig) -> None:
        self._values, self._grads, self._steps, self._eps = values, grads, steps, cfg.eps
        self.moments = {name: torch.zeros_like(values) for name in ("exp_avg", "exp_avg_sq")}

    def __call__(self, step: UpdateStep) -> None:
        adam(
            [self._values],
            [self._grads],
            [self.moments["exp_avg"]],
            [self.moments["exp_avg_sq"]],
            [],
            [self._steps],
            fused=True,
            grad_scale=step.scale,
            found_inf=step.is_bad,
            amsgrad=False,
            beta1=BETAS[0],
            beta2=BETAS[1],
            lr=step.lr,
            weight_decay=0.0,
            eps=self._eps,
            maximize=False,
        )


class RmsProp:
    """Tieleman & Hinton 2012, with the operations of torch's, which cannot skip a step."""

    def __init__(self, values: Tensor, grads: Tensor, steps: Tensor, cfg: LearnerConfig) -> None:
        self._values, self._grads, self._steps, self._eps = values, grads, steps, cfg.eps
        self.moments = {"square_avg": torch.zeros_like(values)}

    def __call__(self, step: UpdateStep) -> None:
        self._steps += 1 - step.is_bad
        grads = self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)
        squares = self.moments["square_avg"]
        squares.mul_((step.is_bad * (1 - ALPHA)).add_(ALPHA))  # 1 where the step is skipped
        squares.addcmul_(grads, grads, value=1 - ALPHA)
        self._values.addcdiv_(grads, squares.sqrt().add_(self._eps), value=-step.lr)


class Sgd:
    """``u = momentum u + g + weight_decay x; x -= lr u``, as in torch."""

    def __init__(self, values: Tensor, grads: Tensor, steps: Tensor, cfg: LearnerConfig) -> None:
        self._values, self._grads, self._steps = values, grads, steps
        self._weight_decay = cfg.weight_decay
        self.moments = {"momentum_buffer": torch.zeros_like(values)}

    def __call__(self, step: UpdateStep) -> None:
        self._steps += 1 - step.is_bad
        sgd(
            [self._values],
            [self._grads],
            [self.moments["momentum_buffer"]],
            fused=True,
            grad_scale=step.scale,
            found_inf=step.is_bad,
            weight_decay=self._weight_decay,
            momentum=step.momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
