"""Writes the metrics of a run for TensorBoard, in the folder `tensorboard` of the run.

Tags are grouped by `metric_groups`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.interfaces import Json, MetricSink
from penstock.monitor.metric_groups import scalars, tag

if TYPE_CHECKING:
    from penstock.configs.schema import Config


def make(config: Config, run_dir: Path) -> MetricSink:
    """The sink of `run.tensorboard`."""
    return Board(run_dir)


class Board(MetricSink):
    """Writes each interval as scalars over agent steps. The library is imported with the first
    interval, so that it does not delay the start of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Write at once, in this thread. The library's own thread would hide a full disk, and its
        full queue would block the caller. Raises OSError."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._writer = EventsWriter(str(self._folder / "events"))
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
