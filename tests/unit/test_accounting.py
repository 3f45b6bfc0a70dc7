"""The equation of agent steps, against streams whose losses are known."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.specs import HEADER
from penstock.replay import Accounting


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


def test_what_a_dead_actor_sent_last_is_lost_when_its_stream_ends() -> None:
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


def test_an_imbalance_shows() -> None:
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
def test_any_history_balances(history: list[tuple[int, int, bool, bool]]) -> None:
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
        accounting.ended(actor, 0, sequences[actor], produced[actor])
    assert accounting.produced == made
    assert accounting.lost.total() == lost
    assert accounting.balance(in_flight=0) == 0
