"""How a run looks while it goes on: a live panel on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from penstock.monitor.figures import Metrics, figures, line

if TYPE_CHECKING:
    from penstock.configs.sections import StopConfig

LINE_EVERY_S = 3.0
REDRAWN_EVERY_S = 0.5


class View(Protocol):
    """Shows a run to a person."""

    def show(self, metrics: Metrics) -> None:
        """The newest metrics."""

    def note(self, text: str) -> None:
        """A sentence that stays to be read."""

    def close(self) -> None:
        """Nothing more will come."""


def make_view(stream: TextIO, title: str, stop: StopConfig | None) -> View:
    """The live view on a terminal, lines elsewhere."""
    if stream.isatty():
        return LiveView(stream, title, stop)
    return LineView(stream, title, stop)


class LineView:
    """One line every few seconds."""

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        self._stream = stream
        self._stop = stop
        self._next_s = 0.0
        self.note(title)

    def show(self, metrics: Metrics) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.note(line(metrics, self._stop))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class LiveView:
    """A panel that is drawn anew with each interval; notes scroll above it."""

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._stop = stop
        console = Console(file=stream)
        self._live = Live(self._panel({}), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def show(self, metrics: Metrics) -> None:
        self._live.update(self._panel(metrics), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _panel(self, metrics: Metrics) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        shown = figures(metrics, self._stop) if metrics else {"starting": ""}
        for label, value in shown.items():
            table.add_row(Text(label, style="dim"), Text(value))
        return Panel(table, title=Text(self._title), title_align="left", expand=False)


class ProgressLine:
    """One line that is written over, for a program or a notebook; notes stay above it.

    Where a stream is neither a terminal nor a notebook's, it stands once, at the end.
    """

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        self._stream = stream
        self._stop = stop
        self._redraws = stream.isatty() or type(stream).__module__.startswith("ipykernel.")
        self._line = self._newest = ""
        self._next_s = 0.0
        self._draw(title)

    def show(self, metrics: Metrics) -> None:
        shown = figures(metrics, self._stop)
        self._newest = ", ".join(f"{name} {shown[name]}" for name in ("time", "steps", "return"))
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REDRAWN_EVERY_S
            self._draw(self._newest)

    def note(self, text: str) -> None:
        print(f"\r{text:{len(self._line)}}" if self._redraws else text, file=self._stream)
        self._draw(self._line)

    def close(self) -> None:
        self._draw(self._newest or self._line)
        print("" if self._redraws else self._line, file=self._stream, flush=True)

    def _draw(self, line: str) -> None:
        padded = f"{line:{len(self._line)}}"
        self._line = line
        if self._redraws:
            print(f"\r{padded}", end="", file=self._stream, flush=True)


class Silent:
    """Shows nothing."""

    def show(self, metrics: Metrics) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass
