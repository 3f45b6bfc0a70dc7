"""The display of a live run: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from penstock.configs.errors import printable
from penstock.core.formatting import count, finite
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.monitor.figures import BEST, RECENT, evaluated, figures, line
from penstock.monitor.json_view import JsonView
from penstock.monitor.run_folder.record import evaluation_figures
from penstock.monitor.terminal_charts import History, bar, sparkline

if TYPE_CHECKING:
    from penstock.configs.run import Log
    from penstock.configs.sections import StopConfig

LINE_EVERY_S = 10.0
REDRAWN_EVERY_S = 1.0
AGAIN_S = 60.0  # between two displays of the same note
NOTES = 1000  # different notes that are counted
EVENTS = 4  # events that a panel lists, the last ones

FEW_EVENTS = 2  # events that it lists on a terminal of fewer rows than `HIGH_ROWS`
HIGH_ROWS = 30
NOT_LISTED = ("note", "end")  # a note is above the panel, and the end below it
LABEL_COLUMNS = 10  # least width of the labels, so that the parts of a panel align
GAP = 2  # columns between a label and its value

FRAME_COLUMNS = 4  # the frame and its margins
# From these widths inside a panel on, figures are in two, or in three groups side by side.
SIDE_BY_SIDE_COLUMNS = (92, 156)
TRAINING = ("time", "steps", "frames", "trained", "return", "evaluation", "loss")
FLOW = ("lag", "queue", "latency", "dropped", "learners")
PART_STYLES = {"compute": "green", "wait_data": "red"}  # styles of the bar's parts


def make_view(
    stream: TextIO,
    title: str,
    stop: StopConfig | None,
    about: str | None = None,
    log: Log = "text",
) -> MetricSink:
    """Makes the live view on a terminal, lines elsewhere; JSON lines on both if ``log`` is "json".

    Args:
        stream: where it is shown.
        title: the first line, or the title of the panel.
        stop: the limits of the run; None: unknown.
        about: environment, algorithm and preset of the run.
        log: `run.log`.
    """
    # A character that the stream lacks must not end a run.
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")

    first_line = f"{title}; {about}" if about else title
    if log == "json":
        return JsonView(stream, first_line, stop)
    if stream.isatty():
        return LiveView(stream, title, stop, about)
    return LineView(stream, first_line, stop)


def make_deferred(make: Callable[[], MetricSink], log: Log) -> MetricSink:
    """Makes a `DeferredView`, or at once the view of JSON lines, which receives every event."""
    return make() if log == "json" else DeferredView(make)


class LineView(MetricSink):
    """Prints a line every ten seconds."""

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        self._stream = stream
        self._stop = stop
        self._next_s = 0.0
        self.note(title)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if not final and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.note(line(metrics, self._stop))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveView(MetricSink):
    """A panel as wide as the terminal, redrawn at most once a second; notes scroll above it.

    It has the return of the whole run as a sparkline, the learner's time as a bar, the figures in
    one to three columns, and the last events.
    """

    def __init__(
        self,
        stream: TextIO,
        title: str,
        stop: StopConfig | None,
        about: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw the panel without figures.

        Args:
            stream: the terminal.
            title: the title of the panel.
            stop: the limits of the run; None: unknown.
            about: environment, algorithm and preset of the run.
            clock: seconds that never go back.
        """
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._stop = stop
        self._about = about
        self._clock = clock
        self._best: float | None = None  # the best mean return in training
        self._returns = History()
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._newest: Json = {}  # metrics of the last interval
        self._due = False  # whether something has changed since it was drawn
        self._next_s = clock() + REDRAWN_EVERY_S
        self._console = Console(file=stream)
        self._live = Live(self._panel(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        mean = finite(metrics.get("episode_return_mean"))
        if mean is not None and not final:
            self._returns.add(mean)
            # The mean of fewer episodes is no best return.
            if (metrics.get("episodes") or 0) >= RECENT:
                self._best = mean if self._best is None else max(self._best, mean)
        self._newest = metrics
        self._due = True
        self._draw()

    def event(self, event: RunEvent) -> bool:
        """Add an event to those that are listed, as a line with the time of day."""
        text = event.text
        if event.role and not text.startswith(event.role):
            text = f"{event.role} {text}"
        if event.kind == "evaluation" and event.result is not None and not event.reported:
            text = f"evaluation: {evaluated(evaluation_figures(event.result))}"
        elif event.kind == "checkpoint" and not event.reported:
            text = f"checkpoint at {count(event.data.get('trained_steps'))} steps"

        if text and event.kind not in NOT_LISTED:
            one_line = printable(" ".join(text.split()))  # a role may have chosen the text
            self._events.append(f"{time.strftime('%H:%M:%S')} {one_line}")
            self._due = True
        return False

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def tick(self) -> None:
        self._draw()

    def close(self) -> None:
        """Draw what has changed, at once, and leave the panel on the terminal."""
        if self._due:
            self._next_s = 0.0
            self._draw()
        self._live.stop()

    def _draw(self) -> None:
        """Draw what has changed, unless that was done less than a second ago."""
        now_s = self._clock()
        if self._due and now_s >= self._next_s:
            self._due = False
            self._next_s = now_s + REDRAWN_EVERY_S
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Any:
        """Returns the panel: what the run is, its charts and figures, and the last events."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        width = self._console.width
        inner_width = width - FRAME_COLUMNS
        parts: list[Any] = []
        if self._about is not None:
            parts.append(_grid([("run", self._about)]))

        if self._newest:
            best = {} if self._best is None else {BEST: self._best}
            shown = figures({**self._newest, **best}, self._stop)
            # The charts take their figures out of `shown`.
            charts = self._take_charts(shown, inner_width - LABEL_COLUMNS - GAP)
            parts.append(_grid(charts))
            parts += _side_by_side(shown, inner_width)
        else:
            parts.append(_grid([("starting", "")]))

        listed = EVENTS if self._console.height >= HIGH_ROWS else FEW_EVENTS
        if events := [*self._events][-listed:]:
            overflow: Any = "crop" if self._console.options.ascii_only else "ellipsis"
            lines = Text("\n".join(events), overflow=overflow, no_wrap=True)
            parts.append(_grid([("events", lines)]))
        return Panel(Group(*parts), title=Text(self._title), title_align="left", width=width)

    def _take_charts(self, shown: dict[str, str], columns: int) -> list[tuple[str, Any]]:
        """Takes the return and the learner's time out of the figures, and adds their charts.

        Args:
            shown: figures by their labels; two are removed.
            columns: width of a chart.

        Returns:
            Labels and values of the rows: the return below its sparkline, once it has two points,
            and the learner's time below its bar, once it is known.
        """
        from rich.text import Text

        ascii_only = self._console.options.ascii_only
        rows: list[tuple[str, Any]] = []
        points = self._returns.points
        return_text = shown.pop("return")
        if len(points) > 1:
            curve = Text(sparkline(points, columns, ascii_only), style="green")
            rows += [("return", curve), ("", return_text)]
        else:
            rows.append(("return", return_text))

        ledger = self._newest.get("ledger") or {}
        names = dict.fromkeys(("compute", "wait_data", *ledger))
        shares = {name: finite(ledger.get(name)) or 0.0 for name in names}
        learner_text = shown.pop("learner")
        if parts := bar(shares, columns, ascii_only):
            styled = ((characters, PART_STYLES.get(name, "")) for name, characters in parts)
            rows += [("learner", Text.assemble(*styled)), ("", learner_text)]
        else:
            rows.append(("learner", learner_text))
        return rows


def _side_by_side(shown: dict[str, str], columns: int) -> list[Any]:
    """Arranges figures in groups side by side, as many as fit; the rest below each other.

    Args:
        shown: texts by their labels; those of the groups are removed.
        columns: width in all.

    Returns:
        One or two tables.
    """
    from rich.table import Table

    training = {name: shown.pop(name) for name in TRAINING if name in shown}
    flow = {name: shown.pop(name) for name in FLOW if name in shown}
    two_columns, three_columns = SIDE_BY_SIDE_COLUMNS
    if columns < two_columns:
        return [_grid({**training, **flow, **shown}.items())]

    groups = [training, flow]
    if columns >= three_columns:
        groups.append(shown)
    groups = [group for group in groups if group]
    table = Table.grid(padding=(0, GAP), expand=True)
    for _ in groups:
        table.add_column(ratio=1)
    table.add_row(*(_grid(group.items()) for group in groups))

    if columns >= three_columns or not shown:
        return [table]
    return [table, _grid(shown.items())]


def _grid(rows: Iterable[tuple[str, Any]]) -> Any:
    """Returns a table of labels and values, one below the other.

    Args:
        rows: a label, and a value that is a text or a `rich.text.Text`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, GAP))
    rows = [*rows]
    width = max((len(label) for label, _ in rows), default=0)
    table.add_column(min_width=max(width, LABEL_COLUMNS))
    for label, value in rows:
        table.add_row(Text(label, style="dim"), Text(value) if isinstance(value, str) else value)
    return table


