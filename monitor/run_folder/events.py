"""`logs/events.jsonl`: the events of a run with their times, one JSON object per line.

The schema is stable; docs/runs.md describes it. A line has

    schema       1
    time         seconds since 1970; of repetitions, of the last one
    uptime_s     seconds since this process began the run, or resumed it
    kind         one of `KINDS`, or another word that a role has reported
    role         name of the process that the event is about, such as "actor-3", or null
    incarnation  which start of that process, counted from 0, or null
    text         one sentence
    count        events with this kind, role, incarnation and text since their last line, this
                 one included
    data         a JSON object; what it holds depends on the kind

The first event is written at once. Later events with the same kind, role, incarnation and text are
counted, and the count is written at most every `REPEAT_S` seconds and at the end. Each start of a
process has a new incarnation, so all starts and ends are written at once. The file is bounded: at
`FILE_NBYTES` it becomes `events.jsonl.1`, which replaces the one before. Events of the traffic
(`OF_TRAFFIC`), whose number peers determine, must not displace deaths: each kind has a share of the
file, beyond which its events are one, that is written every `LATER_S` seconds.

Adding an event never raises. While the disk is full, lines wait in memory, at most `WAITING_NBYTES`
of them, and are written when there is room.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.configs.secrets import redacted, redacted_json
from penstock.core.files import open_private
from penstock.core.interfaces import Json, MetricSink, RunEvent

EVENTS = "events.jsonl"
ROTATED = f"{EVENTS}.1"
SCHEMA = 1
KINDS = {
    "note": "a sentence for the user",
    "start": "a process was started",
    "ready": "a process is ready",
    "exit": "a process has ended",
    "restart": "a process that has ended will be restarted",
    "hosts": "processes have lost their hosts, or were given some",
    "hang": "a process gave no sign of life and is about to be killed",
    "kill": "a process was sent SIGKILL",
    "drop": "agent steps were dropped by a rule of the config",
    "lost": "agent steps were lost with a process or a connection",
    "rejected": "messages from the network were rejected",
    "refused": "a peer or its request was refused",
    "checkpoint": "a checkpoint was written",
    "rollback": "training was rolled back to an earlier state",
    "stop": "the run began to stop",
    "end": "the run has ended",
}
OF_TRAFFIC = ("drop", "lost", "rejected", "refused")  # kinds whose number peers determine
REPEAT_S = 10.0
LATER_S = 3600.0
RETRY_S = 1.0  # between two attempts to write to a disk that was full
FILE_NBYTES = 16 << 20
# The share of each kind of `OF_TRAFFIC` in the file.
SHARE_NBYTES = 2 << 20
WAITING_NBYTES = 4 << 20
# Distinct events whose repetitions are counted at a time; the count of the oldest is then written.
ALIKE = 1000
TEXT_LIMIT = 4000  # characters
DATA_LIMIT = 8000  # characters of JSON

Alike = tuple[str, str | None, int | None, str]
"""Kind, role, incarnation and text of an event: equal for its repetitions."""


@dataclass
class _Repeated:
    """Repetitions of one event since its last line was written."""

    written_s: float
    """When the last line was written."""
    count: int = 0
    line: dict[str, Any] = field(default_factory=dict)
    """The latest of the repetitions; empty if there is none."""


class EventLog(MetricSink):
    """The only writer of the events of one run."""

    def __init__(
        self,
        logs: Path,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Append to ``logs``/events.jsonl from now on.

        Args:
            logs: the folder `logs` of the run.
            clock: seconds that never go back.
            now: seconds since 1970.
        """
        self._path = logs / EVENTS
        self._clock = clock
        self._now = now
        self._began_s = clock()

        # The file; -1 until it is opened.
        self._fd = -1
        self._nbytes = 0  # size of the file
        self._ends_with_newline = True  # false behind an incomplete line
        self._nbytes_by_kind: Counter[str] = Counter()  # bytes of each kind in the file

        # Lines that the disk had no room for.
        self._waiting: deque[bytes] = deque()
        self._waiting_nbytes = 0
        self._omitted = 0  # number of lines that even memory had no room for
        self._retry_s = 0.0  # time of the next attempt

        self._alike: dict[Alike, _Repeated] = {}  # the oldest first
        self._next_check_s = 0.0  # when counts are looked through again

    def event(self, event: RunEvent) -> bool:
        """`add` events with a text; evaluations are in `evaluations.jsonl`."""
        if event.text or event.result is None:
            self.add(
                event.kind,
                event.text,
                role=event.role,
                incarnation=event.incarnation,
                data=event.data,
            )
        return False

    def add(
        self,
        kind: str,
        text: str,
        role: str | None = None,
        incarnation: int | None = None,
        data: Json | None = None,
    ) -> None:
        """Write one event, or count it if an equal one was written within `REPEAT_S`.

        The module describes the fields. Secrets are removed from text and data, and both are
        shortened to their limits.

        Args:
            kind: one of `KINDS`, or another word that a role has reported.
            text: one sentence.
            role: name of the process that the event is about.
            incarnation: which start of that process.
            data: depends on the kind.
        """
        now_s = self._clock()
        text = redacted(text)[:TEXT_LIMIT]
        if self._is_beyond_share(kind):
            # All further events of the kind are one, whose repetitions are counted.
            text = "more events of this kind; they are only counted, so that the file has room"
            role = None
            incarnation = None
            data = None

        line: dict[str, Any] = {
            "schema": SCHEMA,
            "time": round(self._now(), 3),
            "uptime_s": round(now_s - self._began_s, 3),
            "kind": kind,
            "role": role,
            "incarnation": incarnation,
            "text": text,
            "count": 1,
            "data": _json_or_replacement(redacted_json(data)),
        }

        key = kind, role, incarnation, text
        repeated = self._alike.get(key)
        if repeated is None:
            if len(self._alike) >= ALIKE:
                self._flush_repeated(next(iter(self._alike)))
            self._alike[key] = _Repeated(now_s)
            self._write(line)
            return

        repeated.count += 1
        repeated.line = line
        if now_s - repeated.written_s >= self._repeat_s(kind):
            self._write_repeated(repeated, now_s)

    def tick(self) -> None:
        """Write the counts that are due, and the lines that wait for the disk."""
        now_s = self._clock()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + RETRY_S
            self._write_due_counts(now_s)
        if self._waiting and now_s >= self._retry_s:
            self._write_waiting()

    def _write_due_counts(self, now_s: float) -> None:
        """Write the counts whose time has come; an event that was not repeated is forgotten."""
        for key, repeated in [*self._alike.items()]:
            kind = key[0]
            if now_s - repeated.written_s < self._repeat_s(kind):
                continue
            if repeated.count:
                self._write_repeated(repeated, now_s)
            else:
                del self._alike[key]

    def close(self) -> None:
        """Write all counts, and the lines that wait for the disk as far as it has room."""
        for key in [*self._alike]:
            self._flush_repeated(key)
        self._write_waiting()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_beyond_share(self, kind: str) -> bool:
        return kind in OF_TRAFFIC and self._nbytes_by_kind[kind] >= SHARE_NBYTES

    def _repeat_s(self, kind: str) -> float:
        """The least time between two lines of equal events of this kind."""
        return LATER_S if self._is_beyond_share(kind) else REPEAT_S

    def _flush_repeated(self, key: Alike) -> None:
        """Write the count of an event, if it has repetitions, and forget it."""
        repeated = self._alike.pop(key)
        if repeated.count:
            self._write_repeated(repeated, self._clock())

    def _write_repeated(self, repeated: _Repeated, now_s: float) -> None:
        """Write the latest repetition with the count, and count from 0 again."""
        self._write({**repeated.line, "count": repeated.count})
        repeated.written_s = now_s
        repeated.count = 0
        repeated.line = {}

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line behind those that wait, or let it wait if the disk was full just now."""
        data = json.dumps(line).encode() + b"\n"
        self._nbytes_by_kind[line["kind"]] += len(data)
        self._waiting.append(data)
        self._waiting_nbytes += len(data)
        while self._waiting_nbytes > WAITING_NBYTES:
            self._waiting_nbytes -= len(self._waiting.popleft())
            self._omitted += 1

        if self._clock() >= self._retry_s:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the lines that wait, as far as the disk has room for them."""
        try:
            if self._omitted:
                self._append(self._omission_line())
                self._omitted = 0
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting_nbytes -= len(self._waiting.popleft())
        except OSError:
            self._retry_s = self._clock() + RETRY_S

    def _omission_line(self) -> bytes:
        """Returns a line that stands for those that were omitted."""
        line = {
            "schema": SCHEMA,
            "time": round(self._now(), 3),
            "uptime_s": round(self._clock() - self._began_s, 3),
            "kind": "note",
            "role": None,
            "incarnation": None,
            "text": "events are missing here, because the disk was full for too long",
            "count": self._omitted,
            "data": {},
        }
        return json.dumps(line).encode() + b"\n"

    def _append(self, data: bytes) -> None:
        """Write one complete line.

        Raises:
            OSError: if the disk has no room for all of it. A part that was written is removed, or
                the next line begins with a line break.
        """
        if self._fd >= 0 and self._nbytes + len(data) > FILE_NBYTES:
            self._rotate()
        if self._fd < 0:
            self._open()

        if not self._ends_with_newline:
            data = b"\n" + data
        written = os.write(self._fd, data)
        if written < len(data):
            with suppress(OSError):
                os.ftruncate(self._fd, self._nbytes)
                written = 0
            self._ends_with_newline = written == 0 and self._ends_with_newline
            self._nbytes += written
            raise OSError("the disk has room for a part of the line only")

        self._ends_with_newline = True
        self._nbytes += written

    def _rotate(self) -> None:
        """Rename the file, in place of the one before; the next line begins a new one."""
        os.close(self._fd)
        self._fd = -1
        self._nbytes_by_kind.clear()
        with suppress(FileNotFoundError):  # a user has removed it
            os.replace(self._path, self._path.with_name(ROTATED))

    def _open(self) -> None:
        """Open the file, behind what is in it."""
        self._fd = open_private(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._nbytes = os.fstat(self._fd).st_size
        # A machine may have died in the middle of a line.
        last = os.pread(self._fd, 1, self._nbytes - 1) if self._nbytes else b"\n"
        self._ends_with_newline = last == b"\n"


def _json_or_replacement(data: Json | None) -> Json:
    """Returns ``data`` if it is JSON of limited size, otherwise an object that says so."""
    try:
        fits = len(json.dumps(data, allow_nan=False)) <= DATA_LIMIT
        if fits and (data is None or isinstance(data, Mapping)):
            return data or {}
    except (TypeError, ValueError):
        pass
    return {"left_out": "the data is not JSON, or too long"}
