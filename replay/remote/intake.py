"""How a server takes in slots: in order, each once, and only as many as the buffer accepts now.

A client numbers the slots of its stream and may have `WINDOW` of them on the way. Slots that cannot
be stored yet wait here. A slot that is sent again, because its answer was lost, is acknowledged
again and not stored again. After a gap the client sends again from the gap on. A slot with invalid
columns is refused, once, and the stream continues after it.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.replay.buffer import Replay
from penstock.replay.samplers import MAX_PRIORITY, are_priorities
from penstock.replay.table import NONE, TableListener
from penstock.transport import wire
from penstock.transport.shm.store import Slot
from penstock.transport.wire import SlotDecoder, WireError

# Numbers of clients' streams in the headers of slots begin here, above those of writers on this
# host.
FIRST_STREAM = 1 << 48

# Slots of one client that may be on their way.
WINDOW = 8

# The largest policy version that a slot may have.
MAX_VERSION = 1 << 62

# Random bytes of the token that a new client gets.
TOKEN_NBYTES = 16


class RefusedSlot(NamedTuple):
    """A slot that arrived in order and cannot be used."""

    peer: bytes
    """The connection from which it came."""

    sequence: int | None
    """Its number in the client's stream; None if the client may send it again."""

    reason: str
    """What is counted: "columns", or the reason of a `WireError`."""

    text: str
    """What is wrong with it, for the client and the log."""


