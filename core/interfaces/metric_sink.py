"""Where the figures and events of a run go."""

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
    """Something that happened to a run."""

    kind: str
    """One of `monitor.events.KINDS`, "evaluation", or another word that a role has reported."""
    text: str
    """One sentence; empty where only ``result`` matters."""
    role: str | None = None
    """The process that the event is about, such as "actor-3"."""
    incarnation: int | None = None
    """Which start of that process, counted from 0."""
    data: Json = field(default_factory=dict)
    """What `logs/events.jsonl` holds beside the text."""
    reported: bool = False
    """Whether the process chose kind and text itself. Such an event is limited in rate, is shown,
    and has no ``result``."""
    result: Json | None = None
    """All of an "evaluation" (a line of `evaluations.jsonl`), of a "checkpoint" (the fields of
    `launch.callbacks.Saved`), or of the "end" (`summary.json`); None for every other event."""


class SinkFactory(Protocol):
    """What `configs.run.SinkSpec.entry_point` names: makes a sink for the run in the folder."""

    def __call__(self, config: Config, run_dir: Path) -> MetricSink: ...


class MetricSink(Protocol):
    """Receives how a run goes: a file, a view, a service, the user's callbacks.

    Derive from it and override the methods that the sink needs; the others do nothing.

    All calls come from the supervisor's thread, and no process is watched during a call: return
    within milliseconds. `metrics`, `event`, `note` and `tick` come in any order. The event "end"
    follows them, then `close`; while the other sinks close, `event` and `note` may still come. A
    fault of the supervisor itself may end the run without "end" and `close`.

    Any method may raise OSError, whose `filename` names what could not be written. The user is
    shown that, and the run goes on. Any other exception ends the run as a fault of the supervisor.
    """

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """One interval of the run (`run.interval_s`), or the figures that are known at its end.

        Args:
            metrics: figures by name, with the units of docs/metrics.md; names may be unknown. None
                is a figure that is not known, NaN or infinite. Must not be changed.
            final: the figures hold for the whole run, not for an interval. They come at most a few
                times, at the end.
        """
        return

    def event(self, event: RunEvent) -> bool:
        """Something has happened. Returns whether to end the run."""
        return False

    def note(self, text: str) -> None:
        """A sentence to show to the user now, taken from an event that `event` has already
        received."""
        return

    def tick(self) -> None:
        """About every 0.1 s: do what has become due."""
        return

    def close(self) -> None:
        """Write what is left and release everything. A second call does nothing."""
        return
