"""`penstock/ConnectFour-v0`: connect four, on a board of seven columns and six rows.

The seats drop stones in turn, seat 0 first. Four of one's own stones in a line win: the reward is 1
to the winner and -1 to the other. A full board is a draw.

An observation is 85 numbers, each 0 or 1: the own stones (42), the other's stones (42), whether it
is this seat's turn. A square's number is ``6 * column + row``, counted from the bottom left.

Scripted players: `random`; `minimax2` and `minimax4` look two and four turns ahead, see a win or a
loss within these turns, prefer the early win and the late loss, and choose at random among equal
columns, those in the middle more often.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from penstock.envs.games.seat_games import (
    RANDOM,
    Flags,
    Floats,
    Ints,
    SeatResults,
    TurnGames,
    duel_results,
)

Bits = npt.NDArray[np.uint64]

COLUMNS = 7
ROWS = 6
_SQUARES = COLUMNS * ROWS
_FEATURES = 2 * _SQUARES + 1

# The stones of a seat are the bits of a number. A column has seven bits, the last of which is never
# set, so that no line runs from one column into the next.
_COLUMN_BITS = ROWS + 1
_BOTTOMS = np.array([1 << (_COLUMN_BITS * column) for column in range(COLUMNS)], np.uint64)
_COLUMN_MASKS = _BOTTOMS * np.uint64(2**ROWS - 1)
_ALL_BOTTOMS = np.bitwise_or.reduce(_BOTTOMS)
_BOARD = np.bitwise_or.reduce(_COLUMN_MASKS)
# Bits from a square to the next in a line: upwards, down to the right, to the right, up to the
# right.
_DIRECTIONS = np.array([1, _COLUMN_BITS - 1, _COLUMN_BITS, _COLUMN_BITS + 1], np.uint64)

# Turns that the scripted players look ahead.
_DEPTHS = {"minimax2": 2, "minimax4": 4}
# The lines of four through the lowest square of each column.
_LINES = np.array([3, 4, 5, 7, 5, 4, 3])
# The value of a column that is full.
_CLOSED = -100

# Pixels of a square in a picture, each way, and the colours.
_CELL = 32
_BLUE = (30, 60, 160)
_EMPTY = (235, 235, 235)
_COLOURS = ((230, 200, 30), (200, 40, 40))


class ConnectFour(TurnGames):
    """Choices are the columns, from the left; a person drops a stone by the keys 1 to 7."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": 2,
        "seats": 2,
        "sides": (0, 1),
        "bots": (RANDOM, *_DEPTHS),
        "keys": ({str(column + 1): column for column in range(COLUMNS)},) * 2,
    }

    def __init__(self, num_games: int = 1, *, render_mode: str | None = None) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            render_mode: as of gymnasium; pictures can be rendered in any mode.
        """
        super().__init__(num_games, features=_FEATURES, choices=COLUMNS)
        self.render_mode = render_mode

        # The stones of each seat as bits, and the number of stones in each column.
        self._stones = np.zeros((num_games, 2), np.uint64)
        self._heights = np.zeros((num_games, COLUMNS), np.int64)
        # The observations, which each turn changes in a few places.
        self._seen = np.zeros((num_games, 2, _FEATURES), np.float32)

    def render(self) -> tuple[npt.NDArray[np.uint8], ...]:
        """Returns a picture of each game, uint8 ``[192, 224, 3]``; seat 0 is yellow."""
        return tuple(_picture(seen) for seen in self._seen[:, 0])

    def _begin(self, games: Ints) -> None:
        self._stones[games] = 0
        self._heights[games] = 0
        self._mover[games] = 0
        self._seen[games] = 0
        self._seen[games, 0, -1] = 1

    def _move(self, choices: Ints) -> SeatResults:
        games = self._games
        mover = self._mover
        other = 1 - mover
        height = self._heights[games, choices]

        # A column of a game that has ended may be full: then the bit is in no square, and the
        # square is the next column's. That game is begun anew.
        bit = _BOTTOMS[choices] << height.astype(np.uint64)
        own_stones = self._stones[games, mover] | bit
        self._stones[games, mover] = own_stones
        self._heights[games, choices] = height + 1
        self._mover = other

        square = ROWS * choices + height
        self._seen[games, mover, square] = 1
        self._seen[games, other, _SQUARES + square] = 1
        self._seen[games, mover, -1] = 0
        self._seen[games, other, -1] = 1

        won = _has_four(own_stones)
        full = self._heights.min(1) >= ROWS
        return duel_results(won * (1 - 2 * mover), over=won | full)

    def _movers_choices(self) -> Flags:
        return np.less(self._heights, ROWS)

    def _features(self) -> Floats:
        return self._seen.reshape(self.num_envs, -1).copy()

    def _scripted(self, name: str, rows: Ints) -> Ints:
        """Returns the columns of a minimax player; 0 for the rows that do not act."""
        games, seats = np.divmod(rows, 2)
        acts = np.flatnonzero(self._playing[games, seats] & (self._mover[games] == seats))
        own = self._stones[games[acts], seats[acts]]
        other = self._stones[games[acts], 1 - seats[acts]]

        # Values are whole numbers, so the powers, which are below 1, decide among equal columns
        # alone: each is chosen with a probability in proportion to its lines.
        values = column_values(own, other, _DEPTHS[name])
        scores = values + self._bot_random.random(values.shape) ** (1 / _LINES)
        columns = np.zeros(len(rows), np.int64)
        columns[acts] = scores.argmax(1)
        return columns


def column_values(own: Bits, other: Bits, depth: int) -> Ints:
    """Returns what each column is worth to the side that moves, by minimax.

    A win in the n-th turn from now is worth ``depth + 1 - n``, a loss as much below 0, and whatever
    is not decided within ``depth`` turns is worth 0. Where a column wins at once, the others are
    not examined and count 0. A full column is worth less than any other.

    Args:
        own: the stones of the side that moves, ``[positions]``. No side has four in a line.
        other: the stones of the other side, ``[positions]``.
        depth: turns to look ahead, 1 or more.

    Returns:
        int64 ``[positions, 7]``.
    """
    # Adding 1 at the bottom of a column sets the bit above its highest stone.
    reachable = ((own | other) + _ALL_BOTTOMS) & _BOARD
    wins_at = reachable & _completing_squares(own)
    landing = reachable[:, None] & _COLUMN_MASKS
    is_open = landing != 0

    values = np.where(landing & wins_at[:, None], depth, 0)
    values[~is_open] = _CLOSED
    if depth > 1:
        position, column = np.nonzero(is_open & (wins_at == 0)[:, None])
        stones = own[position] | landing[position, column]
        replies = column_values(other[position], stones, depth - 1)
        # On a full board there is no reply, and the game is drawn.
        best_reply = replies.max(1)
        values[position, column] = np.where(best_reply == _CLOSED, 0, -best_reply)
    return values


def _completing_squares(stones: Bits) -> Bits:
    """Returns the squares that would make four in a line with three of the stones.

    Squares that hold a stone may be among them; the arguments and the result have one shape.
    """
    up, *others = _DIRECTIONS
    squares: Bits = (stones << up) & (stones << (up + up)) & (stones << (up + up + up))
    for step in others:
        two_below = (stones << step) & (stones << (step + step))
        two_above = (stones >> step) & (stones >> (step + step))
        squares |= two_below & ((stones << (step + step + step)) | (stones >> step))
        squares |= two_above & ((stones >> (step + step + step)) | (stones << step))
    return squares


def _has_four(stones: Bits) -> Flags:
    """Returns whether stones include four in a line; of the same shape."""
    has_four = np.zeros(stones.shape, np.bool_)
    for step in _DIRECTIONS:
        pairs = stones & (stones >> step)
        has_four |= (pairs & (pairs >> (step + step))) != 0
    return has_four


def _picture(seen: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns a picture of what seat 0 observes, uint8 ``[192, 224, 3]``."""
    own, other = seen[: 2 * _SQUARES].reshape(2, COLUMNS, ROWS)
    stones = np.full((COLUMNS, ROWS, 3), _EMPTY, np.uint8)
    stones[own > 0] = _COLOURS[0]
    stones[other > 0] = _COLOURS[1]
    # The first row of a picture is the highest one.
    rows = stones.transpose(1, 0, 2)[::-1]
    squares = rows.repeat(_CELL, 0).repeat(_CELL, 1)

    # A round hole in each square shows the stone behind the blue front.
    offset = np.arange(_CELL) - (_CELL - 1) / 2
    hole = offset[:, None] ** 2 + offset**2 <= (0.42 * _CELL) ** 2
    holes = np.tile(hole, (ROWS, COLUMNS))
    squares[~holes] = _BLUE
    return squares
