"""`penstock/RockPaperScissors-v0`: rock, paper, scissors over some rounds, both seats at once.

A round pays 1 to the seat that wins it and -1 to the other. An observation is the number 1: a seat
sees nothing of earlier rounds, so a policy without memory is one mixed strategy. The equilibrium
takes each choice with probability 1/3, which is the scripted player `random`.
"""

from __future__ import annotations

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode

from penstock.envs.games.seat_games import (
    RANDOM,
    Array,
    Flags,
    Floats,
    Ints,
    SeatGames,
    SeatResults,
    duel_results,
)


class RockPaperScissors(SeatGames):
    """Choices are rock, paper and scissors, in this order."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": [],
        "seats": 2,
        "sides": (0, 1),
        "bots": (RANDOM,),
    }

    def __init__(self, num_games: int = 1, *, rounds: int = 10) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            rounds: of a game.

        Raises:
            ValueError: if there is no round.
        """
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; a game has 1 round or more")
        super().__init__(num_games, Box(0, 1, (1,), np.float32), Discrete(3))

        self._rounds = rounds
        # Rounds played, and the rounds that seat 0 won beyond those that it lost, by game.
        self._played = np.zeros(num_games, np.int64)
        self._lead = np.zeros(num_games, np.int64)

    def get_action_meanings(self) -> list[str]:
        """The names of the choices, in their order."""
        return ["rock", "paper", "scissors"]

    def _begin(self, games: Ints) -> None:
        self._played[games] = 0
        self._lead[games] = 0

    def _play(self, moves: Array, is_live: Flags) -> SeatResults:
        # Each choice beats the one before it.
        difference = (moves[:, 0] - moves[:, 1]) % 3
        gains = (difference == 1).astype(np.int64) - (difference == 2)

        self._played += 1
        self._lead += gains
        return duel_results(gains, over=self._played == self._rounds, lead=self._lead)

    def _observe(self) -> Floats:
        return np.ones((self.num_envs, 1), np.float32)
