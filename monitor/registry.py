"""The optional sinks of a run's metrics: what a config knows of each.

Imports no sink, so that configs can be validated with it.
"""

from __future__ import annotations

from penstock.configs.registry import ExtraOptions
from penstock.configs.run import SINKS as SINKS
from penstock.configs.run import SinkSpec
from penstock.configs.value_types import Text


class TensorboardOptions(ExtraOptions):
    """Of `monitor.tensorboard`."""

    tensorboard: bool = False
    """Write the metrics to the folder `tensorboard`, too; needs the extra `[tensorboard]`."""


class WandbOptions(ExtraOptions):
    """Of `monitor.wandb`."""

    wandb: Text | None = None
    """Project of Weights & Biases that gets the metrics, too; needs the extra `[wandb]`."""


for _spec in (
    SinkSpec(
        "tensorboard", "penstock.monitor.tensorboard:make", TensorboardOptions, "tensorboardX"
    ),
    SinkSpec("wandb", "penstock.monitor.wandb:make", WandbOptions, "wandb"),
):
    SINKS.register(_spec)
