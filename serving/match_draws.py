"""Who plays against the policy in the next game, so that the shares of a league are kept.

On actors a game has one opponent for ever, so the shares are divided among games. Games of others
come and go, and last as long as they like; so each one that begins is given to the opponent whose
share of the learning rows is furthest behind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.configs.league import LeagueConfig
from penstock.envs.seats import Seating, turns_of

MIRROR = 0
"""The opponent of a game that the newest weights play alone; chairs are 1, 2, ..."""
# The weight of a finished game in the mean length of games.
LENGTH_WEIGHT = 0.05


class MatchDraw(NamedTuple):
    """Who plays a game."""

    opponent: int
    """`MIRROR`, or the policy id of a chair."""
    turn: int
    """The place in `MatchDraws.turns` of the seats that learn; 0 in a mirror game."""


class MatchDraws:
    """Draws the opponents of games; it is told how long they were.

    draws = MatchDraws(config.league, seating)
    opponent, turn = draws.begin()
    draws.end(opponent, rows=20)
    """

    def __init__(self, league: LeagueConfig, seating: Seating) -> None:
        """Read the shares.

        Args:
            league: the config's section, with matches against chairs alone.
            seating: of the games.

        Raises:
            UserError: as `turns_of`.
        """
        chairs = league.chair_count
        self.turns = turns_of(seating, league.seats)
        """The seats that learn in a match, in turn by the matches against a chair."""
        self._shares = np.full(1 + chairs, league.pool_share / chairs)
        self._shares[MIRROR] = league.mirror_share
        self._learning = np.full(1 + chairs, len(self.turns[0]))
        self._learning[MIRROR] = seating.seats

        # By opponent.
        self._rows = np.zeros(1 + chairs)  # learning rows of games that have ended
        self._seats = np.zeros(1 + chairs)  # learning seats of games in progress
        self._matches = np.zeros(1 + chairs, np.int64)  # games that have begun
        self._length = 1.0
        """The mean rows of a learning seat in the last games."""

    def begin(self) -> MatchDraw:
        """Draw who plays a game that begins."""
        # A game in progress counts with the rows that it will probably have.
        rows = self._rows + self._seats * self._length
        behind = np.where(self._shares > 0, self._shares * rows.sum() - rows, -np.inf)
        opponent = int(behind.argmax())

        turn = self._matches[opponent] % len(self.turns) if opponent != MIRROR else 0
        self._matches[opponent] += 1
        self._seats[opponent] += self._learning[opponent]
        return MatchDraw(opponent, int(turn))

    def end(self, opponent: int, rows: int) -> None:
        """Count a game that is over, with or without a result; it had so many learning rows."""
        seats = self._learning[opponent]
        self._seats[opponent] -= seats
        self._rows[opponent] += rows
        self._length += LENGTH_WEIGHT * (rows / seats - self._length)
