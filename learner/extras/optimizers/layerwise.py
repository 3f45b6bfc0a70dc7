"""LARS and LAMB, for large batches: the norm of a layer's weights scales its step.

They come from pytorch-optimizer (the extra "large"). Its classes, and torch's under them, take
1.5 s to import, so they are imported only where one is chosen. All moments lie in flat vectors;
each layer gets a view of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.core.interfaces import OptimizerContext, UpdateStep
from penstock.core.params import Arrays
from penstock.device.choice import runs_behind
from penstock.learner.extras.optimizers.frozen_lamb import convert_lamb
from penstock.learner.optimizers.rules import BETAS, BaseOptimizer


class Layerwise(BaseOptimizer):
    """One of the library's optimizers over views of the flat vectors, one for each part.

    A step by a gradient that is not finite changes no value. On a GPU, which is not synchronized to
    test that, moments decay in it as by a gradient of zero.
    """

    def __init__(self, context: OptimizerContext) -> None:
        """Make the library's optimizer. Raises UserError where the library is missing."""
        super().__init__(context)
        self._parts = context.parts

        # The library has a parameter with a gradient for each part, all views of the flat vectors.
        layers = [nn.Parameter(view, requires_grad=False) for view in self._views(self._values)]
        for layer, gradient in zip(layers, self._views(self._grads), strict=True):
            layer.grad = gradient

        # Its state is views of the moments.
        self._optimizer = self._make(_library(context.cfg.optimizer), layers)
        for kind in self.kinds:
            for layer, view in zip(layers, self._views(self.moments[kind]), strict=True):
                self._optimizer.state[layer][kind] = view

    @abstractmethod
    def _make(self, library: ModuleType, layers: Sequence[nn.Parameter]) -> Any:
        """Make the library's optimizer of ``layers``."""

    def step(self, step: UpdateStep) -> None:
        """Take the library's step by the mean gradient, unless the step is skipped."""
        if not runs_behind(step.is_bad) and step.is_bad:
            return
        self._steps += 1 - step.is_bad
        self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = step.lr * (1 - step.is_bad)  # momentum alone would change values
        self._optimizer.step()

    def _views(self, vector: Tensor) -> list[Tensor]:
        """Returns the parts of a flat vector: matrices, and vectors for biases."""
        views = []
        for part in self._parts:
            values = vector[part.start : part.stop]
            views.append(values if part.is_bias else values.view(part.rows, -1))
        return views


class Lars(Layerwise):
    """You et al. 2017 (arXiv 1708.03888); x is the weight of one layer, g its gradient.

    ``g + weight_decay x`` is multiplied by ``0.001 |x| / (|g| + weight_decay |x|)`` before it
    enters the momentum. Biases take steps of SGD, without decay.
    """

    kinds = ("momentum_buffer",)

    def _make(self, library: ModuleType, layers: Sequence[nn.Parameter]) -> Any:
        return library.LARS(
            layers, momentum=self._cfg.momentum, weight_decay=self._cfg.weight_decay
        )


class Lamb(Layerwise):
    """You et al. 2020 (arXiv 1904.00962); x is the weight or bias of one layer.

    Adam's step plus ``weight_decay x`` gets the length ``lr min(|x|, 10)``, or stays unchanged
    where x is zero. Moments are not corrected for their start at zero, as in the paper's third
    version: without decay the length undoes that anyway.
    """

    kinds = ("exp_avg", "exp_avg_sq")

    def _make(self, library: ModuleType, layers: Sequence[nn.Parameter]) -> Any:
        # With weight_decouple=False decay is part of the measured step, as in the paper. Without
        # adam_debias the library divides lr by 1 - beta1^t, and the length of a step is no longer
        # lr |x|.
        return library.Lamb(
            layers,
            betas=BETAS,
            weight_decay=self._cfg.weight_decay,
            weight_decouple=False,
            adam_debias=True,
            eps=self._cfg.eps,
        )

    def convert_state(self, state: Arrays) -> Arrays:
        return convert_lamb(state, {*self.moments, "steps"}, self._parts)


def _library(optimizer: str) -> ModuleType:
    """Import the library. Raises UserError where it is missing."""
    try:
        return import_module("pytorch_optimizer")
    except ImportError as error:
        raise UserError(
            f"learner.optimizer {optimizer} needs pytorch-optimizer, which is not installed; run "
            "pip install 'penstock[large]', or set learner.optimizer=sgd or adam"
        ) from error
