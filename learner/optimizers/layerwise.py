"""LARS and LAMB: each layer's step is as long as its weights say, so that large batches train.

The rules are those of pytorch-optimizer (the extra "large"); its classes, and torch's under them,
take 1.5 s to import, so this module is imported only where one is chosen. What they remember lies
in flat vectors, of which each parameter gets its view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.rules import BETAS, UpdateStep

MOMENTS = {"lars": ("momentum_buffer",), "lamb": ("exp_avg", "exp_avg_sq")}


class Layerwise:
    """The rule that `learner.optimizer` names; x is one parameter, g its gradient.

    LARS (You et al. 2017, arXiv 1708.03888): ``g + weight_decay x`` is multiplied by
    ``0.001 |x| / (|g| + weight_decay |x|)`` before it enters the momentum; parameters with fewer
    than two dimensions take steps of SGD, without decay.

    LAMB (You et al. 2020, arXiv 1904.00962): Adam's step plus ``weight_decay x`` gets the length
    ``lr min(|x|, 10)``, or stays as it is where x is zero. Moments are not corrected for their
    start at zero, as in the paper's third version: without decay the length undoes that anyway.

    A step by a gradient that is not finite changes no value; on a GPU, which is not asked whether
    there is one, moments decay in it as by a gradient of zero.
    """

    def __init__(
        self,
        values: Tensor,
        grads: Tensor,
        steps: Tensor,
        cfg: LearnerConfig,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._grads, self._steps, self._kind = grads, steps, cfg.optimizer
        self.moments = {name: torch.zeros_like(values) for name in MOMENTS[cfg.optimizer]}
        self._optimizer = _make(cfg, parameters)
        for name, moment in self.moments.items():
            views = moment.split([parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                self._optimizer.state[parameter][name] = view.view(parameter.shape)

    def __call__(self, step: UpdateStep) -> None:
        if not step.is_bad.is_cuda and step.is_bad:
            return
        self._steps += 1 - step.is_bad
        self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = step.lr * (1 - step.is_bad)  # momentum alone would change values
            if self._kind == "lars":
                group["momentum"] = step.momentum
        self._optimizer.step()


def _make(cfg: LearnerConfig, parameters: Sequence[nn.Parameter]) -> Any:
    """The library's optimizer; UserError where the library is missing."""
    try:
        from pytorch_optimizer import LARS, Lamb
    except ImportError as error:
        raise UserError(
            f"learner.optimizer {cfg.optimizer} needs pytorch-optimizer, which is not installed; "
            "run pip install 'penstock[large]', or set learner.optimizer=sgd or adam"
        ) from error
    if cfg.optimizer == "lars":
        return LARS(parameters, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
    # weight_decouple=False: decay is part of the step that is measured, as in the paper. Without
    # adam_debias it divides lr by 1 - beta1^t, and the length of a step is no longer lr |x|.
    return Lamb(
        parameters,
        betas=BETAS,
        weight_decay=cfg.weight_decay,
        weight_decouple=False,
        adam_debias=True,
        eps=cfg.eps,
    )
