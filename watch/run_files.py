"""One run as the page shows it: what its files hold, read as they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.configs.yaml_text import parse
from penstock.core.files import CONFIG_NBYTES, LINES_NBYTES
from penstock.core.formatting import finite
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor import runs
from penstock.monitor.curves import EVALUATED, flat, is_evaluation, is_return
from penstock.monitor.events import EVENTS
from penstock.monitor.record import EVALUATIONS, METRICS, SUMMARY, evaluation_figures, objects
from penstock.watch.columns import MetricColumns
from penstock.watch.files import (
    JsonLines,
    Row,
    open_in,
    read_json,
    read_sample,
    read_tail,
    read_text,
    stamp,
)
from penstock.watch.headline import is_silent
from penstock.watch.series import Points, full_intervals, known

TAIL_NBYTES = 1 << 16
SAMPLE_NBYTES = 4 << 20  # of a longer file of metrics a sample is read before all of it
LISTED = ("env.id", "algo.name", "run.seed", "run.interval_s")
STATE_EVERY_S = 4.0  # a live supervisor is asked at most so often whether it lives
MOST_EVENTS = 20_000
MOST_EVALUATIONS = 20_000
TAILS_NBYTES = 32 << 20  # of events and of evaluations; those of `MOST_EVENTS` take some megabytes
ROTATED = f"{EVENTS}.1"
MARKS = ("restart", "hang", "kill", "drop", "lost", "rejected", "rollback", "checkpoint", "hosts")


class WatchedRun:
    """The files of a run. Safe to use from several threads."""

    def __init__(self, folder: Path, seen_as: tuple[int, int] = (0, 0)) -> None:
        """``seen_as``: the device and inode of the folder, which change if it is replaced."""
        self.folder = folder
        self.seen_as = seen_as
        self.lock = threading.RLock()
        """Held while files are read; take it to read several columns of the same lines."""
        self._config: dict[str, Any] = {}
        self._stamps: dict[str, object] = {}
        self._row: Row = {}
        self._state = ""
        self._state_until_s = float("-inf")
        self.unload()

    def unload(self) -> None:
        """Forget what was read, to free memory; the next `read` reads it again."""
        with self.lock:
            self._metrics = JsonLines(self.folder, METRICS, most=LINES_NBYTES)
            self._evaluations = JsonLines(self.folder, EVALUATIONS, most=TAILS_NBYTES)
            self._logs = [self._log(name) for name in (ROTATED, EVENTS)]
            self.columns = MetricColumns()
            """The metrics that are shown: until all are read for the first time, of a sample."""
            self.last: Row = {}
            """The last line of metrics."""
            self._whole, self._newest = self.columns, self.last  # of what was read, shown or not
            self.evaluations: list[Row] = []
            self.events: list[Row] = []
            self._full: tuple[int, NDArray[np.bool_]] | None = None

    def read(self, budget_s: float) -> float:
        """Read what is new, for about ``budget_s`` seconds. Returns the share of the metrics that
        has been read: below 1 there is more. The first call on a long file returns with a sample,
        without waiting for more."""
        ends_s = time.monotonic() + budget_s
        with self.lock:
            for lines in self._evaluations.chunks():
                if self._evaluations.replaced:
                    self.evaluations.clear()
                self.evaluations += lines
                del self.evaluations[:-MOST_EVALUATIONS]
            if self._logs[1].follow("logs", ROTATED):
                self._logs = [self._logs[1], self._log(EVENTS)]
            for log in self._logs:
                for lines in log.chunks():
                    self.events += lines
                    del self.events[:-MOST_EVENTS]
            if not self._metrics.offset and self.columns is self._whole and self._show_sample():
                return 0.0
            for lines in self._metrics.chunks():
                if self._metrics.replaced:
                    self.columns = self._whole = MetricColumns()
                    self._newest = {}
                self._whole.extend(lines)
                self._newest = lines[-1] if lines else self._newest
                if time.monotonic() > ends_s:
                    break
            if self._metrics.offset < self._metrics.nbytes:
                return self._metrics.offset / self._metrics.nbytes
            if self.columns is not self._whole:
                self.columns, self._full = self._whole, None
            self.last = self._newest
            return 1.0

    def _log(self, name: str) -> JsonLines:
        return JsonLines(self.folder, "logs", name, most=TAILS_NBYTES)

    def _show_sample(self) -> bool:
        """Show lines at even distances of a long file; returns whether it is one."""
        sample: list[Row] = []
        if stamp(self.folder, METRICS)[1] > SAMPLE_NBYTES:
            sample = read_sample(self.folder, METRICS, nbytes=SAMPLE_NBYTES)
        if sample:
            self.columns, self.last = MetricColumns(), sample[-1]
            self.columns.extend(sample)
        return bool(sample)

    def curve(self, x: str, y: str) -> Points:
        """A metric by rising ``x``, which is "env_steps" or "time_s". A figure of an evaluation is
        at the steps, or the time, of the evaluated weights."""
        with self.lock:
            if is_evaluation(y):
                return self._evaluated(EVALUATED[x], y)
            columns = self.columns
            xs, ys = columns.column(x), columns.column(y)
            if not is_return(y):
                if self._full is None or self._full[0] != columns.lines:
                    full = full_intervals(columns.column("interval_s"))
                    self._full = columns.lines, full
                xs, ys = xs[self._full[1]], ys[self._full[1]]
            return known(xs, ys)

    def _evaluated(self, x: str, y: str) -> Points:
        points = []
        for line in self.evaluations:
            try:
                at, value = finite(line.get(x)), finite(evaluation_figures(line).get(y))
            except (LookupError, TypeError):  # of a line that was damaged
                continue
            if at is not None and value is not None:
                points.append((at, value))
        xs, ys = np.array(points, np.float64).reshape(-1, 2).T
        return known(xs, ys)

    def marks(self, x: str) -> list[Row]:
        """The events that a curve shows, each at its place on the axis ``x``."""
        with self.lock:
            times, steps = known(self.columns.column("time_s"), self.columns.column("env_steps"))
            found = []
            for event, time_s in zip(self.events, self._times(), strict=True):
                if event.get("kind") not in MARKS or time_s is None or not len(times):
                    continue
                at = time_s if x == "time_s" else float(np.interp(time_s, times, steps))
                found.append({"x": at, **shown_event(event)})
            return found

    def _times(self) -> list[float | None]:
        """`time_s` of each event, as near as it is known: events have the time since their process
        began the run, and metrics that since the first unroll. The two are aligned by checkpoints,
        whose steps stand in both; without one by the time of the last line of metrics, or by the
        moment when the first learner was ready."""
        trained, times = known(self.columns.column("trained_steps"), self.columns.column("time_s"))
        written_s = stamp(self.folder, METRICS)[2] * 1e-9
        found: list[float | None] = []
        starts = [0]
        for i, event in enumerate(self.events[1:], 1):
            if _uptime(event) < _uptime(self.events[i - 1]) - 1.0:  # another process, by a resume
                starts.append(i)
        for number, first in enumerate(starts):
            after = starts[number + 1] if number + 1 < len(starts) else len(self.events)
            session = self.events[first:after]
            offsets = []
            for event in session:
                data = event.get("data")
                at = finite(data.get("trained_steps")) if isinstance(data, Mapping) else None
                if event.get("kind") == "checkpoint" and at is not None and len(times):
                    offsets.append(float(np.interp(at, trained, times)) - _uptime(event))
            if not offsets and after == len(self.events) and len(times):
                wall = [finite(event.get("time")) for event in session[-1:]]
                offsets += [
                    float(times[-1]) - (written_s - at) - _uptime(session[-1])
                    for at in wall
                    if at is not None
                ]
            if not offsets and not first:
                offsets += [-_uptime(e) for e in session if e.get("kind") == "ready"][:1]
            for event in session:
                found.append(max(0.0, _uptime(event) + offsets[-1]) if offsets else None)
        return found

    def _reached_at_s(self) -> float | None:
        """Seconds of training until the mean return reached `stop.return`; None if it has not."""
        found = {**self.last, **self.summary}
        at = finite(found.get("return_reached_at_s"))
        return finite(found.get("solved_at_s")) if at is None else at

    def target(self, x: str) -> Row | None:
        """`stop.return`, and the place on the axis ``x`` where it was reached, or null."""
        value = self.options.get("stop.return")
        if finite(value) is None:
            return None
        with self.lock:
            at = self._reached_at_s()
            if x != "time_s" and at is not None:
                times, steps = known(self.columns.column("time_s"), self.columns.column(x))
                at = float(np.interp(at, times, steps)) if len(times) else None
        return {"value": finite(value), "reached": at}

    def ends(self) -> dict[str, str]:
        """By process, why it does not run at present, as far as the events say."""
        found: dict[str, str] = {}
        restarts: dict[str, object] = {}
        with self.lock:
            events = [*self.events]
        for event in events:
            role, kind, data = event.get("role"), event.get("kind"), event.get("data")
            about = data if isinstance(data, Mapping) else {}
            if kind == "hosts":
                for key, text in (("lost", "waits for a host"), ("found", "starts")):
                    names = about.get(key)
                    for name in names if isinstance(names, list) else ():
                        found[str(name)] = text
            elif not isinstance(role, str):
                continue
            elif kind == "restart":
                found[role], restarts[role] = "died, is restarted", event.get("incarnation")
            elif kind == "exit" and restarts.get(role, self) != event.get("incarnation"):
                found[role] = "ended" if about.get("expected") else "died"
        return found

    def death(self) -> Row | None:
        """Of a run that died without an end: the last sign of it, as an event; None of others."""
        if self.state != "died" or self.summary:
            return None
        text = "died without ending the run; the time is that of its last report"
        return {"time": self.seen_s, "kind": "died", "role": "supervisor", "text": text}

    @property
    def seen_s(self) -> float | None:
        """Time of the last report, in seconds since the epoch; None without one."""
        files = (METRICS,), ("logs", EVENTS)
        return max(stamp(self.folder, *parts)[2] for parts in files) * 1e-9 or None

    @property
    def options(self) -> dict[str, Any]:
        """The options by dotted name, as in `config.yaml`; empty if it cannot be read."""
        return dict(flat(self.config))

    @property
    def config(self) -> dict[str, Any]:
        """`config.yaml`; empty if it cannot be read."""
        with self.lock:
            if self._changed("config", CONFIG_FILE):
                try:
                    text = read_text(self.folder, CONFIG_FILE, most=CONFIG_NBYTES + 1) or ""
                    found = parse(text, CONFIG_FILE)[0] if len(text) <= CONFIG_NBYTES else None
                except (ValueError, UserError, RecursionError):
                    found = None
                self._config = found if isinstance(found, dict) else {}
            return self._config

    @property
    def summary(self) -> Row:
        """`summary.json` of a run that has ended; empty while it is in progress."""
        if stamp(self.folder, SUPERVISOR_FILE) != (0, 0, 0):
            return {}
        return read_json(self.folder, SUMMARY)

    @property
    def state(self) -> str:
        """running, ended, stopped or died; as of some seconds ago."""
        with self.lock:
            living = stamp(self.folder, SUPERVISOR_FILE) != (0, 0, 0)
            asked = living and time.monotonic() > self._state_until_s
            if self._changed("state", SUPERVISOR_FILE, SUMMARY) or asked:
                files = (read_json(self.folder, name) for name in (SUPERVISOR_FILE, SUMMARY))
                self._state = runs.state_by(*files)
                self._state_until_s = time.monotonic() + STATE_EVERY_S
            return self._state

    def row(self) -> Row:
        """What a list of runs shows of this one."""
        with self.lock:
            if self._changed("row", METRICS, SUMMARY, CONFIG_FILE, SUPERVISOR_FILE, EVALUATIONS):
                self._row = self._made_row()
            state = self.state
            found = {**self._row, "state": state}
            began_s = stamp(self.folder, SUPERVISOR_FILE)[2] * 1e-9
            ending = state == "running" and self._is_ending()
            silent = state == "running" and is_silent(time.time(), began_s, found)
            return {**found, "ending": ending, "stalled": silent and not ending}

    def _is_ending(self) -> bool:
        """Whether the last start or stop among the newest events is a stop."""
        tail = read_tail(self.folder, "logs", EVENTS, most=TAIL_NBYTES) or ""
        kinds = [event.get("kind") for event in objects(tail.encode())]
        return next((kind for kind in reversed(kinds) if kind in ("start", "stop")), "") == "stop"

    def _made_row(self) -> Row:
        last = {**_last_object(self.folder, METRICS), **self.summary}
        found = _best(self.folder)
        named = _named_options(read_text(self.folder, CONFIG_FILE) or "")
        return {
            "env": named.get("env.id"),
            "algorithm": named.get("algo.name"),
            "seed": named.get("run.seed"),
            "interval_s": _interval_s(named.get("run.interval_s")),
            "env_steps": finite(last.get("env_steps")),
            "return_last": finite(last.get("episode_return_mean")),
            "return_best": finite(last.get("eval_return_best", found and found.mean)),
            "seconds": finite(last.get("time_s")),
            "error": _text(last.get("error")),
            "started": stamp(self.folder, CONFIG_FILE)[2] * 1e-9,
            "written": stamp(self.folder, METRICS)[2] * 1e-9,
        }

    def _changed(self, what: str, *names: str) -> bool:
        """Whether files have changed since the last call for ``what``."""
        now = tuple(stamp(self.folder, name) for name in names)
        before, self._stamps[what] = self._stamps.get(what), now
        return before != now


def shown_event(event: Mapping[str, Any]) -> Row:
    """The fields of an event that the page shows."""
    return {
        "time": finite(event.get("time")),
        "kind": _text(event.get("kind")),
        "role": _text(event.get("role")),
        "text": _text(event.get("text")),
        "count": finite(event.get("count")),
    }


def _last_object(folder: Path, name: str) -> Row:
    """The object of the last complete line of a file; empty without one."""
    for nbytes in runs.TAILS_NBYTES:
        tail = read_tail(folder, name, most=nbytes) or ""
        for line in reversed(tail.encode().split(b"\n")):
            if found := objects(line + b"\n"):
                return found[-1]
    return {}


def _best(folder: Path) -> runs.Best | None:
    """The best checkpoint's return; None if there is none that may be opened."""
    with suppress(OSError), open(open_in(folder, *runs.BEST), "rb") as file:
        return runs.best_in(file)
    return None


def _named_options(text: str) -> dict[str, str]:
    """The options of a `config.yaml` that a list of runs shows, by dotted name. Parsing all of the
    file takes some hundred times as long."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if line and line[0] not in " -#":
            section = key
        elif line[:2] == "  " and (name := f"{section}.{key[2:]}") in LISTED:
            found.setdefault(name, value.strip().strip("'\"")[:200])
    return found


def _interval_s(text: str | None) -> float | None:
    try:
        return finite(float(text or ""))
    except ValueError:
        return None


def _uptime(event: Mapping[str, Any]) -> float:
    return float(finite(event.get("uptime_s")) or 0.0)


def _text(value: Any) -> str | None:
    return value[:2000] if isinstance(value, str) else None
