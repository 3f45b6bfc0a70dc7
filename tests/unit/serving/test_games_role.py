"""How long rows of games wait for others, so that a turn decides more at once."""

from __future__ import annotations

import pytest

from penstock.serving.games_role import pause_s


def test_rows_of_thousands_of_slow_games_wait_for_others() -> None:
    assert pause_s(seats=2000, rows_per_s=2000.0) == 0.005


@pytest.mark.parametrize(("seats", "rows_per_s"), [(64, 10_000.0), (256, 300_000.0), (1, 60.0)])
def test_rows_of_games_that_wait_for_each_action_do_not_wait(seats: int, rows_per_s: float) -> None:
    assert pause_s(seats, rows_per_s) == 0.0


def test_the_wait_is_a_hundredth_of_the_time_between_two_rows_of_a_seat() -> None:
    assert pause_s(seats=100, rows_per_s=1000.0) == pytest.approx(0.001)


def test_nothing_waits_before_anything_was_decided() -> None:
    assert pause_s(seats=0, rows_per_s=0.0) == 0.0
    assert pause_s(seats=10, rows_per_s=0.0) == 0.0
