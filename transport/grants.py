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

`Grants` knows the streams, and checks what actors report. Its `GrantPool` knows how many grants
each connection holds, and which streams wait for more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.transport.wire import MAX_COUNT, Header, WireError

# The most grants that one stream may hold.
MAX_WANT = 64
# The most streams at a time; this limits the memory that HELLOs can take.
MAX_STREAMS = 1 << 14
# An actor is a process of its own, with a connection of its own.
MAX_STREAMS_PER_PEER = 64
# The most ended streams that are kept until they are reported.
MAX_ENDED = 10_000
# With so many ended streams, those without a delivered slot are not kept.
MAX_ENDED_UNUSED = MAX_ENDED // 2
# A new stream's counters begin below this, so that later ones stay in range.
MAX_BEGIN = MAX_COUNT // 2
# The most streams that hold their share already and are skipped in one turn.
MAX_PASSED = 64
# The interval between two messages of a live actor.
BEAT_S = 1.0
# Three beats missed, and slack for a host under load.
GRANT_SILENCE_S = 4.5
# After one missed beat the connection may be closed, which is then tested.
PROBE_AFTER_S = 1.5
# A rival process whose last request is older has given up.
RIVAL_S = 2 * GRANT_SILENCE_S
# The interval between two checks of all streams.
CHECK_S = 0.5


class EpisodeEnds(NamedTuple):
    """The environments whose episode ended with the last row of a stored slot."""

    next_sequence: int
    """The sequence of the slot that continues after that row."""
    over: npt.NDArray[np.bool_]
    """Whether the episode of each environment ended, bool ``[envs]``."""


@dataclass(slots=True)
class ActorStream:
    """One incarnation of an actor."""

    actor: int
    incarnation: int
    peer: bytes
    """The routing id of the connection that owns the stream."""
    key: bytes
    """The public CURVE key that began the stream; empty without CURVE."""
    next: int
    """The sequence that the actor sends next."""
    limit: int
    """The lowest sequence that is not granted."""
    promised: int
    """The highest limit that was ever granted, also if it was taken back."""
    produced_steps: int
    """Agent steps that the actor has reported, since it began."""
    last_heard_s: float
    """When the last message of the stream came."""
    last_used_s: float
    """When a grant was last used, or the stream began."""
    want: int = 0
    """The number of grants that the actor wants to hold."""
    idle: bool = False
    """Whether no grant was used for `GRANT_SILENCE_S`."""
    delivered: bool = False
    """Whether a slot of the stream has come."""
    away: bool = False
    """Whether the grants were taken back because the actor is silent."""
    episode_ends: EpisodeEnds | None = None
    """The ends of episodes in the last slot that was stored."""
    rival_s: float | None = None
    """When another process first tried to play this actor."""

    @property
    def outstanding(self) -> int:
        """The number of grants that the stream holds."""
        return self.limit - self.next

    def final_counters(self) -> dict[str, int]:
        """Returns the counters at the end, with the sequence that would have been sent next."""
        return {
            "actor": self.actor,
            "incarnation": self.incarnation,
            "produced_steps": self.produced_steps,
            "sequence": self.next,
        }


class TakenError(WireError):
    """Another process plays this actor.

    ``lives`` is whether that process has sent a message since this one first tried.
    """

    def __init__(self, reason: str, text: str, *, lives: bool) -> None:
        super().__init__(reason, text)
        self.lives = lives


