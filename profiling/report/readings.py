"""A reading of a process: its ledger lanes, counters and processor time at one moment.

Two readings of the same process make a window. Reading does not block the writer, so a span that is
being written may be missing; a span is never torn.
"""

from __future__ import annotations

import base64
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.processes import coreless_s
from penstock.core.role_spec import RoleSpec, Stage
from penstock.profiling.ledger import (
    COUNT,
    LAST,
    PART_BITS,
    PARTS,
    RING,
    RING_SPANS,
    TimeLedger,
)
from penstock.profiling.status import StatusPage

# The lane of a process's main thread.
MAIN = "main"
SUPERVISOR = RoleSpec("supervisor", 0, "penstock.launch.supervisor", Stage.SERVER)
# The spans of one text: 175 kB, below what a control message may have.
PACKED = 1 << 14


@dataclass(frozen=True)
class Reading:
    """The figures of one process at a moment; all of them are totals of its life."""

    spec: RoleSpec
    pid: int
    at_ns: int
    """The moment; CLOCK_MONOTONIC."""
    lanes: Mapping[str, Mapping[str, float]]
    """The seconds of each part, by thread."""
    cpu_s: float
    """Processor time of all threads."""
    coreless_s: float = math.nan
    """How long the main thread was ready to run and had no core; NaN where the kernel does not
    tell."""
    played_steps: int = 0
    """Agent steps of an actor."""
    trained_steps: int = 0
    """Steps of a learner."""
    slots: int = 0
    """Slots of an actor, which begin anew with each of its learners."""


@dataclass(frozen=True)
class Spans:
    """Spans of one thread, oldest first and without gaps."""

    begin_ns: npt.NDArray[np.int64]
    """int64 ``[n]``."""
    end_ns: npt.NDArray[np.int64]
    """int64 ``[n]``."""
    part: npt.NDArray[np.uint8]
    """Numbers of `Part`, uint8 ``[n]``."""

    def __len__(self) -> int:
        return len(self.part)

    def newest(self, most: int) -> Spans:
        """Returns the last ``most`` of the spans."""
        first = max(0, len(self) - most)
        return Spans(self.begin_ns[first:], self.end_ns[first:], self.part[first:])

    @property
    def edges_ns(self) -> npt.NDArray[np.int64]:
        """Where each span begins, and the last one ends, int64 ``[n + 1]``; not without a span."""
        return np.append(self.begin_ns, self.end_ns[-1])

    @property
    def seconds(self) -> float:
        """From the beginning of the first to the end of the last; 0 without a span."""
        return float(self.end_ns[-1] - self.begin_ns[0]) * 1e-9 if len(self) else 0.0


@dataclass(frozen=True)
class Thread:
    """The spans of one lane; ``lane`` is its number in its process."""

    process: str
    pid: int
    name: str
    lane: int
    spans: Spans


def read_supervisor(ledger: TimeLedger) -> Reading:
    """Returns a reading of this process, the supervisor's, whose main thread keeps ``ledger``."""
    pid = os.getpid()
    lanes = {MAIN: ledger.snapshot()}
    return Reading(
        SUPERVISOR,
        pid,
        at_ns=time.perf_counter_ns(),
        lanes=lanes,
        cpu_s=time.process_time(),
        coreless_s=coreless_s(pid),
    )


def read_threads(spec: RoleSpec, pid: int, status: StatusPage, since_ns: int) -> list[Thread]:
    """Returns what the rings of a process hold from ``since_ns`` on."""
    return [
        Thread(spec.name, pid, name, number, read_spans(lane, since_ns))
        for number, (name, lane) in enumerate(status.lanes.items())
    ]


def read_spans(lane: memoryview, since_ns: int) -> Spans:
    """Returns the spans in a lane's ring between ``since_ns`` and now; the current one ends now."""
    now_ns = time.perf_counter_ns()
    count = lane[COUNT]
    used = RING + min(count, RING_SPANS)
    ring = np.frombuffer(lane[RING:used].tobytes(), np.int64)

    # The writer went on meanwhile, and may be writing one more word at this moment.
    first = max(0, lane[COUNT] + 1 - RING_SPANS)
    words = ring[np.arange(first, count) & LAST]

    begin_ns = words >> PART_BITS
    end_ns = np.append(begin_ns[1:], now_ns)[: len(begin_ns)]
    part = (words & (PARTS - 1)).astype(np.uint8)
    chosen = (end_ns > since_ns) & (begin_ns < now_ns)
    return Spans(
        begin_ns=np.maximum(begin_ns[chosen], since_ns),
        end_ns=np.minimum(end_ns[chosen], now_ns),
        part=part[chosen],
    )


def pack_spans(spans: Spans) -> list[str]:
    """Returns spans as texts of at most `PACKED` each, oldest first, for `unpack_spans`."""
    if not len(spans):
        return [""]
    words = spans.begin_ns << PART_BITS | spans.part
    words = np.append(words, spans.end_ns[-1] << PART_BITS)
    starts = range(0, len(words), PACKED)
    return [base64.b64encode(words[i : i + PACKED].tobytes()).decode() for i in starts]


def unpack_spans(texts: Sequence[str], behind_ns: int) -> Spans:
    """Returns the spans of which `pack_spans` has made ``texts``.

    ``behind_ns`` is added to all times: by as much the clock of the other host is behind.
    """
    words = np.frombuffer(b"".join(map(base64.b64decode, texts)), np.int64)
    times_ns = (words >> PART_BITS) + behind_ns
    parts = (words[:-1] & (PARTS - 1)).astype(np.uint8)
    return Spans(begin_ns=times_ns[:-1], end_ns=times_ns[1:], part=parts)
