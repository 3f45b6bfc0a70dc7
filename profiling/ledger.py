"""Time ledger: one thread's wall clock, in disjoint parts that add up to all of it.

The thread is always in exactly one part; `switch` ends the one and begins the next. So nothing is
counted twice and nothing is left out, and what no part claims stands in "other".

A ledger writes to a *lane*: words of memory, shared with the supervisor in a run
(`penstock.profiling.status`), which hold the seconds of each part and a ring of the latest spans.
Both outlive a killed process. Spans of a lane follow each other without a gap, so one word says all
of a span: when it began, and in which part; it ends where the next begins. One thread writes; a
word is written at once, and its count after it, so that a reader sees whole spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Literal, get_args

LearnerPart = Literal[
    "wait_data",
    "h2d_exposed",
    "compute",
    "reduce_exposed",
    "pull_exposed",
    "publish",
    "bookkeeping",
    "other",
]


class Part(IntEnum):
    """The part of its work that a thread is in; the numbers stand in shared memory."""

    OTHER = 0
    WAIT = 1  # for data, for room, for a command
    STEP = 2  # environments
    INFER = 3
    WRITE = 4  # of an actor: what it has seen, into the slot
    RECEIVE = 5
    DECOMPRESS = 6
    PROCESS = 7  # the algorithm's work on a slot
    PUBLISH = 8  # of a learner: weights; of a connector: slots
    GATHER = 9
    H2D = 10  # host to device
    FORWARD = 11
    BACKWARD = 12
    REDUCE = 13
    OPTIMIZE = 14
    SAVE = 15
    COMPRESS = 16
    SEND = 17
    DEVICE = 18  # until a GPU has computed
    COUNT = 19  # of a learner: what it trains on; reports
    PULL = 20  # of a learner: until a parameter server has answered


PART_BITS = 5
PARTS = 1 << PART_BITS
RING_SPANS = 1 << 16
# Words of a lane: spans begun so far, four words of name, the nanoseconds of each part that has
# ended, the ring.
COUNT, NAME, TOTALS = 0, 1, 8
NAME_WORDS = 4
RING = TOTALS + PARTS
LANE_WORDS = RING + RING_SPANS
LAST = RING_SPANS - 1
COMPUTE = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZE, Part.DEVICE)
PLAYING = (Part.STEP, Part.INFER, Part.WRITE, Part.PROCESS)
# A learner whose own thread gathers, or plays (in lockstep), waits for data.
LEARNER_PARTS: dict[Part, LearnerPart] = {
    **dict.fromkeys((Part.WAIT, Part.GATHER, *PLAYING), "wait_data"),
    Part.H2D: "h2d_exposed",
    **dict.fromkeys(COMPUTE, "compute"),
    Part.REDUCE: "reduce_exposed",
    Part.PULL: "pull_exposed",
    Part.PUBLISH: "publish",
    Part.COUNT: "bookkeeping",
    Part.SAVE: "bookkeeping",
}


class TimeLedger:
    """The wall clock of the thread that uses it, from now on, in nanoseconds of CLOCK_MONOTONIC.

    ``lane`` is a lane of shared memory; without one the ledger has memory of its own. A lane that
    has been written to is continued.
    """

    __slots__ = ("_count", "_lane", "_part", "_since", "follower")

    def __init__(self, lane: memoryview | None = None, part: Part = Part.OTHER) -> None:
        self._lane = memoryview(bytearray(8 * LANE_WORDS)).cast("q") if lane is None else lane
        self._part, self._since = part, time.perf_counter_ns()
        self.follower: Callable[[Part], None] | None = None  # is told of each `switch`

        # The first span begins.
        self._count = self._lane[COUNT] + 1
        self._lane[RING + (self._count - 1 & LAST)] = self._since << PART_BITS | part
        self._lane[COUNT] = self._count

    def switch(self, part: Part) -> None:
        """From now on the thread is in ``part``."""
        old = self._part
        if part is old:
            return

        # As few and as simple operations as possible: an actor calls this three times per step.
        now, lane, count = time.perf_counter_ns(), self._lane, self._count
        lane[RING + (count & LAST)] = now << PART_BITS | part
        lane[COUNT] = self._count = count + 1
        lane[TOTALS + old] += now - self._since  # last: a reader in between counts short, not twice
        self._part, self._since = part, now
        if self.follower is not None:
            self.follower(part)

    def switch_at(self, part: Part, at: int) -> None:
        """As `switch`, at a past time.

        That is for what is no thread of this process. The same part twice is two spans.

        Args:
            at_ns: in nanoseconds of CLOCK_MONOTONIC; a time before the last switch counts as that.
        """

        lane, count = self._lane, self._count
        at = max(at, self._since)
        lane[RING + (count & LAST)] = at << PART_BITS | part
        lane[COUNT] = self._count = count + 1
        lane[TOTALS + self._part] += at - self._since
        self._part, self._since = part, at

    def between(self, begin: int, end: int) -> list[tuple[Part, int]]:
        """Returns the parts that the thread was in from ``begin_ns`` to ``end_ns``, oldest first.

        Times are nanoseconds of CLOCK_MONOTONIC. Spans that have left the ring are missing.

        Returns: each part and when it began, ``begin_ns`` for one that began earlier.
        """
        found: list[tuple[Part, int]] = []

        for number in range(self._count - 1, max(-1, self._count - 1 - RING_SPANS), -1):
            word = self._lane[RING + (number & LAST)]
            since = word >> PART_BITS
            if since < end:
                found.append((_PART_OF[word & PARTS - 1], max(since, begin)))
            if since <= begin:
                break
        return found[::-1]

    @property
    def since(self) -> int:
        """When the current part began, in nanoseconds of CLOCK_MONOTONIC."""
        return self._since

    @property
    def part(self) -> Part:
        """The part that the thread is in."""
        return self._part

    @property
    def lane(self) -> memoryview:
        """The memory that the ledger writes to."""
        return self._lane

    def snapshot(self) -> dict[str, float]:
        """Returns the seconds by part up to this moment; parts that never were are left out."""
        return seconds_of(self._lane)


def name_lane(lane: memoryview, name: str) -> None:
    """Give a lane the name of its thread, of which 32 bytes are kept."""
    text = name.encode()[: 8 * NAME_WORDS].ljust(8 * NAME_WORDS, b"\0")
    lane[NAME : NAME + NAME_WORDS] = memoryview(text).cast("q")


def lane_name(lane: memoryview) -> str:
    """Returns the name of a lane; "" where none has been given."""
    return bytes(lane[NAME : NAME + NAME_WORDS]).rstrip(b"\0").decode(errors="replace")


_PART_OF = {part.value: part for part in Part}


def now_in(lane: memoryview) -> tuple[Part, int] | None:
    """Returns the part that a lane's thread is in, and when it began, in nanoseconds.

    None before the first span.
    """
    count = lane[COUNT]
    if not count:
        return None
    word = lane[RING + (count - 1 & LAST)]
    return _PART_OF[word & PARTS - 1], word >> PART_BITS


def seconds_of(lane: memoryview) -> dict[str, float]:
    """Returns the seconds by part up to now, including the current part.

    Any process that maps the memory may call it. While the thread changes parts, one span may be
    counted short.
    """
    totals = {part: lane[TOTALS + part] for part in Part}
    present = now_in(lane)
    if present is not None:
        totals[present[0]] += time.perf_counter_ns() - present[1]
    return {part.name.lower(): ns * 1e-9 for part, ns in totals.items() if ns > 0}


def fractions(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each part in the time between two snapshots.

    What a GPU was in becomes known late: until then its last span seemed to go on, and a part may
    have had more before than now, which counts as 0.
    """
    spent = {part: max(0.0, s - before.get(part, 0.0)) for part, s in now.items()}
    total = sum(spent.values())
    return {part: seconds / total if total else 0.0 for part, seconds in spent.items()}


def learner_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares or seconds of a learner's thread by all the names of `LearnerPart`."""
    names = {part.name.lower(): name for part, name in LEARNER_PARTS.items()}
    found: dict[str, float] = dict.fromkeys(get_args(LearnerPart), 0.0)
    for part, value in parts.items():
        found[names.get(part, "other")] += value
    return found
