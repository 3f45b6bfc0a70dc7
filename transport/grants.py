"""Grants: which actor may send how much. The connector's decisions, without any IO.

A *stream* is the sequence of slots from one incarnation of one actor. A grant allows the sequences
below ``limit``; it can be repeated without effect, so a lost message leaks nothing. Invariants:

- the grants outstanding over all streams never exceed the slots lent to the connector, so that
  every granted slot can be stored;
- a stream holds at most ``want`` grants; one that has used half of them queues (FIFO) for as many
  as it lacks, so that a GRANT is not sent for every slot;
- where slots are scarce a connection holds its share of them, however many streams it has begun,
  and each of these its share of that. A stream that has used no grant for `GRANT_SILENCE_S` is
  idle: it gives back grants beyond its connection's share, rounded down but at least one, while
  another connection lacks grants;
- the next sequence that an actor reports voids its grants below that: those messages are lost,
  because one connection keeps its order;
- a silent actor's grants return after `GRANT_SILENCE_S`, or once its connection is closed. Its
  stream is kept for ``silence_s``, so that an actor that returns continues it;
- a counter of a stream grows by no more than its grants allow: ``sequence`` stays below the highest
  limit granted, and each sequence accounts for at most ``slot_steps`` agent steps. The first
  counters of a new stream are its baseline and count as nothing produced;
- where several keys may join, one holds at most half of the streams, so that others can join;
- an ended stream without a delivered slot takes only room that others leave: a HELLO costs nothing,
  and must not push out the final counters of others;
- a stream belongs to the connection and the key that began it. Another connection with that key may
  take it over once the first is closed or silent.

The cost of every turn of the connector's loop does not depend on the number of streams.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.transport.wire import MAX_COUNT, Header, WireError

MAX_WANT = 64
MAX_STREAMS = 1 << 14  # at a time; limits the memory that HELLOs can take
MAX_STREAMS_PER_PEER = 64  # an actor is a process of its own, with a connection of its own
MAX_ENDED = 10_000  # kept until they are reported
MAX_ENDED_UNUSED = MAX_ENDED // 2  # with so many, those without a delivered slot are not kept
MAX_BEGIN = MAX_COUNT // 2  # limit of a new stream's counters, so that later ones stay in range
MAX_PASSED = 64  # streams that hold their share and are skipped in one turn
BEAT_S = 1.0  # between two messages of a live actor
GRANT_SILENCE_S = 4.5  # three beats missed, and slack for a host under load
PROBE_AFTER_S = 1.5  # one beat missed: the connection may be closed
RIVAL_S = 2 * GRANT_SILENCE_S  # a rival process whose last request is older has given up
LOOK_S = 0.5  # between two checks of all streams


@dataclass(slots=True)
class ActorStream:
    """One incarnation of an actor.

    ``next`` is the sequence that it sends next, ``promised`` the highest limit that was ever
    granted to it, ``away`` whether its grants were taken back.
    """

    actor: int
    incarnation: int
    peer: bytes
    key: bytes
    next: int
    limit: int
    promised: int
    produced_steps: int
    heard_s: float
    used_s: float  # when a grant was last used, or the stream began
    want: int = 0
    idle: bool = False
    delivered: bool = False
    away: bool = False
    over: tuple[int, Any] | None = None  # of `receiver.check_rows`
    rival_s: float | None = None  # when another process first tried to play this actor

    @property
    def outstanding(self) -> int:
        return self.limit - self.next

    def end(self) -> dict[str, int]:
        """The final counters: ``sequence`` is the one that it would have sent next."""
        return {
            "actor": self.actor,
            "incarnation": self.incarnation,
            "produced_steps": self.produced_steps,
            "sequence": self.next,
        }


@dataclass(slots=True)
class PeerGrants:
    """The grants of all streams of one connection.

    ``line`` holds the streams that lack grants, by actor; ``present`` of its ``streams`` are not
    away.
    """

    name: bytes
    streams: int = 0
    present: int = 0
    outstanding: int = 0
    line: OrderedDict[int, ActorStream] = field(default_factory=OrderedDict)


class TakenError(WireError):
    """Another process plays this actor.

    ``lives`` is whether it sent a message since this one tried.
    """

    def __init__(self, reason: str, text: str, *, lives: bool) -> None:
        super().__init__(reason, text)
        self.lives = lives


class Grants:
    """The streams of one connector; ``ended`` are those that are over and not yet reported.

    Args:
        silence_s: seconds of silence after which a stream is over.
        slot_steps: most agent steps of one slot.
        connected: whether the connection of a stream is open, as far as is known.
        keys: number of keys of which actors may have one.
    """

    def __init__(
        self,
        silence_s: float,
        slot_steps: int,
        connected: Callable[[ActorStream], bool] = lambda stream: True,
        keys: int = 1,
    ) -> None:
        self.streams: dict[int, ActorStream] = {}
        self.ended: deque[ActorStream] = deque(maxlen=MAX_ENDED)
        self.outstanding = 0
        self.want = 0  # slots that all actors together want to hold
        self._silence_s = silence_s
        self._slot_steps = slot_steps
        self._connected = connected
        self._most_of_key = MAX_STREAMS if keys < 2 else MAX_STREAMS // 2
        self._of_keys: Counter[bytes] = Counter()  # streams
        self._peers: dict[bytes, PeerGrants] = {}
        self._present = 0  # peers with a stream that is not away
        self._line: OrderedDict[bytes, PeerGrants] = OrderedDict()  # those with a line
        self._waiting = 0  # streams in all lines
        self._idle_share = 1  # of a peer whose streams are idle, at the last lending
        self._look_at_s = 0.0  # when to look for silent streams again

    def hello(
        self, head: Header, peer: bytes, want: int, now_s: float, key: bytes = b""
    ) -> ActorStream:
        """Add an actor, or handle its repeated HELLO.

        Raises WireError: "stale" for an older incarnation, "taken" and "key" (`TakenError`) where
        another process plays it, "full", "header" for counters that leave no room for more, and
        those of `beat`.
        """
        known = self.streams.get(head.actor)
        if known is not None and known.incarnation > head.incarnation:
            raise WireError("stale", f"incarnation {head.incarnation} of actor {head.actor}")
        if known is not None:
            self._check_owner(known, peer, key, now_s, joins=True)
            if known.incarnation < head.incarnation:
                self._end(known)
                known = None
        want = max(1, min(want, MAX_WANT))
        if known is None:
            if len(self.streams) >= MAX_STREAMS:
                raise WireError("full", f"{len(self.streams)} actors")
            if self._of_keys[key] >= self._most_of_key:
                raise WireError("full", f"{self._of_keys[key]} actors with one key")
            self._check_room(peer)
            at, made = head.sequence, head.produced_steps
            if max(at, made) >= MAX_BEGIN:
                raise WireError("header", f"a stream that begins at {at}, after {made} steps")
            known = ActorStream(
                actor=head.actor,
                incarnation=head.incarnation,
                peer=peer,
                key=key,
                next=at,
                limit=at,
                promised=at,
                produced_steps=made,
                heard_s=now_s,
                used_s=now_s,
            )
            self.streams[head.actor] = known
            self._of_keys[key] += 1
            self._enter(known, peer)
        self._check_claim(known, head)
        if not known.away:
            self.want += want - known.want
        known.want = want
        self._proceed(known, head.sequence, head.produced_steps, peer, now_s)
        return known

    def beat(self, head: Header, peer: bytes, now_s: float, key: bytes = b"") -> ActorStream:
        """Handle the counters that an actor reports.

        Raises WireError: "unknown", "stale", "ungranted" and "steps" for counters that no correct
        actor reaches with its grants, "taken" and "key" (`TakenError`).
        """
        stream = self._known(head, peer, now_s, key)
        self._check_claim(stream, head)
        self._proceed(stream, head.sequence, head.produced_steps, peer, now_s)
        return stream

    def admit(
        self, head: Header, peer: bytes, now_s: float, available: int, key: bytes = b""
    ) -> ActorStream:
        """The stream of a slot message that may be stored in one of ``available`` slots.

        ``available`` counts free and granted slots; `received` must follow. A grant that was taken
        back still holds as long as there is a slot that is not granted to others. Raises WireError
        as `beat`, and "replayed".
        """
        stream = self._known(head, peer, now_s, key)
        gap = head.sequence - stream.next
        if gap < 0:
            raise WireError("replayed", f"sequence {head.sequence}, next is {stream.next}")
        if head.sequence >= stream.limit and (
            head.sequence >= stream.promised or self.outstanding >= available
        ):
            raise WireError("ungranted", f"sequence {head.sequence}, limit is {stream.limit}")
        made = head.produced_steps - stream.produced_steps
        most = self._slot_steps
        # Of a slot's steps an actor may have dropped some, which `steps` does not count.
        if not (head.steps <= made <= (gap + 1) * most and head.steps <= most):
            raise WireError("steps", f"{head.produced_steps} after {stream.produced_steps}")
        return stream

    def received(self, stream: ActorStream, head: Header, peer: bytes, now_s: float) -> None:
        """Use up the grant of a slot message with a correct checksum, even if it was not stored."""
        stream.delivered = True
        stream.used_s = now_s
        stream.idle = False
        self._proceed(stream, head.sequence + 1, head.produced_steps, peer, now_s)

    def bye(self, head: Header, peer: bytes, now_s: float, key: bytes = b"") -> ActorStream:
        """Handle an actor that leaves.

        Raises WireError as `beat`: a stream whose BYE is refused ends by silence, with its last
        accepted counters.
        """
        stream = self.beat(head, peer, now_s, key)
        self._end(stream)
        return stream

    def of(self, head: Header, peer: bytes) -> ActorStream | None:
        """The stream in the header of any message, if it belongs to ``peer``."""
        stream = self.streams.get(head.actor)
        own = stream and stream.peer == peer and stream.incarnation == head.incarnation
        return stream if own else None

    def lend(self, available: int) -> list[ActorStream]:
        """Distribute grants for ``available`` slots, free or granted.

        Returns the streams that got more.
        """
        granted: dict[int, ActorStream] = {}
        present = max(1, self._present)
        share, self._idle_share = -(-available // present), max(1, available // present)
        passed = 0
        while self.outstanding < available and passed < min(self._waiting, MAX_PASSED):
            name, peer = self._line.popitem(last=False)
            self._line[name] = peer
            stream = next(iter(peer.line.values()))
            if stream.outstanding >= stream.want:
                self._leave_line(stream, peer)
                continue
            peer.line.move_to_end(stream.actor)
            most = self._idle_share if stream.idle else share
            if peer.outstanding >= most or stream.outstanding * peer.present >= most:
                passed += 1
                continue
            stream.limit += 1
            stream.promised = max(stream.promised, stream.limit)
            self._book(stream, 1)
            granted[stream.actor] = stream
            if stream.outstanding >= stream.want:
                self._leave_line(stream, peer)
        return list(granted.values())

    def expire(self, now_s: float) -> list[ActorStream]:
        """Take grants back from silent actors, and remove those silent for too long.

        Returns these.
        """
        if now_s < self._look_at_s:
            return []
        self._look_at_s = now_s + LOOK_S
        forgotten = []
        for stream in list(self.streams.values()):
            silent_s = now_s - stream.heard_s
            if silent_s <= PROBE_AFTER_S:
                continue
            gone = silent_s > GRANT_SILENCE_S or not self._connected(stream)
            if silent_s > self._silence_s or (gone and not stream.delivered):
                self._end(stream)
                forgotten.append(stream)
            elif gone and not stream.away:
                self._withdraw(stream)
        return forgotten

    def end_all(self) -> None:
        """End all streams: nothing more is received."""
        for stream in list(self.streams.values()):
            self._end(stream)

    def _known(self, head: Header, peer: bytes, now_s: float, key: bytes) -> ActorStream:
        stream = self.streams.get(head.actor)
        if stream is None:
            raise WireError("unknown", f"actor {head.actor}")
        if stream.incarnation != head.incarnation:
            reason = "stale" if head.incarnation < stream.incarnation else "unknown"
            raise WireError(reason, f"incarnation {head.incarnation} of actor {head.actor}")
        if peer != stream.peer:
            self._check_owner(stream, peer, key, now_s)
        return stream

    def _check_owner(
        self, stream: ActorStream, peer: bytes, key: bytes, now_s: float, *, joins: bool = False
    ) -> None:
        """Raise TakenError for a connection that does not own ``stream``."""
        if peer == stream.peer:
            return
        here = now_s - stream.heard_s <= GRANT_SILENCE_S and self._connected(stream)
        if key == stream.key and not here:
            self._check_room(peer)
            return
        if joins and (stream.rival_s is None or now_s - stream.rival_s > RIVAL_S):
            stream.rival_s = now_s
        lives = stream.rival_s is not None and stream.heard_s > stream.rival_s
        if key != stream.key:
            text = f"actor {stream.actor} was begun with another key; start actors with other ids"
            raise TakenError("key", text, lives=lives)
        text = f"actor {stream.actor} is played by another process; start actors with other ids"
        raise TakenError("taken", text, lives=lives)

    def _check_room(self, peer: bytes) -> None:
        """Raise WireError for a connection that has begun as many streams as it may."""
        known = self._peers.get(peer)
        if known is not None and known.streams >= MAX_STREAMS_PER_PEER:
            raise WireError("full", f"{known.streams} actors of one connection")

    def _check_claim(self, stream: ActorStream, head: Header) -> None:
        """Raise WireError where a stream reports more sent slots than it may have."""
        if head.sequence > stream.promised:
            raise WireError("ungranted", f"sequence {head.sequence}, limit is {stream.promised}")
        slots = max(0, head.sequence - stream.next)
        if head.produced_steps > stream.produced_steps + slots * self._slot_steps:
            raise WireError("steps", f"{head.produced_steps} after {stream.produced_steps}")

    def _proceed(
        self, stream: ActorStream, sequence: int, produced_steps: int, peer: bytes, now_s: float
    ) -> None:
        stream.heard_s = now_s
        if peer != stream.peer:
            self._leave(stream)
            self._enter(stream, peer)
        if stream.away:
            stream.away = False
            self._count_present(stream, 1)
            self.want += stream.want
        if produced_steps > stream.produced_steps:
            stream.produced_steps = produced_steps
        if sequence > stream.next:
            before = stream.limit - stream.next
            stream.next = sequence
            if sequence > stream.limit:
                stream.limit = sequence
            self._book(stream, stream.limit - sequence - before)
        if now_s - stream.used_s > GRANT_SILENCE_S:
            stream.idle = True
            self._give_back(stream)
        if stream.limit - stream.next <= stream.want // 2:
            self._stand_in_line(stream)

    def _give_back(self, stream: ActorStream) -> None:
        """Take the grants of an idle stream beyond its connection's share, if another waits."""
        peer = self._peers[stream.peer]
        excess = min(stream.outstanding, peer.outstanding - self._idle_share)
        if excess > 0 and len(self._line) > (stream.peer in self._line):
            stream.limit -= excess
            self._book(stream, -excess)

    def _withdraw(self, stream: ActorStream) -> None:
        """Take back its grants; it does not count as present until its next message."""
        peer = self._peers[stream.peer]
        stream.away = True
        self._count_present(stream, -1)
        self._leave_line(stream, peer)
        self._book(stream, -stream.outstanding)
        self.want -= stream.want
        stream.limit = stream.next

    def _end(self, stream: ActorStream) -> None:
        if not stream.away:
            self._withdraw(stream)
        self._leave(stream)
        del self.streams[stream.actor]
        self._of_keys[stream.key] -= 1
        if stream.delivered or len(self.ended) < MAX_ENDED_UNUSED:
            self.ended.append(stream)

    # ------------------------------------------------------------------ what a connection holds

    def _enter(self, stream: ActorStream, name: bytes) -> None:
        """Count a stream and its grants for the connection ``name``."""
        stream.peer = name
        peer = self._peers.setdefault(name, PeerGrants(name))
        peer.streams += 1
        peer.outstanding += stream.outstanding
        if not stream.away:
            self._count_present(stream, 1)

    def _leave(self, stream: ActorStream) -> None:
        """The reverse of `_enter`."""
        peer = self._peers[stream.peer]
        self._leave_line(stream, peer)
        if not stream.away:
            self._count_present(stream, -1)
        peer.outstanding -= stream.outstanding
        peer.streams -= 1
        if not peer.streams:
            del self._peers[stream.peer]

    def _count_present(self, stream: ActorStream, change: int) -> None:
        peer = self._peers[stream.peer]
        before = peer.present > 0
        peer.present += change
        self._present += (peer.present > 0) - before

    def _book(self, stream: ActorStream, change: int) -> None:
        self.outstanding += change
        self._peers[stream.peer].outstanding += change

    def _stand_in_line(self, stream: ActorStream) -> None:
        peer = self._peers[stream.peer]
        if stream.actor not in peer.line:
            peer.line[stream.actor] = stream
            self._waiting += 1
            self._line.setdefault(stream.peer, peer)

    def _leave_line(self, stream: ActorStream, peer: PeerGrants) -> None:
        if peer.line.pop(stream.actor, None) is not None:
            self._waiting -= 1
            if not peer.line:
                del self._line[peer.name]
