"""How a replay server handles messages, without sockets: a state machine over a buffer.

    SLOT    ── verify ── decode into a lent slot ── check ── publish ──► the buffer ── STORED
    SAMPLE  ── as soon as limiter and credit allow ── sample ── pack ──► BATCH
    UPDATE  ── update_priorities

docs/replay-protocol.md describes the messages for other implementations. No received message
raises: one that cannot be used is counted by reason and dropped, and a request that can never be
served is answered by REFUSE with a sentence. A request that is not allowed yet waits in its peer's
line of bounded length; a peer that asks again is answered by WAIT with the reason.

Memory is bounded whatever peers do (`ServiceLimits`): by the number of peers, by the bytes of slots
that wait to be stored, and by the bytes of batches that were sent and that their peers have not yet
read (`peers.py`). A peer that reads nothing for `STALL_S` loses its place and may join again.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.replay.buffer import Replay, ReplaySource
from penstock.replay.errors import ReplayError
from penstock.replay.remote.batch_codec import PackedBatches, pack
from penstock.replay.remote.intake import Intake, RefusedSlot
from penstock.replay.remote.peers import Peer, PeerRegistry, PendingRequest, ServiceLimits
from penstock.replay.samplers import MAX_PRIORITY, are_priorities
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind, WireError
from penstock.transport.zmq.sockets import FULL, GONE, SENT, IsReleased, Send

# Version of docs/replay-protocol.md, in JOIN and SPEC.
REPLAY_VERSION = 2

# Requests of one peer that may wait.
MAX_REQUESTS = 64

# Batches in one request.
MAX_BATCHES = 64

# Size up to which the batches of one request are drawn together.
TOGETHER_NBYTES = 1 << 20

# Reward, discount, flags, weight and key of one row of a batch.
SCALARS_NBYTES = 32

# Characters of a token that a client sends.
LONGEST_TOKEN = 64

# A peer that reads none of its batches for so long loses its place.
STALL_S = 30.0

# Time between two checks of connections with unread batches.
PROBE_S = 5.0

# Time until an answer that did not fit its connection is tried again.
RETRY_S = 0.2

OTHER_VERSION = (
    f"the server speaks version {REPLAY_VERSION} of the replay protocol; use the same release of "
    "Penstock on all hosts"
)


class SampleMeta(NamedTuple):
    """The meta of SAMPLE: a request for batches, and what the peer has read."""

    batch_rows: int
    """Rows of each batch."""
    batches: int
    """The number of batches; 0 where the message only reports ``read``."""
    read: int
    """Answers that the peer has read on this connection."""
    stacked: bool


class ReplayService:
    """Takes messages of peers and sends answers; its caller keeps ``replay``. One thread.

    Args:
        replay: the buffer.
        send: hands an answer to a peer; returns SENT, FULL or GONE, and a function that
            returns whether the socket has released the answer.
        limits: of memory and peers.
        log: takes one line for the first rejection of each kind.
        marks: the state of streams in a restored snapshot, as from `marks`.
        more_figures: added to those of `figures`.

    Raises:
        ReplayError: the replay accepts no rows from elsewhere.
    """

    def __init__(
        self,
        replay: Replay,
        send: Send,
        *,
        limits: ServiceLimits | None = None,
        log: Callable[[str], None] | None = None,
        marks: dict[str, Any] | None = None,
        more_figures: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        if "alive" not in (replay.table.records.dtype.names or ()):
            raise ReplayError("this replay has no room for others' rows; make it with shared=True")

        self.rejected: Counter[str] = Counter()
        """Messages and slots that could not be used, by reason."""

        self.limits = limits or ServiceLimits()
        self._replay = replay
        self._send = send
        self._log = log
        self._more_figures = more_figures
        self._row_nbytes = row_nbytes(replay)

        # Every message carries both. Clients of a server that was restarted see another run.
        self._spec_hash = replay.layout.spec.hash
        self._run_id = secrets.randbits(63) | 1

        self._intake = Intake(
            replay,
            self._on_slot_refused,
            max_waiting_nbytes=self.limits.waiting_nbytes,
            marks=marks,
        )
        self._peers = PeerRegistry(self._intake, self.limits)
        self._next_probe_s = 0.0
        self._handlers: dict[int, Callable[[bytes, wire.Message], None]] = {
            MessageKind.JOIN: self._on_join,
            MessageKind.SLOT: self._on_slot,
            MessageKind.SAMPLE: self._on_sample,
            MessageKind.UPDATE: self._on_update,
            MessageKind.ASK_STATS: self._on_ask_stats,
        }

    @property
    def waiting(self) -> bool:
        """Whether slots wait to be stored, or requests to be served."""
        has_requests = any(peer.requests for peer in self._peers.connected.values())
        return self._intake.waiting_nbytes > 0 or has_requests

    @property
    def stranded_nbytes(self) -> int:
        """Bytes of batches on connections whose peers do not read them."""
        return self._peers.stranded_nbytes

    def handle(self, name: bytes, parts: Sequence[Buffer]) -> None:
        """Handle one message of a peer.

        Nothing is raised. A message that cannot be used is counted by reason, and answered where
        that helps its sender.

        Args:
            name: of the peer's connection.
            parts: the message.
        """
        number = 0
        try:
            message = wire.decode(parts)
            number = message.head.sequence
            self._dispatch(name, message)
        except WireError as error:
            self._count_rejection(error.reason, str(error))
            if error.reason == "unknown":
                self._send_message(name, MessageKind.WHO)
            elif error.reason == "version":
                self._refuse(
                    name, 0, wire.describe_other_version("this client", error.text, "the server")
                )
        except ReplayError as error:
            self._count_rejection("refused", str(error))
            self._refuse(name, number, str(error))
        except wire.STRANGE as error:
            self._count_rejection("meta", str(error))
        except Exception:
            # A defect of ours that one message triggers must not end the service of all others.
            self._count_rejection("fault", traceback.format_exc())

    def _dispatch(self, name: bytes, message: wire.Message) -> None:
        """Call the handler of a message, which only JOIN may bring from a stranger."""
        head = message.head
        handler = self._handlers.get(head.kind)
        if handler is None:
            raise WireError("kind")
        if head.kind != MessageKind.JOIN:
            if head.run_id != self._run_id or name not in self._peers.connected:
                raise WireError("unknown")
            self._peers.on_message(name)
        handler(name, message)

    def tend(self) -> None:
        """Store and draw what is allowed by now, one request of each peer in turn."""
        for stream in self._intake.store():
            self._send_message(stream.peer, MessageKind.STORED, number=stream.next_sequence)

        now_s = time.monotonic()
        for name, peer in list(self._peers.connected.items()):
            self._peers.return_credit(peer)
            if peer.requests and now_s >= peer.retry_s:
                oldest = next(iter(peer.requests.values()))
                if self._peers.has_credit(peer, oldest.nbytes) and not oldest.source.why_not():
                    del peer.requests[oldest.number]
                    self._serve(name, peer, oldest)

        if now_s >= self._next_probe_s:
            self._next_probe_s = now_s + PROBE_S
            self._probe(now_s)

    def figures(self) -> dict[str, Any]:
        """Counters of the server itself."""
        figures: dict[str, Any] = {
            "peers": len(self._peers.connected),
            **self._intake.received,
            "rejected": dict(self.rejected),
            "unread_nbytes": self._peers.unread_nbytes,
            "waiting_nbytes": self._intake.waiting_nbytes,
        }
        if self._more_figures is not None:
            figures |= self._more_figures()
        return figures

    def marks(self) -> dict[str, Any]:
        """The state of each stream in the buffer, for a snapshot.

        Called under the buffer's lock, also from another thread.
        """
        return self._intake.marks()

    def on_disconnected(self) -> None:
        """Note that all connections were closed; peers may return."""
        self._peers.disconnect_all()

    def close(self) -> None:
        self._intake.close()

    def _probe(self, now_s: float) -> None:
        """Disconnect peers that do not read, and find out which connections are gone."""
        for name in self._peers.stalled(since_s=now_s - STALL_S):
            text = f"a client has not read its batches for {STALL_S:g} s"
            self._count_rejection("unread", text)
            self._peers.disconnect(name)

        # Sending tells whether the connection still exists.
        for name in self._peers.stranded_names:
            self._send_message(name, MessageKind.WHO)

    # ------------------------------------------------------------------------- messages

    def _on_join(self, name: bytes, message: wire.Message) -> None:
        """Connect a peer and send it what it needs to send slots and to read batches."""
        meta = wire.verify(message)
        if not isinstance(meta, dict) or meta.get("version") != REPLAY_VERSION:
            raise ReplayError(OTHER_VERSION)
        token = meta.get("token", "")
        if not isinstance(token, str) or len(token) > LONGEST_TOKEN:
            raise WireError("meta", "no token")

        peer = self._peers.connected.get(name) or self._peers.admit(name, token)
        stream = peer.stream
        stream.peer = name
        layout = self._replay.layout
        welcome = {
            "version": REPLAY_VERSION,
            "spec": layout.spec.to_dict(),
            "frame_stack": layout.frame_stack,
            "autoreset": self._replay.autoreset,
            "row_nbytes": self._row_nbytes,
            "token": stream.token,
            "next": stream.next_sequence,
            "kept": stream.ingested_rows,
            "sent": peer.sent,
        }
        self._send_message(name, MessageKind.SPEC, welcome, actor=stream.number)

    def _on_slot(self, name: bytes, message: wire.Message) -> None:
        self._intake.accept(self._peers.connected[name].stream, name, message)

    def _on_slot_refused(self, slot: RefusedSlot) -> None:
        """Count a slot that cannot be used; tell its client unless it may send the slot again."""
        self._count_rejection(slot.reason, slot.text)
        if slot.sequence is not None:
            text = f"slot {slot.sequence} was refused: {slot.text}"
            self._refuse(slot.peer, slot.sequence, text, kind=MessageKind.SLOT)

    def _on_sample(self, name: bytes, message: wire.Message) -> None:
        """Add a request for batches to those of its peer, which `tend` serves."""
        sample = _read_sample_meta(wire.verify(message))
        number = message.head.sequence
        peer = self._peers.connected[name]
        self._peers.on_read(peer, sample.read)
        if not sample.batches:
            return

        # A peer that asks again is told what its request waits for.
        if number in peer.requests:
            reason = peer.requests[number].source.why_not()
            reason = reason or "answers that were sent are unread"
            self._send_message(name, MessageKind.WAIT, {"reason": reason}, number=number)
            return

        nbytes = self._validated_nbytes(sample)
        if len(peer.requests) >= MAX_REQUESTS:
            raise ReplayError(f"more than {MAX_REQUESTS} requests wait; wait for answers first")
        peer.requests[number] = PendingRequest(
            number=number,
            source=ReplaySource(self._replay, sample.batch_rows, sample.stacked),
            batch_rows=sample.batch_rows,
            count=sample.batches,
            stacked=sample.stacked,
            nbytes=nbytes,
        )

    def _validated_nbytes(self, sample: SampleMeta) -> int:
        """Approximate size of the answer to a request.

        Raises:
            ReplayError: the request can never be served.
        """
        count = sample.batches
        rows = sample.batch_rows

        if not 1 <= count <= MAX_BATCHES or not 1 <= rows <= self._replay.capacity:
            raise ReplayError(
                f"{count} batches of {rows} rows; ask for 1 to {MAX_BATCHES} of 1 to "
                f"{self._replay.capacity}, the buffer's capacity"
            )

        nbytes = rows * count * self._row_nbytes
        if nbytes > self.limits.answers_nbytes:
            raise ReplayError(
                f"{count} batches of {rows} rows of {self._row_nbytes} bytes are more than "
                f"{self.limits.answers_nbytes >> 20} MiB; ask for less at a time: a lower prefetch"
            )
        return nbytes

    def _on_update(self, name: bytes, message: wire.Message) -> None:
        """Set new priorities of rows."""
        if len(message.frames) != 2:
            raise WireError("frames", "an update has keys and priorities")
        wire.verify(message)

        keys = np.frombuffer(message.frames[0], np.int64)
        priorities = np.frombuffer(message.frames[1], np.float64)
        if len(keys) != len(priorities):
            raise WireError("size", f"{len(keys)} keys, {len(priorities)} priorities")
        valid = are_priorities(priorities)
        if not valid.all():
            raise ReplayError(
                f"priority {priorities[~valid][0]} must be a number from 0 to {MAX_PRIORITY:g}"
            )

        self._replay.update_priorities(keys, priorities)

    def _on_ask_stats(self, name: bytes, message: wire.Message) -> None:
        wire.verify(message)
        stats = self._replay.stats() | {"server": self.figures()}
        self._send_message(name, MessageKind.STATS, stats, number=message.head.sequence)

    # ------------------------------------------------------------------------- batches

    def _serve(self, name: bytes, peer: Peer, request: PendingRequest) -> None:
        """Draw the batches of a request and send them.

        A request whose rows cannot be drawn is refused. If the connection has no room for the
        answer, the request is put back, and tried again after `RETRY_S` seconds.
        """
        try:
            groups = self._draw(request)
        except (ReplayError, MemoryError) as error:
            text = str(error) or f"{request.nbytes} bytes of memory are not there; ask for less"
            self._count_rejection("refused", text)
            self._refuse(name, request.number, text)
            return
        except Exception:
            self._count_rejection("fault", traceback.format_exc())
            text = "the server failed to draw these rows; see its output"
            self._refuse(name, request.number, text)
            return
        if not groups:
            return  # too little data is left by now; the peer asks again

        frames = [frame.data for group in groups for frame in group.frames]
        outcome, is_released = self._send_frames(
            name,
            MessageKind.BATCH,
            groups[0].shape.meta,
            number=request.number,
            frames=frames,
        )
        if outcome == SENT:
            self._peers.on_sent(peer, sum(frame.nbytes for frame in frames), is_released)
        elif outcome == FULL:
            peer.requests[request.number] = request
            peer.requests.move_to_end(request.number, last=False)
            peer.retry_s = time.monotonic() + RETRY_S

    def _draw(self, request: PendingRequest) -> list[PackedBatches]:
        """Draw the batches of a request.

        Small batches are drawn together, which costs less, and dealt out in turn: each has its
        share of every stratum, as if it had been drawn alone.

        Returns:
            The batches, in one group or in one for each; fewer than requested if the replay has
            too little data by now.
        """
        replay = self._replay
        rows = request.batch_rows * request.count
        fits_together = rows * self._row_nbytes <= TOGETHER_NBYTES and rows <= len(replay)
        needs_single_draws = replay.sequences is not None or replay.rate_limited is not None
        if request.count == 1 or needs_single_draws or not fits_together:
            batches = [request.source.draw(0.0) for _ in range(request.count)]
            return [pack(batch) for batch in batches if batch is not None]

        # The largest weight of each batch is 1, as in one that is drawn alone.
        batch = replay.sample(rows, stacked=request.stacked)
        weights = batch["weights"].reshape(-1, request.count)
        batch["weights"] = (weights / weights.max(axis=0)).reshape(-1)
        return [pack(batch, request.count)]

    # ------------------------------------------------------------------------- answers

    def _count_rejection(self, reason: str, text: str) -> None:
        """Count what could not be used; the first of each reason is also logged."""
        self.rejected[reason] += 1
        if self.rejected[reason] == 1 and self._log is not None:
            line = "".join(c if c.isprintable() else " " for c in text[-400:])
            self._log(f"rejected ({reason}): {line}; more of this kind are only counted")

    def _refuse(
        self, name: bytes, number: int, text: str, kind: MessageKind = MessageKind.SAMPLE
    ) -> None:
        """Tell a peer that its request or slot of a ``number`` can never be served."""
        meta = {"error": text, "kind": int(kind)}
        self._send_message(name, MessageKind.REFUSE, meta, number=number)

    def _send_message(
        self,
        name: bytes,
        kind: MessageKind,
        meta: Any = None,
        *,
        number: int = 0,
        actor: int = 0,
    ) -> None:
        """Send an answer without frames; one that does not fit is lost, and the peer asks again."""
        self._send_frames(name, kind, meta, number=number, actor=actor)

    def _send_frames(
        self,
        name: bytes,
        kind: MessageKind,
        meta: Any,
        *,
        number: int,
        actor: int = 0,
        frames: Sequence[Buffer] = (),
    ) -> tuple[int, IsReleased]:
        """Send an answer, and note if its connection is gone.

        Returns:
            SENT, FULL or GONE, and a function that returns whether the socket has released it.
        """
        head = Header(
            kind, spec_hash=self._spec_hash, run_id=self._run_id, actor=actor, sequence=number
        )

        outcome, is_released = self._send(name, wire.encode(head, meta, frames))
        if outcome == GONE:
            self._peers.on_closed(name)
        return outcome, is_released


def row_nbytes(replay: Replay) -> int:
    """Approximate bytes of one row of a batch, or of a whole sequence."""
    layout = replay.layout
    row = sum(2 * o.leaf.nbytes for o in layout.observations)
    row += sum(leaf.nbytes for leaf in layout.other_leaves) + SCALARS_NBYTES
    return row * (replay.sequences.length if replay.sequences else 1)


def _read_sample_meta(meta: Any) -> SampleMeta:
    """Read the meta of SAMPLE; raises `WireError` where it has other values."""
    batch_rows = _read_count(meta, "batch")
    batches = _read_count(meta, "count")
    read = _read_count(meta, "read")
    stacked = meta["stacked"]
    if not isinstance(stacked, bool):
        raise WireError("meta", "stacked")
    return SampleMeta(batch_rows=batch_rows, batches=batches, read=read, stacked=stacked)


def _read_count(meta: Any, key: str) -> int:
    """A whole number of at least 0 in a message's meta."""
    value = meta[key]
    if type(value) is not int or value < 0:
        raise WireError("meta", f"{key} is no whole number")
    return value
