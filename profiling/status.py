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

from penstock.profiling.ledger import (
    LANE_WORDS,
    Part,
    TimeLedger,
    current_span,
    lane_name,
    name_lane,
)

LARGEST = (1 << 63) - 1

# The layout of the memory, with offsets in bytes: counters, lanes, the end of the role's output,
# and the path of its log. The last two begin with a word that has their length.
PAGE_NBYTES = 4096
ROLE_AT = 10 * 8  # the fields of the shim, `role_pid` and what follows
LANES = 6
TAIL_NBYTES = 8192
TAIL_AT = PAGE_NBYTES + LANES * LANE_WORDS * 8
LOG_NBYTES = 4096  # the longest path that the kernel opens
LOG_AT = TAIL_AT + 8 + TAIL_NBYTES
NBYTES = LOG_AT + 8 + LOG_NBYTES

# The words of the first page that are no `_Int`; some are floats.
BEAT = 1
PHASE = 2
PHASE_BEGAN = 9


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
    """Agent steps that an actor has published in its present stream, or that were reported to a
    learner, which writes them before ``trained_steps``."""
    sequence = _Int(4)
    """Unrolls that an actor has published in its present stream."""
    incarnation = _Int(5)
    """Distinguishes the streams of an actor."""
    played_steps = _Int(6)
    """Agent steps of all streams of an actor's life."""
    trained_steps = _Int(7)
    """Steps that a learner has trained on."""
    reduction = _Int(8)
    """Number of the all-reduce that a learner began last."""
    role_pid = _Int(ROLE_AT // 8)
    """Pid of the role; 0 before its process is executed."""
    role_began = _Int(ROLE_AT // 8 + 1)
    """When the process of the role began, in ticks since the machine did; 0 before."""
    role_cleared = _Int(ROLE_AT // 8 + 2)
    """1 once all that descends from the role has been ended."""
    role_dropped = _Int(ROLE_AT // 8 + 3)
    """Bytes of the role's output that are not in its log."""
    role_grace_ms = _Int(ROLE_AT // 8 + 4)
    """Time that the role has to save after the death of its supervisor."""

    def __init__(self, descriptor: int) -> None:
        """Map the page behind ``descriptor``, which the caller keeps and may close."""
        self._page = mmap.mmap(descriptor, NBYTES)
        self.ints = memoryview(self._page).cast("q")
        self._floats = memoryview(self._page)[:PAGE_NBYTES].cast("d")
        self._lanes = [self.ints[start : start + LANE_WORDS] for start in _lane_starts()]

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
        """The present activity, a number of `Phase`."""
        return self.ints[PHASE]

    @phase.setter
    def phase(self, phase: int) -> None:
        if phase != self.ints[PHASE]:
            self.ints[PHASE] = phase
            self._floats[PHASE_BEGAN] = time.monotonic()

    @property
    def phase_s(self) -> float:
        """When the present phase began; CLOCK_MONOTONIC."""
        return self._floats[PHASE_BEGAN]

    def begin_stream(self, incarnation: int, sequence: int) -> None:
        """Count the steps of another stream, as an actor has joined a learner.

        At no moment does the page give the steps of one stream to another.
        """
        self.sequence = 0
        self.produced_steps = 0
        self.incarnation = incarnation
        self.sequence = sequence

    def beat(self) -> None:
        """Say "alive"; call it in every turn of the work loop, waiting turns too."""
        self._floats[BEAT] = time.monotonic()

    def begin(self, phase: Phase) -> None:
        """Enter a part of the start, with a beat: each part is timed on its own."""
        self.phase = phase
        self.beat()

    @property
    def beat_s(self) -> float:
        """The time of the last beat; CLOCK_MONOTONIC, 0.0 before the first."""
        return self._floats[BEAT]

    @property
    def alive_s(self) -> float:
        """When the process last beat, or its main thread switched to another part.

        A thread that switches at every step need not beat as well. CLOCK_MONOTONIC, 0.0 before the
        first sign of life.
        """
        main_lane = self.lanes.get("main")
        current = current_span(main_lane) if main_lane is not None else None
        if current is None:
            return self.beat_s
        _, since_ns = current
        return max(self.beat_s, since_ns * 1e-9)

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
        start = TAIL_AT + 8
        nbytes = self.ints[TAIL_AT // 8]
        return self._page[start : start + nbytes]

    def name_log(self, path: Path) -> None:
        """Set the file for the role's output."""
        name = os.fsencode(path)
        start = LOG_AT + 8
        self._page[start : start + len(name)] = name
        self.ints[LOG_AT // 8] = len(name)  # last, as the shim reads this first

    def close(self) -> None:
        """Unmap the page. Ledgers in its lanes cannot be used afterwards."""
        for lane in self._lanes:
            lane.release()
        self.ints.release()
        self._floats.release()
        self._page.close()


def _lane_starts() -> range:
    """Returns where lanes begin, in words."""
    return range(PAGE_NBYTES // 8, TAIL_AT // 8, LANE_WORDS)
