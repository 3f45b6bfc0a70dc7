"""The connector's decisions: who may send, what is refused, and that no grant leaks."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.transport.grants import MAX_WANT, Grants, Stream
from penstock.transport.wire import Head, Kind, WireError

SILENCE_S = 60.0


def head(
    actor: int, sequence: int, *, incarnation: int = 0, produced: int = 0, steps: int = 0
) -> Head:
    return Head(
        Kind.SLOT,
        actor=actor,
        incarnation=incarnation,
        sequence=sequence,
        produced_steps=produced,
        steps=steps,
    )


def join(grants: Grants, actor: int, want: int = 2, sequence: int = 0, now_s: float = 0) -> Stream:
    return grants.hello(head(actor, sequence), b"peer", want, now_s)


def deliver(grants: Grants, actor: int, sequence: int, now_s: float = 0) -> None:
    message = head(actor, sequence, produced=sequence + 1, steps=1)
    grants.received(grants.admit(message), message, b"peer", now_s)


def refusal(grants: Grants, message: Head) -> str:
    with pytest.raises(WireError) as caught:
        grants.admit(message)
    return caught.value.reason


def test_grants_are_backed_by_slots_and_bounded_by_want() -> None:
    grants = Grants(SILENCE_S)
    stream = join(grants, 1, want=3)
    assert grants.lend(0) == []
    assert grants.lend(2) == [stream]
    assert (stream.limit, grants.outstanding) == (2, 2)
    assert grants.lend(2) == []
    grants.lend(10)
    assert (stream.limit, grants.outstanding) == (3, 3)


def test_a_slot_uses_its_grant_and_gets_the_next() -> None:
    grants = Grants(SILENCE_S)
    stream = join(grants, 1, want=2)
    grants.lend(2)
    deliver(grants, 1, 0)
    assert (stream.next, stream.limit, grants.outstanding) == (1, 2, 1)
    assert grants.lend(1) == []  # the slot was filled and is not lent again yet
    assert grants.lend(2) == [stream]
    assert stream.limit == 3


def test_scarce_slots_go_round() -> None:
    """First come, first served: nobody gets a second grant before everyone has had one."""
    grants = Grants(SILENCE_S)
    streams = [join(grants, actor, want=4) for actor in range(5)]
    grants.lend(7)
    assert [stream.outstanding for stream in streams] == [2, 2, 1, 1, 1]


def test_fast_and_slow_actors_share_fairly_under_scarcity() -> None:
    grants = Grants(SILENCE_S)
    for actor in range(3):
        join(grants, actor, want=2)
    sent: Counter[int] = Counter()
    for _ in range(300):  # one slot at a time comes free; whoever is granted sends at once
        (stream,) = grants.lend(1)
        deliver(grants, stream.actor, stream.next)
        sent[stream.actor] += 1
    assert set(sent.values()) == {100}


def test_replayed_ungranted_and_unknown_messages_are_refused() -> None:
    grants = Grants(SILENCE_S)
    join(grants, 1, want=2)
    grants.lend(2)
    deliver(grants, 1, 0)
    assert refusal(grants, head(1, 0, produced=1, steps=1)) == "replayed"
    assert refusal(grants, head(1, 2, produced=3, steps=1)) == "ungranted"
    assert refusal(grants, head(2, 0)) == "unknown"
    assert refusal(grants, head(1, 1, incarnation=1)) == "unknown"


def test_produced_steps_cannot_run_backwards() -> None:
    grants = Grants(SILENCE_S)
    join(grants, 1, want=2)
    grants.lend(2)
    first = head(1, 0, produced=10, steps=10)
    grants.received(grants.admit(first), first, b"peer", 0)
    assert refusal(grants, head(1, 1, produced=19, steps=10)) == "steps"
    assert grants.admit(head(1, 1, produced=20, steps=10)).next == 1


def test_a_gap_voids_the_grants_of_what_was_lost() -> None:
    grants = Grants(SILENCE_S)
    stream = join(grants, 1, want=4)
    grants.lend(4)
    deliver(grants, 1, 2)  # 0 and 1 never came
    assert (stream.next, grants.outstanding) == (3, 1)
    grants.lend(4)
    assert (stream.limit, grants.outstanding) == (7, 4)


def test_a_beat_heals_the_loss_of_the_last_slots() -> None:
    grants = Grants(SILENCE_S)
    stream = join(grants, 1, want=2)
    grants.lend(2)
    grants.beat(head(1, 2), b"peer", 1)  # both were lost on the way
    assert grants.outstanding == 0
    grants.lend(2)
    assert (stream.next, stream.limit) == (2, 4)


def test_hello_again_keeps_grants_and_follows_the_new_connection() -> None:
    grants = Grants(SILENCE_S)
    join(grants, 1, want=2)
    grants.lend(2)
    again = grants.hello(head(1, 1), b"other peer", 2, 1)
    assert (again.next, again.limit, again.peer, grants.outstanding) == (1, 2, b"other peer", 1)


def test_a_restarted_connector_takes_an_actor_in_where_it_stands() -> None:
    grants = Grants(SILENCE_S)
    stream = join(grants, 1, want=1, sequence=1000)
    grants.lend(5)
    assert (stream.next, stream.limit) == (1000, 1001)
    deliver(grants, 1, 1000)


def test_a_newer_incarnation_replaces_the_older_one() -> None:
    grants = Grants(SILENCE_S)
    old = join(grants, 1, want=2)
    grants.lend(2)
    new = grants.hello(head(1, 0, incarnation=1), b"peer", 2, 0)
    assert (new.limit, grants.outstanding, grants.ended) == (0, 0, [old])
    assert refusal(grants, head(1, 0, incarnation=0)) == "stale"
    with pytest.raises(WireError, match="stale"):
        grants.hello(head(1, 0, incarnation=0), b"peer", 2, 0)


def test_the_silent_are_forgotten_and_their_grants_go_to_others() -> None:
    grants = Grants(SILENCE_S)
    silent, other = join(grants, 1), join(grants, 2)
    grants.lend(2)
    grants.beat(head(2, 0), b"peer", 50)
    assert grants.expire(SILENCE_S) == []
    assert grants.expire(SILENCE_S + 1) == [silent]
    assert grants.lend(2) == [other]
    assert (other.outstanding, grants.want) == (2, 2)
    assert refusal(grants, head(1, 0)) == "unknown"


def test_bye_ends_a_stream_where_it_stands() -> None:
    grants = Grants(SILENCE_S)
    join(grants, 1)
    grants.lend(2)
    stream = grants.bye(head(1, 1, produced=40), b"peer", 1)
    assert (stream.next, stream.produced_steps) == (1, 40)
    assert (grants.outstanding, grants.ended, grants.streams) == (0, [stream], {})


def test_want_is_bounded() -> None:
    grants = Grants(SILENCE_S)
    assert join(grants, 1, want=10**9).want == MAX_WANT
    assert join(grants, 2, want=-5).want == 1


def test_who_comes_again_and_again_stands_in_line_once() -> None:
    grants = Grants(SILENCE_S)
    for incarnation in range(3):
        grants.hello(head(1, 0, incarnation=incarnation), b"peer", 2, 0)
    other = join(grants, 2)
    last = grants.streams[1]
    assert grants.lend(2) == [last, other]
    assert (last.incarnation, last.limit, other.limit, grants.want) == (2, 1, 1, 4)


@pytest.mark.parametrize("actors", [10, 1000])
def test_a_turn_costs_the_same_however_many_actors_there_are(actors: int) -> None:
    """Least times of a slot with all that a turn asks; walking over actors would be ten times."""
    assert _turn_s(actors) < 5 * _turn_s(10)


def _turn_s(actors: int) -> float:
    grants = Grants(SILENCE_S)
    for actor in range(actors):
        join(grants, actor, want=2)
    grants.lend(2 * actors)
    took_s = []
    for sequence in range(100):
        start_s = time.perf_counter()
        deliver(grants, 0, sequence, now_s=1.0)
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
        self.grants = Grants(SILENCE_S)
        self.available = 4
        self.sent: dict[int, int] = {}  # next sequence of each actor, by the actor's own count

    @rule(actor=st.integers(0, 3), want=st.integers(1, 5))
    def hello(self, actor: int, want: int) -> None:
        self.grants.hello(head(actor, self.sent.setdefault(actor, 0)), b"p", want, 0)

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
            deliver(self.grants, stream.actor, sequence)
            self.available -= 1

    @precondition(lambda self: self.grants.streams)
    @rule(data=st.data())
    def beat(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(sorted(self.grants.streams)))
        self.grants.beat(head(actor, self.sent[actor]), b"p", 0)

    @precondition(lambda self: self.grants.streams)
    @rule(data=st.data())
    def bye(self, data: st.DataObject) -> None:
        actor = data.draw(st.sampled_from(sorted(self.grants.streams)))
        self.grants.bye(head(actor, self.sent[actor]), b"p", 0)

    @invariant()
    def grants_are_backed(self) -> None:
        streams = self.grants.streams.values()
        assert self.grants.outstanding == sum(s.outstanding for s in streams)
        assert 0 <= self.grants.outstanding <= self.available
        assert all(s.limit >= s.next for s in streams)
        assert self.grants.want == sum(s.want for s in streams)

    def teardown(self) -> None:
        """Once everyone has said where they stand, nobody waits for more: nothing leaked."""
        for actor, stream in self.grants.streams.items():
            self.grants.beat(head(actor, self.sent[actor]), b"p", 0)
            assert stream.next == self.sent[actor]
        self.grants.lend(100)
        assert all(s.outstanding > s.want // 2 for s in self.grants.streams.values())


Connected.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_no_grant_leaks = Connected.TestCase
