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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.replay.buffer import Replay, ReplaySource
from penstock.replay.errors import ReplayError
from penstock.replay.remote.batch_codec import Array, Shape, pack
from penstock.replay.remote.intake import Intake, Taken
from penstock.replay.samplers import MAX_PRIORITY, are_priorities
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind, WireError
from penstock.transport.zmq.sockets import FULL, GONE, SENT, IsReleased, Send

REPLAY_VERSION = 2  # of docs/replay-protocol.md, in JOIN and SPEC
MAX_ASKS = 64  # requests of a peer that may wait
MAX_BATCHES = 64  # in one request
TOGETHER_NBYTES = 1 << 20  # of batches drawn together
SCALARS_NBYTES = 32  # reward, discount, flags, weight and key of a row
TOKEN_NBYTES = 16
LONGEST_TOKEN = 64  # characters
STALL_S = 30.0  # without reading its answers, a peer loses its place
QUIET_S = 60.0  # without a message, where others need its place
PROBE_S = 5.0  # between two checks of connections with unread batches
RETRY_S = 0.2  # until an answer that did not fit the connection is tried again
OTHER_VERSION = (
    f"the server speaks version {REPLAY_VERSION} of the replay protocol; use the same release of "
    "Penstock on all hosts"
)


@dataclass(frozen=True)
class ServiceLimits:
    """Limits for all peers together, in bytes except ``peers``.

    ``answers_nbytes``: batches that were sent and are not read, and the largest answer;
    ``peer_nbytes``: those of one peer, beyond its first; ``waiting_nbytes``: slots to be stored.
    """

    peers: int = 1024
    peer_nbytes: int = 32 << 20
    answers_nbytes: int = 512 << 20
    waiting_nbytes: int = 256 << 20


@dataclass
class PendingRequest:
    """A request of a peer for ``count`` batches."""

    number: int
    source: ReplaySource
    batch: int
    count: int
    stacked: bool
    nbytes: int


