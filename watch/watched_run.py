"""One run as the page shows it: its files, and what its events add to them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.formatting import finite
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor.run_folder.events import EVENTS
from penstock.monitor.run_folder.files import Row, read_tail, stamp
from penstock.monitor.run_folder.folder import short_text
from penstock.monitor.run_folder.lines import Lines, objects
from penstock.monitor.run_folder.reader import EventReader, RunReader
from penstock.monitor.run_folder.record import METRICS
from penstock.watch.headline import is_silent

TAIL_NBYTES = 1 << 16
MARKS = ("restart", "hang", "kill", "drop", "lost", "rejected", "rollback", "checkpoint", "hosts")


class WatchedRun(RunReader):
    """A run with its events. Safe to use from several threads."""

    def __init__(self, folder: Path, seen_as: tuple[int, int] = (0, 0)) -> None:
        """``seen_as``: the device and inode of the folder, which change if it is replaced."""
        super().__init__(folder)
        self.seen_as = seen_as

    def unload(self) -> None:
        with self.lock:
            super().unload()
            self._events = EventReader(self.folder)

    def read(self, budget_s: float = math.inf) -> float:
        with self.lock:
            self._events.read()
            return super().read(budget_s)

    @property
    def events(self) -> Lines:
        """The newest events, the oldest of them first."""
        return self._events.events

    def row(self) -> Row:
        """Returns what the list shows of this run.

        Beside what a run's reader knows, that is ``stops``: why it has begun to end, or None, and
        ``stalled``: whether it writes no metrics.
        """
        with self.lock:
            row = super().row()
            running = row["state"] == "running"
            began_s = stamp(self.folder, SUPERVISOR_FILE)[2] * 1e-9
            stops = self._why_it_stops() if running else None
            silent = running and is_silent(time.time(), began_s, row)
            return {**row, "stops": stops, "stalled": silent and stops is None}

    def _why_it_stops(self) -> str | None:
        """Returns why the run has begun to end since its last start, by the newest events.

        None if it has not begun to end.
        """
        tail = read_tail(self.folder, "logs", EVENTS, most=TAIL_NBYTES) or ""
        for event in reversed(objects(tail.encode())):
            if event.get("kind") == "start":
                return None
            if event.get("kind") == "stop":
                data = event.get("data")
                reason = data.get("reason") if isinstance(data, Mapping) else None
                return short_text(reason) or "unknown"
        return None

    def marks(self, x: str) -> list[Row]:
        """Returns the events that a curve shows, each at its place on the axis ``x``.

        ``x`` is "time_s" or "env_steps".
        """
        with self.lock:
            times, steps = self.columns.points("time_s", "env_steps")
            marks = []
            for event, time_s in zip(self.events, self._times(), strict=True):
                if event.get("kind") not in MARKS or time_s is None or not len(times):
                    continue
                at = time_s if x == "time_s" else float(np.interp(time_s, times, steps))
                marks.append({"x": at, **shown_event(event)})
            return marks

    def _times(self) -> list[float | None]:
        """Returns `time_s` of each event, as near as it is known; None where it is not.

        Events have the uptime of their process, and metrics the time since the first unroll. The
        offset between the two clocks is constant in a session, which a start or a resume begins.
        """
        trained, times = self.columns.points("trained_steps", "time_s")
        written_s = stamp(self.folder, METRICS)[2] * 1e-9
        places: list[float | None] = []
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
                places.append(max(0.0, _uptime(event) + offsets[-1]) if offsets else None)
        return places

    def target(self, x: str) -> Row | None:
        """Returns `stop.return` as ``value``; None without that option.

        ``reached`` is the place on the axis ``x`` where it was reached, or None.
        """
        value = self.options.get("stop.return")
        if finite(value) is None:
            return None

        with self.lock:
            figures = {**self.last, **self.summary}
            at = finite(figures.get("return_reached_at_s"))
            at = finite(figures.get("solved_at_s")) if at is None else at

            # Both are seconds of training.
            if x != "time_s" and at is not None:
                times, steps = self.columns.points("time_s", x)
                at = float(np.interp(at, times, steps)) if len(times) else None
        return {"value": finite(value), "reached": at}

    def ends(self) -> dict[str, str]:
        """Returns by process why it does not run at present, as far as the events say."""
        reasons: dict[str, str] = {}
        restarts: dict[str, object] = {}
        with self.lock:
            events = [*self.events]

        for event in events:
            role, kind, data = event.get("role"), event.get("kind"), event.get("data")
            details = data if isinstance(data, Mapping) else {}
            if kind == "hosts":
                for key, text in (("lost", "waits for a host"), ("found", "starts")):
                    names = details.get(key)
                    for name in names if isinstance(names, list) else ():
                        reasons[str(name)] = text
            elif not isinstance(role, str):
                continue
            elif kind == "restart":
                reasons[role], restarts[role] = "died, is restarted", event.get("incarnation")
            elif kind == "exit" and restarts.get(role, self) != event.get("incarnation"):
                reasons[role] = "ended" if details.get("expected") else "died"
        return reasons

    def death(self) -> Row | None:
        """Returns the last sign of a run that died without an end, as an event; None of others."""
        if self.state != "died" or self.summary:
            return None
        text = "died without ending the run; the time is that of its last report"
        return {"time": self.seen_s, "kind": "died", "role": "supervisor", "text": text}

    @property
    def seen_s(self) -> float | None:
        """Time of the last report, in seconds since the epoch; None without one."""
        files = (METRICS,), ("logs", EVENTS)
        return max(stamp(self.folder, *parts)[2] for parts in files) * 1e-9 or None


def shown_event(event: Mapping[str, Any]) -> Row:
    """Returns the fields of an event that the page shows."""
    return {
        "time": finite(event.get("time")),
        "kind": short_text(event.get("kind")),
        "role": short_text(event.get("role")),
        "text": short_text(event.get("text")),
        "count": finite(event.get("count")),
    }


def _uptime(event: Mapping[str, Any]) -> float:
    return float(finite(event.get("uptime_s")) or 0.0)
