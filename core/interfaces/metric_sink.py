"""Receivers of a run's metrics and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.configs.schema import Config


Json = Mapping[str, Any]
"""A JSON object. Its values are None, bool, int, float, str, and lists and objects of these."""


@dataclass(frozen=True)
class RunEvent:
    """An event of a run."""

    kind: str
    """One of `monitor.run_folder.events.KINDS`, "evaluation", or another word that a role has
    reported."""
    text: str
    """One sentence; empty where only ``result`` matters."""
    role: str | None = None
    """The process that the event is about, such as "actor-3"."""
    incarnation: int | None = None
    """Which start of that process, counted from 0."""
    data: Json = field(default_factory=dict)
    """The fields of the event's line in `logs/events.jsonl`, beside the text."""
    reported: bool = False
    """Whether the process chose kind and text itself. Such an event is limited in rate, is shown,
    and has no ``result``."""
    result: Json | None = None
    """The complete result of some events; None for every other event.

    For an "evaluation" a line of `evaluations.jsonl`, for a "checkpoint" the fields of
    `launch.callbacks.Saved`, for the "end" `summary.json`.
    """


class SinkFactory(Protocol):
    """The type of `configs.run.SinkSpec.entry_point`: makes a sink for the run in the folder."""

    def __call__(self, config: Config, run_dir: Path) -> MetricSink: ...


class MetricSink(Protocol):
    """Receives the metrics and events of a run: a file, a view, a service, the user's callbacks.

    Derive from it and override the methods that the sink needs; the others do nothing.

    All calls come from the supervisor's thread, which watches no process during a call: return
    within milliseconds. `metrics`, `event`, `note` and `tick` are called in any order. The event
    "end" follows them, then `close`; while the other sinks close, `event` and `note` may still be
    called. A fault of the supervisor itself may end the run without "end" and `close`.

    Any method may raise OSError, whose `filename` names the file that could not be written. It is
    shown to the user, and the run continues. Any other exception ends the run as a fault of the
    supervisor.
    """

    def metrics(self, metrics: Json, *, final: bool = False) -> bool | None:
        """Take one interval of the run (`run.interval_s`), or the final figures. True ends the run.

        Args:
            metrics: figures by name, with the units of docs/metrics.md; names may be unknown. None
                is a figure that is not known, NaN or infinite. Must not be changed.
            final: the figures hold for the whole run, not for an interval. There are few such
                calls, at the end.
        """
        return None

    def event(self, event: RunEvent) -> bool:
        """Take an event. Returns whether to end the run."""
        return False

    def note(self, text: str) -> None:
        """Show a sentence to the user now.

        It is from an event that `event` has already received.
        """
        return

    def tick(self) -> None:
        """Called about every 0.1 s, for periodic work."""
        return

    def close(self) -> None:
        """Flush and release everything. A second call does nothing."""
        return
