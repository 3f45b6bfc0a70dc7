"""How a server takes slots in: in order, each once, and only as many as the buffer wants now.

A client numbers the slots of its stream and may have `WINDOW` of them on the way. What cannot be
stored yet waits here; a slot that comes again, because its answer was lost, is answered again and
not stored again. A gap makes the client send from the gap on.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from penstock.replay.buffer import Replay
from penstock.replay.sharing import Inlet
from penstock.transport import wire
from penstock.transport.shm.store import Slot
from penstock.transport.wire import SlotDecoder, WireError

FIRST_STREAM = 1 << 48  # none of those that writers of this host have
WINDOW = 8  # slots of a client that may be on their way


@dataclass
class Line:
    """The slots of one stream: which one is next, and those that wait. ``due``: to be answered."""

    name: bytes
    next: int = 0
    waiting: deque[wire.Message] = field(default_factory=deque)
    due: bool = False


class Intake:
    """Stores slots of many streams through one lane of ``replay``'s store."""

    def __init__(self, replay: Replay, rejected: Counter[str]) -> None:
        """``rejected`` counts what cannot be used, by reason."""
        self._rejected = rejected
        self.received = dict.fromkeys(("slots", "rows", "raw_nbytes", "coded_nbytes"), 0)
        self._spec = replay.layout.spec
        self._decoder = SlotDecoder(replay.layout.spec)
        self._inlet = Inlet(replay)
        self._lines: dict[int, Line] = {}

    @property
    def waiting(self) -> bool:
        """Whether some slot waits to be stored."""
        return any(line.waiting for line in self._lines.values())

    def accept(self, stream: int, name: bytes, message: wire.Message) -> None:
        """Note a slot that came. Raises WireError for one that cannot be used."""
        head = message.head
        if head.spec_hash != self._spec.hash:
            raise WireError("spec")
        line = self._lines.setdefault(stream, Line(name))
        line.name, line.due = name, True
        if head.sequence < line.next + len(line.waiting):
            return  # it came before
        if head.sequence > line.next + len(line.waiting) or len(line.waiting) >= WINDOW:
            raise WireError("ungranted")
        line.waiting.append(message)

    def store(self) -> list[tuple[bytes, int]]:
        """Store what may be stored by now; whom to answer, with the sequence that is next."""
        lines = [(stream, line) for stream, line in self._lines.items() if line.waiting]
        stored = 0
        while lines:
            for stream, line in lines:
                if not self._store(stream, line):
                    lines = []
                    break
                stored += 1
            lines = [(stream, line) for stream, line in lines if line.waiting]
        if stored:
            self._inlet.collect()
        return self._answers()

    def forget(self, stream: int) -> None:
        """A client is gone for good."""
        self._lines.pop(stream, None)

    def close(self) -> None:
        self._inlet.close()

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answers(self) -> list[tuple[bytes, int]]:
        due = [line for line in self._lines.values() if line.due]
        for line in due:
            line.due = False
        return [(line.name, line.next) for line in due]

    def _store(self, stream: int, line: Line) -> bool:
        """Store a stream's oldest slot; False when the buffer takes none now."""
        slot = self._inlet.acquire()
        if slot is None:
            return False
        message = line.waiting[0]
        try:
            self._decoder.decode(message, slot.payload)
        except WireError as error:
            self._rejected[error.reason] += 1
            line.waiting.clear()  # they no longer follow; the client sends all of them again
            self._inlet.give_back(slot)
            return True
        line.waiting.popleft()
        line.next += 1
        line.due = True
        head = message.head
        _fill_header(slot, stream, head)
        self._inlet.publish(slot)
        self._count(head)
        return True

    def _count(self, head: wire.Head) -> None:
        received = self.received
        received["slots"] += 1
        received["rows"] += head.steps
        received["raw_nbytes"] += head.raw_nbytes
        received["coded_nbytes"] += head.coded_nbytes


def _fill_header(slot: Slot, stream: int, head: wire.Head) -> None:
    """As its writer would have in shared memory; the message's generation is its `rows`."""
    now_s = time.monotonic()
    slot.header[...] = (
        FIRST_STREAM + stream,
        0,
        0,
        head.sequence,
        head.version,
        head.steps,
        head.produced_steps,
        now_s - head.duration_s,
        now_s,
        head.generation,
    )
