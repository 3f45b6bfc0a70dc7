"""The seats of games: which rows are taken, for many at once as for one after another."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.serving.seats import (
    FIRST_FAULT,
    MOST_ROWS_A_TURN,
    RowOutcome,
    SeatPhase,
    SeatTable,
    StepRows,
    outcome_of,
)

FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8


def rows(seats: list[int], flags: list[int], rewards: list[float] | None = None) -> StepRows:
    """Rows, each of a STEP of its own."""
    return StepRows(
        np.array(seats, np.int64),
        flags=np.array(flags, np.uint8),
        reward=np.array(rewards or [0.0] * len(seats), np.float32),
        message=np.arange(len(seats)),
    )


def playing(count: int = 4) -> SeatTable:
    """A table whose seats are in an episode."""
    table = SeatTable(count, state_size=2)
    seats = list(range(count))
    table.take(rows(seats, [FIRST] * count))
    table.finish_turn(np.array(seats))
    return table


@pytest.mark.parametrize(
    ("phase", "flags", "outcome"),
    [
        (SeatPhase.IDLE, FIRST, RowOutcome.DECIDE),
        (SeatPhase.IDLE, 0, RowOutcome.NOT_BEGUN),
        (SeatPhase.IDLE, TERMINATED, RowOutcome.NOT_BEGUN),
        (SeatPhase.IDLE, LEAVES, RowOutcome.END),
        (SeatPhase.ACTING, 0, RowOutcome.DECIDE),
        (SeatPhase.ACTING, FIRST, RowOutcome.DECIDE),
        (SeatPhase.ACTING, TERMINATED, RowOutcome.END),
        (SeatPhase.ACTING, TRUNCATED, RowOutcome.END),
        (SeatPhase.ACTING, TERMINATED | TRUNCATED, RowOutcome.END),
        (SeatPhase.ACTING, LEAVES, RowOutcome.END),
        (SeatPhase.ACTING, FIRST | TERMINATED, RowOutcome.FIRST_AND_LAST),
        (SeatPhase.ACTING, 16, RowOutcome.UNKNOWN_FLAG),
        (SeatPhase.WAITING, 0, RowOutcome.NOT_ANSWERED),
        (SeatPhase.WAITING, FIRST, RowOutcome.NOT_ANSWERED),
        (SeatPhase.AT_FAULT, FIRST, RowOutcome.IGNORE),
        (SeatPhase.REFUSED, FIRST, RowOutcome.END_REFUSED),
        (SeatPhase.REFUSED, TERMINATED, RowOutcome.NOT_BEGUN),
        (SeatPhase.REFUSED, LEAVES, RowOutcome.END),
    ],
)
def test_a_row_has_the_outcome_of_its_phase(
    phase: SeatPhase, flags: int, outcome: RowOutcome
) -> None:
    assert outcome_of(phase, flags) is outcome


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1.1e6, -1.1e6])
def test_a_reward_out_of_bounds_is_a_fault_of_its_row(reward: float) -> None:
    outcomes = playing().take(rows([0, 1, 2], [0, 0, TERMINATED], [1e6, reward, reward]))
    assert outcomes.tolist() == [RowOutcome.DECIDE, RowOutcome.REWARD, RowOutcome.REWARD]


def test_the_reward_of_a_first_row_means_nothing() -> None:
    assert playing().take(rows([0], [FIRST], [np.nan])).tolist() == [RowOutcome.DECIDE]


def test_an_episode_may_end_and_the_next_begin_in_one_turn() -> None:
    outcomes = playing().take(rows([3, 3, 1], [TERMINATED, FIRST, 0]))
    assert outcomes.tolist() == [RowOutcome.END, RowOutcome.DECIDE, RowOutcome.DECIDE]


def test_a_seat_that_waits_may_not_step() -> None:
    table = playing()
    assert table.take(rows([2, 2], [0, 0])).tolist() == [RowOutcome.DECIDE, RowOutcome.NOT_ANSWERED]
    assert not table.are_waiting(np.array([2])).any()
    table.finish_turn(np.zeros(0, np.int64))
    assert table.take(rows([2], [0])).tolist() == [RowOutcome.NOT_BEGUN]


def test_rows_beyond_those_that_can_be_right_are_faults() -> None:
    table = playing()
    outcomes = table.take(rows([2] * 5, [TERMINATED, LEAVES, LEAVES, FIRST, 0]))
    assert outcomes.tolist() == [RowOutcome.END] * 3 + [RowOutcome.NOT_ANSWERED] * 2
    assert not table.are_waiting(np.array([2])).any()


def test_a_seat_with_two_rows_in_one_step_is_at_fault() -> None:
    twice = rows([2, 2], [TERMINATED, FIRST])._replace(message=np.zeros(2, np.int64))
    assert playing().take(twice).tolist() == [RowOutcome.END, RowOutcome.REPEATED]


def test_what_the_network_remembers_is_forgotten_where_an_episode_begins() -> None:
    table = playing()
    table.state[:] = 7
    table.take(rows([0, 1, 2], [0, FIRST, TERMINATED]))
    assert table.state[:, 0].tolist() == [7, 0, 7, 7]


def test_many_rows_at_once_are_taken_as_one_after_another() -> None:
    draw = random.Random(3)
    table = playing(6)
    phases = [SeatPhase.ACTING] * 6
    for turn in range(400):
        seats = draw.sample([*range(6)] * MOST_ROWS_A_TURN, draw.randrange(1, 12))
        flags = [draw.choice([0, 0, 0, 1, 1, 2, 4, 8, 3, 32]) for _ in seats]
        outcomes = table.take(rows(seats, flags))

        for seat, flag, outcome in zip(seats, flags, outcomes.tolist(), strict=True):
            expected = outcome_of(phases[seat], flag)
            if phases[seat] is SeatPhase.AT_FAULT:  # how often a fault is told does not matter
                assert outcome >= RowOutcome.IGNORE
            else:
                assert outcome == expected, (turn, seats, flags)
            ends = flag & (TERMINATED | TRUNCATED | LEAVES) and not flag & FIRST
            if expected >= FIRST_FAULT and ends and phases[seat] is not SeatPhase.WAITING:
                phases[seat] = SeatPhase.REFUSED
            elif expected >= FIRST_FAULT:
                phases[seat] = SeatPhase.AT_FAULT
            elif expected == RowOutcome.DECIDE:
                phases[seat] = SeatPhase.WAITING
            elif expected == RowOutcome.END:
                phases[seat] = SeatPhase.IDLE
        assert table.phase.tolist() == phases

        waiting = np.flatnonzero(table.are_waiting(np.arange(6)))
        table.finish_turn(waiting)
        phases = [
            {SeatPhase.WAITING: SeatPhase.ACTING, SeatPhase.AT_FAULT: SeatPhase.IDLE}.get(
                phase, phase
            )
            for phase in phases
        ]
        assert table.phase.tolist() == phases


def test_places_of_games_do_not_overlap_and_are_used_again() -> None:
    draw = random.Random(5)
    table = SeatTable(100, state_size=0)
    games: list[range] = []
    for number in range(500):
        if games and draw.random() < 0.5:
            table.release(games.pop(draw.randrange(len(games))))
        places = table.allocate(draw.randrange(1, 30), number)
        if places is not None:
            assert not table.phase[places.start : places.stop].any()
            assert set(table.game[places.start : places.stop]) == {number}
            games.append(places)
        taken = [place for places in games for place in places]
        assert len(set(taken)) == len(taken) == table.taken
        table.phase[taken] = SeatPhase.ACTING
    for places in games:
        table.release(places)
    assert table.allocate(100, 0) == range(100)
    assert table.allocate(1, 0) is None
