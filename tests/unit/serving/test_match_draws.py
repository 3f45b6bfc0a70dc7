"""Who plays against the policy in games that come and go."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from penstock.configs.league import LeagueConfig
from penstock.envs.seats import Seating
from penstock.serving.match_draws import MIRROR, MatchDraws

DUEL = Seating(2, (0, 1))


def shares_of_rows(draws: MatchDraws, seats: dict[int, int], games: int, total: int) -> list[float]:
    """The shares of learning rows by opponent, of ``games`` games at a time and ``total`` games;
    those of a chair are longer the higher its number."""
    rng = np.random.default_rng(games)
    rows = dict.fromkeys(seats, 0)
    in_progress: list[tuple[int, int, int]] = []  # when each ends, its opponent and its length
    now = 0
    for _ in range(total):
        if len(in_progress) == games:
            now, opponent, length = heapq.heappop(in_progress)
            draws.end(opponent, rows=length * seats[opponent])
            rows[opponent] += length * seats[opponent]
        opponent, _ = draws.begin()
        length = int(rng.integers(1, 20)) * (1 + opponent)
        heapq.heappush(in_progress, (now + length, opponent, length))
    played = np.array([*rows.values()])
    return [*(played / played.sum())]


@pytest.mark.parametrize("games", [1, 7, 500])
def test_shares_are_of_learning_rows_for_any_number_of_games_of_any_length(games: int) -> None:
    draws = MatchDraws(LeagueConfig(mirror=0.4, chairs=3), DUEL)
    shares = shares_of_rows(draws, {MIRROR: 2, 1: 1, 2: 1, 3: 1}, games, total=20 * games + 4000)
    assert shares == pytest.approx([0.4, 0.2, 0.2, 0.2], abs=0.02)


def test_games_that_begin_together_are_divided_by_the_shares() -> None:
    draws = MatchDraws(LeagueConfig(mirror=0.5, chairs=2), DUEL)
    opponents = [draws.begin().opponent for _ in range(600)]
    # A mirror game has two learning rows, so half of the rows are a third of the games.
    assert np.bincount(opponents).tolist() == [200, 200, 200]


def test_no_mirror_game_begins_where_its_share_is_0() -> None:
    draws = MatchDraws(LeagueConfig(mirror=0, chairs=2), DUEL)
    opponents = []
    for _ in range(100):
        opponent, _ = draws.begin()
        draws.end(opponent, rows=3)
        opponents.append(opponent)
    assert np.bincount(opponents).tolist() == [0, 50, 50]


def test_sides_take_turns_against_each_chair() -> None:
    draws = MatchDraws(LeagueConfig(mirror=0.2, chairs=3), Seating(4, (0, 1, 1, 0)))
    assert draws.turns == ((0, 3), (1, 2))
    turns: dict[int, list[int]] = {}
    for _ in range(60):
        opponent, turn = draws.begin()
        turns.setdefault(opponent, []).append(turn)
    for chair in (1, 2, 3):
        assert turns[chair] == [i % 2 for i in range(len(turns[chair]))]
