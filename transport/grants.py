"""Which actor may send how much: the connector's decisions, without any IO.

A *stream* is what one incarnation of one actor sends, numbered by sequence. A grant says "you may
send the sequences below ``limit``"; it only grows, and saying it again does no harm, so a lost
message leaks nothing. Invariants:

- the grants outstanding over all streams never exceed the slots lent to the connector, so that
  whatever was granted can be stored;
- a stream holds at most ``want`` grants; one that has used half of them stands in a line (FIFO) for
  as many as it lacks, so that a GRANT is not sent for every slot;
- what an actor says it will send next voids its grants below: those messages are lost, because one
  connection keeps its order.

What is asked in every turn of the connector's loop costs the same for ten streams and a thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.transport.wire import Head, WireError

MAX_WANT = 64


@dataclass
class Stream:
    """One incarnation of an actor: ``next`` is the sequence that it sends next."""

    actor: int
    incarnation: int
    peer: bytes
    want: int
    next: int
    limit: int
    produced_steps: int
    heard_s: float

    @property
    def outstanding(self) -> int:
        return self.limit - self.next

    def end(self) -> dict[str, int]:
        """How far it came: ``sequence`` is the one that it would have sent next."""
        return {
            "actor": self.actor,
            "incarnation": self.incarnation,
            "produced_steps": self.produced_steps,
            "sequence": self.next,
        }


class Grants:
    """The streams of one connector; ``ended`` are those that are over and not yet reported."""

    def __init__(self, silence_s: float) -> None:
        self.streams: dict[int, Stream] = {}
        self.ended: list[Stream] = []
        self.outstanding = 0
        self.want = 0  # slots that all actors together would like to hold
        self._silence_s = silence_s
        self._look_at_s = 0.0  # before that, nobody can have been silent too long
        self._line: OrderedDict[int, Stream] = OrderedDict()  # who want more, by actor

    def hello(self, head: Head, peer: bytes, want: int, now_s: float) -> Stream:
        """Take in an actor, or one that says hello again."""
        known = self.streams.get(head.actor)
        if known is not None and known.incarnation > head.incarnation:
            raise WireError("stale", f"incarnation {head.incarnation} of actor {head.actor}")
        if known is not None and known.incarnation < head.incarnation:
            self._end(known)
            known = None
        if known is None:
            start = head.sequence
            known = Stream(head.actor, head.incarnation, peer, 0, start, start, 0, now_s)
            self.streams[head.actor] = known
        self.want -= known.want
        known.want = max(1, min(want, MAX_WANT))
        self.want += known.want
        self._proceed(known, head, peer, now_s)
        return known

    def beat(self, head: Head, peer: bytes, now_s: float) -> Stream:
        """An actor that waits says where it stands."""
        stream = self._known(head)
        self._proceed(stream, head, peer, now_s)
        return stream

    def admit(self, head: Head) -> Stream:
        """The stream of a slot message that may be stored; `received` must follow."""
        stream = self._known(head)
        if head.sequence < stream.next:
            raise WireError("replayed", f"sequence {head.sequence}, next is {stream.next}")
        if head.sequence >= stream.limit:
            raise WireError("ungranted", f"sequence {head.sequence}, limit is {stream.limit}")
        if head.produced_steps < stream.produced_steps + head.steps:
            raise WireError("steps", f"{head.produced_steps} after {stream.produced_steps}")
        return stream

    def received(self, stream: Stream, head: Head, peer: bytes, now_s: float) -> None:
        """A slot message whose checksum held has used its grant, whether or not it was stored."""
        following = head._replace(sequence=head.sequence + 1)
        self._proceed(stream, following, peer, now_s)

    def bye(self, head: Head, peer: bytes, now_s: float) -> Stream:
        """An actor leaves."""
        stream = self.beat(head, peer, now_s)
        self._end(stream)
        return stream

    def lend(self, available: int) -> list[Stream]:
        """Grant what ``available`` slots, free or granted, allow; the streams that got more."""
        granted: dict[int, Stream] = {}
        while self.outstanding < available and self._line:
            _, stream = self._line.popitem(last=False)
            if stream.outstanding >= stream.want:
                continue
            stream.limit += 1
            self.outstanding += 1
            granted[stream.actor] = stream
            if stream.outstanding < stream.want:
                self._line[stream.actor] = stream
        return list(granted.values())

    def expire(self, now_s: float) -> list[Stream]:
        """Forget the actors that have been silent too long."""
        if now_s < self._look_at_s:
            return []
        silent = [s for s in self.streams.values() if now_s - s.heard_s > self._silence_s]
        for stream in silent:
            self._end(stream)
        heard = (stream.heard_s for stream in self.streams.values())
        self._look_at_s = min(heard, default=now_s) + self._silence_s
        return silent

    def end_all(self) -> None:
        """No more is received from anyone."""
        for stream in list(self.streams.values()):
            self._end(stream)

    def _known(self, head: Head) -> Stream:
        stream = self.streams.get(head.actor)
        if stream is None:
            raise WireError("unknown", f"actor {head.actor}")
        if stream.incarnation != head.incarnation:
            reason = "stale" if head.incarnation < stream.incarnation else "unknown"
            raise WireError(reason, f"incarnation {head.incarnation} of actor {head.actor}")
        return stream

    def _proceed(self, stream: Stream, head: Head, peer: bytes, now_s: float) -> None:
        stream.heard_s = now_s
        stream.peer = peer
        stream.produced_steps = max(stream.produced_steps, head.produced_steps)
        before = stream.outstanding
        stream.next = max(stream.next, head.sequence)
        stream.limit = max(stream.limit, stream.next)
        self.outstanding += stream.outstanding - before
        self._queue(stream)

    def _queue(self, stream: Stream) -> None:
        if stream.outstanding <= stream.want // 2:
            self._line.setdefault(stream.actor, stream)

    def _end(self, stream: Stream) -> None:
        del self.streams[stream.actor]
        self._line.pop(stream.actor, None)
        self.outstanding -= stream.outstanding
        self.want -= stream.want
        self.ended.append(stream)
