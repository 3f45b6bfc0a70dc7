"""LARS and LAMB, for the config: what it needs of each.

Imports no torch, so that configs can be validated with it.
"""

from __future__ import annotations

from penstock.configs.learner import OPTIMIZERS, OptimizerSpec

_ROOM = "penstock.learner.extras.optimizers"
for _spec in (
    OptimizerSpec(
        "lars",
        f"{_ROOM}.layerwise:Lars",
        long_name="LARS",
        options=("momentum", "weight_decay"),
        scales_layers=True,
    ),
    OptimizerSpec(
        "lamb",
        f"{_ROOM}.layerwise:Lamb",
        long_name="LAMB",
        options=("weight_decay",),
        divides_by_variance=True,
        scales_layers=True,
        frozen_variance=f"{_ROOM}.frozen_lamb:FrozenVarianceLamb",
    ),
):
    OPTIMIZERS.register(_spec)
