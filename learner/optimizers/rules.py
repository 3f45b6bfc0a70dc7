"""Update rules: how one step changes the parameters, once the gradient is summed and measured.

`Adam`, `RmsProp` and `Sgd` work on one flat vector with torch's functional interface: its optimizer
classes would import torch._dynamo, which takes longer than everything else at the start of a
learner. For large batches `Layerwise` has LARS and LAMB, which scale each layer's step by the norm
of its weights; they come from pytorch-optimizer (the extra "large"). Its classes, and torch's under
them, take 1.5 s to import, so they are imported only where one is chosen. All moments lie in flat
vectors; for `Layerwise` each layer gets a view of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from penstock.configs.errors import UserError
from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import AdamState, GradientPart
from penstock.device.choice import runs_behind

MOMENTS = {"lars": ("momentum_buffer",), "lamb": ("exp_avg", "exp_avg_sq")}
BETAS = (0.9, 0.999)
ALPHA = 0.99


class UpdateStep(NamedTuple):
    """Arguments of a rule besides the gradient; tensors are float32 ``[]``, on the device."""

    lr: float
    momentum: float
    scale: Tensor
    """The divisor of the gradient."""
    is_bad: Tensor
    """1 where some gradient is not finite, and then no value may change; else 0."""
    update: int
    """Number of steps before this one, with skipped ones."""


class UpdateRule(Protocol):
    """Changes ``values`` by ``grads``, and may overwrite ``grads``."""

    moments: dict[str, Tensor]
    """The rule's state, each ``[N]`` like the values; or ``[L]``, a number for each layer."""

    def __call__(self, step: UpdateStep) -> None:
        """Take one step, and count it in the ``steps`` of the constructor."""


class Adam:
    """Kingma & Ba 2015 (arXiv 1412.6980)."""

    def __init__(self, values: Tensor, grads: Tensor, steps: Tensor, cfg: LearnerConfig) -> None:
        self._values, self._grads, self._steps, self._eps = values, grads, steps, cfg.eps
        self.moments = {name: torch.zeros_like(values) for name in ("exp_avg", "exp_avg_sq")}

    def __call__(self, step: UpdateStep) -> None:
        # What torch's functional adam calls with fused=True. On a small network its checks and its
        # grouping by devices would take five times as long.
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
            eps=self._eps,
            maximize=False,
            grad_scale=step.scale,
            found_inf=step.is_bad,
        )
        self._steps -= step.is_bad


class FrozenVarianceAdam(Adam):
    """Adam of which only some steps change the variance, beside a codec that sends its momentum.

    After 1-bit Adam (Tang et al. 2021, arXiv 2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv
    2202.06009). Where ``reduces_gradients`` is true for the update, a step is Adam's. In the others
    ``grads`` are the new momentum, already clipped, and the variance corrected for its start at
    zero stays as the codec left it: ``exp_avg_sq`` is multiplied by
    ``(1 - b2^t) / (1 - b2^(t-1))``, so that the state is one of Adam at any time. The momentum is
    corrected as in Adam, which the papers leave out; their warm-ups take thousands of steps.
    """

    def __init__(
        self,
        values: Tensor,
        grads: Tensor,
        steps: Tensor,
        cfg: LearnerConfig,
        reduces_gradients: Callable[[ReduceConfig, int], bool],
    ) -> None:
        super().__init__(values, grads, steps, cfg)
        self.state = AdamState(**self.moments, steps=steps, eps=cfg.eps)
        self._reduces_gradients = partial(reduces_gradients, cfg.reduce)

    def __call__(self, step: UpdateStep) -> None:
        if self._reduces_gradients(step.update):
            super().__call__(step)
            return
        momentum, variance = self.state.exp_avg, self.state.exp_avg_sq
        before = correction(BETAS[1], self._steps)
        self._steps += 1 - step.is_bad
        variance.mul_(correction(BETAS[1], self._steps) / before)
        torch.where(step.is_bad > 0, momentum, self._grads, out=momentum)
        direction = torch.div(momentum, adam_denominator(self.state, self._grads), out=self._grads)
        direction.mul_((1 - step.is_bad) / correction(BETAS[0], self._steps))
        self._values.add_(direction, alpha=-step.lr)


def adam_denominator(state: AdamState, out: Tensor) -> Tensor:
    """``sqrt(v) + eps`` of Adam's step, with v corrected for its start at zero, in ``out``."""
    weight = correction(BETAS[1], state.steps)
    return torch.div(state.exp_avg_sq, weight, out=out).sqrt_().add_(state.eps)


def correction(beta: float, steps: Tensor) -> Tensor:
    """``1 - beta^steps``, at least that of one step: float64 ``[]``."""
    return 1 - beta ** steps.double().clamp(min=1.0)


