"""Where the seconds of a learner on a GPU go: what its stream was in and, where the stream had
nothing to do, what the host was in meanwhile.

The host runs ahead of its GPU. So what the host is in says little: it waits for data while the
stream still computes, and for the stream while that waits for a copy or for another learner. Only
where the stream is empty has the host kept it waiting.

Nothing here waits for the device. Marks (events) lie in the stream between the kernels; `settle`
places those that have passed on the host's clock, each by the time since the mark before it, since
times over hours would lose digits (they come as 32-bit floats). Between two marks of a part the
stream counts as in it, gaps between its kernels included.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from penstock.profiling.ledger import COMPUTE, Part, TimeLedger

# The parts in which the host puts work on the stream.
ON_STREAM = frozenset((Part.H2D, Part.FORWARD, Part.BACKWARD, Part.REDUCE, Part.OPTIMIZE))


class Event(Protocol):
    """What is used of a `torch.cuda.Event` that keeps times; `elapsed_time` is in milliseconds."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any, /) -> float: ...


class Mark(NamedTuple):
    """An event in the stream, from which on the stream is in ``part``.

    With WAIT it has nothing to do. ``recorded_ns`` is when the host put the event there.
    """

    part: Part
    event: Event
    recorded_ns: int


class DeviceClock:
    """Measures the parts of the current stream of the thread that uses it.

    `mark` is to be called at every switch of that thread's ledger (`TimeLedger.follow`), and
    `settle` now and then.
    """

    def __init__(
        self, host: TimeLedger, ledger: TimeLedger, make_event: Callable[[], Event]
    ) -> None:
        """Record the first event.

        Args:
            host: the ledger of the thread.
            ledger: gets the spans of the stream.
            make_event: makes events of the current device that keep times.
        """
        self._host = host
        self._ledger = ledger
        self._make_event = make_event
        self._marks: deque[Mark] = deque()
        """Marks that have not passed, as far as is known."""
        self._spare: list[Event] = []
        """Events to record again."""
        self._marked_part = Part.WAIT
        """The part of the last mark."""
        self._part = Part.WAIT
        """The part of the last mark that has passed."""

        self._last_event = self._make_event()
        """The event of the last mark that has passed, or the first one."""
        self._last_event.record()
        self._passed_ns = time.perf_counter_ns()
        """When that passed, on the host's clock."""
        self._written_ns = self._passed_ns
        """Up to when ``ledger`` is written."""

    def mark(self, part: Part) -> None:
        """Attribute what is put on the stream from now on to ``part``."""
        stream_part = part if part in ON_STREAM else Part.WAIT
        if stream_part is self._marked_part:
            return
        self._marked_part = stream_part
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._marks.append(Mark(stream_part, event, time.perf_counter_ns()))

    def settle(self) -> None:
        """Write the spans of all marks that have passed to the ledger.

        The more often it is called, the truer they are: each call corrects for the drift between
        the two clocks.
        """
        while self._marks and self._marks[0].event.query():
            mark = self._marks.popleft()
            elapsed_ns = round(self._last_event.elapsed_time(mark.event) * 1e6)
            self._passed_ns = bounded_mark_ns(
                self._passed_ns + elapsed_ns, mark.recorded_ns, time.perf_counter_ns()
            )
            self._spare.append(self._last_event)
            self._last_event = mark.event
            self._begin(mark.part, self._passed_ns)

        if self._part is Part.WAIT:
            self._fill_with_host(time.perf_counter_ns())

    def _begin(self, part: Part, at_ns: int) -> None:
        """Begin a span of the stream."""
        if self._part is Part.WAIT:
            self._fill_with_host(at_ns)
        if part is not Part.WAIT:
            self._ledger.switch_at(part, at_ns)
        self._part = part
        self._written_ns = max(self._written_ns, at_ns)

    def _fill_with_host(self, until_ns: int) -> None:
        """Write what the host was in while the stream had nothing to do, up to ``until_ns``."""
        for part, begin_ns in self._host.between(self._written_ns, until_ns):
            idle_part = blame(part)
            if idle_part is not self._ledger.part:
                self._ledger.switch_at(idle_part, begin_ns)
        self._written_ns = max(self._written_ns, until_ns)


def bounded_mark_ns(estimate_ns: int, recorded_ns: int, seen_ns: int) -> int:
    """Returns when a mark passed, on the host's clock.

    That is not before it was recorded, nor after it was seen to have passed. Both bounds hold the
    drift of ``estimate_ns`` down.
    """
    return min(max(estimate_ns, recorded_ns), seen_ns)


def blame(host: Part) -> Part:
    """Returns the part as which an idle stream's time is booked, by what the host was in.

    A host that is still putting the work on the stream computes nothing.
    """
    return Part.OTHER if host in COMPUTE else host
