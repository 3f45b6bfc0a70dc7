"""Where every agent step went: produced = trained + dropped + lost + in flight.

Each term is counted on its own, none by subtraction, so that the equation can fail and tests can
assert it. A *stream* is one incarnation of one actor. Its slots carry a sequence number and the
number of steps produced so far, so a gap in the sequence shows how many steps were lost.

The counters of a stream may have come over a network, so they count within bounds:

- The first slot of a stream is a baseline: steps before it are neither produced nor lost, as a
  restarted learner meets streams in the middle.
- Steps that a writer counts between two slots without a gap are steps that failed, which the writer
  has dropped itself. Together with the steps that the slot holds, they are at most ``slot_steps``.
- A gap counts as lost if it is no longer than the grants that a stream may hold (`MAX_GAP`), and
  with at most ``slot_steps`` steps for each slot of it. A longer gap is a new baseline.
- Only the supervisor of this host knows the whole of a stream that began with this learner: the end
  that it reports for one of its own actors counts in full.

Time and memory per slot do not depend on the number of streams.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

# So many slots of one stream may be on their way: `transport.grants.MAX_WANT`.
MAX_GAP = 64
# So many streams are remembered, the latest ones: more than play for one learner.
MAX_STREAMS = 1 << 14
# The default of `Accounting.slot_steps`: no limit.
UNBOUNDED = 1 << 62
# The reason, in `Accounting.dropped`, of steps that an actor has dropped because they failed.
FAILED = "env_error"

# Actor and incarnation.
_StreamKey = tuple[int, int]


@dataclass(slots=True)
class _Stream:
    """How far the slots of one stream were counted.

    Args:
        next_sequence: the sequence number of the next slot.
        produced_steps: steps that the stream itself counted before that slot.
        counted_steps: the steps of the stream in `Accounting.produced`.
    """

    next_sequence: int
    produced_steps: int
    counted_steps: int = 0


@dataclass
class Accounting:
    """Counts agent steps (unmasked decisions), never emulator frames.

    Steps in flight are not counted here; the queue and the staging batches that hold them sum them
    up. The receiving thread and the training thread may both use it.

    Args:
        slot_steps: most agent steps of one slot.
        trained: steps that were used for training.
        dropped: steps that arrived and were not used, by reason.
        lost: steps that were produced and did not arrive, by reason.
    """

    slot_steps: int = UNBOUNDED
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    _produced: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # The latest streams; the one whose last slot arrived first comes first.
    _streams: OrderedDict[_StreamKey, _Stream] = field(default_factory=OrderedDict)

    def arrived(self, header: Any) -> None:
        """Count a slot that was taken in; ``header`` is its HEADER record."""
        key = (int(header["actor"]), int(header["incarnation"]))
        sequence = int(header["sequence"])
        steps = int(header["steps"])
        previous_steps = int(header["produced_steps"]) - steps

        with self._lock:
            stream = self._streams.get(key)
            if stream is None:
                baseline = previous_steps if sequence else 0
                stream = self._begin(key, sequence, baseline)
            else:
                self._streams.move_to_end(key)
                self._advance(stream, sequence, previous_steps)

            # A slot that comes late, after a gap that was counted as lost, changes no baseline.
            if sequence == stream.next_sequence:
                failed_steps = previous_steps - stream.produced_steps
                self._drop(stream, min(failed_steps, self.slot_steps - steps))
                stream.next_sequence += 1
                stream.produced_steps = previous_steps + steps
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
        """Count the end of a stream: steps that were sent and never arrived are lost.

        Call it once everything that was sent has been received. It may be called again for the same
        stream, and then counts nothing twice.

        Args:
            actor: the stream's actor.
            incarnation: the actor's incarnation.
            next_sequence: the sequence number that the stream would have sent next.
            produced_steps: agent steps of the whole stream.
            trusted: whether the numbers come from the supervisor that started the actor, and not
                from the actor over the wire.
        """
        key = (actor, incarnation)
        with self._lock:
            stream = self._streams.get(key)
            if trusted:
                if stream is None:
                    stream = self._begin(key, sequence=0, produced_steps=0)
                self._lose(stream, produced_steps - stream.counted_steps)
                if next_sequence > stream.next_sequence:
                    stream.next_sequence = next_sequence
                    stream.produced_steps = produced_steps
            elif stream is not None:
                self._advance(stream, next_sequence, produced_steps)

    def count_batch(self, steps: int, trained: int) -> None:
        """Count a batch of steps that a learner has taken.

        Args:
            steps: of the batch.
            trained: those that were used. The others were dropped because the group of learners
                lost a member.
        """
        self.trained += trained
        if steps > trained:
            self.dropped["group_lost"] += steps - trained

    @property
    def produced(self) -> int:
        """The number of steps that arrived or are known to be lost."""
        return self._produced

    def to_dict(self, in_flight: int) -> dict[str, Any]:
        """Returns all terms as JSON values; ``in_flight`` is the number of steps in flight."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "lost": dict(self.lost),
            "in_flight": in_flight,
        }

    def balance(self, in_flight: int) -> int:
        """Returns the produced steps minus all other terms.

        Anything but 0 is a defect of Penstock.
        """
        accounted = self.trained + self.dropped.total() + self.lost.total() + in_flight
        return self.produced - accounted

    def _begin(self, key: _StreamKey, sequence: int, produced_steps: int) -> _Stream:
        """Begin to count a stream at the slot ``sequence``, and forget the oldest stream."""
        stream = _Stream(sequence, produced_steps)
        self._streams[key] = stream
        if len(self._streams) > MAX_STREAMS:
            self._streams.popitem(last=False)
        return stream

    def _advance(self, stream: _Stream, sequence: int, produced_steps: int) -> None:
        """Count the slots of a stream that are missing before ``sequence`` as lost.

        ``produced_steps`` is what the stream itself counted before that slot.
        """
        gap = sequence - stream.next_sequence
        if gap <= 0:
            return

        if gap <= MAX_GAP:
            missing_steps = produced_steps - stream.produced_steps
            self._lose(stream, min(missing_steps, gap * self.slot_steps))
        stream.next_sequence = sequence
        stream.produced_steps = produced_steps

    def _drop(self, stream: _Stream, steps: int) -> None:
        """Count steps that the stream's actor has dropped, if there are any."""
        if steps > 0:
            self.dropped[FAILED] += steps
            self._produced += steps
            stream.counted_steps += steps

    def _lose(self, stream: _Stream, steps: int) -> None:
        """Count steps that did not arrive, if there are any."""
        if steps > 0:
            self.lost["disconnect"] += steps
            self._produced += steps
            stream.counted_steps += steps
