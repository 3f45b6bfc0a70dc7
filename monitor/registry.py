"""The optional sinks of a run's metrics: their specs for the config.

A new sink is a file beside this one, with its spec below and the option that enables it as a field
of `SinkOptions` (`configs/run.py`).

Imports no sink, so that configs can be validated with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.run import SINKS as SINKS
from penstock.configs.run import RunConfig, SinkSpec
from penstock.configs.section import Contradiction
from penstock.configs.value_types import is_local


def _exposed(run: RunConfig) -> Iterator[Contradiction]:
    """Yields a contradiction if other hosts reach the address of metrics, and the user has not
    agreed."""
    is_exposed = not is_local(f"tcp://{run.metrics_host}:0")
    if run.metrics_port is not None and is_exposed and not run.metrics_insecure:
        yield Contradiction(
            ("run.metrics_host", "run.metrics_insecure"),
            f"run.metrics_host {run.metrics_host} can be reached from other hosts, and "
            "everyone there could read the metrics; set run.metrics_host=127.0.0.1, or "
            "run.metrics_insecure=true on a trusted network",
        )


for _spec in (
    SinkSpec("tensorboard", "penstock.monitor.tensorboard:make", "tensorboardX"),
    SinkSpec("wandb", "penstock.monitor.wandb:make", "wandb"),
    SinkSpec(
        "metrics_port",
        "penstock.monitor.prometheus:make",
        "prometheus_client",
        extra="prometheus",
        thinned=False,
        check=_exposed,
    ),
):
    SINKS.register(_spec)
