"""Writes the metrics of a run for TensorBoard, in the folder `tensorboard` of the run.

Tags are in the sections of `metric_groups`. The options of the config are the hyper-parameters of
TensorBoard's HPARAMS page, which compares the runs of a folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.interfaces import Json, MetricSink
from penstock.monitor.metric_groups import scalars, tag

if TYPE_CHECKING:
    from penstock.configs.schema import Config

COMPARED = tuple(
    map(tag, ("episode_return_mean", "eval_return_mean", "steps_per_s", "ledger/compute"))
)
"""Figures beside the hyper-parameters."""


def make(config: Config, run_dir: Path) -> MetricSink:
    """The sink of `run.tensorboard`."""
    return Board(run_dir, config.model_dump(mode="json"))


class Board(MetricSink):
    """Writes each interval as scalars over agent steps. The library is imported with the first
    interval, so that it does not delay the start of a run."""

    def __init__(self, run_dir: Path, config: Json) -> None:
        self._folder = run_dir / "tensorboard"
        self._config = config
        self._writer: Any = None

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Write at once, in this thread. The library's own thread would hide a full disk, and its
        full queue would block the caller. Raises OSError."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import hparams

        if self._writer is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
            for summary in hparams(dict(options(self._config)), COMPARED)[:2]:  # not the end
                self._writer.write_event(Event(wall_time=time.time(), summary=summary))
        values = [Summary.Value(tag=tag(n), simple_value=value) for n, value in scalars(metrics)]
        step = metrics.get("env_steps", 0)
        self._writer.write_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()


def options(config: Json, prefix: str = "") -> Iterator[tuple[str, str | bool | float]]:
    """The options of a config by their dotted names, without null. Lists are text."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from options(value, f"{prefix}{name}.")
        elif value is not None:
            plain = isinstance(value, str | bool | int | float)
            yield f"{prefix}{name}", value if plain else json.dumps(value)
