"""The optional sinks of a run's metrics: their specs for the config.

Imports no sink, so that configs can be validated with it.
"""

from __future__ import annotations

from penstock.configs.registry import ExtraOptions
from penstock.configs.run import SINKS as SINKS
from penstock.configs.run import SinkSpec
from penstock.configs.value_types import Text


class TensorboardOptions(ExtraOptions):
    """Options of `monitor.tensorboard`."""

    tensorboard: bool = False
    """Whether metrics are also written for TensorBoard, to the folder `tensorboard` of the run;
    needs the extra `[tensorboard]`."""


class WandbOptions(ExtraOptions):
    """Options of `monitor.wandb`."""

    wandb: Text | None = None
    """Project of Weights & Biases to which metrics are also sent; null: none. Needs the extra
    `[wandb]`."""


for _spec in (
    SinkSpec(
        "tensorboard", "penstock.monitor.tensorboard:make", TensorboardOptions, "tensorboardX"
    ),
    SinkSpec("wandb", "penstock.monitor.wandb:make", WandbOptions, "wandb"),
):
    SINKS.register(_spec)