class ProgressLine(MetricSink):
    """One line that is overwritten, for a program or a notebook; notes stay above it.

    On a stream that is neither a terminal nor a notebook's it is printed once, at the end.
    """

    def __init__(self, stream: TextIO, title: str, stop: StopConfig | None) -> None:
        """Show the title.

        Args:
            stream: where the line is shown.
            title: the line before the first metrics.
            stop: the limits of the run; None: unknown.
        """
        self._stream = stream
        self._stop = stop
        self._redraws = stream.isatty() or type(stream).__module__.startswith("ipykernel.")
        self._line = ""  # the line that is drawn
        self._newest = ""  # the line of the last metrics, drawn or not
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
        """Draw a line in place of the last one, of which spaces cover the rest."""
        padded = f"{line:{len(self._line)}}"
        self._line = line
        if self._redraws:
            print(f"\r{padded}", end="", file=self._stream, flush=True)


class Silent(MetricSink):
    """Shows nothing."""


@dataclass
class _Note:
    """A note that was shown, or will be when the view exists."""

    clock: str
    """Time of day of the last display, or of the note if it was not shown yet."""
    count: int = 0
    """How often it came since it was last shown."""
    next_s: float = 0.0
    """When it may be shown again; 0: it was not shown yet."""


class DeferredView(MetricSink):
    """A view that is made at the first `tick`, when the processes of the run have been started, so
    that its imports do not delay them.

    It receives the newest value of every figure. A note is shown at most once a minute, with the
    time of day. Errors of a closed terminal are ignored.
    """

    def __init__(self, make: Callable[[], MetricSink]) -> None:
        """``make``: makes the view."""
        self._make = make
        self._view: MetricSink | None = None
        self._last: dict[str, Any] = {}  # newest value of each figure
        self._notes: dict[str, _Note] = {}  # by text
        self._early: deque[RunEvent] = deque(maxlen=EVENTS)  # events before the view exists

    def tick(self) -> None:
        """Make the view if it does not exist, with what came before; then let it draw."""
        with suppress(OSError):
            if self._view is None:
                self._view = self._make()
                for event in self._early:
                    self._view.event(event)
                for text, note in self._notes.items():
                    self._show_note(self._view, text, note)
            self._view.tick()

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self._last |= metrics
        if self._view is not None:
            with suppress(OSError):
                self._view.metrics(self._last, final=final)

    def event(self, event: RunEvent) -> bool:
        if self._view is None:
            self._early.append(event)
        else:
            with suppress(OSError):
                self._view.event(event)
        return False

    def note(self, text: str) -> None:
        """Show a note at once, or count it if it was shown less than a minute ago: all actors may
        report the same."""
        if len(self._notes) >= NOTES and text not in self._notes:
            oldest = next(iter(self._notes))
            del self._notes[oldest]

        note = self._notes.setdefault(text, _Note(time.strftime("%H:%M:%S")))
        note.count += 1
        if self._view is not None and time.monotonic() >= note.next_s:
            note.clock = time.strftime("%H:%M:%S")
            self._show_note(self._view, text, note)

    def _show_note(self, view: MetricSink, text: str, note: _Note) -> None:
        """Show a note, and how often it came since it was last shown."""
        is_repeated = note.count > 1 and note.next_s
        repetitions = f" ({note.count} times)" if is_repeated else ""
        note.count = 0
        note.next_s = time.monotonic() + AGAIN_S
        with suppress(OSError):
            view.note(f"{note.clock} {text}{repetitions}")

    def close(self) -> None:
        if self._view is not None:
            with suppress(OSError):
                self._view.close()
