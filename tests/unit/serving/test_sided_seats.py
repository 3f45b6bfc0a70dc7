"""The rules of seats of games of several sides, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.league import LeagueConfig
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.draws import NO_DRAW, draw_number
from penstock.core.params import Float32, Stamp
from penstock.envs import EnvInfo, probe
from penstock.envs.seats import Seating
from penstock.serving.match_draws import MatchDraws
from penstock.serving.opponents import Opponents
from penstock.serving.seats import RowOutcome, StepRows
from penstock.serving.sided_seats import SidedSeats

FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8
GOES_ON = 0
DRAW = Stamp(3, 7)
NUMBER = draw_number(DRAW)
Row = tuple[int, int, float]  # seat, flags, reward


@cache
def kuhn() -> tuple[Config, EnvInfo]:
    """The config of a game of two seats, and its spaces."""
    config = resolve("kuhn")
    return config, probe(config.env)


class Table:
    """A table for one connection of duels, in which STEPs are taken one at a time.

    Only matches against one chair are played, unless ``league`` says otherwise.
    """

    def __init__(self, games: int = 1, seating: Seating | None = None, **league: object) -> None:
        seating = seating or Seating(2, (0, 1))
        config, spaces = kuhn()
        size = network_shape(config, spaces).layout.size
        options = {"mirror": 0.0, "chairs": 1} | league
        draws = MatchDraws(LeagueConfig.model_validate(options), seating)
        opponents = Opponents(
            chairs=int(str(options["chairs"])),
            size=size,
            games=games,
            make=lambda weights: BatchPolicy(config, spaces, weights),
        )
        assert opponents.refresh(publishes(DRAW))
        self.opponents = opponents
        self.seats = SidedSeats(
            games * seating.seats, 0, seating=seating, draws=draws, opponents=opponents
        )
        places = self.seats.allocate(games * seating.seats, 0)
        assert places == range(games * seating.seats)

    def step(self, *rows: Row, answered: bool = True) -> list[RowOutcome]:
        """Takes one STEP; all that wait are answered after it."""
        outcomes = self.take([rows])
        if answered:
            self.answer()
        return outcomes

    def take(self, steps: Sequence[Sequence[Row]]) -> list[RowOutcome]:
        """Takes STEPs that have arrived together."""
        rows = [row for step in steps for row in step]
        seats, flags, rewards = zip(*rows, strict=True)
        outcomes = self.seats.take(
            StepRows(
                np.array(seats, np.int64),
                flags=np.array(flags, np.uint8),
                reward=np.array(rewards, np.float32),
                message=np.repeat(np.arange(len(steps)), [len(step) for step in steps]),
            )
        )
        return [RowOutcome(outcome) for outcome in outcomes]

    def answer(self) -> None:
        waiting = np.flatnonzero(self.seats.are_waiting(np.arange(self.seats.capacity)))
        self.seats.finish_turn(waiting)

    def learners(self) -> list[int]:
        """The seats that play and learn."""
        return np.flatnonzero(self.seats.are_recorded(np.arange(self.seats.capacity))).tolist()

    def result(self, *seats: int) -> list[tuple[bool, int, int]]:
        """What the last rows of seats record: whether they learn, the draw, who has won."""
        outcomes = self.seats.outcomes(np.array(seats))
        return [*zip(*(array.tolist() for array in outcomes), strict=True)]


def publishes(stamp: Stamp):  # type: ignore[no-untyped-def]
    """A learner that shows one draw on all chairs."""

    def read(out: Float32, newer_than: Stamp | None, policy_id: int = 0) -> Stamp | None:
        out[:] = 0
        return None if newer_than == stamp else stamp

    return read


def begin(*seats: int) -> list[Row]:
    return [(seat, FIRST, 0.0) for seat in seats]


def test_sides_learn_in_turn_and_the_winner_is_told_by_all_returns() -> None:
    table = Table()
    for learner in (0, 1, 0):
        assert table.step(*begin(0, 1)) == [RowOutcome.DECIDE] * 2
        assert table.learners() == [learner]
        table.step((0, GOES_ON, 0.25), (1, GOES_ON, 0.0))
        assert table.result(learner) == [(True, NUMBER, 0)]

        ends = table.step((0, TERMINATED, -1.0), (1, TERMINATED, 0.5))
        assert ends == [RowOutcome.END] * 2
        won = -1 if learner == 0 else 1
        assert table.result(learner, 1 - learner) == [(True, NUMBER, won), (False, NO_DRAW, -won)]
        assert table.learners() == []
    assert len(table.seats.take_abandoned()) == 0


def test_a_seat_joins_the_game_when_it_is_its_turn() -> None:
    table = Table()
    assert table.step(*begin(0)) == [RowOutcome.DECIDE]
    table.step((0, GOES_ON, 0.0))
    assert table.step(*begin(1)) == [RowOutcome.DECIDE]
    assert table.learners() == [0]
    table.step((0, TERMINATED, 0.0), (1, TRUNCATED, 0.0))
    assert table.result(0) == [(True, NUMBER, 0)]


def test_a_game_that_ends_before_a_seat_came_to_play_has_a_result() -> None:
    table = Table()
    table.step(*begin(0))
    assert table.step((0, TERMINATED, 1.0)) == [RowOutcome.END]
    assert table.result(0) == [(True, NUMBER, 1)]
    assert table.opponents.policies.tolist() == [-1]


@pytest.mark.parametrize("together", [False, True])
def test_seats_that_end_in_different_steps_are_at_fault(together: bool) -> None:
    table = Table()
    table.step(*begin(0, 1))
    steps = [[(0, TERMINATED, 1.0)], [(1, TERMINATED, -1.0)]]
    outcomes = table.take(steps) if together else [*table.step(*steps[0]), *table.step(*steps[1])]
    second = RowOutcome.ENDS_APART if together else RowOutcome.GAME_IS_OVER
    assert outcomes == [RowOutcome.ENDS_APART, second]
    table.answer()
    assert table.seats.take_abandoned().tolist() == [0]

    # Both are told by their next rows, begin anew, and what ended apart is forgotten.
    assert table.step(*begin(0, 1)) == [RowOutcome.END_REFUSED] * 2
    assert table.step(*begin(0, 1)) == [RowOutcome.DECIDE] * 2
    table.step((0, TERMINATED, 0.0), (1, TERMINATED, 0.5))
    assert table.result(1) == [(True, NUMBER, 1)]


def test_a_seat_that_begins_anew_abandons_the_game_of_all_its_seats() -> None:
    table = Table()
    table.step(*begin(0, 1))
    assert table.step(*begin(1)) == [RowOutcome.DECIDE]
    assert table.learners() == [1]
    assert table.seats.take_abandoned().tolist() == [0]

    assert table.step((0, GOES_ON, 0.0)) == [RowOutcome.GAME_IS_OVER]
    assert table.step(*begin(0)) == [RowOutcome.DECIDE]
    table.step((0, TERMINATED, 1.0), (1, TERMINATED, -1.0))
    assert table.result(1) == [(True, NUMBER, -1)]


def test_a_step_in_which_all_seats_begin_anew_begins_one_game() -> None:
    table = Table(games=2)
    table.step(*begin(0, 1, 2, 3))
    assert table.step(*begin(0, 1, 2, 3)) == [RowOutcome.DECIDE] * 4
    assert table.learners() == [0, 3]
    # Seats that learn again have begun anew, and no episode of theirs is left to abandon.
    assert table.seats.take_abandoned().tolist() == []


def test_a_seat_that_has_ended_waits_for_the_others_of_its_game() -> None:
    table = Table(seating=Seating(3, (0, 1, 2)))
    table.step(*begin(0, 1, 2))
    assert table.step((2, LEAVES, 0.0)) == [RowOutcome.END]
    assert table.step(*begin(2)) == [RowOutcome.GAME_GOES_ON]
    # The game goes on, and has no result.
    assert table.step((0, TERMINATED, 1.0), (1, TERMINATED, 0.0)) == [RowOutcome.END] * 2
    assert table.result(0) == [(True, NO_DRAW, 1)]
    assert table.step(*begin(2)) == [RowOutcome.DECIDE]


def test_a_seat_at_fault_ends_the_game_without_a_result() -> None:
    table = Table()
    table.step(*begin(0, 1))
    outcomes = table.step((0, GOES_ON, 0.0), (1, GOES_ON, float("nan")))
    assert outcomes == [RowOutcome.GAME_IS_OVER, RowOutcome.REWARD]
    assert table.seats.take_abandoned().tolist() == [0]
    assert table.step(*begin(0, 1)) == [RowOutcome.DECIDE] * 2
    assert table.learners() == [1]


def test_a_game_may_end_and_begin_among_steps_that_arrive_together() -> None:
    table = Table()
    table.step(*begin(0, 1))
    ends = [(0, TERMINATED, 1.0), (1, TERMINATED, 0.0)]
    assert table.take([ends, begin(0, 1)]) == [RowOutcome.END] * 2 + [RowOutcome.DECIDE] * 2
    # The ended row is that of seat 0, which won; the new game is that of seat 1.
    assert table.result(0, 1) == [(True, NUMBER, 1), (False, NO_DRAW, -1)]
    assert table.learners() == [1]


def test_a_result_counts_if_the_seats_leave_in_the_step_behind_it() -> None:
    table = Table()
    table.step(*begin(0, 1))
    ends = [(0, TERMINATED, 1.0), (1, TERMINATED, -1.0)]
    leaves = [(0, LEAVES, 0.0), (1, LEAVES, 0.0)]
    assert table.take([ends, leaves]) == [RowOutcome.END] * 4
    assert table.result(0) == [(True, NUMBER, 1)]


def test_a_connection_that_vanishes_ends_its_games() -> None:
    table = Table(games=2)
    table.step(*begin(0, 1, 2, 3))
    table.seats.release(range(4))
    assert table.opponents.policies.tolist() == [-1, -1]
    assert table.seats.allocate(4, 1) == range(4)
    assert table.step(*begin(0, 1)) == [RowOutcome.DECIDE] * 2


def test_a_team_counts_its_result_once() -> None:
    table = Table(seating=Seating(4, (0, 0, 1, 1)))
    table.step(*begin(0, 1, 2, 3))
    assert table.learners() == [0, 1]
    table.step(*((seat, TERMINATED, reward) for seat, reward in enumerate([3.0, -1.0, 1.0, 0.5])))
    assert table.result(0, 1) == [(True, NUMBER, 1), (True, NO_DRAW, -1)]


def test_all_seats_learn_in_mirror_games_which_count_no_result() -> None:
    table = Table(games=3, mirror=0.5, chairs=2)
    table.step(*begin(*range(6)))
    mirror = [game for game in range(3) if table.opponents.policies[game] == -1]
    assert len(mirror) == 1
    seats = [2 * mirror[0], 2 * mirror[0] + 1]
    assert {*seats} <= {*table.learners()}
    assert len(table.learners()) == 4
    table.step(*((seat, TERMINATED, float(seat % 2)) for seat in range(6)))
    assert [draw for _, draw, _ in table.result(*seats)] == [NO_DRAW] * 2


class PlainGame:
    """The rules of one duel in plain Python, seat by seat: the reference."""

    def __init__(self) -> None:
        self.playing: set[int] = set()
        self.has_ended: set[int] = set()
        self.counts = False
        self.returns = [0.0, 0.0]
        self.learner = 1
        self.results: list[tuple[int, float]] = []  # learner and lead of each game that counts

    def take(self, rows: Sequence[Row], phases: dict[int, str]) -> dict[int, RowOutcome]:
        """The outcomes of a STEP by seat; ``phases`` of its seats are idle, acting or refused."""
        outcomes = {}
        for seat, flags, _ in rows:  # what a seat alone may not do
            if phases[seat] == "refused" and not flags & (TERMINATED | TRUNCATED | LEAVES):
                outcomes[seat] = RowOutcome.END_REFUSED
            elif not flags & FIRST and phases[seat] != "acting" and not flags & LEAVES:
                outcomes[seat] = RowOutcome.NOT_BEGUN
        if self.playing & outcomes.keys():
            self.playing = set()

        ends = {seat for seat, flags, _ in rows if flags & (TERMINATED | TRUNCATED)}
        for seat, flags, reward in rows:
            if flags & FIRST or seat in outcomes:
                continue
            outcomes[seat] = RowOutcome.END if flags else RowOutcome.DECIDE
            if seat not in self.playing:
                if not flags & LEAVES:
                    outcomes[seat] = RowOutcome.GAME_IS_OVER
                continue
            self.returns[seat] += reward
        leaving = {seat for seat, flags, _ in rows if flags == LEAVES} & self.playing
        if leaving:
            self.has_ended |= leaving
            self.playing -= leaving
            self.counts = False
        ending = {seat for seat in ends & self.playing if outcomes[seat] is RowOutcome.END}
        if ending and ending < self.playing:
            outcomes |= dict.fromkeys(ending, RowOutcome.ENDS_APART)
            self.playing = set()
        elif ending:
            if self.counts:
                self.results.append((self.learner, self.returns[0] - self.returns[1]))
            self.has_ended |= ending
            self.playing = set()

        begins = [seat for seat, flags, _ in rows if flags & FIRST and seat not in outcomes]
        if self.playing & {*begins}:
            self.playing = set()
        if begins and not self.playing:
            self.has_ended = set()
            self.counts = True
            self.returns = [0.0, 0.0]
            self.learner = 1 - self.learner
        for seat in begins:
            outcomes[seat] = RowOutcome.DECIDE
            if seat in self.has_ended:
                outcomes[seat] = RowOutcome.GAME_GOES_ON
            else:
                self.playing.add(seat)
        return outcomes


def test_random_rows_have_the_outcomes_of_the_rules_in_plain_python() -> None:
    rng = np.random.default_rng(5)
    table = Table()
    game = PlainGame()
    phases = {0: "idle", 1: "idle"}
    results = []
    kinds = set()
    for _ in range(6000):
        seats = [[0, 1], [0, 1], [0], [1]][rng.integers(4)]
        likely = FIRST if not game.playing else [0, 0, TERMINATED][rng.integers(3)]
        flags = [
            likely if rng.random() < 0.9 else (1, 0, 2, 4, 8, 10)[rng.integers(6)] for _ in seats
        ]
        rows = [
            (seat, flag, float(rng.integers(-3, 4)))
            for seat, flag in zip(seats, flags, strict=True)
        ]
        expected = game.take(rows, phases)
        outcomes = table.take([rows])
        assert outcomes == [expected[seat] for seat in seats], rows
        kinds |= {*outcomes}
        for seat, outcome in zip(seats, outcomes, strict=True):
            [(learns, draw, won)] = table.result(seat)
            has_ended = outcome is RowOutcome.END and phases[seat] == "acting"
            if has_ended and flags[seats.index(seat)] != LEAVES and learns and draw:
                results.append((seat, won))
            ends = flags[seats.index(seat)] & (TERMINATED | TRUNCATED | LEAVES)
            if outcome is RowOutcome.DECIDE:
                phases[seat] = "acting"
            elif outcome is RowOutcome.END or not ends:
                phases[seat] = "idle"
            else:
                phases[seat] = "refused"
        table.answer()
        assert {*np.flatnonzero(table.seats.plays)} == game.playing
        assert table.learners() == sorted(game.playing & {game.learner})

    expected_results = [
        (learner, int(np.sign(lead if learner == 0 else -lead))) for learner, lead in game.results
    ]
    # Nothing is recorded of a game whose learner never came to play.
    assert len(results) > 500
    counted = iter(expected_results)
    assert all(result in counted for result in results)
    assert kinds == {*RowOutcome} - {
        RowOutcome.IGNORE,
        RowOutcome.UNKNOWN_FLAG,
        RowOutcome.FIRST_AND_LAST,
        RowOutcome.NOT_ANSWERED,
        RowOutcome.REPEATED,
        RowOutcome.REWARD,
    }


def test_any_rows_that_arrive_together_keep_the_books_of_games_and_opponents() -> None:
    rng = np.random.default_rng(7)
    seating = Seating(3, (0, 1, 2))
    table = Table(games=5, seating=seating, mirror=0.4, chairs=2)
    for _ in range(2000):
        steps = []
        for _ in range(rng.integers(1, 5)):
            seats = rng.permutation(15)[: rng.integers(1, 16)]
            flags = rng.choice([0, 0, 1, 1, 2, 4, 8, 9, 10, 16, 255], len(seats))
            rewards = rng.choice([0.5, -1.0, np.nan, 1e9], len(seats), p=[0.5, 0.4, 0.05, 0.05])
            steps.append([*zip(seats.tolist(), flags.tolist(), rewards.tolist(), strict=True)])
        table.take(steps)
        table.seats.take_abandoned()
        if rng.random() < 0.3:
            table.seats.fail(rng.permutation(15)[:1])
            table.seats.take_abandoned()
        table.answer()
        if rng.random() < 0.02:
            table.seats.release(range(15))
            assert table.seats.allocate(15, 0) == range(15)
            assert not table.seats.plays.any()

        playing = table.seats.plays.reshape(5, 3)
        np.testing.assert_array_equal(table.seats._playing, playing.sum(1))
        opponents = table.opponents.policies
        assert (opponents[~playing.any(1)] == -1).all()
        counts = np.bincount(opponents[opponents >= 0], minlength=8)
        assert table.opponents._games == counts.tolist()
        # In each match one side learns, and in each mirror game all do.
        learning = table.seats.learns.reshape(5, 3).sum(1)[playing.any(1)]
        np.testing.assert_array_equal(learning, np.where(opponents[playing.any(1)] < 0, 3, 1))
        in_progress = table.seats._draws._seats
        assert in_progress.sum() == learning.sum()
