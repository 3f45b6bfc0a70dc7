"""One optimizer over one flat vector.

All parameters of a network are views of one vector and their gradients views of another: one call
updates everything, one norm clips everything, and learners reduce slices of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from penstock.configs.schedules import value_at
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import AdamState, Optimizer, OptimizerContext, UpdateStep
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.registry import CODECS
from penstock.learner.optimizers.registry import make_frozen, make_optimizer
from penstock.models.flat_parameters import flatten, split

CLIP_MARGIN = 1e-6  # as in torch's clip_grad_norm_


class FlatOptimizer:
    """An optimizer over flat ``values`` and ``grads``.

    Gradients add up in ``grads`` until `zero_grad`.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], cfg: LearnerConfig) -> None:
        """Move parameters and their gradients into flat vectors.

        Args:
            named: parameters by name, float32, on one device.
            cfg: the section `learner` of the config.
        """
        self._cfg = cfg
        named_parameters = list(named)
        self.parameters = [parameter for _, parameter in named_parameters]
        self.parts = parts_of(named_parameters)
        """Position of each layer in the vectors, in the order of the parameters."""
        self.values = flatten(self.parameters)
        """The parameters, float32 ``[size]``."""
        self.grads = _make_gradients(self.values, self.parameters)
        """Sums of their gradients, float32 ``[size]``."""

        # A codec with a momentum of its own sends a velocity, or Adam's momentum, which it has
        # clipped. The codec is not known yet where it is `auto`, and has no effect on one learner.
        codec = CODECS.specs.get(cfg.reduce.codec) if cfg.most_count > 1 else None
        codec_has_momentum = codec is not None and codec.own_momentum
        self.momentum = 0.0 if codec_has_momentum else cfg.momentum
        """Momentum of sgd and lars; 0 where the codec has its own."""
        self.grad_clip = None if codec_has_momentum else cfg.grad_clip
        """Bound on the norm of the mean gradient; None for no bound here."""

        self.learners_in_step = cfg.most_count
        """Number of learners whose gradients are in a step. It is below ``cfg.most_count`` while a
        learner is dead, or its gradient is discarded (`learner.spare`)."""
        self.lr_factor = 1.0
        """Factor of the learning rate after rollbacks (`learner.nonfinite`)."""
        self.lr: float | None = None
        """Learning rate of the last step; None before the first."""
        self.updates = 0
        """Number of steps; it equals ``_steps``, but is known without a device synchronisation."""
        self._steps = torch.zeros((), device=self.values.device)
        self.adam: AdamState | None = None
        """The state of Adam for a codec that sends its momentum; None for any other codec."""

        context = OptimizerContext(
            values=self.values, grads=self.grads, steps=self._steps, parts=self.parts, cfg=cfg
        )
        self._optimizer: Optimizer
        if codec is not None and codec.reduces_gradients is not None:
            reduces_gradients = partial(codec.reduces_gradients, cfg.reduce)
            frozen = make_frozen(context._replace(reduces_gradients=reduces_gradients))
            self._optimizer = frozen
            self.adam = frozen.state
        else:
            self._optimizer = make_optimizer(context)

    @property
    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state by name, float32: laid out like ``values``, or ``[len(parts)]``."""
        return self._optimizer.moments

    def recount(self) -> None:
        """Read the number of steps from the state, as a load does.

        A step that was skipped, since its gradient was not finite, does not count.
        """
        self.updates = int(self._steps)

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self.grads.zero_()

    @torch.no_grad()
    def step(self, count: float, env_steps: int) -> Tensor:
        """Update ``values`` by the gradient ``grads / count``.

        Args:
            count: number of samples, which turns a summed gradient into a mean one.
            env_steps: agent steps so far, which determine the learning rate.

        Returns:
            The norm of the mean gradient before clipping, float32 ``[]``. It is not finite if any
            gradient is not, and then the step is skipped: ``values``, the moments and their
            number of steps stay unchanged; `updates` counts it.
        """
        norm: Tensor = torch.linalg.vector_norm(self.grads) / count
        is_bad = norm.isfinite().logical_not_().float()
        scale = torch.full_like(norm, count)
        if self.grad_clip is not None:
            scale.mul_(((norm + CLIP_MARGIN) / self.grad_clip).clamp_(min=1.0))

        self.updates += 1
        rate = learning_rate(self._cfg, env_steps, self.updates, self.learners_in_step)
        self.lr = rate * self.lr_factor
        self._optimizer.step(
            UpdateStep(
                lr=self.lr,
                momentum=self.momentum,
                scale=scale,
                is_bad=is_bad,
                update=self.updates - 1,
            )
        )
        return norm

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Returns arrays by name; on a CPU they share the optimizer's memory."""
        return {name: tensor.cpu().numpy() for name, tensor in self.tensors().items()}

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a `state_dict` of the same kind of optimizer and the same parameters.

        Raises:
            ValueError: if the names or the shapes are of another kind. Nothing is changed then.
        """
        tensors = self.tensors()
        state = self._optimizer.convert_state(dict(state))
        if state.keys() != tensors.keys():
            raise ValueError(
                f"state of {sorted(state)}, but {self._cfg.optimizer} needs {sorted(tensors)}"
            )
        for name, tensor in tensors.items():
            if state[name].shape != tuple(tensor.shape):
                raise ValueError(f"{name} of shape {state[name].shape}, not {tuple(tensor.shape)}")

        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(np.array(state[name])))
        self.updates = int(self._steps)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state by name, on the device: moments, and the number of steps."""
        return self._optimizer.moments | {"steps": self._steps}


def _make_gradients(values: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """Make the parameters' gradients views of one vector, and return that."""
    grads = torch.zeros_like(values)
    for parameter, grad in zip(parameters, split(grads, parameters), strict=True):
        parameter.grad = grad.view(parameter.shape)
    return grads


def learning_rate(cfg: LearnerConfig, env_steps: int, update: int, learners: int) -> float:
    """Returns the learning rate of an optimizer step.

    ``lr``, or the present value of its schedule, is multiplied by the factor of `lr_scaling` for
    that many learners: linear after Goyal et al. 2017 (arXiv 1706.02677), the root after Krizhevsky
    2014 (arXiv 1404.5997). Step ``lr_warmup_updates`` is the first at the full rate; the steps
    before it rise linearly, from the unscaled ``lr`` as in Goyal et al. §2.2, or from 0 where
    nothing is scaled. The rate falls linearly to its ``lr_end_fraction`` after ``lr_decay_steps``
    agent steps, and stays there.

    Args:
        cfg: the section `learner` of the config.
        env_steps: agent steps so far.
        update: number of the step, from 1.
        learners: number of learners that take the step together.
    """
    lr = value_at(cfg.lr, env_steps)
    full_rate = lr * scaling(cfg, learners)
    first_rate = lr if full_rate > lr else 0.0

    warmup = 1.0  # share of the warm-up that is over
    if cfg.lr_warmup_updates:
        warmup = min(update / cfg.lr_warmup_updates, 1.0)
    decay = 0.0  # share of the decay that is over
    if cfg.lr_decay_steps:
        decay = min(env_steps / cfg.lr_decay_steps, 1.0)

    warm_rate = first_rate + (full_rate - first_rate) * warmup
    return warm_rate * (1 - decay * (1 - cfg.lr_end_fraction))


def scaling(cfg: LearnerConfig, learners: int) -> float:
    """Returns the factor of the learning rate for that many ``learners`` instead of one."""
    return {"none": 1.0, "sqrt": sqrt(learners), "linear": float(learners)}[cfg.lr_scaling]
