"""The sinks of a run's metrics: the optional ones that a config requests, and the fan-out to
all."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.run import SINKS, SinkOptions, SinkSpec
from penstock.configs.secrets import redacted
from penstock.core.files import without_nan
from penstock.core.interfaces import Json, MetricSink, RunEvent, SinkFactory
from penstock.monitor.run_folder.record import METRICS, Thinned, evaluation_figures

if TYPE_CHECKING:
    from penstock.configs.schema import Config

SHOWN = ("note", "restart", "refused", "rollback")  # kinds of events that are shown at once

ROLE_BURST = 100.0  # events that one role may report at once

ROLE_RATE = 5.0  # events that one role may report in a second
ROLE_BURST, ROLE_RATE = 100.0, 5.0  # events that one role may report at once, and in a second
KIND = re.compile("[a-z][a-z_]{0,31}")  # the form of a kind that a role may report


class _Allowance(NamedTuple):
    """How many events a role might report at a time."""

    events: float
    time_s: float


def check_libraries(config: Config) -> None:
    """Checks that the libraries of the requested sinks are installed.

    Raises:
        UserError: for one that is missing.
    """
    for spec, value in _requested(config):
        if not spec.library or _is_installed(spec.library):
            continue

        default = SinkOptions.model_fields[spec.name].default
        raise UserError(
            f"run.{spec.name}={json.dumps(value)} needs {spec.library}, which is not installed;"
            f' run `pip install "penstock[{spec.extra or spec.name}]"`, or set '
            f"run.{spec.name}={json.dumps(default)}"
        )


def _is_installed(library: str) -> bool:
    """Whether a library can be imported; a folder of that name, without code, is none."""
    module = find_spec(library)
    return module is not None and module.origin is not None


def make_sinks(config: Config, run_dir: Path) -> list[MetricSink]:
    """Makes the optional sinks that the config requests.

    Unless their spec says otherwise, they get the same intervals as `metrics.jsonl`.
    """
    sinks: list[MetricSink] = []
    for spec, _ in _requested(config):
        make: SinkFactory = resolve_name(spec.entry_point)
        sink = make(config, run_dir)
        sinks.append(Thinned(sink) if spec.thinned else sink)
    return sinks


def _requested(config: Config) -> Iterator[tuple[SinkSpec, object]]:
    """Yields the requested optional sinks, and the values of their options."""
    options = config.run.model_dump()
    for spec in SINKS.specs.values():
        value = options[spec.name]
        if value is not None and value is not False:  # 0 may be a value
            yield spec, value


class FanOut(MetricSink):
    """All sinks of a run as one. An OSError of a sink is shown as a note and does not affect
    others.

    A `note` is passed to every sink as an event of that kind. The sinks' own `note` is called for
    events that should be shown, with secrets removed.
    """

    def __init__(
        self,
        sinks: Sequence[MetricSink],
        evaluation: Json | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Forward calls to the sinks.

        Args:
            sinks: they are called in order. The first is closed last, so that it can record notes
                of the others.
            evaluation: figures of the last evaluation before a resume.
            clock: seconds that never go back.
        """
        self._sinks = sinks
        self._evaluation = evaluation or {}
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}  # by role, after its last event

    def metrics(self, metrics: Json, *, final: bool = False) -> bool:
        """Forward the metrics of an interval, with the figures of the last evaluation.

        Returns:
            Whether a sink asks for the end of the run.
        """
        metrics = without_nan({**metrics} if final else {**metrics, **self._evaluation})
        end = False
        for sink in self._sinks:
            with self._contained():
                end = sink.metrics(metrics, final=final) or end
        return end

    def event(self, event: RunEvent) -> bool:
        """Forward an event, and show it if it concerns the user.

        Returns:
            Whether a sink asks for the end of the run.
        """
        is_shown = event.reported or event.kind in SHOWN
        event = replace(event, text=redacted(event.text))
        if event.reported:
            event, is_shown = self._limited(event)
        if event.kind == "evaluation" and event.result is not None:
            self._evaluation = evaluation_figures(event.result)

        end = False
        for sink in self._sinks:
            # A failure to record a note is no note, which might fail again.
            with self._contained(notes_failure=event.kind != "note"):
                end = sink.event(event) or end

        if is_shown:
            for sink in self._sinks:
                with suppress(OSError):
                    sink.note(event.text)
        return end

    def note(self, text: str) -> None:
        self.event(RunEvent("note", text))

    def tick(self) -> None:
        for sink in self._sinks:
            with self._contained():
                sink.tick()

    def close(self) -> None:
        """Close all sinks; failures are printed to standard error, as the view is closed."""
        for sink in (*self._sinks[1:], *self._sinks[:1]):
            try:
                sink.close()
            except OSError as error:
                with suppress(OSError):
                    print(_failure(error), file=sys.stderr, flush=True)

    @contextmanager
    def _contained(self, *, notes_failure: bool = True) -> Iterator[None]:
        """Catch an OSError of a sink; it becomes a note if ``notes_failure``."""
        try:
            yield
        except OSError as error:
            if notes_failure:
                self.note(_failure(error))

    def _limited(self, event: RunEvent) -> tuple[RunEvent, bool]:
        """Limit the rate of the events that a role reports.

        Events beyond it are replaced by one that is only counted: a role can neither fill the disk
        nor displace the events of others.

        Returns:
            The event to forward, and whether its role is within its rate.
        """
        role = event.role or ""
        now_s = self._clock()
        allowance = self._allowances.get(role, _Allowance(ROLE_BURST, now_s))

        # The allowance is refilled with time.
        refilled = allowance.events + (now_s - allowance.time_s) * ROLE_RATE
        available = min(ROLE_BURST, refilled)
        is_within_rate = available >= 1.0
        remaining = available - 1.0 if is_within_rate else available
        self._allowances[role] = _Allowance(remaining, now_s)

        if not KIND.fullmatch(event.kind):
            event = replace(event, kind="note")
        if not is_within_rate:
            text = "reports too many events; the rest is counted only"
            event = replace(event, text=text, data={})
        return event, is_within_rate


def _failure(error: OSError) -> str:
    """Returns the sentence about a file that a sink cannot write."""
    return f"{error.filename or METRICS} cannot be written: {error.strerror or error}"
