"""One run as the page shows it: its files, and what its events add to them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.formatting import finite
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor.intervals import Floats
from penstock.monitor.run_folder.events import EVENTS
from penstock.monitor.run_folder.files import Row, read_tail, stamp
from penstock.monitor.run_folder.folder import short_text
from penstock.monitor.run_folder.lines import Lines, objects
from penstock.monitor.run_folder.reader import EventReader, RunReader
from penstock.monitor.run_folder.record import METRICS
from penstock.watch.headline import is_silent

# The end of the event log that tells whether a run has begun to end.
TAIL_NBYTES = 1 << 16
# An uptime that is shorter than that of the event before, by more than this, is of another process.
UPTIME_TOLERANCE_S = 1.0
# The kinds of events that are marked on a curve.
MARKS = ("restart", "hang", "kill", "drop", "lost", "rejected", "rollback", "checkpoint", "hosts")


class WatchedRun(RunReader):
    """A run with its events. Safe to use from several threads."""

    def __init__(self, folder: Path, seen_as: tuple[int, int] = (0, 0)) -> None:
        """``seen_as``: the device and inode of the folder, which change if it is replaced."""
        super().__init__(folder)
        self.seen_as = seen_as

    def unload(self) -> None:
        """Forget what was read; the next `read` begins anew."""
        with self.lock:
            super().unload()
            self._events = EventReader(self.folder)

    def read(self, budget_s: float = math.inf) -> float:
        """Read new events, and new metrics for about ``budget_s``; returns as `RunReader.read`."""
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
            stops = None
            stalled = False
            if row["state"] == "running":
                began_s = stamp(self.folder, SUPERVISOR_FILE)[2] * 1e-9
                stops = self._why_it_stops()
                stalled = stops is None and is_silent(time.time(), began_s, row)
            return {**row, "stops": stops, "stalled": stalled}

    def _why_it_stops(self) -> str | None:
        """Returns why the run has begun to end since its last start, by the newest events.

        None if it has not begun to end.
        """
        tail = read_tail(self.folder, "logs", EVENTS, most=TAIL_NBYTES) or ""
        for event in reversed(objects(tail.encode())):
            if event.get("kind") == "start":
                return None
            if event.get("kind") == "stop":
                return short_text(_details(event).get("reason")) or "unknown"
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
                place = time_s if x == "time_s" else float(np.interp(time_s, times, steps))
                marks.append({"x": place, **shown_event(event)})
            return marks

    def _times(self) -> list[float | None]:
        """Returns `time_s` of each event, as near as it is known; None where it is not.

        Events have the uptime of their process, and metrics the time since the first unroll. The
        offset between the two clocks is constant in a session, which a start or a resume begins.
        """
        events = self.events
        starts = [0]
        for i, event in enumerate(events[1:], 1):
            if _uptime(event) < _uptime(events[i - 1]) - UPTIME_TOLERANCE_S:
                starts.append(i)

        trained, line_times = self.columns.points("trained_steps", "time_s")
        times: list[float | None] = []
        for start, end in pairwise([*starts, len(events)]):
            session = events[start:end]
            offset_s = self._offset_s(
                session,
                trained=trained,
                line_times=line_times,
                is_first=start == 0,
                is_last=end == len(events),
            )
            for event in session:
                time_s = None if offset_s is None else max(0.0, _uptime(event) + offset_s)
                times.append(time_s)
        return times

    def _offset_s(
        self,
        session: Sequence[Mapping[str, Any]],
        *,
        trained: Floats,
        line_times: Floats,
        is_first: bool,
        is_last: bool,
    ) -> float | None:
        """Returns `time_s` minus the uptime in a session; None if nothing tells it.

        Args:
            session: its events.
            trained: trained steps of each line of metrics, rising.
            line_times: `time_s` of each line.
            is_first, is_last: whether the session is the first or the last of the run.
        """
        # The steps of a checkpoint stand in both, its event and the metrics; the last one counts.
        for event in reversed(session):
            steps = finite(_details(event).get("trained_steps"))
            if event.get("kind") == "checkpoint" and steps is not None and len(line_times):
                return float(np.interp(steps, trained, line_times)) - _uptime(event)

        # The last line of metrics was written when their file was.
        last_event_s = finite(session[-1].get("time")) if session else None
        if is_last and len(line_times) and last_event_s is not None:
            written_s = stamp(self.folder, METRICS)[2] * 1e-9
            return float(line_times[-1]) - (written_s - last_event_s) - _uptime(session[-1])

        # The first unroll comes about when the first learner is ready.
        if is_first:
            for event in session:
                if event.get("kind") == "ready":
                    return -_uptime(event)
        return None

    def target(self, x: str) -> Row | None:
        """Returns `stop.return` as ``value``; None without that option.

        ``reached`` is the place on the axis ``x`` where it was reached, or None.
        """
        value = finite(self.options.get("stop.return"))
        if value is None:
            return None

        with self.lock:
            figures = {**self.last, **self.summary}
            reached = finite(figures.get("return_reached_at_s"))
            if reached is None:
                reached = finite(figures.get("solved_at_s"))

            # Both are seconds of training.
            if x != "time_s" and reached is not None:
                times, steps = self.columns.points("time_s", x)
                reached = float(np.interp(reached, times, steps)) if len(times) else None
        return {"value": value, "reached": reached}

    def ends(self) -> dict[str, str]:
        """Returns by process why it does not run at present, as far as the events say."""
        reasons: dict[str, str] = {}
        restarted: dict[str, object] = {}  # the incarnation that was last restarted
        with self.lock:
            events = [*self.events]

        for event in events:
            role = event.get("role")
            kind = event.get("kind")
            details = _details(event)
            if kind == "hosts":
                for key, reason in (("lost", "waits for a host"), ("found", "starts")):
                    names = details.get(key)
                    for name in names if isinstance(names, list) else ():
                        reasons[str(name)] = reason
            elif not isinstance(role, str):
                continue
            elif kind == "restart":
                reasons[role] = "died, is restarted"
                restarted[role] = event.get("incarnation")
            elif kind == "exit":
                # The exit of a process whose restart is known already says nothing new.
                is_known = role in restarted and restarted[role] == event.get("incarnation")
                if not is_known:
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
        written_ns = [stamp(self.folder, METRICS)[2], stamp(self.folder, "logs", EVENTS)[2]]
        return max(written_ns) * 1e-9 or None


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
    """Returns the seconds since the process of an event began; 0 where it does not say so."""
    return float(finite(event.get("uptime_s")) or 0.0)


def _details(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the data of an event; empty where it has none."""
    data = event.get("data")
    return data if isinstance(data, Mapping) else {}
