"""Where every agent step went: produced = trained + dropped + lost + in flight.

Each term is counted on its own, none by subtraction, so that the equation can fail and tests can
assert it. A *stream* is one incarnation of one actor; its slots carry a sequence number and the
steps it has produced so far, so a gap in the sequence says exactly how many steps were lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Stream:
    next_sequence: int = 0
    produced_steps: int = 0


@dataclass
class Accounting:
    """Counts agent steps (unmasked decisions), never emulator frames.

    What is in flight is not counted here but summed by who holds it: queue and staging batches.
    The thread that receives and the one that trains and reports may both use it.
    """

    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _streams: dict[tuple[int, int], _Stream] = field(default_factory=dict)

    def arrived(self, header: Any) -> None:
        """A slot was taken in; ``header`` is its HEADER record."""
        steps = int(header["steps"])
        produced = int(header["produced_steps"])
        with self._lock:
            stream = self._stream(int(header["actor"]), int(header["incarnation"]))
            self._advance(stream, int(header["sequence"]), produced - steps)
            stream.next_sequence += 1
            stream.produced_steps += steps

    def ended(self, actor: int, incarnation: int, next_sequence: int, produced_steps: int) -> None:
        """A stream is over: what it sent before this point and never arrived is lost.

        Call it once everything that was sent has been received.
        """
        with self._lock:
            self._advance(self._stream(actor, incarnation), next_sequence, produced_steps)

    @property
    def produced(self) -> int:
        """What the actors say that they produced, as far as they were heard."""
        with self._lock:
            return sum(stream.produced_steps for stream in self._streams.values())

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

    def _stream(self, actor: int, incarnation: int) -> _Stream:
        return self._streams.setdefault((actor, incarnation), _Stream())

    def _advance(self, stream: _Stream, sequence: int, produced_steps: int) -> None:
        """Account for a gap up to ``sequence``, before which ``produced_steps`` were made."""
        if sequence > stream.next_sequence:
            self.lost["disconnect"] += produced_steps - stream.produced_steps
            stream.next_sequence = sequence
            stream.produced_steps = produced_steps
