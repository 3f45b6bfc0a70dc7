"""One page of shared memory per child process: what it is doing, readable after it has died.

The supervisor makes the page (a memfd), the child inherits its descriptor and writes, the
supervisor reads. Invariants: one writer; every field is one aligned eight-byte word, so a reader
sees an old or a new value and never half of one; the page outlives its writer, so the last values
of a killed actor still tell what it had produced.

Beats come from the loop that does the work, not from a helper thread: a process whose environment
hangs must look hung.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum

PAGE_NBYTES = 4096


class Phase(IntEnum):
    """What a process is in the middle of; the supervisor names it when the process hangs."""

    STARTING = 0
    WAITING = 1
    ENVIRONMENT = 2
    INFERENCE = 3
    TRAINING = 4
    SAVING = 5
    RECEIVING = 6
    STOPPING = 7
    REDUCING = 8


class _Int:
    """A 64-bit integer of the page."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: StatusPage, owner: type[StatusPage]) -> int:
        return page.ints[self._index]

    def __set__(self, page: StatusPage, value: int) -> None:
        page.ints[self._index] = value


class StatusPage:
    """The status of one process over a memfd of 4 KiB.

    ``beats`` counts beats and ``beat_s`` is the time of the last one (CLOCK_MONOTONIC seconds, 0.0
    before the first). ``phase_s`` is when the present phase began.

    Of an actor: ``incarnation`` tells its streams apart; ``produced_steps`` and ``sequence`` are
    the agent steps and the unrolls that it has published in the present one, ``played_steps`` the
    steps of all streams of its life.

    Of a learner: ``produced_steps`` is what it has heard of (write that first), ``trained_steps``
    what it has trained on; ``reduction`` is the number of the all-reduce that it began last.
    """

    beats = _Int(0)
    produced_steps = _Int(3)
    sequence = _Int(4)
    incarnation = _Int(5)
    played_steps = _Int(6)
    trained_steps = _Int(7)
    reduction = _Int(8)

    def __init__(self, descriptor: int) -> None:
        """Map the page behind ``descriptor``, which the caller keeps and may close."""
        self._page = mmap.mmap(descriptor, PAGE_NBYTES)
        self.ints = memoryview(self._page).cast("q")
        self._floats = memoryview(self._page).cast("d")

    @classmethod
    def create(cls) -> tuple[StatusPage, int]:
        """A fresh page of zeros, and its descriptor for a child to inherit."""
        descriptor = os.memfd_create("penstock-status")
        os.ftruncate(descriptor, PAGE_NBYTES)
        return cls(descriptor), descriptor

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
        """An actor has joined a learner. At no moment does the page give the steps of one stream
        to another."""
        self.sequence = self.produced_steps = 0
        self.incarnation = incarnation
        self.sequence = sequence

    def beat(self) -> None:
        """Say "alive"; call it in every turn of the work loop, waiting turns too."""
        self._floats[1] = time.monotonic()
        self.ints[0] += 1

    @property
    def beat_s(self) -> float:
        return self._floats[1]

    def close(self) -> None:
        self.ints.release()
        self._floats.release()
        self._page.close()
