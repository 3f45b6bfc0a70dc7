"""The display of a live run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.monitor.figures import BEST, figures, line
from penstock.monitor.json_lines import JsonLines
from penstock.monitor.record import evaluation_figures

if TYPE_CHECKING:
    from penstock.configs.run import Log
    from penstock.configs.sections import StopConfig

LINE_EVERY_S = 3.0
REDRAWN_EVERY_S = 0.5
AGAIN_S = 60.0  # between two displays of the same note
NOTES = 1000  # different notes that are counted
LABEL_COLUMNS = 10  # of the labels, so that the parts of a panel align
PANEL_COLUMNS = 140  # a wider terminal is not filled
SIDE_BY_SIDE_COLUMNS = 96  # of a terminal on which short figures are shown in two columns
TRAINING = ("time", "steps", "frames", "trained", "return", "evaluation", "loss")
FLOW = ("lag", "queue", "latency", "dropped", "learners")
FULL_EPISODES = 100  # that `episode_return_mean` is the mean of; with fewer it is no best return


def make_view(
    stream: TextIO,
    title: str,
    stop: StopConfig | None,
    about: str | None = None,
    log: Log = "text",
) -> MetricSink:
    """The live view on a terminal, lines elsewhere; JSON lines on both if ``log`` is "json".

    Args:
        about: environment, algorithm and preset of the run.
    """
    whole = f"{title}; {about}" if about else title
    if log == "json":
        return JsonLines(stream, whole, stop)
    return (
        LiveView(stream, title, stop, about) if stream.isatty() else LineView(stream, whole, stop)
    )


def make_deferred(make: Callable[[], MetricSink], log: Log) -> MetricSink:
    """A `DeferredView`, or at once the view of JSON lines, which receives every event."""
    return make() if log == "json" else DeferredView(make)


class LineView(MetricSink):
    """Prints one line every few seconds."""

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
    """A panel that is redrawn with each interval, as wide as the terminal; notes scroll above it.

    On a wide terminal the figures of training and those of the data flow stand side by side.
    """

    def __init__(
        self, stream: TextIO, title: str, stop: StopConfig | None, about: str | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._stop = stop
        self._about = about
        self._best: float | None = None
        self._console = Console(file=stream)
        self._live = Live(self._panel({}), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        mean = metrics.get("episode_return_mean")
        if mean is not None and (metrics.get("episodes") or 0) >= FULL_EPISODES:
            self._best = mean if self._best is None else max(self._best, mean)
        best = {} if self._best is None else {BEST: self._best}
        self._live.update(self._panel({**metrics, **best}), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _panel(self, metrics: Json) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        shown = {} if self._about is None else {"run": self._about}
        shown |= figures(metrics, self._stop) if metrics else {"starting": ""}
        width = min(self._console.width, PANEL_COLUMNS)
        parts: list[Any] = []
        if metrics and width >= SIDE_BY_SIDE_COLUMNS:
            columns = [{n: shown.pop(n) for n in names if n in shown} for names in (TRAINING, FLOW)]
            both = Table.grid(padding=(0, 2), expand=True)
            for _ in columns:
                both.add_column(ratio=1)
            both.add_row(*map(_grid, columns))
            first = {"run": shown.pop("run")} if "run" in shown else {}
            parts = [_grid(first), both] if first else [both]
        parts.append(_grid(shown))
        return Panel(Group(*parts), title=Text(self._title), title_align="left", width=width)


def _grid(shown: dict[str, str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    width = max((len(label) for label in shown), default=0)
    table.add_column(min_width=max(width, LABEL_COLUMNS))
    for label, value in shown.items():
        table.add_row(Text(label, style="dim"), Text(value))
    return table


class ProgressLine(MetricSink):
    """One line that is overwritten, for a program or a notebook; notes stay above it.

    On a stream that is neither a terminal nor a notebook's it is printed once, at the end.
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
    """A note that was shown, or will be when the view exists."""

    clock: str  # time of day of the last display
    count: int = 0  # since it was last shown
    next_s: float = 0.0  # when it may be shown again


class DeferredView(MetricSink):
    """A view that is made at the first `tick`, when the processes of the run have been started, so
    that its imports do not delay them.

    It receives the newest value of every figure. A note is shown at most once a minute, with the
    time of day. Errors of a closed terminal are ignored.
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
        """Show a note at once, or count it if it was shown less than a minute ago: all actors may
        report the same."""
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
