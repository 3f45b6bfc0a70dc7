"""Status page of a child process in shared memory, readable after the process has died.

The supervisor makes it (a memfd), the child inherits its descriptor and writes, the supervisor
reads. First comes a page of counters, then a lane for the time ledger of each thread that keeps
one. Invariants: one writer; every field is one aligned eight-byte word, so a reader sees an old or
a new value and never half of one; the memory outlives its writer, so the last values of a killed
actor still show its produced steps and its phase.

Signs of life come from the loop that does the work, not from a helper thread: a process whose
environment hangs must look hung.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path

from penstock.profiling.ledger import LANE_WORDS, Part, TimeLedger, lane_name, name_lane, now_in

PAGE_NBYTES = 4096
LANES = 6
LARGEST = (1 << 63) - 1
ROLE_AT = 10 * 8
TAIL_NBYTES = 8192
TAIL_AT = PAGE_NBYTES + LANES * LANE_WORDS * 8
LOG_AT = TAIL_AT + 8 + TAIL_NBYTES
LOG_NBYTES = 4096  # of a path, the most that the kernel opens
NBYTES = LOG_AT + 8 + LOG_NBYTES


class Phase(IntEnum):
    """The activity of a process; the supervisor names it when the process hangs."""

    STARTING = 0
    WAITING = 1
    ENVIRONMENT = 2
    INFERENCE = 3
    TRAINING = 4
    SAVING = 5
    RECEIVING = 6
    STOPPING = 7
    REDUCING = 8
    IMPORTING = 9


class _Int:
    """A 64-bit integer of the page.

    A value beyond its range is written as the nearest in it, since what is shown must not end what
    is counted.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: StatusPage, owner: type[StatusPage]) -> int:
        return page.ints[self._index]

    def __set__(self, page: StatusPage, value: int) -> None:
        try:
            page.ints[self._index] = value
        except ValueError:
            page.ints[self._index] = max(-LARGEST - 1, min(value, LARGEST))


class StatusPage:
    """The status of one process over a memfd; untouched pages of it take no memory.

    `penstock.launch.engines.shim` writes the fields that begin with ``role_``, and the `tail` of
    the role's output. It reads ``role_grace_ms`` and what `name_log` has written.
    """

    produced_steps = _Int(3)
    sequence = _Int(4)
    incarnation = _Int(5)
    played_steps = _Int(6)
    trained_steps = _Int(7)
    reduction = _Int(8)
    role_pid = _Int(ROLE_AT // 8)
    role_began = _Int(ROLE_AT // 8 + 1)
    role_cleared = _Int(ROLE_AT // 8 + 2)
    role_dropped = _Int(ROLE_AT // 8 + 3)
    role_grace_ms = _Int(ROLE_AT // 8 + 4)

    def __init__(self, descriptor: int) -> None:
        """Map the page behind ``descriptor``, which the caller keeps and may close."""
        self._page = mmap.mmap(descriptor, NBYTES)
        self.ints = memoryview(self._page).cast("q")
        self._floats = memoryview(self._page)[:PAGE_NBYTES].cast("d")
        self._lanes = [self.ints[at : at + LANE_WORDS] for at in _starts()]

    @classmethod
    def create(cls) -> tuple[StatusPage, int]:
        """Returns a fresh page of zeros, and its descriptor for a child to inherit."""
        descriptor = os.memfd_create("penstock-status")
        try:
            os.ftruncate(descriptor, NBYTES)
            return cls(descriptor), descriptor
        except OSError:
            os.close(descriptor)
            raise

    @property
    def phase(self) -> int:
        return self.ints[2]

    @phase.setter
    def phase(self, phase: int) -> None:
        if phase != self.ints[2]:
            self.ints[2] = phase
            self._floats[9] = time.monotonic()

    @property
    def phase_s(self) -> float:
        return self._floats[9]

    def begin_stream(self, incarnation: int, sequence: int) -> None:
        """Count the steps of another stream, as an actor has joined a learner.

        At no moment does the page give the steps of one stream to another.
        """
        self.sequence = self.produced_steps = 0
        self.incarnation = incarnation
        self.sequence = sequence

    def beat(self) -> None:
        """Say "alive"; call it in every turn of the work loop, waiting turns too."""
        self._floats[1] = time.monotonic()

    def begin(self, phase: Phase) -> None:
        """Enter a part of the start, with a beat: each part is timed on its own."""
        self.phase = phase
        self.beat()

    @property
    def beat_s(self) -> float:
        return self._floats[1]

    @property
    def alive_s(self) -> float:
        """When the process last beat, or its main thread switched to another part.

        A thread that switches at every step need not beat as well. CLOCK_MONOTONIC, 0.0 before the
        first sign of life.
        """
        main = self.lanes.get("main")
        since = now_in(main) if main is not None else None
        return max(self.beat_s, since[1] * 1e-9 if since else 0.0)

    def ledger(self, name: str, part: Part = Part.OTHER) -> TimeLedger:
        """Returns a time ledger for a thread of this process, which is in ``part`` now.

        The ledger writes to the lane of that name or the next free one. If all lanes are taken, it
        has private memory.
        """
        for lane in self._lanes:
            if lane_name(lane) in ("", name):
                name_lane(lane, name)
                return TimeLedger(lane, part)
        return TimeLedger(part=part)

    @property
    def lanes(self) -> dict[str, memoryview]:
        """The lanes in use, by the names of their threads."""
        return {name: lane for lane in self._lanes if (name := lane_name(lane))}

    @property
    def tail(self) -> bytes:
        """The last that the process wrote to its standard output and error."""
        return self._page[TAIL_AT + 8 : TAIL_AT + 8 + self.ints[TAIL_AT // 8]]

    def name_log(self, path: Path) -> None:
        """Set the file for the role's output."""
        name = os.fsencode(path)
        self._page[LOG_AT + 8 : LOG_AT + 8 + len(name)] = name
        self.ints[LOG_AT // 8] = len(name)  # last, as the shim reads this first

    def close(self) -> None:
        for lane in self._lanes:
            lane.release()
        self.ints.release()
        self._floats.release()
        self._page.close()


def _starts() -> range:
    """Where lanes begin, in words."""
    return range(PAGE_NBYTES // 8, TAIL_AT // 8, LANE_WORDS)
