"""The peers of a replay server: who is connected, who may return, and what they have not read.

A peer is a client with its stream of slots. Its connection has a name, which changes when it
reconnects; its token stays, and so does its stream. A batch that was sent counts against the limits
(`ServiceLimits`) until the peer has reported it as read and the socket has released it: a peer that
does not read can report anything. A peer that leaves takes its unread batches along as *stranded*
bytes, since libzmq holds them until the connection itself is closed.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.replay.buffer import ReplaySource
from penstock.replay.errors import ReplayError
from penstock.replay.remote.intake import ClientStream, Intake
from penstock.transport.wire import WireError
from penstock.transport.zmq.sockets import IsReleased

# A peer that has sent nothing for so long gives its place to a new one, if all places are taken.
QUIET_S = 60.0


@dataclass(frozen=True)
class ServiceLimits:
    """Limits for all peers together, in bytes except ``peers``.

    Args:
        peers: the number of peers that are connected.
        peer_nbytes: batches that one peer has not read, beyond its first answer.
        answers_nbytes: batches that all peers together have not read; also the largest answer.
        waiting_nbytes: slots that wait to be stored.
    """

    peers: int = 1024
    peer_nbytes: int = 32 << 20
    answers_nbytes: int = 512 << 20
    waiting_nbytes: int = 256 << 20


@dataclass
class PendingRequest:
    """A request of a peer for ``count`` batches of ``batch_rows`` rows."""

    number: int
    source: ReplaySource
    batch_rows: int
    count: int
    stacked: bool
    nbytes: int
    """Approximate size of the answer."""


class UnreadAnswer(NamedTuple):
    """An answer with batches that its peer has not read as far as the server knows."""

    nbytes: int
    is_released: IsReleased


@dataclass
class Peer:
    """A client: its stream of slots, its pending requests and its unread answers."""

    stream: ClientStream

    last_message_s: float
    """When its last message came."""

    requests: OrderedDict[int, PendingRequest] = field(default_factory=OrderedDict)
    """Requests that wait to be served, by their number, the oldest first."""

    retry_s: float = 0.0
    """When a request is tried again whose answer did not fit the connection."""

    unread: deque[UnreadAnswer] = field(default_factory=deque)
    unread_nbytes: int = 0

    sent: int = 0
    """Answers with batches that were sent on this connection."""

    read: int = 0
    """Answers of this connection that the peer reports as read."""

    read_s: float = 0.0
    """When `unread` last shrank, or got its first answer."""


class PeerRegistry:
    """All peers of a server, and the bytes of batches on their way to them; for one thread."""

    def __init__(self, intake: Intake, limits: ServiceLimits) -> None:
        self._intake = intake
        self._limits = limits

        self.connected: OrderedDict[bytes, Peer] = OrderedDict()
        """Peers by the name of their connection; the one with the newest message is last."""

        self._away: OrderedDict[str, Peer] = OrderedDict()
        """Peers that have left and may return, by token; the one that left last is last."""

        self._stranded: dict[bytes, int] = {}
        """Bytes of unread batches on connections whose peers have left, by name."""

        self._in_flight_nbytes = 0
        """Bytes of unread batches of all connected peers."""

    @property
    def unread_nbytes(self) -> int:
        """Bytes of all batches that were sent and not read."""
        return self._in_flight_nbytes + self.stranded_nbytes

    @property
    def stranded_nbytes(self) -> int:
        """Bytes of batches on connections whose peers do not read them."""
        return sum(self._stranded.values())

    @property
    def stranded_names(self) -> list[bytes]:
        """Names of the connections that hold stranded bytes."""
        return list(self._stranded)

    # ------------------------------------------------------------------------- connections

    def admit(self, name: bytes, token: str) -> Peer:
        """Connect the peer of ``token``, or a new one if the token is unknown.

        Raises:
            ReplayError: all places are taken, and no peer is silent.
        """
        # A peer of this token that is still connected has lost its connection.
        names = [n for n, peer in self.connected.items() if token and peer.stream.token == token]
        for old_name in names:
            self.disconnect(old_name)

        now_s = time.monotonic()
        self._make_room(now_s)
        peer = self._away.pop(token, None)
        if peer is None:
            peer = Peer(self._intake.open(name, token), now_s)
        peer.last_message_s = now_s
        self.connected[name] = peer
        return peer

    def _make_room(self, now_s: float) -> None:
        """Disconnect the peer that has been silent for longest, if all places are taken.

        Raises:
            ReplayError: that peer has sent something within `QUIET_S` seconds.
        """
        if len(self.connected) < self._limits.peers:
            return

        name, peer = next(iter(self.connected.items()))
        if now_s - peer.last_message_s < QUIET_S:
            raise ReplayError(
                f"{len(self.connected)} clients are connected, and the server accepts no more; "
                "close some, or start it with a larger --max-clients"
            )
        self.disconnect(name)

    def on_message(self, name: bytes) -> None:
        """Note that a connected peer has sent a message."""
        self.connected.move_to_end(name)
        self.connected[name].last_message_s = time.monotonic()

    def disconnect(self, name: bytes) -> None:
        """End a connection; its peer may return with its token."""
        peer = self.connected.pop(name)
        if peer.unread_nbytes:
            self._stranded[name] = self._stranded.get(name, 0) + peer.unread_nbytes
            self._in_flight_nbytes -= peer.unread_nbytes

        # What belongs to the connection starts anew with the next one.
        peer.requests.clear()
        peer.unread.clear()
        peer.unread_nbytes = 0
        peer.sent = 0
        peer.read = 0

        self._away[peer.stream.token] = peer
        if len(self._away) > self._limits.peers:
            _, oldest = self._away.popitem(last=False)
            self._intake.forget(oldest.stream)

    def disconnect_all(self) -> None:
        """Note that all connections were closed, which freed their batches; peers may return."""
        for name in list(self.connected):
            self.disconnect(name)
        self._stranded.clear()

    def on_closed(self, name: bytes) -> None:
        """Note that a connection is closed, which freed its batches."""
        if name in self.connected:
            self.disconnect(name)
        self._stranded.pop(name, None)

    def stalled(self, since_s: float) -> list[bytes]:
        """Names of peers that have unread batches and have read none since ``since_s``."""
        return [n for n, peer in self.connected.items() if peer.unread and peer.read_s < since_s]

    # ------------------------------------------------------------------------- unread batches

    def has_credit(self, peer: Peer, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be on their way to a peer.

        Its first answer always may, as far as the limit for all peers leaves room.
        """
        if peer.unread and peer.unread_nbytes + nbytes > self._limits.peer_nbytes:
            return False
        total = self._in_flight_nbytes + nbytes
        return not self._in_flight_nbytes or total <= self._limits.answers_nbytes

    def on_sent(self, peer: Peer, nbytes: int, is_released: IsReleased) -> None:
        """Count an answer with batches that was sent to a peer."""
        if not peer.unread:
            peer.read_s = time.monotonic()
        peer.unread.append(UnreadAnswer(nbytes, is_released))
        peer.unread_nbytes += nbytes
        self._in_flight_nbytes += nbytes
        peer.sent += 1

    def on_read(self, peer: Peer, count: int) -> None:
        """Note that a peer reports ``count`` answers of this connection as read.

        Raises:
            WireError: so many were not sent.
        """
        if count > peer.sent:
            raise WireError("meta", f"{count} answers read of {peer.sent}")
        peer.read = max(peer.read, count)
        self.return_credit(peer)

    def return_credit(self, peer: Peer) -> None:
        """Stop counting the answers that a peer reports as read and that the socket released."""
        while peer.sent - len(peer.unread) < peer.read and peer.unread[0].is_released():
            answer = peer.unread.popleft()
            peer.unread_nbytes -= answer.nbytes
            self._in_flight_nbytes -= answer.nbytes
            peer.read_s = time.monotonic()