class RmsProp:
    """Tieleman & Hinton 2012, with the operations of torch's RMSprop, which cannot skip a step."""

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
    """``u = momentum u + g + weight_decay x; x -= lr u``, as in torch.

    Where the codec applies momentum to the gradients (dgc), a step's momentum is 0 and g is a
    velocity already. The decay then has a velocity of its own, ``w = momentum w + weight_decay x``,
    and ``x -= lr (g + w)``: the sum is the same.
    """

    def __init__(self, values: Tensor, grads: Tensor, steps: Tensor, cfg: LearnerConfig) -> None:
        self._values, self._grads, self._steps = values, grads, steps
        self._weight_decay, self._momentum = cfg.weight_decay, cfg.momentum
        self.moments = {"momentum_buffer": torch.zeros_like(values)}

    def __call__(self, step: UpdateStep) -> None:
        self._steps += 1 - step.is_bad
        by_codec = step.momentum != self._momentum
        decay = self._decay(step) if by_codec and self._weight_decay else None
        sgd(
            [self._values],
            [self._grads],
            [self.moments["momentum_buffer"]],
            fused=True,
            grad_scale=step.scale,
            found_inf=step.is_bad,
            weight_decay=0.0 if by_codec else self._weight_decay,
            momentum=step.momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if decay is not None:
            self._values.addcmul_(decay, 1 - step.is_bad, value=-step.lr)

    def _decay(self, step: UpdateStep) -> Tensor:
        """The decay's velocity; unchanged where the step is skipped."""
        velocity = self.moments["momentum_buffer"]
        velocity.mul_(step.is_bad * (1 - self._momentum) + self._momentum)
        return velocity.addcmul_(self._values, 1 - step.is_bad, value=self._weight_decay)


class Layerwise:
    """LARS or LAMB, by `learner.optimizer`; x is one part of the network (`parts_of`), g its
    gradient.

    LARS (You et al. 2017, arXiv 1708.03888): ``g + weight_decay x`` is multiplied by ``0.001 |x| /
    (|g| + weight_decay |x|)`` before it enters the momentum; biases take steps of SGD, without
    decay.

    LAMB (You et al. 2020, arXiv 1904.00962): Adam's step plus ``weight_decay x`` gets the length
    ``lr min(|x|, 10)``, or stays unchanged where x is zero. Moments are not corrected for their
    start at zero, as in the paper's third version: without decay the length undoes that anyway.

    A step by a gradient that is not finite changes no value. On a GPU, which is not synchronized to
    test that, moments decay in it as by a gradient of zero.
    """

    def __init__(
        self,
        values: Tensor,
        grads: Tensor,
        steps: Tensor,
        cfg: LearnerConfig,
        parts: Sequence[GradientPart],
    ) -> None:
        self._grads, self._steps, self._kind = grads, steps, cfg.optimizer
        self.moments = {name: torch.zeros_like(values) for name in MOMENTS[cfg.optimizer]}
        layers = [nn.Parameter(_layer(values, part)) for part in parts]
        for layer, part in zip(layers, parts, strict=True):
            layer.grad = _layer(grads, part)
        self._optimizer = _make_layerwise(cfg, layers)
        for name, moment in self.moments.items():
            for layer, part in zip(layers, parts, strict=True):
                self._optimizer.state[layer][name] = _layer(moment, part)

    def __call__(self, step: UpdateStep) -> None:
        if not runs_behind(step.is_bad) and step.is_bad:
            return
        self._steps += 1 - step.is_bad
        self._grads.div_(step.scale).masked_fill_(step.is_bad > 0, 0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = step.lr * (1 - step.is_bad)  # momentum alone would change values
            if self._kind == "lars":
                group["momentum"] = step.momentum
        self._optimizer.step()


def _layer(values: Tensor, part: GradientPart) -> Tensor:
    """The view of a part: a vector if it is a bias, else a matrix, as the library tells them."""
    view = values[part.start : part.stop]
    return view if part.is_bias else view.view(part.rows, -1)


def _make_layerwise(cfg: LearnerConfig, parameters: Sequence[nn.Parameter]) -> Any:
    """Make the library's optimizer. Raises UserError where the library is missing."""
    try:
        from pytorch_optimizer import LARS, Lamb
    except ImportError as error:
        raise UserError(
            f"learner.optimizer {cfg.optimizer} needs pytorch-optimizer, which is not installed; "
            "run pip install 'penstock[large]', or set learner.optimizer=sgd or adam"
        ) from error
    if cfg.optimizer == "lars":
        return LARS(parameters, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
    # weight_decouple=False: decay is part of the measured step, as in the paper. Without
    # adam_debias it divides lr by 1 - beta1^t, and the length of a step is no longer lr |x|.
    return Lamb(
        parameters,
        betas=BETAS,
        weight_decay=cfg.weight_decay,
        weight_decouple=False,
        adam_debias=True,
        eps=cfg.eps,
    )
