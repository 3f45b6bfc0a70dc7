"""Where metrics go besides `metrics.jsonl`: one small interface, and who of them a run has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.configs.schema import Config


class MetricSink(Protocol):
    """Takes the metrics of a run. Nothing that happens to it ends the run, or holds it up."""

    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """One interval. Raises OSError for what the user should hear, told once."""

    def close(self) -> None:
        """Nothing more will come."""


def check_libraries(config: Config) -> None:
    """Raise UserError where one is missing that the config asks for."""
    if config.run.tensorboard:
        from penstock.monitor import tensorboard

        tensorboard.require()
    if config.run.wandb is not None:
        from penstock.monitor import wandb

        wandb.require(config.run.wandb)


def writers(config: Config, run_dir: Path) -> list[MetricSink]:
    """Those that the config asks for, whose libraries are there."""
    made: list[MetricSink] = []
    if config.run.tensorboard:
        from penstock.monitor.tensorboard import Board

        made.append(Board(run_dir))
    run = config.run
    if run.wandb is not None:
        from penstock.monitor.wandb import WandbWriter

        made.append(WandbWriter(run_dir, run.wandb, config.model_dump(mode="json"), run.grace_s))
    return made
