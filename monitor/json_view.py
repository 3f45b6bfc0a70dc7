"""`run.log=json`: the events and figures of a run as one JSON object per line, for programs that
collect logs. A line has

    time    UTC, as ISO 8601 with milliseconds
    level   "info", "warning" or "error"
    kind    "metrics", or the kind of the event (`monitor.run_folder.events.KINDS`)
    role    name of the process that it is about, such as "actor-3", or null
    text    one sentence
    data    an object: the numbers of an interval, or what the event holds

An event that repeats is written at most once a minute; `count` is then how often it occurred since
its last line.
Errors of a closed terminal are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from penstock.core.files import without_nan
from penstock.core.formatting import finite
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.monitor.figures import line
from penstock.monitor.run_folder.events import Alike

if TYPE_CHECKING:
    from penstock.configs.sections import StopConfig

METRICS_EVERY_S = 10.0
AGAIN_S = 60.0  # between two lines of the same event
DISTINCT = 1000  # events whose repetitions are counted
WARNINGS = ("restart", "hang", "kill", "drop", "lost", "rejected", "refused", "rollback")


class _RepeatedLine(NamedTuple):
    """Repetitions of an event: when its next line may be written, and how many came since its last
    line."""

    next_s: float
    repetitions: int


class JsonView(MetricSink):
    """Writes events at once, and figures every ten seconds."""

    def __init__(
        self,
        stream: TextIO,
        title: str,
        stop: StopConfig | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write the first line.

        Args:
            stream: where lines are written.
            title: the text of the first line.
            stop: the limits of the run; None: unknown.
            clock: seconds that never go back.
        """
        self._stream = stream
        self._stop = stop
        self._clock = clock
        self._next_metrics_s = clock()
        self._repeated: dict[Alike, _RepeatedLine] = {}  # the least recent first
        self._figures: dict[str, Any] = {}  # newest value of each
        write_line(stream, "info", "note", title)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Keep the newest figures, and write a line of them if it is due."""
        self._figures |= metrics
        if final or self._clock() < self._next_metrics_s:
            return

        self._next_metrics_s = self._clock() + METRICS_EVERY_S
        text = line(self._figures, self._stop)
        numbers = {name: n for name, n in self._figures.items() if finite(n) is not None}
        write_line(self._stream, "info", "metrics", text, data=numbers)

    def event(self, event: RunEvent) -> bool:
        """Write a line, or count the event if its last line was written less than a minute ago."""
        if not event.text:
            return False

        key = event.kind, event.role, event.incarnation, event.text
        first = _RepeatedLine(next_s=self._clock(), repetitions=0)
        next_s, earlier = self._repeated.pop(key, first)
        count = earlier + 1
        if self._clock() >= next_s:
            write_line(
                self._stream,
                level(event),
                event.kind,
                event.text,
                data=event.data,
                role=event.role,
                count=count,
            )
            next_s = self._clock() + AGAIN_S
            count = 0

        if len(self._repeated) >= DISTINCT:
            del self._repeated[next(iter(self._repeated))]
        self._repeated[key] = _RepeatedLine(next_s, count)
        return False


def write_line(
    stream: TextIO,
    level: str,
    kind: str,
    text: str,
    data: Json | None = None,
    role: str | None = None,
    count: int = 1,
) -> None:
    """Writes one line, whose fields the module describes; an error of the stream is ignored.

    Args:
        stream: where it is written.
        level: "info", "warning" or "error".
        kind: "metrics", or the kind of an event.
        text: one sentence.
        data: numbers of an interval, or what the event holds.
        role: name of the process that it is about.
        count: how often the event occurred; it is written where it is more than 1.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields: dict[str, Any] = {"time": now, "level": level, "kind": kind, "role": role, "text": text}
    fields["data"] = without_nan({**(data or {})})
    if count > 1:
        fields["count"] = count

    encoded = json.dumps(fields, default=str)
    with suppress(OSError):
        # One write, line break included, as other threads may print.
        print(f"{encoded}\n", end="", file=stream, flush=True)


def level(event: RunEvent) -> str:
    """Returns the level of an event: "info", "warning" or "error"."""
    if event.kind == "end" and event.data.get("error"):
        return "error"
    unexpected_exit = event.kind == "exit" and event.data.get("expected") is False
    return "warning" if unexpected_exit or event.kind in WARNINGS else "info"
