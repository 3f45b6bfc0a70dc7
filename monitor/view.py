"""How a run looks while it goes on: a live panel on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.monitor.figures import figures, line
from penstock.monitor.record import evaluation_figures

if TYPE_CHECKING:
    from penstock.configs.sections import StopConfig

LINE_EVERY_S = 3.0
REDRAWN_EVERY_S = 0.5
AGAIN_S = 60.0  # between two times that the same note is shown
NOTES = 1000  # different ones that are counted


def make_view(stream: TextIO, title: str, stop: StopConfig | None) -> MetricSink:
    """The live view on a terminal, lines elsewhere."""
    if stream.isatty():
        return LiveView(stream, title, stop)
    return LineView(stream, title, stop)


class LineView(MetricSink):
    """One line every few seconds."""

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        self._stream = stream
        self._stop = stop
        self._next_s = 0.0
        self.note(title)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.note(line(metrics, self._stop))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveView(MetricSink):
    """A panel that is drawn anew with each interval; notes scroll above it."""

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._stop = stop
        console = Console(file=stream)
        self._live = Live(self._panel({}), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self._live.update(self._panel(metrics), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _panel(self, metrics: Json) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        shown = figures(metrics, self._stop) if metrics else {"starting": ""}
        for label, value in shown.items():
            table.add_row(Text(label, style="dim"), Text(value))
        return Panel(table, title=Text(self._title), title_align="left", expand=False)


class ProgressLine(MetricSink):
    """One line that is written over, for a program or a notebook; notes stay above it.

    Where a stream is neither a terminal nor a notebook's, it stands once, at the end.
    """

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        self._stream = stream
        self._stop = stop
        self._redraws = stream.isatty() or type(stream).__module__.startswith("ipykernel.")
        self._line = self._newest = ""
        self._next_s = 0.0
        self._closed = False
        self._draw(title)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        shown = figures(metrics, self._stop)
        self._newest = ", ".join(f"{name} {shown[name]}" for name in ("time", "steps", "return"))
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REDRAWN_EVERY_S
            self._draw(self._newest)

    def note(self, text: str) -> None:
        print(f"\r{text:{len(self._line)}}" if self._redraws else text, file=self._stream)
        self._draw(self._line)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._draw(self._newest or self._line)
        print("" if self._redraws else self._line, file=self._stream, flush=True)

    def _draw(self, line: str) -> None:
        padded = f"{line:{len(self._line)}}"
        self._line = line
        if self._redraws:
            print(f"\r{padded}", end="", file=self._stream, flush=True)


class Silent(MetricSink):
    """Shows nothing."""


@dataclass
class _Note:
    """A note that was shown or waits for the view."""

    clock: str  # when it was last said, as far as it was shown
    count: int = 0  # since it was last shown
    next_s: float = 0.0  # when it may be shown again


class DeferredView(MetricSink):
    """A view that is made at the first `tick`, when the processes of the run have been started:
    what it imports must not delay them.

    It is shown the newest value of every figure. A note is shown at most once a minute, with the
    time of day. A closed terminal is no failure.
    """

    def __init__(self, make: Callable[[], MetricSink]) -> None:
        self._make = make
        self._view: MetricSink | None = None
        self._last: dict[str, Any] = {}
        self._notes: dict[str, _Note] = {}

    def tick(self) -> None:
        if self._view is None:
            with suppress(OSError):
                self._view = self._make()
                for text, note in self._notes.items():
                    self._show_note(self._view, text, note)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self._last |= metrics
        if self._view is not None:
            with suppress(OSError):
                self._view.metrics(self._last, final=final)

    def event(self, event: RunEvent) -> bool:
        if event.kind == "evaluation" and event.result is not None:
            self._last |= evaluation_figures(event.result)
        return False

    def note(self, text: str) -> None:
        """Show it at once, or count it where it was shown less than a minute ago: every actor may
        say the same."""
        if len(self._notes) >= NOTES and text not in self._notes:
            del self._notes[next(iter(self._notes))]
        note = self._notes.setdefault(text, _Note(time.strftime("%H:%M:%S")))
        note.count += 1
        if self._view is not None and time.monotonic() >= note.next_s:
            note.clock = time.strftime("%H:%M:%S")
            self._show_note(self._view, text, note)

    def _show_note(self, view: MetricSink, text: str, note: _Note) -> None:
        often = f" ({note.count} times)" if note.count > 1 and note.next_s else ""
        note.count, note.next_s = 0, time.monotonic() + AGAIN_S
        with suppress(OSError):
            view.note(f"{note.clock} {text}{often}")

    def close(self) -> None:
        if self._view is not None:
            with suppress(OSError):
                self._view.close()
