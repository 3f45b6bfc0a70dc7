"""The connector's grants: who may send, what is refused, and that no grant leaks."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.transport.grants import (
    GRANT_SILENCE_S,
    MAX_BEGIN,
    MAX_ENDED,
    MAX_ENDED_UNUSED,
    MAX_STREAMS,
    MAX_STREAMS_PER_PEER,
    MAX_WANT,
    PROBE_AFTER_S,
    ActorStream,
    Grants,
    TakenError,
)
from penstock.transport.wire import MAX_COUNT, Header, MessageKind, WireError

SILENCE_S = 60.0
STEPS = 40  # of a slot, at most
MANY = 1000  # slots


def made() -> Grants:
    """Grants of a connector whose peers keep their connections."""
    return Grants(SILENCE_S, STEPS)


def head(
    actor: int, sequence: int, *, incarnation: int = 0, produced: int = 0, steps: int = 0
) -> Header:
    return Header(
        MessageKind.SLOT,
        actor=actor,
        incarnation=incarnation,
        sequence=sequence,
        produced_steps=produced,
        steps=steps,
    )


def join(
    grants: Grants,
    actor: int,
    want: int = 2,
    sequence: int = 0,
    now_s: float = 0,
    peer: bytes = b"peer",
) -> ActorStream:
    return grants.on_hello(head(actor, sequence, produced=sequence), peer, want, now_s)


def deliver(
    grants: Grants, actor: int, sequence: int, now_s: float = 0, peer: bytes = b"peer"
) -> None:
    message = head(actor, sequence, produced=sequence + 1, steps=1)
    stream = grants.admit(message, peer, now_s, MANY)
    grants.count_slot(stream, message, peer, now_s)


def own(actor: int) -> bytes:
    """A connection of its own for each actor."""
    return f"peer {actor}".encode()


def refusal(grants: Grants, message: Header, available: int = MANY) -> str:
    with pytest.raises(WireError) as caught:
        grants.admit(message, b"peer", 0, available)
    return caught.value.reason


def test_grants_are_backed_by_slots_and_bounded_by_want() -> None:
    grants = made()
    stream = join(grants, 1, want=3)
    assert grants.lend(0) == []
    assert grants.lend(2) == [stream]
    assert (stream.limit, grants.outstanding) == (2, 2)
    assert grants.lend(2) == []
    grants.lend(10)
    assert (stream.limit, grants.outstanding) == (3, 3)


def test_slot_uses_its_grant_and_the_next_is_lent() -> None:
    grants = made()
    stream = join(grants, 1, want=2)
    grants.lend(2)
    deliver(grants, 1, 0)
    assert (stream.next, stream.limit, grants.outstanding) == (1, 2, 1)
    assert grants.lend(1) == []  # the slot was filled and is not lent again yet
    assert grants.lend(2) == [stream]
    assert stream.limit == 3


def test_scarce_slots_are_lent_in_turn() -> None:
    """First come, first served: nobody gets a second grant before everyone has had one."""
    grants = made()
    streams = [join(grants, actor, want=4) for actor in range(5)]
    grants.lend(7)
    assert [stream.outstanding for stream in streams] == [2, 2, 1, 1, 1]


def test_fast_and_slow_actors_share_fairly_under_scarcity() -> None:
    grants = made()
    for actor in range(3):
        join(grants, actor, want=2)
    sent: Counter[int] = Counter()
    for _ in range(300):  # one slot at a time comes free; whoever is granted sends at once
        (stream,) = grants.lend(1)
        deliver(grants, stream.actor, stream.next)
        sent[stream.actor] += 1
    assert set(sent.values()) == {100}


def test_replayed_ungranted_and_unknown_messages_are_refused() -> None:
    grants = made()
    join(grants, 1, want=2)
    grants.lend(2)
    deliver(grants, 1, 0)
    assert refusal(grants, head(1, 0, produced=1, steps=1)) == "replayed"
    assert refusal(grants, head(1, 2, produced=3, steps=1)) == "ungranted"
    assert refusal(grants, head(2, 0)) == "unknown"
    assert refusal(grants, head(1, 1, incarnation=1)) == "unknown"


def test_produced_steps_cannot_decrease() -> None:
    grants = made()
    join(grants, 1, want=2)
    grants.lend(2)
    first = head(1, 0, produced=10, steps=10)
    grants.count_slot(grants.admit(first, b"peer", 0, MANY), first, b"peer", 0)
    assert refusal(grants, head(1, 1, produced=19, steps=10)) == "steps"
    assert grants.admit(head(1, 1, produced=20, steps=10), b"peer", 0, MANY).next == 1


def test_dropped_steps_of_an_actor_count_up_to_one_slot() -> None:
    grants = made()
    join(grants, 1, want=2)
    grants.lend(2)
    assert refusal(grants, head(1, 0, produced=STEPS + 1, steps=10)) == "steps"
    assert grants.admit(head(1, 0, produced=STEPS, steps=10), b"peer", 0, MANY).next == 0


def test_gap_in_the_sequence_frees_the_grants_of_lost_slots() -> None:
    grants = made()
    stream = join(grants, 1, want=4)
    grants.lend(4)
    deliver(grants, 1, 2)  # 0 and 1 never came
    assert (stream.next, grants.outstanding) == (3, 1)
    grants.lend(4)
    assert (stream.limit, grants.outstanding) == (7, 4)


def test_beat_frees_the_grants_of_lost_last_slots() -> None:
    grants = made()
    stream = join(grants, 1, want=2)
    grants.lend(2)
    grants.on_beat(head(1, 2), b"peer", 1)  # both were lost on the way
    assert grants.outstanding == 0
    grants.lend(2)
    assert (stream.next, stream.limit) == (2, 4)


def test_repeated_hello_keeps_grants_and_moves_to_the_new_connection() -> None:
    grants = Grants(SILENCE_S, STEPS, connected=lambda stream: False)
    join(grants, 1, want=2)
    grants.lend(2)
    again = grants.on_hello(head(1, 1), b"other peer", 2, 1)
    assert (again.next, again.limit, again.peer, grants.outstanding) == (1, 2, b"other peer", 1)


def test_restarted_connector_continues_an_actor_at_its_sequence() -> None:
    grants = made()
    stream = join(grants, 1, want=1, sequence=1000)
    grants.lend(5)
    assert (stream.next, stream.limit) == (1000, 1001)
    deliver(grants, 1, 1000)


def test_a_newer_incarnation_replaces_the_older_one() -> None:
    grants = made()
    old = join(grants, 1, want=2)
    grants.lend(2)
    new = grants.on_hello(head(1, 0, incarnation=1), b"peer", 2, 0)
    assert (new.limit, grants.outstanding, list(grants.ended)) == (0, 0, [old])
    assert refusal(grants, head(1, 0, incarnation=0)) == "stale"
    with pytest.raises(WireError, match="stale"):
        grants.on_hello(head(1, 0, incarnation=0), b"peer", 2, 0)


def test_grants_of_silent_actors_are_lent_to_others_before_their_stream_ends() -> None:
    grants = made()
    silent = join(grants, 1)
    grants.lend(2)
    deliver(grants, 1, 0)
    grants.lend(2)
    other = join(grants, 2)
    assert (silent.outstanding, grants.want) == (2, 4)
    assert grants.lend(2) == []
    grants.on_beat(head(2, 0), b"peer", 4)
    assert grants.expire(GRANT_SILENCE_S) == []
    assert silent.outstanding == 2
    assert grants.expire(GRANT_SILENCE_S + 1) == []  # the stream stays
    assert (silent.outstanding, grants.outstanding, grants.want) == (0, 0, 2)
    assert grants.lend(2) == [other]
    assert other.outstanding == 2
    grants.on_beat(head(2, 0), b"peer", 59)
    assert grants.expire(SILENCE_S + 1) == [silent]
    assert refusal(grants, head(1, 1)) == "unknown"


def test_returning_actor_continues_its_stream() -> None:
    grants = made()
    stream = join(grants, 1)
    grants.lend(2)
    deliver(grants, 1, 0)
    grants.expire(10)
    assert (stream.away, stream.limit, grants.outstanding, grants.want) == (True, 1, 0, 0)
    assert grants.on_beat(head(1, 1, produced=1), b"peer", 11) is stream
    assert (stream.away, grants.want) == (False, 2)
    assert grants.lend(2) == [stream]
    deliver(grants, 1, 1)


def test_late_slot_is_stored_if_there_is_room_or_counted_as_lost_once() -> None:
    grants = made()
    stream, other = join(grants, 1), join(grants, 2)
    grants.lend(4)
    deliver(grants, 1, 0)
    grants.on_beat(head(2, 0), b"peer", 9)
    grants.expire(10)  # takes back sequence 1
    assert refusal(grants, head(1, 1, produced=2, steps=1), available=2) == "ungranted"
    late = head(1, 1, produced=2, steps=1)
    grants.count_slot(grants.admit(late, b"peer", 10, 3), late, b"peer", 10)
    assert (stream.next, grants.outstanding, other.outstanding) == (2, 2, 2)
    assert refusal(grants, head(1, 2, produced=3, steps=1)) == "ungranted"  # never granted
    grants.on_beat(head(1, 2, produced=2), b"peer", 11)


def test_closed_connection_returns_its_grants_at_once() -> None:
    grants = Grants(SILENCE_S, STEPS, connected=lambda stream: stream.actor != 1)
    gone, there = join(grants, 1), join(grants, 2)
    grants.lend(4)
    deliver(grants, 1, 0)
    deliver(grants, 2, 0)
    grants.expire(PROBE_AFTER_S + 0.1)
    assert (gone.outstanding, there.outstanding) == (0, 1)


def test_stream_that_was_never_used_is_removed_with_its_grants() -> None:
    """Or HELLOs of actors that do not exist would take memory for long."""
    grants = made()
    stream = join(grants, 1)
    assert grants.expire(GRANT_SILENCE_S + 0.1) == [stream]
    assert grants.streams == {}


def test_number_of_actors_is_limited() -> None:
    grants = made()
    for actor in range(MAX_STREAMS):
        join(grants, actor, peer=own(actor))
    with pytest.raises(WireError, match="full"):
        join(grants, MAX_STREAMS, peer=own(MAX_STREAMS))
    join(grants, 0, peer=own(0))  # one that is known may say hello again


def test_number_of_actors_per_connection_is_limited() -> None:
    grants = made()
    for actor in range(MAX_STREAMS_PER_PEER):
        join(grants, actor)
    with pytest.raises(WireError, match="full: 64 actors of one connection"):
        join(grants, MAX_STREAMS_PER_PEER)
    join(grants, 0)
    join(grants, MAX_STREAMS_PER_PEER, peer=b"other")
    grants.on_bye(head(1, 0), b"peer", 0)
    join(grants, 1000)


def test_number_of_actors_per_key_is_limited() -> None:
    grants = Grants(SILENCE_S, STEPS, keys=2)

    def enter(actor: int, key: bytes, incarnation: int = 0) -> None:
        message = head(actor, 0, incarnation=incarnation)
        grants.on_hello(message, own(actor), 1, 0.0, key)

    for actor in range(MAX_STREAMS // 2):
        enter(actor, b"many")
    with pytest.raises(WireError, match="full: 8192 actors with one key"):
        enter(MAX_STREAMS, b"many")
    enter(0, b"many", incarnation=1)  # in place of its older one
    enter(MAX_STREAMS, b"other")
    grants.on_bye(head(1, 0), own(1), 0.0, b"many")
    enter(1, b"many", incarnation=1)


def test_flood_of_hellos_does_not_push_out_final_counters_of_others() -> None:
    grants = made()
    join(grants, 0)
    grants.lend(MANY)
    deliver(grants, 0, 0)
    grants.on_bye(head(0, 1, produced=1), b"peer", 0)
    for incarnation in range(2 * MAX_ENDED):
        message = head(1, 7, incarnation=incarnation, produced=7)
        grants.on_hello(message, b"hostile", 1, 0.0)
    assert grants.ended[0].actor == 0
    assert len(grants.ended) == MAX_ENDED_UNUSED


CLAIMS = [  # next is 1, produced 30; granted are 1 and 2
    (4, 30, "ungranted"),
    (MAX_COUNT - 1, 30, "ungranted"),
    (1, 31, "steps"),
    (3, 30 + 2 * STEPS + 1, "steps"),
    (3, MAX_COUNT - 1, "steps"),
    (0, 31, "steps"),
]


@pytest.mark.parametrize("kind", ["hello", "beat", "bye", "slot"])
@pytest.mark.parametrize(("sequence", "produced", "reason"), CLAIMS)
def test_a_counter_grows_by_no_more_than_was_granted(
    kind: str, sequence: int, produced: int, reason: str
) -> None:
    grants = made()
    stream = join(grants, 1)
    grants.lend(2)
    first = head(1, 0, produced=30, steps=30)
    grants.count_slot(grants.admit(first, b"peer", 0, MANY), first, b"peer", 0)
    grants.lend(2)
    said = head(1, sequence, produced=produced)
    says = {
        "hello": lambda: grants.on_hello(said, b"peer", 2, 0),
        "beat": lambda: grants.on_beat(said, b"peer", 0),
        "bye": lambda: grants.on_bye(said, b"peer", 0),
        "slot": lambda: grants.admit(said._replace(sequence=sequence - 1), b"peer", 0, MANY),
    }
    with pytest.raises(WireError) as caught:
        says[kind]()
    assert caught.value.reason == ("replayed" if kind == "slot" and sequence <= 1 else reason)
    assert (stream.next, stream.limit, stream.produced_steps) == (1, 3, 30)
    assert (grants.streams, list(grants.ended)) == ({1: stream}, [])
    grants.on_bye(head(1, 3, produced=30 + 2 * STEPS), b"peer", 0)  # the most that is believed


def test_initial_position_of_an_unknown_stream_counts_no_production() -> None:
    grants = made()
    message = head(1, 1000, produced=MAX_BEGIN - 1)
    stream = grants.on_hello(message, b"peer", 2, 0)
    assert (stream.next, stream.produced_steps) == (1000, MAX_BEGIN - 1)
    grants.lend(2)
    with pytest.raises(WireError, match="steps"):
        grants.on_bye(head(1, 1001, produced=MAX_BEGIN + STEPS), b"peer", 0)


def test_second_process_with_an_actor_id_is_refused_while_the_first_lives() -> None:
    grants = made()
    first = join(grants, 3)
    rival = head(3, 0, incarnation=5)
    with pytest.raises(TakenError) as caught:
        grants.on_hello(rival, b"rival", 2, 1.0)
    assert not caught.value.lives  # it may be the same actor, started again: it asks once more
    grants.on_beat(head(3, 0), b"peer", 1.5)
    with pytest.raises(TakenError, match="actor 3 is played by another process") as caught:
        grants.on_hello(rival, b"rival", 2, 2.0)
    assert caught.value.lives
    for say in (grants.on_beat, grants.on_bye):
        with pytest.raises(TakenError):
            say(head(3, 0), b"rival", 2.0)
    with pytest.raises(TakenError):
        grants.admit(head(3, 0, produced=1, steps=1), b"rival", 2.0, MANY)
    assert grants.streams == {3: first}
    second = grants.on_hello(rival, b"rival", 2, 1.5 + GRANT_SILENCE_S + 0.1)
    assert (second.incarnation, list(grants.ended)) == (5, [first])


def test_actor_with_a_closed_connection_is_replaced_at_once() -> None:
    grants = Grants(SILENCE_S, STEPS, connected=lambda stream: stream.peer != b"peer")
    first = join(grants, 3)
    second = grants.on_hello(head(3, 0, incarnation=1), b"new", 2, 0.1)
    assert (grants.streams, list(grants.ended)) == ({3: second}, [first])


def test_stream_accepts_only_messages_with_its_first_key() -> None:
    grants = Grants(SILENCE_S, STEPS, connected=lambda stream: False)
    stream = grants.on_hello(head(3, 0), b"peer", 2, 0, b"key")
    for say in (grants.on_beat, grants.on_bye):
        with pytest.raises(TakenError, match="key"):
            say(head(3, 0), b"other", 20, b"other key")
    with pytest.raises(TakenError, match="key"):
        grants.on_hello(head(3, 0, incarnation=1), b"other", 2, 20, b"other key")
    assert grants.on_beat(head(3, 0), b"other", 20, b"key") is stream


def test_no_actor_gets_more_than_its_share_of_grants() -> None:
    """A host with many actors that joined first leaves some for those that come later."""
    grants = made()
    hogs = [join(grants, actor, want=MAX_WANT) for actor in range(32)]
    grants.lend(64)
    assert {stream.outstanding for stream in hogs} == {2}
    late = [join(grants, 100 + i, want=2) for i in range(32)]
    for hog in hogs:
        deliver(grants, hog.actor, 0)
        grants.lend(64)
    assert {stream.outstanding for stream in late} == {1}
    assert {stream.outstanding for stream in hogs} == {1}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("slots", [16, 64])
def test_connection_with_many_actors_gets_the_share_of_one_actor(first: bool, slots: int) -> None:
    """Eight connections that say hello under a thousand ids each, and never send a slot."""
    grants = made()
    hostile = [b"evil %d" % i for i in range(8)]
    begun: list[tuple[int, bytes]] = []
    now_s = 0.0

    def flood() -> None:
        for i in range(8000):
            peer = hostile[i % 8]
            with suppress(WireError):  # full
                join(grants, 1000 + i, want=MAX_WANT, now_s=now_s, peer=peer)
                begun.append((1000 + i, peer))

    if not first:
        flood()
        grants.lend(slots)
    honest = join(grants, 1, want=4, now_s=now_s, peer=b"honest")
    if first:
        flood()
    sent = most = 0
    for _ in range(20):
        now_s += 1.0
        for actor, peer in begun:
            if actor in grants.streams:
                grants.on_beat(head(actor, 0), peer, now_s)
        grants.on_beat(head(1, sent, produced=sent), b"honest", now_s)
        grants.expire(now_s)
        for _ in range(20):
            grants.lend(slots)
            most = max(most, honest.outstanding)
            if honest.outstanding:
                deliver(grants, 1, sent, now_s, b"honest")
                sent += 1
    assert sent > 200  # it waits 5 s at most, then for nothing
    assert most >= min(honest.want, slots // 9)
    assert grants.outstanding == sum(s.outstanding for s in grants.streams.values()) <= slots


def test_busy_actor_keeps_its_grants() -> None:
    grants = made()
    early = join(grants, 1, want=8, peer=own(1))
    grants.lend(8)
    deliver(grants, 1, 0, 4.0, own(1))
    late = join(grants, 2, want=8, now_s=5.0, peer=own(2))
    grants.lend(7)
    grants.on_beat(head(1, 1, produced=1), own(1), 5.0)
    assert (early.outstanding, late.outstanding) == (7, 0)
    grants.on_beat(head(1, 1, produced=1), own(1), 4.0 + GRANT_SILENCE_S + 0.1)  # idle since
    assert early.outstanding == 3
    for _ in range(3):
        grants.lend(7)
    assert (early.outstanding, late.outstanding) == (3, 4)


def test_bye_ends_a_stream_at_its_sequence() -> None:
    grants = made()
    join(grants, 1)
    grants.lend(2)
    stream = grants.on_bye(head(1, 1, produced=40), b"peer", 1)
    assert (stream.next, stream.produced_steps) == (1, 40)
    assert (grants.outstanding, list(grants.ended), grants.streams) == (0, [stream], {})


def test_want_is_bounded() -> None:
    grants = made()
    assert join(grants, 1, want=10**9).want == MAX_WANT
    assert join(grants, 2, want=-5).want == 1


def test_repeatedly_restarted_actor_queues_for_grants_once() -> None:
    grants = made()
    for incarnation in range(3):
        grants.on_hello(head(1, 0, incarnation=incarnation), b"peer", 2, 0)
    other = join(grants, 2)
    last = grants.streams[1]
    assert grants.lend(2) == [last, other]
    assert (last.incarnation, last.limit, other.limit, grants.want) == (2, 1, 1, 4)


@pytest.mark.parametrize("actors", [10, 1000])
def test_cost_of_a_turn_does_not_grow_with_the_number_of_actors(actors: int) -> None:
    """Least times of a slot with all that a turn asks; walking over actors would be ten times."""
    assert _turn_s(actors) < 5 * _turn_s(10)


def _turn_s(actors: int) -> float:
    grants = made()
    for actor in range(actors):
        join(grants, actor, want=2, peer=own(actor))
    for _ in range(actors):
        grants.lend(2 * actors)
    took_s = []
    for sequence in range(100):
        start_s = time.perf_counter()
        deliver(grants, 0, sequence, now_s=1.0, peer=own(0))
        grants.lend(2 * actors if sequence % 2 else 0)
        grants.expire(1.0)
        assert grants.want == 2 * actors
        took_s.append(time.perf_counter() - start_s)
        grants.lend(2 * actors)
    return min(took_s)


class Connected(RuleBasedStateMachine):
    """Actors that lose messages at random against a pool of slots, in any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.grants = made()
        self.available = 4
        self.now_s = 0.0
        self.sent: dict[int, int] = {}  # next sequence of each actor, by the actor's own count

    def standing(self, actor: int) -> Header:
        """What an actor says of itself; its slots have one step each."""
        return head(actor, self.sent[actor], produced=self.sent[actor])

    @rule(actor=st.integers(0, 3), want=st.integers(1, 5))
    def hello(self, actor: int, want: int) -> None:
        self.sent.setdefault(actor, 0)
        self.grants.on_hello(self.standing(actor), b"p", want, self.now_s)

    @rule()
    def lend(self) -> None:
        self.grants.lend(self.available)

    @precondition(lambda self: self.available < 8)
    @rule()
    def slot_lent(self) -> None:
        self.available += 1

    @precondition(lambda self: self.grants.outstanding)
    @rule(data=st.data(), lost=st.booleans())
    def send(self, data: st.DataObject, lost: bool) -> None:
        able = [s for s in self.grants.streams.values() if self.sent[s.actor] < s.limit]
        if not able:
            return
        stream = data.draw(st.sampled_from(able))
        sequence = self.sent[stream.actor]
        self.sent[stream.actor] += 1
        if not lost:
            message = head(stream.actor, sequence, produced=sequence + 1, steps=1)
            self.grants.admit(message, b"p", self.now_s, self.available)
            self.grants.count_slot(stream, message, b"p", self.now_s)
            self.available -= 1

    @precondition(lambda self: self.grants.streams)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(sorted(self.grants.streams)))
        self.grants.on_beat(self.standing(actor), b"p", self.now_s)

    @precondition(lambda self: self.grants.streams)
    @rule(data=st.data())
    def bye(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(sorted(self.grants.streams)))
        self.grants.on_bye(self.standing(actor), b"p", self.now_s)

    @rule(later_s=st.floats(0.1, 3), actor=st.integers(0, 3))
    def time_goes_by(self, later_s: float, actor: int) -> None:
        """One actor says where it stands, the others are silent."""
        self.now_s += later_s
        if actor in self.grants.streams:
            self.grants.on_beat(self.standing(actor), b"p", self.now_s)
        self.grants.expire(self.now_s)

    @invariant()
    def grants_are_backed(self) -> None:
        streams = self.grants.streams.values()
        assert self.grants.outstanding == sum(s.outstanding for s in streams)
        assert 0 <= self.grants.outstanding <= self.available
        assert all(s.limit >= s.next for s in streams)
        assert self.grants.want == sum(s.want for s in streams if not s.away)
        for name, peer in self.grants._pool._connections.items():
            own = [s for s in streams if s.peer == name]
            assert peer.streams == len(own) > 0
            assert peer.outstanding == sum(s.outstanding for s in own)
            assert peer.present == sum(not s.away for s in own)

    def teardown(self) -> None:
        """Once everyone has said where they stand, nobody waits for more: nothing leaked."""
        for actor, stream in self.grants.streams.items():
            self.grants.on_beat(self.standing(actor), b"p", self.now_s)
            assert stream.next == self.sent[actor]
        self.grants.lend(100)
        assert all(s.outstanding > s.want // 2 for s in self.grants.streams.values())


Connected.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_no_grant_leaks = Connected.TestCase


@pytest.mark.parametrize(("sequence", "produced"), [(MAX_BEGIN, 0), (0, MAX_BEGIN)])
def test_a_stream_that_leaves_no_room_for_grants_is_refused(sequence: int, produced: int) -> None:
    """A grant beyond it would be a message that the protocol does not allow."""
    grants = made()
    with pytest.raises(WireError) as raised:
        grants.on_hello(head(1, sequence, produced=produced), b"peer", 1, 0)
    assert raised.value.reason == "header"
    assert not grants.streams
