"""`penstock/Leduc-v0`: Leduc poker (Southey et al. 2005), with six cards and two rounds of bets.

The cards are jack, queen and king, two of each. Each seat pays an ante of 1 and gets one card. In
each round a seat calls (or checks), raises, or folds if it faces a raise; seat 0 begins. A raise is
2 in the first round and 4 in the second, and a round has two raises at most. A round ends with a
call, unless that is its first action. Between the rounds a card is laid open. At the end a card
equal to the open one wins, else the higher card; equal cards share the chips. Rewards are the chips
won or lost, up to ±13, when the game ends.

An observation is 24 numbers, each 0 or 1: the own card (3), the open card (3), whether this is
seat 1, whether it is this seat's turn, and for each round and each of its four turns whether it was
a call, and whether a raise.
"""

from __future__ import annotations

import numpy as np
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

FOLD = 0
CALL = 1
RAISE = 2
RANKS = 3

_ANTE = 1
# What a raise adds, in the first and in the second round.
_RAISES = np.array([2, 4])
_MOST_RAISES = 2
# A round has at most so many turns: a check, two raises, and the call of the second.
_TURNS = 4
# The features before those of the turns: two cards, the seat, and whose turn it is.
_BEFORE_TURNS = 2 * RANKS + 2
_FEATURES = _BEFORE_TURNS + 2 * _TURNS * 2


class LeducPoker(TurnGames):
    """Choices are to fold, to call and to raise, in this order."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": [],
        "seats": 2,
        "sides": (0, 1),
        "bots": (RANDOM,),
    }

    def __init__(self, num_games: int = 1) -> None:
        """Make ``num_games`` games."""
        super().__init__(num_games, features=_FEATURES, choices=3)

        # The ranks of the cards of seat 0, of seat 1, and of the open one.
        self._cards = np.zeros((num_games, 3), np.int64)
        # The chips that each seat has paid.
        self._paid = np.zeros((num_games, 2), np.int64)
        # Of each game the round, 0 or 1, and of the round the raises and the turns.
        self._round = np.zeros(num_games, np.int64)
        self._raises = np.zeros(num_games, np.int64)
        self._turns = np.zeros(num_games, np.int64)
        # What the seats see of the turns, [games, rounds * turns * 2].
        self._seen = np.zeros((num_games, _FEATURES - _BEFORE_TURNS), np.float32)

    def get_action_meanings(self) -> list[str]:
        """The names of the choices, in their order."""
        return ["fold", "call", "raise"]

    def _begin(self, games: Ints) -> None:
        decks = self.np_random.permuted(np.tile(np.arange(2 * RANKS), (len(games), 1)), axis=1)
        self._cards[games] = decks[:, :3] // 2
        self._paid[games] = _ANTE
        self._round[games] = 0
        self._raises[games] = 0
        self._turns[games] = 0
        self._mover[games] = 0
        self._seen[games] = 0

    def _move(self, choices: Ints) -> SeatResults:
        mover = self._mover
        folds = choices == FOLD
        raises = choices == RAISE
        closes = (choices == CALL) & (self._turns > 0)
        self._note_turn(choices)

        # Whoever calls or raises pays as much as the other has paid, and the raise.
        highest = self._paid.max(1)
        own = self._paid[self._games, mover]
        added = raises * _RAISES[self._round]
        self._paid[self._games, mover] = np.where(folds, own, highest + added)
        self._raises += raises
        self._turns += 1

        # A round begins with seat 0.
        over = folds | (closes & (self._round == 1))
        next_round = closes & ~over
        self._round[next_round] = 1
        self._raises[next_round] = 0
        self._turns[next_round] = 0
        self._mover = np.where(next_round, 0, 1 - mover)

        # Seat 0 wins if seat 1 folds.
        winners = np.where(folds, 2 * mover - 1, self._showdown())
        return duel_results(winners * self._paid.min(1) * over, over=over)

    def _note_turn(self, choices: Ints) -> None:
        """Show a call or a raise to both seats; a fold ends the game and is not shown."""
        # An ended game may be at a turn that no round has; it is begun anew.
        turn = np.minimum(self._turns, _TURNS - 1)
        column = (self._round * _TURNS + turn) * 2 + np.maximum(choices - CALL, 0)
        self._seen[self._games, column] = choices != FOLD

    def _showdown(self) -> Ints:
        """Returns who has the better card: 1 is seat 0, -1 is seat 1, 0 neither; ``[games]``."""
        private = self._cards[:, :2]
        is_pair = private == self._cards[:, 2:]
        strength = private + RANKS * is_pair
        return np.asarray(np.sign(strength[:, 0] - strength[:, 1]))

    def _movers_choices(self) -> Flags:
        legal = np.ones((self.num_games, 3), np.bool_)
        legal[:, FOLD] = self._paid[:, 0] != self._paid[:, 1]
        legal[:, RAISE] = self._raises < _MOST_RAISES
        return legal

    def _features(self) -> Floats:
        features = np.zeros((self.num_games, 2, _FEATURES), np.float32)
        features[self._games[:, None], [0, 1], self._cards[:, :2]] = 1
        features[self._games, :, RANKS + self._cards[:, 2]] = (self._round == 1)[:, None]
        features[:, 1, 2 * RANKS] = 1
        features[self._games, self._mover, 2 * RANKS + 1] = 1
        features[:, :, _BEFORE_TURNS:] = self._seen[:, None]
        return features.reshape(self.num_envs, -1)