@dataclass
class Peer:
    """A client: its stream of slots, its waiting requests, and its unread batches."""

    stream: int
    token: str
    heard_s: float
    asks: OrderedDict[int, PendingRequest] = field(default_factory=OrderedDict)
    unread: deque[tuple[int, IsReleased]] = field(default_factory=deque)  # bytes of each answer
    unread_nbytes: int = 0
    sent: int = 0  # answers on this connection, since it joined
    read: int = 0  # of these, as the peer reports
    read_s: float = 0.0  # when `unread` last shrank, or began
    retry_s: float = 0.0


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
        taken: dict[str, Any] | None = None,
        more_figures: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        if "alive" not in (replay.table.records.dtype.names or ()):
            raise ReplayError("this replay has no room for others' rows; make it with shared=True")
        self.rejected: Counter[str] = Counter()
        self.limits = limits or ServiceLimits()
        self._replay, self._send, self._log = replay, send, log
        self._more_figures = more_figures
        self._spec_hash = replay.layout.spec.hash
        self._run_id = secrets.randbits(63) | 1
        # the most recently active one is last
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._away: OrderedDict[str, Peer] = OrderedDict()  # by token; may return
        self._stranded: dict[bytes, int] = {}  # bytes on connections of peers that lost their place
        self._streams = 0
        self._in_flight_nbytes = 0
        self._probe_s = 0.0
        self._row_nbytes = row_nbytes(replay)
        self._saved = {token: Taken(token, *mark) for token, mark in (taken or {}).items()}
        self._intake = Intake(replay, self._slot_refused, self.limits.waiting_nbytes)
        self._handlers: dict[int, Callable[[bytes, wire.Message], None]] = {
            MessageKind.JOIN: self._join,
            MessageKind.SLOT: self._slot,
            MessageKind.SAMPLE: self._sample,
            MessageKind.UPDATE: self._update,
            MessageKind.ASK_STATS: self._ask_stats,
        }

    @property
    def waiting(self) -> bool:
        """Whether slots wait to be stored, or requests to be served."""
        return self._intake.waiting_nbytes > 0 or any(peer.asks for peer in self._peers.values())

    @property
    def stranded_nbytes(self) -> int:
        """Bytes of batches on connections whose peers do not read them."""
        return sum(self._stranded.values())

    def handle(self, name: bytes, parts: Sequence[Buffer]) -> None:
        """Handle one message of a peer; a bad one is counted."""
        number = 0
        try:
            message = wire.decode(parts)
            number = message.head.sequence
            handler = self._handlers.get(message.head.kind)
            if handler is None:
                raise WireError("kind")
            if message.head.kind != MessageKind.JOIN:
                if message.head.run_id != self._run_id or name not in self._peers:
                    raise WireError("unknown")
                self._peers.move_to_end(name)
                self._peers[name].heard_s = time.monotonic()
            handler(name, message)
        except WireError as error:
            self._reject(error.reason, str(error))
            if error.reason == "unknown":
                self._say(name, MessageKind.WHO)
            elif error.reason == "version":
                self._refuse(name, 0, wire.other_version("this client", error.text, "the server"))
        except ReplayError as error:
            self._reject("refused", str(error))
            self._refuse(name, number, str(error))
        except wire.STRANGE as error:
            self._reject("meta", str(error))
        except Exception:  # a defect of ours that one message triggers must not end all others
            self._reject("fault", traceback.format_exc())

    def tend(self) -> None:
        """Store and draw what is allowed by now, one request of each peer in turn."""
        for name, stored in self._intake.store():
            self._say(name, MessageKind.STORED, None, stored)
        now_s = time.monotonic()
        for name, peer in list(self._peers.items()):
            self._settle(peer)
            if peer.asks and now_s >= peer.retry_s:
                ask = next(iter(peer.asks.values()))
                if self._has_credit(peer, ask.nbytes) and not ask.source.missing():
                    self._answer(name, peer, peer.asks.popitem(last=False)[1])
        if now_s >= self._probe_s:
            self._probe_s = now_s + PROBE_S
            self._probe(now_s)

    def figures(self) -> dict[str, Any]:
        """Counters of the server itself."""
        return {
            "peers": len(self._peers),
            **self._intake.received,
            "rejected": dict(self.rejected),
            "unread_nbytes": self._in_flight_nbytes + self.stranded_nbytes,
            "waiting_nbytes": self._intake.waiting_nbytes,
            **(self._more_figures() if self._more_figures is not None else {}),
        }

    def marks(self) -> dict[str, Any]:
        """The state of each stream in the buffer, for a snapshot.

        Called under the buffer's lock, also from another thread.
        """
        streams = dict(self._saved) | {taken.token: taken for taken in self._intake.all_taken()}
        return {token: [taken.next, taken.rows] for token, taken in streams.items()}

    def disconnected(self) -> None:
        """Note that all connections were closed; peers may return."""
        for name in list(self._peers):
            self._forget(name)
        self._stranded.clear()

    def close(self) -> None:
        self._intake.close()

    # ------------------------------------------------------------------------- peers

    def _join(self, name: bytes, message: wire.Message) -> None:
        meta = wire.verify(message)
        if not isinstance(meta, dict) or meta.get("version") != REPLAY_VERSION:
            raise ReplayError(OTHER_VERSION)
        token = meta.get("token", "")
        if not isinstance(token, str) or len(token) > LONGEST_TOKEN:
            raise WireError("meta", "no token")
        peer = self._peers.get(name) or self._admit(name, token)
        layout = self._replay.layout
        self._say(
            name,
            MessageKind.SPEC,
            {
                "version": REPLAY_VERSION,
                "spec": layout.spec.to_dict(),
                "frame_stack": layout.frame_stack,
                "autoreset": self._replay.autoreset,
                "row_nbytes": self._row_nbytes,
                "token": peer.token,
                "next": self._intake.rename(peer.stream, name),
                "kept": self._intake.taken(peer.stream).rows,
                "sent": peer.sent,
            },
            actor=peer.stream,
        )

    def _admit(self, name: bytes, token: str) -> Peer:
        """The peer for a new connection: the one of its token, if known, or a new one."""
        for other in [n for n, peer in self._peers.items() if token and peer.token == token]:
            self._forget(other)  # its connection broke
        now_s = time.monotonic()
        self._make_room(now_s)
        peer = self._away.pop(token, None)
        if peer is None:
            self._streams += 1
            taken = self._saved.get(token) or Taken(secrets.token_hex(TOKEN_NBYTES))
            peer = Peer(self._streams, taken.token, now_s)
            self._intake.open(peer.stream, name, taken)
            self._saved.pop(token, None)  # after the peer is known: a snapshot may be taken
        peer.heard_s = now_s
        self._peers[name] = peer
        return peer

    def _make_room(self, now_s: float) -> None:
        """Make room for a peer.

        Raises ReplayError where all places are taken and no peer is silent.
        """
        if len(self._peers) >= self.limits.peers:
            oldest, peer = next(iter(self._peers.items()))
            if now_s - peer.heard_s < QUIET_S:
                raise ReplayError(
                    f"{len(self._peers)} clients are connected, and the server accepts no more; "
                    "close some, or start it with a larger --max-clients"
                )
            self._forget(oldest)

    def _forget(self, name: bytes) -> None:
        """End a connection; its peer may return with its token."""
        peer = self._peers.pop(name)
        if peer.unread_nbytes:
            self._stranded[name] = self._stranded.get(name, 0) + peer.unread_nbytes
            self._in_flight_nbytes -= peer.unread_nbytes
        peer.asks.clear()
        peer.unread.clear()
        peer.unread_nbytes = peer.sent = peer.read = 0
        self._away[peer.token] = peer
        if len(self._away) > self.limits.peers:
            _, oldest = self._away.popitem(last=False)
            self._intake.forget(oldest.stream)

    def _gone(self, name: bytes) -> None:
        """Note that a connection is closed, which freed its batches."""
        if name in self._peers:
            self._forget(name)
        self._stranded.pop(name, None)

    def _probe(self, now_s: float) -> None:
        """Remove peers that do not read; forget connections that are gone."""
        for name, peer in list(self._peers.items()):
            if peer.unread and now_s - peer.read_s > STALL_S:
                self._reject("unread", f"a client has not read its batches for {STALL_S:g} s")
                self._forget(name)
        for name in list(self._stranded):
            self._say(name, MessageKind.WHO)

    # ------------------------------------------------------------------------- messages

    def _slot(self, name: bytes, message: wire.Message) -> None:
        self._intake.accept(self._peers[name].stream, name, message)

    def _slot_refused(self, name: bytes, sequence: int, reason: str, text: str) -> None:
        self._reject(reason, text)
        if sequence >= 0:
            self._refuse(
                name, sequence, f"slot {sequence} was refused: {text}", kind=MessageKind.SLOT
            )

    def _sample(self, name: bytes, message: wire.Message) -> None:
        meta = wire.verify(message)
        number, peer = message.head.sequence, self._peers[name]
        batch, count, read = (_count_in(meta, key) for key in ("batch", "count", "read"))
        stacked = meta["stacked"]
        if not isinstance(stacked, bool):
            raise WireError("meta", "stacked")
        self._note_read(peer, read)
        if not count:
            return
        if number in peer.asks:
            reason = peer.asks[number].source.missing() or "answers that were sent are unread"
            self._say(name, MessageKind.WAIT, {"reason": reason}, number)
            return
        if not 1 <= count <= MAX_BATCHES or not 1 <= batch <= self._replay.capacity:
            raise ReplayError(
                f"{count} batches of {batch} rows; ask for 1 to {MAX_BATCHES} of 1 to "
                f"{self._replay.capacity}, the buffer's capacity"
            )
        nbytes = batch * count * self._row_nbytes
        if nbytes > self.limits.answers_nbytes:
            raise ReplayError(
                f"{count} batches of {batch} rows of {self._row_nbytes} bytes are more than "
                f"{self.limits.answers_nbytes >> 20} MiB; ask for less at a time: a lower prefetch"
            )
        if len(peer.asks) >= MAX_ASKS:
            raise ReplayError(f"more than {MAX_ASKS} requests wait; wait for answers first")
        source = ReplaySource(self._replay, batch, stacked)
        peer.asks[number] = PendingRequest(number, source, batch, count, stacked, nbytes)

    def _update(self, name: bytes, message: wire.Message) -> None:
        if len(message.frames) != 2:
            raise WireError("frames", "an update has keys and priorities")
        wire.verify(message)
        keys = np.frombuffer(message.frames[0], np.int64)
        priorities = np.frombuffer(message.frames[1], np.float64)
        if len(keys) != len(priorities):
            raise WireError("size", f"{len(keys)} keys, {len(priorities)} priorities")
        sound = are_priorities(priorities)
        if not sound.all():
            raise ReplayError(
                f"priority {priorities[~sound][0]} must be a number from 0 to {MAX_PRIORITY:g}"
            )
        self._replay.update_priorities(keys, priorities)

    def _ask_stats(self, name: bytes, message: wire.Message) -> None:
        wire.verify(message)
        stats = self._replay.stats() | {"server": self.figures()}
        self._say(name, MessageKind.STATS, stats, message.head.sequence)

    # ------------------------------------------------------------------------- batches

    def _note_read(self, peer: Peer, read: int) -> None:
        """Note that the peer has ``read`` answers since it joined."""
        if read > peer.sent:
            raise WireError("meta", f"{read} answers read of {peer.sent}")
        peer.read = max(peer.read, read)
        self._settle(peer)

    def _settle(self, peer: Peer) -> None:
        """Return the credit of answers that the peer reports as read and the socket released."""
        while peer.sent - len(peer.unread) < peer.read and peer.unread[0][1]():
            nbytes, _ = peer.unread.popleft()
            peer.unread_nbytes -= nbytes
            self._in_flight_nbytes -= nbytes
            peer.read_s = time.monotonic()

    def _has_credit(self, peer: Peer, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be on their way to a peer.

        Its first answer always may, as far as the limit for all peers leaves room.
        """
        if peer.unread and peer.unread_nbytes + nbytes > self.limits.peer_nbytes:
            return False
        total = self._in_flight_nbytes + nbytes
        return not self._in_flight_nbytes or total <= self.limits.answers_nbytes

    def _answer(self, name: bytes, peer: Peer, ask: PendingRequest) -> None:
        try:
            packed = self._draw(ask)
        except (ReplayError, MemoryError) as error:
            text = str(error) or f"{ask.nbytes} bytes of memory are not there; ask for less"
            self._reject("refused", text)
            self._refuse(name, ask.number, text)
            return
        except Exception:
            self._reject("fault", traceback.format_exc())
            self._refuse(name, ask.number, "the server failed to draw these rows; see its output")
            return
        if not packed:  # the peer asks again
            return
        frames = [frame.data for _, frames in packed for frame in frames]
        meta = packed[0][0].meta
        outcome, is_released = self._post(name, MessageKind.BATCH, meta, ask.number, frames=frames)
        if outcome == SENT:
            nbytes = sum(frame.nbytes for frame in frames)
            if not peer.unread:
                peer.read_s = time.monotonic()
            peer.unread.append((nbytes, is_released))
            peer.unread_nbytes += nbytes
            self._in_flight_nbytes += nbytes
            peer.sent += 1
        elif outcome == FULL:
            peer.asks[ask.number] = ask
            peer.asks.move_to_end(ask.number, last=False)
            peer.retry_s = time.monotonic() + RETRY_S

    def _draw(self, ask: PendingRequest) -> list[tuple[Shape, Array]]:
        """Draw the batches of a request.

        Small batches are drawn together, which costs less, and dealt out in turn: each has its
        share of every stratum, as if it had been drawn alone.
        """
        replay, rows = self._replay, ask.batch * ask.count
        together = rows * self._row_nbytes <= TOGETHER_NBYTES and rows <= len(replay)
        alone = replay.sequences is not None or replay.rate_limited is not None
        if ask.count == 1 or not together or alone:
            drawn = [ask.source.draw(0.0) for _ in range(ask.count)]
            return [pack(batch) for batch in drawn if batch is not None]
        batch = replay.sample(rows, stacked=ask.stacked)
        weights = batch["weights"].reshape(-1, ask.count)
        batch["weights"] = (weights / weights.max(axis=0)).reshape(-1)
        return [pack(batch, ask.count)]

    # ------------------------------------------------------------------------- answers

    def _reject(self, reason: str, text: str) -> None:
        self.rejected[reason] += 1
        if self.rejected[reason] == 1 and self._log is not None:
            line = "".join(c if c.isprintable() else " " for c in text[-400:])
            self._log(f"rejected ({reason}): {line}; more of this kind are only counted")

    def _refuse(
        self, name: bytes, number: int, text: str, kind: MessageKind = MessageKind.SAMPLE
    ) -> None:
        self._say(name, MessageKind.REFUSE, {"error": text, "kind": int(kind)}, number)

    def _say(
        self,
        name: bytes,
        kind: MessageKind,
        meta: Any = None,
        number: int = 0,
        actor: int = 0,
    ) -> None:
        """Send an answer without frames. A FULL one is not sent; the peer asks again."""
        self._post(name, kind, meta, number, actor)

    def _post(
        self,
        name: bytes,
        kind: MessageKind,
        meta: Any,
        number: int,
        actor: int = 0,
        frames: Sequence[Buffer] = (),
    ) -> tuple[int, IsReleased]:
        head = Header(
            kind, spec_hash=self._spec_hash, run_id=self._run_id, actor=actor, sequence=number
        )
        outcome, is_released = self._send(name, wire.encode(head, meta, frames))
        if outcome == GONE:
            self._gone(name)
        return outcome, is_released


def row_nbytes(replay: Replay) -> int:
    """Approximate bytes of one row of a batch, or of a whole sequence."""
    layout = replay.layout
    row = sum(2 * o.leaf.nbytes for o in layout.observations)
    row += sum(leaf.nbytes for leaf in layout.others) + SCALARS_NBYTES
    return row * (replay.sequences.length if replay.sequences else 1)


def _count_in(meta: Any, key: str) -> int:
    value = meta[key]
    if type(value) is not int or value < 0:
        raise WireError("meta", f"{key} is no whole number")
    return value
