"""How many slots are lent, by the lag of those that were taken."""

from __future__ import annotations

from penstock.learner.sources.lag_control import PATIENCE, LagControl


def test_fewer_slots_are_lent_until_none_exceeds_the_limit() -> None:
    """Four actors, of which one is slow: each slot in use beyond three adds a step of lag."""
    control = LagControl(most=8, batch_slots=1, limit=4, updates=1)
    dropped = 0
    for _ in range(40):
        lag = min(4, control.slots) + 1
        dropped += lag > 4
        control.took(1, lag, in_use=min(4, control.slots))
    assert (control.slots, dropped) == (3, 1)


def test_slots_that_were_lent_before_a_change_count_no_more() -> None:
    control = LagControl(most=9, batch_slots=2, limit=4, updates=1)
    control.took(2, 5, in_use=9)
    assert control.slots == 7
    for _ in range(5):  # nine slots, two at a time
        control.took(2, 5, in_use=7)
    assert control.slots == 7
    control.took(2, 5, in_use=7)
    assert control.slots == 5


def test_never_fewer_than_a_batch() -> None:
    control = LagControl(most=4, batch_slots=3, limit=4, updates=1)
    for _ in range(20):
        control.took(3, 100, in_use=3)
    assert control.slots == 3


def test_more_are_lent_again_after_long_with_room_for_a_batch() -> None:
    """As after an actor was suspended."""
    control = LagControl(most=4, batch_slots=1, limit=40, updates=10)
    control.took(1, 5000, in_use=4)
    assert control.slots == 3
    for _ in range(4 + 3 * PATIENCE):
        control.took(1, 31, in_use=3)
    assert control.slots == 3  # a batch more could make it 41
    for _ in range(10 + 4 * PATIENCE):
        control.took(1, 30, in_use=3)
    assert control.slots == 4
