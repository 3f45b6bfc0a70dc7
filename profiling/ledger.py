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
    WAIT = 1  # waiting for data, for room, for a command
    STEP = 2  # environments
    INFER = 3
    WRITE = 4  # an actor's observations and actions into the slot
    RECEIVE = 5
    DECOMPRESS = 6
    PROCESS = 7  # the algorithm's work on a slot
    PUBLISH = 8  # weights by a learner, slots by a connector
    GATHER = 9
    H2D = 10  # host to device
    FORWARD = 11
    BACKWARD = 12
    REDUCE = 13
    OPTIMIZE = 14
    SAVE = 15
    COMPRESS = 16
    SEND = 17
    DEVICE = 18  # waiting for a GPU to compute
    COUNT = 19  # a learner's counters and reports
    PULL = 20  # waiting for the answer of a parameter server


# A word of the ring has a time in nanoseconds above these bits, and in them the number of a part.
PART_BITS = 5
PARTS = 1 << PART_BITS
# So many spans of a lane are remembered, a power of two.
RING_SPANS = 1 << 16
LAST = RING_SPANS - 1  # the mask that makes a place in the ring of the number of a span
# The words of a lane: the number of spans begun so far, the name, the nanoseconds of each part in
# the spans that have ended, and the ring.
COUNT = 0
NAME = 1
TOTALS = 8
NAME_WORDS = 4
RING = TOTALS + PARTS
LANE_WORDS = RING + RING_SPANS

# The parts in which a learner computes, and those in which environments are played.
COMPUTE = (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZE, Part.DEVICE)
PLAYING = (Part.STEP, Part.INFER, Part.WRITE, Part.PROCESS)
# The parts of a learner's thread, by the name that users read. A learner whose own thread gathers,
# or plays (in lockstep), waits for data.
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


_PART_OF = {part.value: part for part in Part}


class TimeLedger:
    """The wall clock of the thread that uses it, from now on, in nanoseconds of CLOCK_MONOTONIC.

    ``lane`` is a lane of shared memory; without one the ledger has memory of its own. A lane that
    has been written to is continued.
    """

    # _lane      words of memory, shared or not
    # _count     spans begun so far, as in the lane
    # _part      the part that the thread is in
    # _since     when that part began, in nanoseconds
    # _follower  called at each `switch`
    __slots__ = ("_count", "_follower", "_lane", "_part", "_since")

    def __init__(self, lane: memoryview | None = None, part: Part = Part.OTHER) -> None:
        self._lane = memoryview(bytearray(8 * LANE_WORDS)).cast("q") if lane is None else lane
        self._part = part
        self._since = time.perf_counter_ns()
        self._follower: Callable[[Part], None] | None = None

        # The first span begins.
        self._count = self._lane[COUNT] + 1
        self._lane[RING + (self._count - 1 & LAST)] = self._since << PART_BITS | part
        self._lane[COUNT] = self._count

    def follow(self, follower: Callable[[Part], None]) -> None:
        """Call ``follower`` with the new part at each `switch` from now on, in the same thread."""
        self._follower = follower

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
        if self._follower is not None:
            self._follower(part)

    def switch_at(self, part: Part, at_ns: int) -> None:
        """As `switch`, at a past time.

        That is for what is no thread of this process. The same part twice is two spans.

        Args:
            at_ns: in nanoseconds of CLOCK_MONOTONIC; a time before the last switch counts as that.
        """
        at_ns = max(at_ns, self._since)

        lane = self._lane
        count = self._count
        lane[RING + (count & LAST)] = at_ns << PART_BITS | part
        self._count = count + 1
        lane[COUNT] = count + 1
        lane[TOTALS + self._part] += at_ns - self._since
        self._part = part
        self._since = at_ns

    def between(self, begin_ns: int, end_ns: int) -> list[tuple[Part, int]]:
        """Returns the parts that the thread was in from ``begin_ns`` to ``end_ns``, oldest first.

        Times are nanoseconds of CLOCK_MONOTONIC. Spans that have left the ring are missing.

        Returns: each part and when it began, ``begin_ns`` for one that began earlier.
        """
        spans: list[tuple[Part, int]] = []
        oldest = max(0, self._count - RING_SPANS)

        for number in reversed(range(oldest, self._count)):
            word = self._lane[RING + (number & LAST)]
            since_ns = word >> PART_BITS
            if since_ns < end_ns:
                spans.append((_PART_OF[word & PARTS - 1], max(since_ns, begin_ns)))
            if since_ns <= begin_ns:
                break
        return spans[::-1]

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
        return seconds_by_part(self._lane)


def name_lane(lane: memoryview, name: str) -> None:
    """Give a lane the name of its thread, of which 32 bytes are kept."""
    nbytes = 8 * NAME_WORDS
    text = name.encode()[:nbytes].ljust(nbytes, b"\0")
    lane[NAME : NAME + NAME_WORDS] = memoryview(text).cast("q")


def lane_name(lane: memoryview) -> str:
    """Returns the name of a lane; "" where none has been given."""
    return bytes(lane[NAME : NAME + NAME_WORDS]).rstrip(b"\0").decode(errors="replace")


def current_span(lane: memoryview) -> tuple[Part, int] | None:
    """Returns the part that a lane's thread is in, and when it began, in nanoseconds.

    None before the first span.
    """
    count = lane[COUNT]
    if not count:
        return None
    word = lane[RING + (count - 1 & LAST)]
    return _PART_OF[word & PARTS - 1], word >> PART_BITS


def seconds_by_part(lane: memoryview) -> dict[str, float]:
    """Returns the seconds by part up to now, including the current part.

    Any process that maps the memory may call it. While the thread changes parts, one span may be
    counted short.
    """
    totals_ns = {part: lane[TOTALS + part] for part in Part}
    current = current_span(lane)
    if current is not None:
        part, since_ns = current
        totals_ns[part] += time.perf_counter_ns() - since_ns
    return {part.name.lower(): ns * 1e-9 for part, ns in totals_ns.items() if ns > 0}


def shares_between(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each part in the time between two snapshots.

    What a GPU was in becomes known late: until then its last span seemed to go on, and a part may
    have had more before than now, which counts as 0.
    """
    spent_s = {part: max(0.0, s - before.get(part, 0.0)) for part, s in now.items()}
    total_s = sum(spent_s.values())
    return {part: seconds / total_s if total_s else 0.0 for part, seconds in spent_s.items()}


def by_learner_part(parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares or seconds of a learner's thread by all the names of `LearnerPart`."""
    learner_part_of = {part.name.lower(): name for part, name in LEARNER_PARTS.items()}
    sums: dict[str, float] = dict.fromkeys(get_args(LearnerPart), 0.0)
    for part, value in parts.items():
        sums[learner_part_of.get(part, "other")] += value
    return sums