@dataclass(eq=False)
class ClientStream:
    """The slots of one client, over all its connections.

    ``token`` identifies the client when it reconnects, also after a restart of the server.
    `ingested_until` and `ingested_rows` are changed only under the buffer's lock, together with the
    table, so a snapshot has both as of one instant.
    """

    number: int
    token: str
    peer: bytes
    """The connection to which answers go."""

    next_sequence: int = 0
    """Number of the next slot to be stored: those before it are acknowledged."""

    ingested_until: int = 0
    """Number of the next slot that the buffer's table takes in."""

    ingested_rows: int = 0
    """Rows of the stream that the table has taken in."""

    waiting: deque[wire.Message] = field(default_factory=deque)
    """Slots that wait to be stored, in order from `next_sequence` on."""

    answer_due: bool = False
    """Whether the client is to be told `next_sequence`."""

    @property
    def expected_sequence(self) -> int:
        """Number of the next slot that the client may send."""
        return self.next_sequence + len(self.waiting)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of the waiting slots, as they came."""
        return sum(message.head.coded_nbytes for message in self.waiting)


class Intake(TableListener):
    """Stores the slots of many streams through one lane of ``replay``'s store; for one thread.

    Only `marks` is also called from another thread.
    """

    def __init__(
        self,
        replay: Replay,
        on_refused: Callable[[RefusedSlot], None],
        *,
        max_waiting_nbytes: int,
        marks: dict[str, Any] | None = None,
    ) -> None:
        """Make the intake.

        Args:
            replay: the buffer.
            on_refused: called for each slot that arrived in order and cannot be used.
            max_waiting_nbytes: limit for all slots together that wait to be stored.
            marks: the state of streams in a restored snapshot, as from `marks`.
        """
        self._on_refused = on_refused
        self._max_waiting_nbytes = max_waiting_nbytes
        self.received = dict.fromkeys(("slots", "rows", "raw_nbytes", "coded_nbytes"), 0)
        """Counts of the slots that were stored."""

        self.waiting_nbytes = 0
        """Bytes of all slots that wait to be stored."""

        self._replay = replay
        self._spec = replay.layout.spec
        self._decoder = SlotDecoder(replay.layout.spec)
        with replay.lock:
            self._lane, self._writer = replay.table.open_lane()

        # These are changed only under the buffer's lock, since `marks` reads them in another
        # thread.
        self._streams: dict[int, ClientStream] = {}
        self._marks: dict[str, Any] = dict(marks or {})
        self._last_number = 0

        replay.table.subscribe(self)

    # ------------------------------------------------------------------------- streams

    def open(self, peer: bytes, token: str) -> ClientStream:
        """Begin the stream of a client, or continue that of ``token`` in the restored snapshot.

        A client whose token is not known gets a new one.
        """
        with self._replay.lock:
            mark = self._marks.pop(token, None)
            if mark is None:
                token = secrets.token_hex(TOKEN_NBYTES)
            ingested_until, ingested_rows = mark or (0, 0)

            self._last_number += 1
            stream = ClientStream(
                self._last_number,
                token,
                peer,
                next_sequence=ingested_until,
                ingested_until=ingested_until,
                ingested_rows=ingested_rows,
            )
            self._streams[stream.number] = stream
        return stream

    def forget(self, stream: ClientStream) -> None:
        """Remove a client for good."""
        self.waiting_nbytes -= stream.waiting_nbytes
        with self._replay.lock:
            del self._streams[stream.number]

    def marks(self) -> dict[str, Any]:
        """The part of each stream that the buffer has, for a snapshot.

        Called under the buffer's lock, also from another thread.

        Returns:
            By token, the number of the next slot and the number of rows. Streams of the restored
            snapshot whose client has not returned yet are among them.
        """
        streams = self._streams.values()
        return self._marks | {s.token: [s.ingested_until, s.ingested_rows] for s in streams}

    def close(self) -> None:
        self._replay.table.unsubscribe(self)
        with self._replay.lock:
            self._replay.table.close_lane(self._lane, NONE)

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_ingested(self, slot: Slot) -> None:
        """Note that the buffer has taken a slot in; called under its lock."""
        number = int(slot.header["actor"]) - FIRST_STREAM
        if (stream := self._streams.get(number)) is not None:
            stream.ingested_until = int(slot.header["sequence"]) + 1
            stream.ingested_rows += int(slot.header["steps"])

    # ------------------------------------------------------------------------- slots

    def accept(self, stream: ClientStream, peer: bytes, message: wire.Message) -> None:
        """Let a received slot wait to be stored.

        Args:
            stream: of the client.
            peer: the connection from which the slot came.
            message: the slot.

        Raises:
            WireError: the slot does not follow in its stream, or there is no room for it.
        """
        head = message.head
        if head.spec_hash != self._spec.hash:
            raise WireError("spec")

        # Whatever becomes of this slot, the client is told from which one on to send.
        stream.peer = peer
        stream.answer_due = True
        if head.sequence < stream.expected_sequence:
            return  # it was received before
        if head.sequence > stream.expected_sequence or len(stream.waiting) >= WINDOW:
            raise WireError("ungranted")

        # Only the bytes of frames are counted while the slot waits; the meta is small.
        if len(message.frames) != len(self._spec.blocks):
            raise WireError("frames", f"{len(message.frames)} instead of {len(self._spec.blocks)}")
        nbytes = self.waiting_nbytes + head.coded_nbytes
        if self.waiting_nbytes and nbytes > self._max_waiting_nbytes:
            raise WireError("busy", "slots of other clients wait; it will be sent again")

        self.waiting_nbytes = nbytes
        stream.waiting.append(message)

    def store(self) -> list[ClientStream]:
        """Store waiting slots, one of each stream in turn, while the buffer accepts any.

        Returns:
            The streams whose clients are to be told `ClientStream.next_sequence` now.
        """
        streams = [stream for stream in self._streams.values() if stream.waiting]
        has_stored = False
        while streams:
            for stream in streams:
                if not self._store_oldest(stream):
                    streams = []
                    break
                has_stored = True
            streams = [stream for stream in streams if stream.waiting]
        if has_stored:
            self._collect()

        due = [stream for stream in self._streams.values() if stream.answer_due]
        for stream in due:
            stream.answer_due = False
        return due

    def _store_oldest(self, stream: ClientStream) -> bool:
        """Store or refuse a stream's oldest waiting slot.

        Returns:
            False if the buffer accepts no slot now, and the slot goes on waiting.
        """
        slot = self._acquire()
        if slot is None:
            return False

        message = stream.waiting[0]
        head = message.head
        try:
            self._decoder.decode(message, slot.payload)
            # Comparing a signalling NaN would warn.
            with np.errstate(invalid="ignore"):
                fault = self._fault(head, slot)
        except WireError as error:
            self._drop_waiting(stream, error.reason, str(error))
            self._writer.reuse_later(slot)
            return True
        except wire.STRANGE as error:
            self._drop_waiting(stream, "meta", str(error))
            self._writer.reuse_later(slot)
            return True

        # The slot is whole, so the stream continues after it even if its columns are refused.
        stream.waiting.popleft()
        self.waiting_nbytes -= head.coded_nbytes
        stream.next_sequence += 1
        stream.answer_due = True
        if fault is None:
            self._publish(stream, head, slot)
        else:
            self._on_refused(RefusedSlot(stream.peer, head.sequence, "columns", fault))
            self._writer.reuse_later(slot)
        return True

    def _publish(self, stream: ClientStream, head: wire.Header, slot: Slot) -> None:
        """Publish a decoded slot with the header that a writer in shared memory would give it."""
        number = FIRST_STREAM + stream.number
        # The policy's generation is not needed here; its field in a client's message holds the
        # number of rows.
        header = head._replace(actor=number, incarnation=0, generation=0)
        wire.fill_header(slot.header, header, time.monotonic(), rows=head.generation)
        self._replay.table.checked_slots.add(slot.index)
        self._writer.publish(slot)

        self.received["slots"] += 1
        self.received["rows"] += head.steps
        self.received["raw_nbytes"] += head.raw_nbytes
        self.received["coded_nbytes"] += head.coded_nbytes

    def _drop_waiting(self, stream: ClientStream, reason: str, text: str) -> None:
        """Drop a stream's waiting slots after a fault of the first; the client sends all again."""
        self.waiting_nbytes -= stream.waiting_nbytes
        stream.waiting.clear()
        self._on_refused(RefusedSlot(stream.peer, None, reason, text))

    def _acquire(self) -> Slot | None:
        """A slot to fill, for which the oldest may be evicted; None while the buffer lends none."""
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

    def _fault(self, head: wire.Header, slot: Slot) -> str | None:
        """What is wrong with the columns of a decoded slot, as a sentence; None if nothing is."""
        spec = self._spec
        count = head.generation
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
        if priority is not None and not _are_priorities_or_nan(priority[:count]):
            return f"column priority must hold numbers from 0 to {MAX_PRIORITY:g}, or NaN"

        # What rows say about other rows is checked as for any foreign slot.
        table = self._replay.table
        records = table.records.reshape(-1, spec.unroll, spec.envs)[slot.index]
        return table.checks.fault(records[:count], marked=True)


def _are_priorities_or_nan(priority: npt.NDArray[Any]) -> bool:
    """Whether each value is a priority, or NaN, which stands for the sampler's own choice."""
    if np.isnan(priority).all():
        return True
    values = priority.astype(np.float64)
    return bool((are_priorities(values) | np.isnan(values)).all())
