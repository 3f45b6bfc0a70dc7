"""How a server takes in slots: in order, each once, and only as many as the buffer accepts now.

A client numbers the slots of its stream and may have `WINDOW` of them on the way. Slots that cannot
be stored yet wait here; a slot that is sent again, because its answer was lost, is acknowledged
again and not stored again. After a gap the client sends again from the gap on. A slot with invalid
columns is refused, once, and the stream continues after it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.buffer import Replay
from penstock.replay.samplers import MAX_PRIORITY, are_priorities
from penstock.replay.table import NONE, TableListener
from penstock.transport import wire
from penstock.transport.shm.store import Slot
from penstock.transport.wire import SlotDecoder, WireError

FIRST_STREAM = 1 << 48  # above the streams of writers on this host
WINDOW = 8  # slots of a client that may be on their way
MAX_VERSION = 1 << 62

Refused = Callable[[bytes, int, str, str], None]  # peer, sequence, reason, what is wrong


@dataclass
class Line:
    """The slots of one stream: the next sequence number, and waiting slots.

    ``due``: an answer is due.
    """

    name: bytes
    next: int = 0
    waiting: deque[wire.Message] = field(default_factory=deque)
    due: bool = False

    @property
    def waiting_nbytes(self) -> int:
        return sum(message.head.coded_nbytes for message in self.waiting)


@dataclass
class Taken:
    """The part of a token's stream that the buffer has: slots before ``next``, and their rows."""

    token: str
    next: int = 0
    rows: int = 0


