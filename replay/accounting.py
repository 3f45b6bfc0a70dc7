"""Where every agent step went: produced = trained + dropped + lost + in flight.

Each term is counted on its own, none by subtraction, so that the equation can fail and tests can
assert it. A *stream* is one incarnation of one actor; its slots carry a sequence number and the
steps it has produced so far, so a gap in the sequence says how many steps were lost.

What a stream says of itself counts within bounds, since it may have come over a network:

- the first slot of a stream is a baseline: what its counters hold before it is neither produced nor
  lost, as a learner that was restarted meets streams in the middle;
- a gap counts as lost if it is no longer than the grants that a stream may hold (`MAX_GAP`), and
  with at most ``slot_steps`` steps for each slot of it; a longer one is a new baseline;
- only the supervisor of this host knows the whole of a stream that began with this learner: what it
  gives as the end of one of its own actors counts in full.

The cost of a slot and the memory are the same however many streams there have been.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

MAX_GAP = 64  # slots that may be on their way in one stream: `transport.grants.MAX_WANT`
MAX_STREAMS = 1 << 14  # that are remembered, the latest ones: more than play for one learner
UNBOUNDED = 1 << 62


@dataclass(slots=True)
class _Stream:
    next_sequence: int
    produced_steps: int  # by its own count, before ``next_sequence``
    counted_steps: int = 0  # in `Accounting.produced`


@dataclass
class Accounting:
    """Counts agent steps (unmasked decisions), never emulator frames.

    What is in flight is not counted here but summed by what holds it: queue and staging batches.
    The thread that receives and the one that trains and reports may both use it.

    Args:
        slot_steps: most agent steps of one slot.
    """

    slot_steps: int = UNBOUNDED
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    _produced: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: OrderedDict[tuple[int, int], _Stream] = field(default_factory=OrderedDict)

    def arrived(self, header: Any) -> None:
        """A slot was taken in; ``header`` is its HEADER record."""
        steps, sequence = int(header["steps"]), int(header["sequence"])
        before = int(header["produced_steps"]) - steps
        key = int(header["actor"]), int(header["incarnation"])
        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                stream = self._begin(key, sequence, before)
            else:
                self._streams.move_to_end(key)
                self._advance(stream, sequence, before)
            if sequence == stream.next_sequence:
                stream.next_sequence += 1
                stream.produced_steps = before + steps
            stream.counted_steps += steps
            self._produced += steps

    def ended(
        self,
        actor: int,
        incarnation: int,
        next_sequence: int,
        produced_steps: int,
        *,
        trusted: bool = False,
    ) -> None:
        """A stream is over: what it sent before this point and never arrived is lost.

        Call it once everything that was sent has been received. May be called again.

        Args:
            actor: the stream's actor.
            incarnation: the actor's incarnation.
            next_sequence: the sequence that it would have sent next.
            produced_steps: agent steps of the whole stream.
            trusted: whether this comes from the supervisor that started the actor, and not from
                what the actor said over the wire.
        """
        key = actor, incarnation
        with self._lock:
            stream = self._streams.get(key)
            if trusted:
                stream = stream or self._begin(key, 0, 0)
                self._lose(stream, produced_steps - stream.counted_steps)
                if next_sequence > stream.next_sequence:
                    stream.next_sequence, stream.produced_steps = next_sequence, produced_steps
            elif stream is not None:
                self._advance(stream, next_sequence, produced_steps)

    def used(self, steps: int, trained: int) -> None:
        """A batch of so many steps has been used; the rest was dropped with a lost group."""
        self.trained += trained
        if steps > trained:
            self.dropped["group_lost"] += steps - trained

    @property
    def produced(self) -> int:
        """Steps that arrived or are known to be lost."""
        return self._produced

    def to_dict(self, in_flight: int) -> dict[str, Any]:
        return {
            "produced": self.produced,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "lost": dict(self.lost),
            "in_flight": in_flight,
        }

    def balance(self, in_flight: int) -> int:
        """Produced minus where it went; anything but 0 is a defect of Penstock."""
        went = self.trained + self.dropped.total() + self.lost.total() + in_flight
        return self.produced - went

    def _begin(self, key: tuple[int, int], sequence: int, produced_steps: int) -> _Stream:
        stream = self._streams[key] = _Stream(sequence, produced_steps)
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return stream

    def _advance(self, stream: _Stream, sequence: int, produced_steps: int) -> None:
        """Account for a gap up to ``sequence``, before which ``produced_steps`` were made."""
        gap = sequence - stream.next_sequence
        if gap <= 0:
            return
        if gap <= MAX_GAP:
            made = produced_steps - stream.produced_steps
            self._lose(stream, min(made, gap * self.slot_steps))
        stream.next_sequence, stream.produced_steps = sequence, produced_steps

    def _lose(self, stream: _Stream, steps: int) -> None:
        if steps > 0:
            self.lost["disconnect"] += steps
            self._produced += steps
            stream.counted_steps += steps
