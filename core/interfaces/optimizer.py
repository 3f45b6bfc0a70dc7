"""How one step changes the parameters, once their gradient is summed and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.configs.sections import LearnerConfig
    from penstock.core.interfaces.codec import AdamState, GradientPart
    from penstock.core.params import Arrays


class UpdateStep(NamedTuple):
    """Arguments of one step besides the gradient; tensors are float32 ``[]``, on the device."""

    lr: float
    momentum: float
    """`learner.momentum`, or 0 where a codec applies momentum in the optimizer's place."""
    scale: Tensor
    """The divisor of the gradient: it turns a sum into a mean, and clips it."""
    is_bad: Tensor
    """1 where some gradient is not finite, and then no value may change; else 0."""
    update: int
    """Number of steps before this one, with skipped ones."""


class OptimizerContext(NamedTuple):
    """The arguments of an optimizer. Vectors are float32 ``[size]``, on one device; an optimizer
    keeps them and changes them in place."""

    values: Tensor
    """The parameters."""
    grads: Tensor
    """Their gradients, summed over samples, and possibly over learners."""
    steps: Tensor
    """Number of steps that were not skipped, float32 ``[]``."""
    parts: Sequence[GradientPart]
    """The weight or bias of each layer of each tower; together they make up the vectors without
    gaps. A parameter server has one part, as it does not know of layers
    (`OptimizerSpec.is_elementwise`)."""
    cfg: LearnerConfig
    """``learner``."""
    reduces_gradients: Callable[[int], bool] | None = None
    """Given to the form of `OptimizerSpec.frozen_variance`: whether ``grads`` in the given update
    are gradients. In the others they are the new momentum, already clipped. None: always
    gradients."""


class OptimizerFactory(Protocol):
    """The kind of object that `OptimizerSpec.entry_point` names: a class, or a function."""

    def __call__(self, context: OptimizerContext) -> Optimizer: ...


class Optimizer(Protocol):
    """Changes the parameters of one flat vector by their gradient.

    It is made once, before the first step and before any state is loaded. Then one thread calls

        step(arguments)        after each backward pass, or each reduction over learners

    and between two steps reads or writes `moments` in place: checkpoints and other learners take
    them, and a load writes them. No call waits for the device or raises for a gradient: where
    ``is_bad`` is 1, neither values, nor moments, nor the number of steps change. (A library's
    optimizer that cannot be told so on a device may let moments decay.)

    Clipping, the schedule of the rate and the norm belong to the caller, `FlatOptimizer`. The
    constructor raises UserError where a library is missing.
    """

    moments: dict[str, Tensor]
    """The state by name, float32: ``[size]`` like the values, or ``[len(parts)]``, a number for
    each part. Names and shapes stay the same, as they are those in checkpoints."""

    def step(self, step: UpdateStep) -> None:
        """Change ``values`` by ``grads / scale`` and add 1 to ``steps``; ``grads`` may be
        overwritten."""

    def convert_state(self, state: Arrays) -> Arrays:
        """``state``, of another form of this optimizer, with the names of `moments` and "steps".

        So a run goes on with another codec. A state that is already its own, or of another
        optimizer, is returned as it is.
        """


class FrozenVarianceOptimizer(Optimizer, Protocol):
    """The form of an optimizer that `OptimizerSpec.frozen_variance` names."""

    state: AdamState
    """Its momentum and variance, for the codec."""


class FrozenVarianceFactory(Protocol):
    """The kind of object that `OptimizerSpec.frozen_variance` names."""

    def __call__(self, context: OptimizerContext) -> FrozenVarianceOptimizer: ...