class Intake(TableListener):
    """Stores the slots of many streams through one lane of ``replay``'s store."""

    def __init__(self, replay: Replay, refused: Refused, waiting_nbytes: int) -> None:
        """Make the intake.

        Args:
            replay: the buffer.
            refused: called with peer, sequence, reason and text for each slot that arrived in order
                and cannot be used; the sequence is -1 where the client may send it again.
            waiting_nbytes: limit for all slots together that wait to be stored.
        """
        self._refused, self._most_waiting_nbytes = refused, waiting_nbytes
        self.received = dict.fromkeys(("slots", "rows", "raw_nbytes", "coded_nbytes"), 0)
        self.waiting_nbytes = 0
        self._replay, self._spec = replay, replay.layout.spec
        self._decoder = SlotDecoder(replay.layout.spec)
        with replay.lock:
            self._lane, self._writer = replay.table.open_lane()
        self._lines: dict[int, Line] = {}
        # Changed only under the buffer's lock, together with the table.
        self._taken: dict[int, Taken] = {}
        replay.table.subscribe(self)

    def accept(self, stream: int, name: bytes, message: wire.Message) -> None:
        """Take in a received slot. Raises WireError for one that cannot be used."""
        head = message.head
        if head.spec_hash != self._spec.hash:
            raise WireError("spec")
        line = self._lines[stream]
        line.name, line.due = name, True
        if head.sequence < line.next + len(line.waiting):
            return  # it was received before
        if head.sequence > line.next + len(line.waiting) or len(line.waiting) >= WINDOW:
            raise WireError("ungranted")
        # Only the bytes of frames are counted while the slot waits; the meta is small.
        if len(message.frames) != len(self._spec.blocks):
            raise WireError("frames", f"{len(message.frames)} instead of {len(self._spec.blocks)}")
        nbytes = self.waiting_nbytes + head.coded_nbytes
        if self.waiting_nbytes and nbytes > self._most_waiting_nbytes:
            raise WireError("busy", "slots of other clients wait; it will be sent again")
        self.waiting_nbytes = nbytes
        line.waiting.append(message)

    def store(self) -> list[tuple[bytes, int]]:
        """Store waiting slots; returns the peers to answer, with their next sequence."""
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
            self._collect()
        return self._answers()

    def open(self, stream: int, name: bytes, taken: Taken) -> None:
        """Add a client; the buffer has ``taken`` of its stream before."""
        with self._replay.lock:
            self._taken[stream] = taken
        self._lines[stream] = Line(name, taken.next)

    def rename(self, stream: int, name: bytes) -> int:
        """Give the client of a stream a new connection; returns the next sequence."""
        self._lines[stream].name = name
        return self._lines[stream].next

    def taken(self, stream: int) -> Taken:
        return self._taken[stream]

    def all_taken(self) -> list[Taken]:
        """The state of all streams; needs the buffer's lock."""
        return list(self._taken.values())

    def forget(self, stream: int) -> None:
        """Remove a client for good."""
        if line := self._lines.pop(stream, None):
            self.waiting_nbytes -= line.waiting_nbytes
        with self._replay.lock:
            self._taken.pop(stream, None)

    def close(self) -> None:
        self._replay.table.unsubscribe(self)
        with self._replay.lock:
            self._replay.table.close_lane(self._lane, NONE)

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_ingested(self, slot: Slot) -> None:
        """Note that the buffer has taken a slot in."""
        stream = int(slot.header["actor"]) - FIRST_STREAM
        if (taken := self._taken.get(stream)) is not None:
            taken.next = int(slot.header["sequence"]) + 1
            taken.rows += int(slot.header["steps"])

    def _answers(self) -> list[tuple[bytes, int]]:
        due = [line for line in self._lines.values() if line.due]
        for line in due:
            line.due = False
        return [(line.name, line.next) for line in due]

    def _store(self, stream: int, line: Line) -> bool:
        """Store a stream's oldest slot; False when the buffer accepts none now."""
        slot = self._acquire()
        if slot is None:
            return False
        message, head = line.waiting[0], line.waiting[0].head
        try:
            self._decoder.decode(message, slot.payload)
            with np.errstate(invalid="ignore"):  # of NaN that signals
                fault = self._fault(head, slot)
        except WireError as error:
            self._refuse(line, -1, error.reason, str(error))
        except wire.STRANGE as error:
            self._refuse(line, -1, "meta", str(error))
        else:
            line.waiting.popleft()
            self.waiting_nbytes -= head.coded_nbytes
            line.next += 1
            line.due = True
            if fault is None:
                # As a writer in shared memory would: a client's message has its rows as generation.
                own = head._replace(actor=FIRST_STREAM + stream, incarnation=0, generation=0)
                wire.fill_header(slot.header, own, time.monotonic(), rows=head.generation)
                self._replay.table.checked.add(slot.index)
                self._writer.publish(slot)
                self._count(head)
                return True
            self._refused(line.name, head.sequence, "columns", fault)
        self._writer.give_back(slot)
        return True

    def _acquire(self) -> Slot | None:
        """A slot to fill, evicting the oldest; None while there is none."""
        rate_limited = self._replay.rate_limited
        if rate_limited is not None and not rate_limited.may_lend():
            return None
        slot = self._writer.acquire(0)
        if slot is None:
            self._collect()
            slot = self._writer.acquire(0)
        return slot

    def _collect(self) -> None:
        """Make the buffer collect published slots."""
        with self._replay.lock:
            self._replay.collect()

    def _refuse(self, line: Line, sequence: int, reason: str, text: str) -> None:
        """Drop waiting slots, which no longer follow; the client sends all of them again."""
        self.waiting_nbytes -= line.waiting_nbytes
        line.waiting.clear()
        self._refused(line.name, sequence, reason, text)

    def _fault(self, head: wire.Header, slot: Slot) -> str | None:
        """What is wrong with the columns of a slot, as a sentence; None: nothing."""
        spec, count = self._spec, head.generation
        if not 1 <= count <= spec.unroll:
            return f"the slot says that it has {count} steps, and has 1 to {spec.unroll}"
        if head.version > MAX_VERSION:
            return f"policy version {head.version} is above {MAX_VERSION}"
        columns = slot.columns
        alive = int(np.count_nonzero(columns["alive"][:count]))
        if alive != head.steps:
            return f"{alive} rows are alive, and the header says {head.steps}"
        if not np.isfinite(columns["reward"][:count]).all():
            return "column reward holds a number that is not finite"
        priority = columns.get("priority")
        if priority is not None and not _sound(priority[:count]):
            return f"column priority must hold numbers from 0 to {MAX_PRIORITY:g}, or NaN"
        table = self._replay.table
        rows = table.records.reshape(-1, spec.unroll, spec.envs)[slot.index]
        return table.checks.fault(rows[:count], marked=True)

    def _count(self, head: wire.Header) -> None:
        received = self.received
        received["slots"] += 1
        received["rows"] += head.steps
        received["raw_nbytes"] += head.raw_nbytes
        received["coded_nbytes"] += head.coded_nbytes


def _sound(priority: npt.NDArray[Any]) -> bool:
    if np.isnan(priority).all():
        return True
    values = priority.astype(np.float64)
    return bool((are_priorities(values) | np.isnan(values)).all())
