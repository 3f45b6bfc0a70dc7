"""The balance of agent steps, against streams whose losses are known."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.specs import HEADER
from penstock.replay import Accounting
from penstock.replay.accounting import MAX_GAP, MAX_STREAMS

LARGEST = 2**62


def header(
    actor: int, sequence: int, steps: int, produced: int, incarnation: int = 0
) -> np.ndarray:
    record = np.zeros((), HEADER)
    record["actor"], record["incarnation"] = actor, incarnation
    record["sequence"], record["steps"], record["produced_steps"] = sequence, steps, produced
    return record


def test_gap_in_a_sequence_is_loss_of_exactly_its_steps() -> None:
    accounting = Accounting()
    accounting.arrived(header(1, 0, steps=60, produced=60))
    accounting.arrived(header(1, 3, steps=64, produced=60 + 61 + 62 + 64))
    assert accounting.lost == {"disconnect": 61 + 62}
    assert accounting.produced == 60 + 61 + 62 + 64


def test_steps_that_an_actor_dropped_are_counted_by_their_reason() -> None:
    accounting = Accounting(slot_steps=64)
    accounting.arrived(header(1, 0, steps=60, produced=64))
    accounting.arrived(header(1, 1, steps=64, produced=128))
    accounting.arrived(header(1, 2, steps=30, produced=LARGEST))  # no more than a slot has
    assert accounting.dropped == {"env_error": 4 + 34}
    assert accounting.produced == 3 * 64
    assert accounting.balance(in_flight=60 + 64 + 30) == 0
    accounting.ended(1, 0, next_sequence=3, produced_steps=3 * 64, trusted=True)
    assert not accounting.lost


def test_unreceived_steps_of_a_dead_actor_are_lost_when_its_stream_ends() -> None:
    accounting = Accounting()
    accounting.arrived(header(1, 0, steps=10, produced=10))
    accounting.ended(1, 0, next_sequence=3, produced_steps=35)
    accounting.ended(1, 0, next_sequence=3, produced_steps=35)  # told twice: counted once
    assert accounting.lost == {"disconnect": 25}
    assert accounting.produced == 35


def test_incarnations_are_streams_of_their_own() -> None:
    accounting = Accounting()
    accounting.arrived(header(1, 0, steps=10, produced=10))
    accounting.arrived(header(1, 0, steps=7, produced=7, incarnation=1))
    assert accounting.produced == 17
    assert not accounting.lost


def test_imbalance_is_reported() -> None:
    accounting = Accounting()
    accounting.arrived(header(1, 0, steps=10, produced=10))
    assert accounting.balance(in_flight=10) == 0
    accounting.trained = 9
    assert accounting.balance(in_flight=0) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 100), st.booleans(), st.booleans()), max_size=60
    )
)
def test_every_history_balances(history: list[tuple[int, int, bool, bool]]) -> None:
    """Actors make unrolls of random length; some get lost, some dropped, the rest trained."""
    accounting = Accounting()
    sequences, produced, made, lost = [0] * 4, [0] * 4, 0, 0
    for actor, steps, is_lost, is_dropped in history:
        produced[actor] += steps
        made += steps
        if is_lost:
            lost += steps
        else:
            accounting.arrived(header(actor, sequences[actor], steps, produced[actor]))
            if is_dropped:
                accounting.dropped["stale"] += steps
            else:
                accounting.trained += steps
        sequences[actor] += 1
    for actor in range(4):
        accounting.ended(actor, 0, sequences[actor], produced[actor], trusted=True)
    assert accounting.produced == made
    assert accounting.lost.total() == lost
    assert accounting.balance(in_flight=0) == 0


def test_earlier_steps_of_a_stream_met_in_the_middle_do_not_count() -> None:
    """So a learner that was restarted meets an actor; a liar gains nothing by it."""
    accounting = Accounting(slot_steps=12)
    accounting.arrived(header(1, 1000, steps=12, produced=LARGEST))
    assert (accounting.produced, accounting.lost.total()) == (12, 0)


def test_a_gap_is_bounded_by_what_its_slots_can_hold() -> None:
    accounting = Accounting(slot_steps=12)
    accounting.arrived(header(1, 0, steps=12, produced=12))
    accounting.arrived(header(1, 4, steps=12, produced=LARGEST))
    assert accounting.lost == {"disconnect": 3 * 12}
    accounting.ended(1, 0, next_sequence=7, produced_steps=2 * LARGEST)
    assert accounting.lost == {"disconnect": 5 * 12}
    assert accounting.produced == 7 * 12


def test_a_jump_beyond_all_grants_is_a_new_baseline() -> None:
    accounting = Accounting(slot_steps=12)
    accounting.arrived(header(1, 0, steps=12, produced=12))
    accounting.arrived(header(1, MAX_GAP + 2, steps=12, produced=12 * (MAX_GAP + 3)))
    accounting.arrived(header(1, MAX_GAP + 4, steps=12, produced=12 * (MAX_GAP + 5)))
    assert (accounting.produced, accounting.lost.total()) == (4 * 12, 12)
    accounting.ended(1, 0, next_sequence=LARGEST, produced_steps=LARGEST)
    assert accounting.produced == 4 * 12


def test_only_supervisor_reports_count_steps_of_unseen_streams() -> None:
    """A connector that was killed at the start leaves nothing else that knows it."""
    accounting = Accounting(slot_steps=12)
    accounting.ended(1, 0, next_sequence=3, produced_steps=36)
    assert accounting.produced == 0
    accounting.ended(1, 0, next_sequence=3, produced_steps=36, trusted=True)
    accounting.arrived(header(2, 3, steps=12, produced=48))
    accounting.ended(2, 0, next_sequence=5, produced_steps=60)
    accounting.ended(2, 0, next_sequence=5, produced_steps=60, trusted=True)
    accounting.ended(2, 0, next_sequence=5, produced_steps=60, trusted=True)
    assert accounting.lost == {"disconnect": 36 + 48}
    assert accounting.produced == 36 + 60


def test_out_of_order_slot_does_not_move_a_stream_back() -> None:
    accounting = Accounting(slot_steps=12)
    accounting.arrived(header(1, 5, steps=12, produced=72))
    accounting.arrived(header(1, 2, steps=12, produced=36))
    accounting.arrived(header(1, 6, steps=12, produced=84))
    assert (accounting.produced, accounting.lost.total()) == (36, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrived", "ended", "trusted"]),
            st.integers(0, 2),
            st.integers(0, LARGEST) | st.integers(0, 200),
            st.integers(0, 12),
            st.integers(0, LARGEST) | st.integers(0, 2000),
        ),
        max_size=40,
    )
)
def test_equation_holds_for_arbitrary_stream_reports(
    said: list[tuple[str, int, int, int, int]],
) -> None:
    accounting = Accounting(slot_steps=12)
    arrived = trusted = 0
    for what, actor, sequence, steps, produced in said:
        if what == "arrived":
            accounting.arrived(header(actor, sequence, steps, produced + steps))
            accounting.trained += steps
            arrived += 1
        else:
            trusted += what == "trusted"
            accounting.ended(actor, 0, sequence, produced, trusted=what == "trusted")
        assert accounting.balance(in_flight=0) == 0
    if not trusted:
        assert accounting.produced <= len(said) * (MAX_GAP + 1) * 12


@pytest.mark.parametrize("streams", [10 * MAX_STREAMS])
def test_memory_and_time_do_not_grow_with_the_number_of_streams(streams: int) -> None:
    accounting = Accounting(slot_steps=12)
    record = header(0, 0, steps=12, produced=12)

    def live(actors: range) -> float:
        """Seconds of so many actors that come, send a slot and go; ``produced`` is asked often."""
        began_s = time.perf_counter()
        for actor in actors:
            record["actor"] = actor
            accounting.arrived(record)
            assert accounting.produced == 12 * (actor + 1)
            accounting.ended(actor, 0, 1, 12)
        return time.perf_counter() - began_s

    first_s = live(range(2 * MAX_STREAMS))
    tracemalloc.start()
    live(range(2 * MAX_STREAMS, 3 * MAX_STREAMS))
    early, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    live(range(3 * MAX_STREAMS, streams - 3 * MAX_STREAMS))
    tracemalloc.start()
    live(range(streams - 3 * MAX_STREAMS, streams - 2 * MAX_STREAMS))
    late, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    last_s = live(range(streams - 2 * MAX_STREAMS, streams))
    assert late <= early * 1.1
    assert last_s < 5 * first_s
    assert (accounting.produced, accounting.lost.total()) == (12 * streams, 0)
