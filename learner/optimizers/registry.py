"""The registry of optimizers: what a config needs of each, and how a learner makes one.

A new optimizer goes into `learner/extras/optimizers/`, with its spec in the registry there. Only
one that most runs would use belongs here; the core never imports `learner.extras`.

Imports no torch, so that configs can be validated with it. Documentation and messages list
optimizers in the order of registration: those here, then those of `learner.extras.optimizers`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.configs.learner import OPTIMIZERS as OPTIMIZERS
from penstock.configs.learner import OptimizerSpec

if TYPE_CHECKING:
    from penstock.core.interfaces import (
        FrozenVarianceFactory,
        FrozenVarianceOptimizer,
        Optimizer,
        OptimizerContext,
        OptimizerFactory,
    )


def make_optimizer(context: OptimizerContext) -> Optimizer:
    """Make the optimizer named by ``context.cfg.optimizer``."""
    factory: OptimizerFactory = resolve_name(OPTIMIZERS.specs[context.cfg.optimizer].entry_point)
    return factory(context)


def make_frozen(context: OptimizerContext) -> FrozenVarianceOptimizer:
    """Make the form of that optimizer that steps beside a codec that sends its momentum."""
    name = OPTIMIZERS.specs[context.cfg.optimizer].frozen_variance
    factory: FrozenVarianceFactory = resolve_name(name)
    return factory(context)


_ROOM = "penstock.learner.optimizers.rules"
_FROZEN = "penstock.learner.extras.optimizers.frozen_adam"
for _spec in (
    OptimizerSpec(
        "adam",
        f"{_ROOM}:Adam",
        long_name="Adam",
        is_elementwise=True,
        divides_by_variance=True,
        frozen_variance=f"{_FROZEN}:FrozenVarianceAdam",
    ),
    OptimizerSpec(
        "adamw",
        f"{_ROOM}:AdamW",
        long_name="Adam with decoupled weight decay",
        options=("weight_decay",),
        divides_by_variance=True,
        frozen_variance=f"{_FROZEN}:FrozenVarianceAdamW",
    ),
    OptimizerSpec("rmsprop", f"{_ROOM}:RmsProp", is_elementwise=True, divides_by_variance=True),
    OptimizerSpec(
        "sgd",
        f"{_ROOM}:Sgd",
        options=("momentum", "weight_decay"),
        is_elementwise=True,
        leaves_momentum=True,
    ),
):
    OPTIMIZERS.register(_spec)
