"""The optional sinks of a run's metrics: their specs for the config.

Imports no sink, so that configs can be validated with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.registry import ExtraOptions
from penstock.configs.run import SINKS as SINKS
from penstock.configs.run import SinkSpec
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Port, Switch, Text
from penstock.transport.addresses import is_local


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


class PrometheusOptions(ExtraOptions):
    """Options of `monitor.prometheus`."""

    metrics_port: Port | None = None
    """Port at which the run serves `/metrics` for Prometheus, and `/healthz` and `/readyz` for
    probes; null: none, 0: one that the system chooses, which a note names. Needs the extra
    `[prometheus]`."""
    metrics_host: Text = "127.0.0.1"
    """Address of `metrics_port`. Off this host only with `metrics_insecure`."""
    metrics_insecure: Switch = False
    """Whether `metrics_host` may be an address that other hosts reach: every program there can
    read the metrics, as there are no keys. Use it on trusted networks only."""

    def contradictions(self) -> Iterator[Contradiction]:
        """An address that other hosts reach, without consent."""
        exposed = not is_local(f"tcp://{self.metrics_host}:0")
        if self.metrics_port is not None and exposed and not self.metrics_insecure:
            yield Contradiction(
                ("run.metrics_host", "run.metrics_insecure"),
                f"run.metrics_host {self.metrics_host} can be reached from other hosts, and "
                "everyone there could read the metrics; set run.metrics_host=127.0.0.1, or "
                "run.metrics_insecure=true on a trusted network",
            )


for _spec in (
    SinkSpec(
        "tensorboard", "penstock.monitor.tensorboard:make", TensorboardOptions, "tensorboardX"
    ),
    SinkSpec("wandb", "penstock.monitor.wandb:make", WandbOptions, "wandb"),
    SinkSpec(
        "metrics_port",
        "penstock.monitor.prometheus:make",
        PrometheusOptions,
        "prometheus_client",
        extra="prometheus",
        thinned=False,
    ),
):
    SINKS.register(_spec)
