"""Connect four against a plain board, and the scripted players against a plain minimax."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.envs.games.connect_four import ConnectFour, column_values

COLUMNS, ROWS = 7, 6
# The squares of a column from the bottom, 0 or 1 by seat.
Board = list[list[int]]


# All lines of four squares, (column, row) each.
LINES = [
    frozenset((column + i * across, row + i * up) for i in range(4))
    for column in range(COLUMNS)
    for row in range(ROWS)
    for across, up in ((1, 0), (0, 1), (1, 1), (1, -1))
    if column + 3 * across < COLUMNS and 0 <= row + 3 * up < ROWS
]


def has_won(board: Board, seat: int) -> bool:
    """Returns whether four stones of a seat are in a line."""
    stones = {
        (column, row)
        for column, owners in enumerate(board)
        for row, owner in enumerate(owners)
        if owner == seat
    }
    return any(line <= stones for line in LINES)


def open_columns(board: Board) -> list[int]:
    return [column for column in range(COLUMNS) if len(board[column]) < ROWS]


def best_value(board: Board, seat: int, depth: int) -> int:
    """Returns the value of a position to the seat that moves, as `column_values` counts."""
    values = [value_of(board, column, seat, depth) for column in open_columns(board)]
    return max(values, default=0)


def value_of(board: Board, column: int, seat: int, depth: int) -> int:
    """Returns the value of a column to the seat that moves."""
    board[column].append(seat)
    if has_won(board, seat):
        value = depth
    elif depth == 1:
        value = 0
    else:
        value = -best_value(board, 1 - seat, depth - 1)
    board[column].pop()
    return value


def features_of(board: Board, seat: int, turn: int) -> npt.NDArray[np.float32]:
    """Returns what a seat should observe."""
    features = np.zeros(85, np.float32)
    for column, stones in enumerate(board):
        for row, owner in enumerate(stones):
            features[(0 if owner == seat else 42) + 6 * column + row] = 1
    features[84] = turn == seat
    return features


def bits_of(board: Board, seat: int) -> int:
    return sum(
        1 << (7 * column + row)
        for column, stones in enumerate(board)
        for row, owner in enumerate(stones)
        if owner == seat
    )


def test_games_equal_those_on_a_plain_board() -> None:
    """Observations, legal columns, wins, draws, and who wins; of random play, and of minimax."""
    count = 30
    games = ConnectFour(count)
    observations, _ = games.reset(seed=2)
    boards: list[Board] = [[[] for _ in range(COLUMNS)] for _ in range(count)]
    turns = np.zeros(count, int)
    ends = {"win 0": 0, "win 1": 0, "draw": 0}
    over = np.zeros(count, np.bool_)
    rows = np.arange(2 * count)

    for _ in range(200):
        # Half of the games are played well enough to be drawn now and then.
        actions = games.bot("random", rows)
        actions[:count] = games.bot("minimax2", rows[:count])
        for game, board in enumerate(boards):
            seat = turns[game]
            if over[game]:
                continue
            for row in (0, 1):
                np.testing.assert_array_equal(
                    observations["observation"][2 * game + row], features_of(board, row, seat)
                )
            mask = observations["action_mask"][2 * game + seat]
            assert np.flatnonzero(mask).tolist() == open_columns(board)
            assert np.flatnonzero(observations["action_mask"][2 * game + 1 - seat]).tolist() == [0]

        observations, rewards, terminated, truncated, info = games.step(actions)
        assert not truncated.any()
        for game, board in enumerate(boards):
            pair = slice(2 * game, 2 * game + 2)
            if over[game]:
                # The step only resets.
                boards[game] = [[] for _ in range(COLUMNS)]
                turns[game] = 0
                over[game] = False
                assert not rewards[pair].any()
                assert not terminated[pair].any()
                continue

            seat = turns[game]
            board[actions[2 * game + seat]].append(int(seat))
            turns[game] = 1 - seat
            won = has_won(board, seat)
            over[game] = won or not open_columns(board)
            assert terminated[pair].tolist() == [over[game]] * 2
            expected = [0.0, 0.0]
            if won:
                expected = [1.0, -1.0] if seat == 0 else [-1.0, 1.0]
            assert rewards[pair].tolist() == expected
            assert info["outcome"][pair].tolist() == expected
            if over[game]:
                ends[f"win {seat}" if won else "draw"] += 1

    assert min(ends.values()) >= 3, ends


def random_positions(count: int, rng: np.random.Generator) -> list[tuple[Board, int]]:
    """Returns positions without a line of four, from few stones to nearly full boards."""
    positions: list[tuple[Board, int]] = []
    while len(positions) < count:
        board: Board = [[] for _ in range(COLUMNS)]
        seat = 0
        for _ in range(int(rng.integers(40))):
            columns = [c for c in open_columns(board) if value_of(board, c, seat, 1) == 0]
            if not columns:
                break
            board[int(rng.choice(columns))].append(seat)
            seat = 1 - seat
        positions.append((board, seat))
    return positions


@pytest.mark.parametrize(("depth", "count"), [(1, 200), (2, 150), (4, 12)])
def test_values_of_columns_equal_those_of_a_plain_minimax(depth: int, count: int) -> None:
    rng = np.random.default_rng(depth)
    values_seen: set[int] = set()
    for board, seat in random_positions(count, rng):
        own = np.array([bits_of(board, seat)], np.uint64)
        other = np.array([bits_of(board, 1 - seat)], np.uint64)
        values = column_values(own, other, depth)[0]
        columns = open_columns(board)
        expected = {column: value_of(board, column, seat, depth) for column in columns}
        assert all(values[column] < -depth for column in range(COLUMNS) if column not in columns)
        if depth in expected.values():
            # Beside a winning column the others are not examined.
            expected = {column: depth * (value == depth) for column, value in expected.items()}
        assert {column: values[column] for column in columns} == expected
        values_seen |= set(expected.values())
    assert values_seen >= {0, depth}
    assert depth == 1 or min(values_seen) < 0


def score(first: str, second: str, games: int) -> float:
    """Returns the mean result of ``first``, 1 for a win and 1/2 for a draw, from both seats."""
    vector = ConnectFour(games)
    vector.reset(seed=5)
    seat = np.arange(games) % 2
    rows = 2 * np.arange(games) + seat
    others = 2 * np.arange(games) + 1 - seat
    results = np.full(games, np.nan)
    while np.isnan(results).any():
        actions = np.zeros(2 * games, np.int64)
        actions[rows] = vector.bot(first, rows)
        actions[others] = vector.bot(second, others)
        _, _, terminated, _, info = vector.step(actions)
        first_ends = terminated[rows] & np.isnan(results)
        results[first_ends] = (info["outcome"][rows][first_ends] + 1) / 2
    return float(results.mean())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("minimax2", "random", 0.96), ("minimax4", "random", 0.99), ("minimax4", "minimax2", 0.78)],
)
def test_scripted_players_are_as_strong_as_measured(
    first: str, second: str, expected: float
) -> None:
    assert score(first, second, 300) == pytest.approx(expected, abs=0.05)


def test_a_scripted_player_waits_where_the_other_moves() -> None:
    games = ConnectFour(3)
    games.reset(seed=0)
    assert games.bot("minimax4", np.array([1, 3, 5])).tolist() == [0, 0, 0]


def test_a_full_column_is_refused() -> None:
    games = ConnectFour(2)
    games.reset(seed=0)
    for _ in range(6):
        games.step(np.array([0, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"seat 0 of game 0 took the illegal choice 0"):
        games.step(np.array([0, 0, 3, 0]))


def test_a_picture_shows_each_stone() -> None:
    games: Any = ConnectFour(1, render_mode="rgb_array")
    games.reset(seed=0)
    empty = games.render()[0]
    games.step(np.array([2, 0]))
    games.step(np.array([0, 2]))
    (picture,) = games.render()
    assert picture.shape == (192, 224, 3)
    changed = (picture != empty).any(-1).reshape(6, 32, 7, 32).any((1, 3))
    # The lowest two squares of the third column.
    assert np.argwhere(changed).tolist() == [[4, 2], [5, 2]]
    assert (picture[5 * 32 + 16, 2 * 32 + 16] != picture[4 * 32 + 16, 2 * 32 + 16]).any()
