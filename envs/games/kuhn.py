"""`penstock/Kuhn-v0`: Kuhn poker (Kuhn 1950), with three cards and one bet.

Each seat pays an ante of 1 and gets one of the cards jack, queen and king. Seat 0 passes or bets 1.
A seat that faces a bet passes, and loses its ante, or bets as well. After two passes or two bets
the higher card wins. Rewards are the chips won or lost, ±1 or ±2, when the game ends. In
equilibrium seat 0 loses 1/18 a game.

An observation is 11 numbers, each 0 or 1: the own card (3), whether this is seat 1, whether it is
this seat's turn, and for each of three turns whether it was a pass, and whether a bet.
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

NASH = "nash"
PASS = 0
BET = 1
CARDS = 3

# What has happened, as a text of p (pass) and b (bet). The number of a history is its place here.
_HISTORIES = ("", "p", "b", "pb", "pp", "bp", "bb", "pbp", "pbb")
# The histories after which a seat acts come first.
_OPEN = 4
# The number of the history after a pass, and after a bet.
_NEXT = np.array([[_HISTORIES.index(h + a) for a in "pb"] for h in _HISTORIES[:_OPEN]])
# What the winner gains where a game ends; 0 elsewhere.
_STAKES = np.array([0, 0, 0, 0, 1, 1, 2, 1, 2])
# Who wins where a game ends: 1 is seat 0, -1 is seat 1, and 0 is the seat with the higher card.
_WINNERS = np.array([0, 0, 0, 0, 0, 1, 0, -1, 0])

# What a seat sees of a history: two numbers for each turn, a pass and a bet.
_SEEN = np.zeros((len(_HISTORIES), 6), np.float32)
for _number, _history in enumerate(_HISTORIES):
    for _turn, _action in enumerate(_history):
        _SEEN[_number, 2 * _turn + "pb".index(_action)] = 1

# One equilibrium of those that Kuhn gives: the probability of a bet by history and card. Seat 0
# bets with a jack a third as often as with a king, which is free to choose; here 1/3 and 1.
_NASH_BETS = np.array(
    [
        [1 / 3, 0, 1],
        [1 / 3, 0, 1],
        [0, 1 / 3, 1],
        [0, 2 / 3, 1],
    ]
)


class KuhnPoker(TurnGames):
    """Choices are to pass and to bet, in this order."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": [],
        "seats": 2,
        "sides": (0, 1),
        "bots": (RANDOM, NASH),
    }

    def __init__(self, num_games: int = 1) -> None:
        """Make ``num_games`` games."""
        super().__init__(num_games, features=11, choices=2)

        # The card of each seat, 0 for the jack, and the number of the history.
        self._cards = np.zeros((num_games, 2), np.int64)
        self._history = np.zeros(num_games, np.int64)

    def get_action_meanings(self) -> list[str]:
        """The names of the choices, in their order."""
        return ["pass", "bet"]

    def _begin(self, games: Ints) -> None:
        decks = self.np_random.permuted(np.tile(np.arange(CARDS), (len(games), 1)), axis=1)
        self._cards[games] = decks[:, :2]
        self._history[games] = 0
        self._mover[games] = 0

    def _move(self, choices: Ints) -> SeatResults:
        # A game that has ended has no next history, and is begun anew.
        history = _NEXT[self._history % _OPEN, choices]
        self._history = history
        self._mover = 1 - self._mover

        higher_card = np.sign(self._cards[:, 0] - self._cards[:, 1])
        winners = np.where(_WINNERS[history] == 0, higher_card, _WINNERS[history])
        return duel_results(winners * _STAKES[history], over=history >= _OPEN)

    def _movers_choices(self) -> Flags:
        return np.ones((self.num_games, 2), np.bool_)

    def _features(self) -> Floats:
        features = np.zeros((self.num_games, 2, 11), np.float32)
        features[self._games[:, None], [0, 1], self._cards] = 1
        features[:, 1, 3] = 1
        features[self._games, self._mover, 4] = 1
        features[:, :, 5:] = _SEEN[self._history][:, None]
        return features.reshape(self.num_envs, -1)

    def _scripted(self, name: str, rows: Ints) -> Ints:
        """Returns the choices of the equilibrium `_NASH_BETS`; a pass where a seat waits."""
        games, seats = np.divmod(rows, 2)
        history = self._history[games] % _OPEN
        probability = _NASH_BETS[history, self._cards[games, seats]]
        bets = self._bot_random.random(len(rows)) < probability
        return np.where(self._mover[games] == seats, bets, PASS)