class Grants:
    """The streams of one connector, and the rules for what their actors may report.

    The methods ``on_...`` handle the messages of actors, `lend` and `expire` the connector's turn.

    Args:
        silence_s: seconds of silence after which a stream is over.
        slot_steps: most agent steps of one slot.
        connected: returns whether the connection of a stream is open, as far as is known.
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
        """The streams by actor."""
        self.ended: deque[ActorStream] = deque(maxlen=MAX_ENDED)
        """The streams that are over, for the caller to report and remove."""
        self._pool = GrantPool()
        self._silence_s = silence_s
        self._slot_steps = slot_steps
        self._connected = connected
        self._max_streams_per_key = MAX_STREAMS if keys < 2 else MAX_STREAMS // 2
        self._streams_per_key: Counter[bytes] = Counter()
        self._next_check_s = 0.0  # the time of the next check for silent streams

    @property
    def outstanding(self) -> int:
        """The number of grants that all streams hold."""
        return self._pool.outstanding

    @property
    def want(self) -> int:
        """The number of slots that all present actors together want to hold."""
        return self._pool.want

    # --------------------------------------------------------------------- messages of an actor

    def on_hello(
        self, head: Header, peer: bytes, want: int, now_s: float, key: bytes = b""
    ) -> ActorStream:
        """Add an actor, or handle its repeated HELLO.

        Args:
            head: the header of the message.
            peer: the routing id of its connection.
            want: the number of grants that the actor wants to hold.
            now_s: the time.
            key: the public CURVE key of the peer; empty without CURVE.

        Returns:
            The stream of the actor.

        Raises:
            WireError: "stale" for an older incarnation; "taken" and "key" (`TakenError`) where
                another process plays the actor; "full" where there are too many streams; "header"
                for counters that leave no room for more; and the errors of `on_beat`.
        """
        want = max(1, min(want, MAX_WANT))
        stream = self.streams.get(head.actor)

        if stream is not None:
            if stream.incarnation > head.incarnation:
                raise WireError("stale", f"incarnation {head.incarnation} of actor {head.actor}")
            self._check_owner(stream, peer, key=key, now_s=now_s, joins=True)
            if stream.incarnation < head.incarnation:
                self._end(stream)
                stream = None
        if stream is None:
            stream = self._begin(head, peer, now_s=now_s, key=key)

        self._check_counters(stream, head)
        self._pool.set_want(stream, want)
        self._advance(
            stream,
            next_sequence=head.sequence,
            produced_steps=head.produced_steps,
            peer=peer,
            now_s=now_s,
        )
        return stream

    def on_beat(self, head: Header, peer: bytes, now_s: float, key: bytes = b"") -> ActorStream:
        """Handle the counters that an actor reports, and return its stream.

        Raises:
            WireError: "unknown" and "stale" for an actor or incarnation without a stream here;
                "ungranted" and "steps" for counters that no correct actor reaches with its grants;
                "taken" and "key" (`TakenError`) where another process plays the actor.
        """
        stream = self._owned_stream(head, peer, now_s=now_s, key=key)
        self._check_counters(stream, head)
        self._advance(
            stream,
            next_sequence=head.sequence,
            produced_steps=head.produced_steps,
            peer=peer,
            now_s=now_s,
        )
        return stream

    def admit(
        self, head: Header, peer: bytes, now_s: float, available: int, key: bytes = b""
    ) -> ActorStream:
        """Return the stream of a slot message, if the slot may be stored.

        A grant that was taken back still holds as long as there is a slot that is not granted to
        others. `count_slot` must follow.

        Args:
            head: the header of the message.
            peer: the routing id of its connection.
            now_s: the time.
            available: the number of free slots, granted ones among them.
            key: the public CURVE key of the peer; empty without CURVE.

        Raises:
            WireError: as `on_beat`, and "replayed" for a sequence that has come before.
        """
        stream = self._owned_stream(head, peer, now_s=now_s, key=key)

        skipped = head.sequence - stream.next
        if skipped < 0:
            raise WireError("replayed", f"sequence {head.sequence}, next is {stream.next}")
        if head.sequence >= stream.limit and (
            head.sequence >= stream.promised or self.outstanding >= available
        ):
            raise WireError("ungranted", f"sequence {head.sequence}, limit is {stream.limit}")

        # An actor may have dropped some of a slot's steps, which `head.steps` does not count.
        new_steps = head.produced_steps - stream.produced_steps
        max_steps = (skipped + 1) * self._slot_steps
        if not (head.steps <= new_steps <= max_steps and head.steps <= self._slot_steps):
            raise WireError("steps", f"{head.produced_steps} after {stream.produced_steps}")
        return stream

    def count_slot(self, stream: ActorStream, head: Header, peer: bytes, now_s: float) -> None:
        """Use up the grant of a slot message with a correct checksum, even if it was not stored."""
        stream.delivered = True
        stream.last_used_s = now_s
        stream.idle = False
        self._advance(
            stream,
            next_sequence=head.sequence + 1,
            produced_steps=head.produced_steps,
            peer=peer,
            now_s=now_s,
        )

    def on_bye(self, head: Header, peer: bytes, now_s: float, key: bytes = b"") -> ActorStream:
        """Handle an actor that leaves, and return its ended stream.

        Raises:
            WireError: as `on_beat`. A stream whose BYE is refused ends by silence, with its last
                accepted counters.
        """
        stream = self.on_beat(head, peer, now_s=now_s, key=key)
        self._end(stream)
        return stream

    def stream_of(self, head: Header, peer: bytes) -> ActorStream | None:
        """Return the stream that a header names, if it belongs to ``peer``."""
        stream = self.streams.get(head.actor)
        if stream is None or stream.peer != peer or stream.incarnation != head.incarnation:
            return None
        return stream

    # ---------------------------------------------------------------------- the connector's turn

    def lend(self, available: int) -> list[ActorStream]:
        """Distribute grants for ``available`` slots, free or granted already.

        Returns:
            The streams that got more.
        """
        return self._pool.lend(available)

    def expire(self, now_s: float) -> list[ActorStream]:
        """Take grants back from silent actors, and remove those that were silent for too long.

        Returns:
            The streams that were removed.
        """
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + CHECK_S

        removed = []
        for stream in list(self.streams.values()):
            silent_s = now_s - stream.last_heard_s
            if silent_s <= PROBE_AFTER_S:
                continue
            absent = silent_s > GRANT_SILENCE_S or not self._connected(stream)
            if silent_s > self._silence_s or (absent and not stream.delivered):
                self._end(stream)
                removed.append(stream)
            elif absent and not stream.away:
                self._pool.withdraw(stream)
        return removed

    def end_all(self) -> None:
        """End all streams: nothing more is received."""
        for stream in list(self.streams.values()):
            self._end(stream)

    # -------------------------------------------------------------------------------- the checks

    def _owned_stream(self, head: Header, peer: bytes, *, now_s: float, key: bytes) -> ActorStream:
        """Return the stream that a header names; raise WireError unless ``peer`` may use it."""
        stream = self.streams.get(head.actor)
        if stream is None:
            raise WireError("unknown", f"actor {head.actor}")
        if stream.incarnation != head.incarnation:
            reason = "stale" if head.incarnation < stream.incarnation else "unknown"
            raise WireError(reason, f"incarnation {head.incarnation} of actor {head.actor}")

        if peer != stream.peer:
            self._check_owner(stream, peer, key=key, now_s=now_s)
        return stream

    def _check_owner(
        self, stream: ActorStream, peer: bytes, *, key: bytes, now_s: float, joins: bool = False
    ) -> None:
        """Raise TakenError for a connection that does not own ``stream`` and may not take it over.

        Where the connection ``joins``, it is noted as a rival of the owner.
        """
        if peer == stream.peer:
            return

        # A peer with the same key may take the stream over once its owner is silent or has left.
        present = now_s - stream.last_heard_s <= GRANT_SILENCE_S and self._connected(stream)
        if key == stream.key and not present:
            self._check_room(peer)
            return

        # The owner lives if it sends a message after the rival's first request.
        if joins and (stream.rival_s is None or now_s - stream.rival_s > RIVAL_S):
            stream.rival_s = now_s
        lives = stream.rival_s is not None and stream.last_heard_s > stream.rival_s

        if key != stream.key:
            text = f"actor {stream.actor} was begun with another key; start actors with other ids"
            raise TakenError("key", text, lives=lives)
        text = f"actor {stream.actor} is played by another process; start actors with other ids"
        raise TakenError("taken", text, lives=lives)

    def _check_room(self, peer: bytes) -> None:
        """Raise WireError for a connection that has begun as many streams as it may."""
        count = self._pool.stream_count(peer)
        if count >= MAX_STREAMS_PER_PEER:
            raise WireError("full", f"{count} actors of one connection")

    def _check_counters(self, stream: ActorStream, head: Header) -> None:
        """Raise WireError where a stream reports more slots or steps than its grants allow."""
        if head.sequence > stream.promised:
            raise WireError("ungranted", f"sequence {head.sequence}, limit is {stream.promised}")
        slots = max(0, head.sequence - stream.next)
        if head.produced_steps > stream.produced_steps + slots * self._slot_steps:
            raise WireError("steps", f"{head.produced_steps} after {stream.produced_steps}")

    # --------------------------------------------------------------------- the life of a stream

    def _begin(self, head: Header, peer: bytes, *, now_s: float, key: bytes) -> ActorStream:
        """Begin a stream at the counters of a HELLO; raise WireError where there is no room."""
        if len(self.streams) >= MAX_STREAMS:
            raise WireError("full", f"{len(self.streams)} actors")
        if self._streams_per_key[key] >= self._max_streams_per_key:
            raise WireError("full", f"{self._streams_per_key[key]} actors with one key")
        self._check_room(peer)
        if max(head.sequence, head.produced_steps) >= MAX_BEGIN:
            text = f"a stream that begins at {head.sequence}, after {head.produced_steps} steps"
            raise WireError("header", text)

        stream = ActorStream(
            actor=head.actor,
            incarnation=head.incarnation,
            peer=peer,
            key=key,
            next=head.sequence,
            limit=head.sequence,
            promised=head.sequence,
            produced_steps=head.produced_steps,
            last_heard_s=now_s,
            last_used_s=now_s,
        )
        self.streams[head.actor] = stream
        self._streams_per_key[key] += 1
        self._pool.add(stream, peer)
        return stream

    def _advance(
        self,
        stream: ActorStream,
        *,
        next_sequence: int,
        produced_steps: int,
        peer: bytes,
        now_s: float,
    ) -> None:
        """Take over the counters of an accepted message, and queue the stream for grants it lacks.

        Args:
            stream: of the message.
            next_sequence: the sequence that the actor sends next.
            produced_steps: the agent steps that it reports.
            peer: the connection of the message, which owns the stream from now on.
            now_s: the time.
        """
        stream.last_heard_s = now_s
        if peer != stream.peer:
            self._pool.remove(stream)
            self._pool.add(stream, peer)
        if stream.away:
            self._pool.restore(stream)

        if produced_steps > stream.produced_steps:
            stream.produced_steps = produced_steps
        if next_sequence > stream.next:
            self._pool.use(stream, next_sequence)
        if now_s - stream.last_used_s > GRANT_SILENCE_S:
            stream.idle = True
            self._pool.return_excess(stream)
        if stream.limit - stream.next <= stream.want // 2:
            self._pool.enqueue(stream)

    def _end(self, stream: ActorStream) -> None:
        """End a stream, and keep its final counters in ``ended``."""
        if not stream.away:
            self._pool.withdraw(stream)
        self._pool.remove(stream)
        del self.streams[stream.actor]
        self._streams_per_key[stream.key] -= 1

        if stream.delivered or len(self.ended) < MAX_ENDED_UNUSED:
            self.ended.append(stream)


@dataclass(slots=True)
class ConnectionGrants:
    """The grants of all streams of one connection."""

    peer: bytes
    """The routing id of the connection."""
    streams: int = 0
    """The number of streams."""
    present: int = 0
    """The number of streams that are not away."""
    outstanding: int = 0
    """The number of grants that the streams hold."""
    queue: OrderedDict[int, ActorStream] = field(default_factory=OrderedDict)
    """The streams that lack grants, by actor."""


class GrantPool:
    """The grants that each connection holds, and the queue of streams that lack some.

    It changes the fields ``peer``, ``limit``, ``promised``, ``next``, ``want`` and ``away`` of the
    streams, which are counted here.
    """

    def __init__(self) -> None:
        self.outstanding = 0
        """The number of grants that all streams hold."""
        self.want = 0
        """The number of grants that all streams that are not away want to hold."""
        self._connections: dict[bytes, ConnectionGrants] = {}
        self._present_connections = 0  # connections with a stream that is not away
        # The connections of which some stream lacks grants, and the number of these streams.
        self._queue: OrderedDict[bytes, ConnectionGrants] = OrderedDict()
        self._queued_streams = 0
        # The grants that a connection of idle streams may hold, at the last lending.
        self._idle_share = 1

    def stream_count(self, peer: bytes) -> int:
        """The number of streams of a connection."""
        connection = self._connections.get(peer)
        return 0 if connection is None else connection.streams

    def add(self, stream: ActorStream, peer: bytes) -> None:
        """Count a stream and its grants for the connection ``peer``."""
        stream.peer = peer
        connection = self._connections.setdefault(peer, ConnectionGrants(peer))
        connection.streams += 1
        connection.outstanding += stream.outstanding
        if not stream.away:
            self._change_present(connection, 1)

    def remove(self, stream: ActorStream) -> None:
        """Undo `add`."""
        connection = self._connections[stream.peer]
        self._dequeue(stream, connection)
        if not stream.away:
            self._change_present(connection, -1)
        connection.outstanding -= stream.outstanding
        connection.streams -= 1
        if not connection.streams:
            del self._connections[stream.peer]

    def set_want(self, stream: ActorStream, want: int) -> None:
        """Set the number of grants that a stream wants to hold."""
        if not stream.away:
            self.want += want - stream.want
        stream.want = want

    def withdraw(self, stream: ActorStream) -> None:
        """Take back the grants of a stream, which is away until `restore`."""
        connection = self._connections[stream.peer]
        stream.away = True
        self._change_present(connection, -1)
        self._dequeue(stream, connection)
        self._change_outstanding(stream, -stream.outstanding)
        self.want -= stream.want
        stream.limit = stream.next

    def restore(self, stream: ActorStream) -> None:
        """Count a stream that was away as present again; it has no grants yet."""
        stream.away = False
        self._change_present(self._connections[stream.peer], 1)
        self.want += stream.want

    def use(self, stream: ActorStream, sequence: int) -> None:
        """Use up, or void, the grants below ``sequence``."""
        previous_outstanding = stream.limit - stream.next
        stream.next = sequence
        if sequence > stream.limit:
            stream.limit = sequence
        self._change_outstanding(stream, stream.limit - sequence - previous_outstanding)

    def return_excess(self, stream: ActorStream) -> None:
        """Take the grants of an idle stream beyond its connection's share, if another waits."""
        connection = self._connections[stream.peer]
        excess = min(stream.outstanding, connection.outstanding - self._idle_share)
        others_wait = any(peer != stream.peer for peer in self._queue)
        if excess > 0 and others_wait:
            stream.limit -= excess
            self._change_outstanding(stream, -excess)

    def enqueue(self, stream: ActorStream) -> None:
        """Let a stream wait for the grants that it lacks."""
        connection = self._connections[stream.peer]
        if stream.actor not in connection.queue:
            connection.queue[stream.actor] = stream
            self._queued_streams += 1
            self._queue.setdefault(stream.peer, connection)

    def lend(self, available: int) -> list[ActorStream]:
        """Distribute grants for ``available`` slots, free or granted already.

        Connections take turns, and the streams of each connection too.

        Returns:
            The streams that got more.
        """
        # A connection gets no further grant while it holds its share: rounded up, so that all slots
        # are granted, or rounded down for idle streams, so that they leave room for others.
        connections = max(1, self._present_connections)
        share = -(-available // connections)
        self._idle_share = max(1, available // connections)

        granted: dict[int, ActorStream] = {}
        passed = 0  # streams that hold their share already
        while self.outstanding < available and passed < min(self._queued_streams, MAX_PASSED):
            # The first connection, and its first stream, have their turn.
            peer, connection = self._queue.popitem(last=False)
            self._queue[peer] = connection
            stream = next(iter(connection.queue.values()))
            if stream.outstanding >= stream.want:
                self._dequeue(stream, connection)
                continue

            # Both shares are compared without a division: that of the connection, and the stream's
            # share of it.
            connection.queue.move_to_end(stream.actor)
            limit = self._idle_share if stream.idle else share
            if connection.outstanding >= limit or stream.outstanding * connection.present >= limit:
                passed += 1
                continue

            stream.limit += 1
            stream.promised = max(stream.promised, stream.limit)
            self._change_outstanding(stream, 1)
            granted[stream.actor] = stream
            if stream.outstanding >= stream.want:
                self._dequeue(stream, connection)
        return list(granted.values())

    def _dequeue(self, stream: ActorStream, connection: ConnectionGrants) -> None:
        """Remove a stream from the queue, if it is there."""
        if connection.queue.pop(stream.actor, None) is not None:
            self._queued_streams -= 1
            if not connection.queue:
                del self._queue[connection.peer]

    def _change_present(self, connection: ConnectionGrants, change: int) -> None:
        """Change the number of streams of a connection that are not away."""
        was_present = connection.present > 0
        connection.present += change
        is_present = connection.present > 0
        if is_present and not was_present:
            self._present_connections += 1
        elif was_present and not is_present:
            self._present_connections -= 1

    def _change_outstanding(self, stream: ActorStream, change: int) -> None:
        """Change the number of grants that a stream holds, and with it all sums of them."""
        self.outstanding += change
        self._connections[stream.peer].outstanding += change
