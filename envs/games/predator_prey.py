"""`penstock/PredatorPrey-v0`: hunters and prey on a square field, two unlike roles.

A step moves a seat in one of four directions, or not at all. Prey is faster than a hunter, and once
its charge is full it may dash, three steps in one. A hunter catches all prey within its reach. Prey
that is caught is out, and so loses; prey that is free after the last step wins. A game ends when
all prey is caught, or after that step.

Prey gets 1 or -1. Each hunter gets 1 for every prey that is caught and -1 for every one that goes
free, divided by the number of prey. Side 0 are the hunters, who have the first seats.

Both roles have one space. An observation holds numbers in -1 ... 1: whether this seat is prey, its
place (2), its charge, the share of the steps that is left, and for each seat whether it is in the
game and where it is from here (2, divided by the field's width). A hunter's charge is 0, and its
dashes are always illegal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from penstock.envs.games.seat_games import (
    RANDOM,
    Array,
    Flags,
    Floats,
    Ints,
    MaskedGames,
    SeatResults,
)

# Lengths where the field runs from -1 to 1, each way.
_FIELD = 2.0
_HUNTER_SPEED = 0.06
_PREY_SPEED = 0.07
_REACH = 0.15
_DASH = 3
# Steps until prey may dash again.
_RECHARGE = 10

# The choices: stay, right, left, up, down, then the four dashes.
_DIRECTIONS = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)], np.float32)
_MOVES = len(_DIRECTIONS)
_STEPS = np.concatenate((_DIRECTIONS, _DASH * _DIRECTIONS[1:]))
# The features before those of the seats.
_OWN_FEATURES = 5


class PredatorPrey(MaskedGames):
    """Choices are to stay, to go right, left, up and down, and to dash in these directions."""

    _ends_apart = True

    def __init__(
        self, num_games: int = 1, *, hunters: int = 2, prey: int = 2, steps: int = 100
    ) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            hunters: in a game.
            prey: in a game.
            steps: the most steps of a game.

        Raises:
            ValueError: for a number below 1.
        """
        for name, value in (("hunters", hunters), ("prey", prey), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")

        seats = hunters + prey
        self.metadata: dict[str, Any] = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "render_modes": [],
            "seats": seats,
            "sides": (0,) * hunters + (1,) * prey,
            "bots": (RANDOM,),
        }
        super().__init__(
            num_games, features=_OWN_FEATURES + 3 * seats, choices=len(_STEPS), low=-1.0
        )

        self._steps = steps
        self._hunters = hunters
        self._speeds = np.full(seats, _HUNTER_SPEED, np.float32)
        self._speeds[hunters:] = _PREY_SPEED

        # The places, [games, seats, 2]; which prey is free, and the steps until it may dash, each
        # [games, prey]; the steps of the game, [games].
        self._places = np.zeros((num_games, seats, 2), np.float32)
        self._free = np.ones((num_games, prey), np.bool_)
        self._recharge = np.zeros((num_games, prey), np.int64)
        self._age = np.zeros(num_games, np.int64)

    def get_action_meanings(self) -> list[str]:
        """The names of the choices, in their order."""
        directions = ["right", "left", "up", "down"]
        return ["stay", *directions, *(f"dash {direction}" for direction in directions)]

    def _begin(self, games: Ints) -> None:
        places = self.np_random.uniform(-1, 1, (len(games), self.seats, 2))
        # Hunters begin in the left third of the field, and prey in the right one.
        places[:, : self._hunters, 0] = (places[:, : self._hunters, 0] - 2) / 3
        places[:, self._hunters :, 0] = (places[:, self._hunters :, 0] + 2) / 3
        self._places[games] = places
        self._free[games] = True
        self._recharge[games] = 0
        self._age[games] = 0

    def _play(self, moves: Array, is_live: Flags) -> SeatResults:
        self._refuse_illegal(moves, acting=self._playing & is_live[:, None])
        self._places += _STEPS[moves] * self._speeds[:, None]
        np.clip(self._places, -1, 1, out=self._places)
        dashes = moves[:, self._hunters :] >= _MOVES
        self._recharge = np.where(dashes, _RECHARGE, np.maximum(self._recharge - 1, 0))
        self._age += 1

        caught = self._free & self._within_reach()
        self._free &= ~caught
        late = self._age >= self._steps
        over = late | ~self._free.any(1)
        escaped = self._free & late[:, None]

        # Prey gets its own result, and the hunters the mean over all prey.
        losses = caught.astype(np.float32) - escaped
        results = np.empty((self.num_games, self.seats), np.float32)
        results[:, self._hunters :] = 0 - losses
        results[:, : self._hunters] = losses.mean(1, keepdims=True)

        terminated = np.repeat(over[:, None], self.seats, 1)
        terminated[:, self._hunters :] = caught | escaped
        outcomes = results.copy()
        still_free = self._free.mean(1, keepdims=True)
        outcomes[:, : self._hunters] = 1 - 2 * still_free
        return SeatResults(
            rewards=results,
            terminated=terminated,
            truncated=np.zeros_like(terminated),
            outcomes=outcomes,
        )

    def _within_reach(self) -> Flags:
        """Returns which prey a hunter can reach, ``[games, prey]``."""
        hunters = self._places[:, : self._hunters, None]
        prey = self._places[:, None, self._hunters :]
        square_distances = ((hunters - prey) ** 2).sum(-1)
        return np.asarray((square_distances < _REACH**2).any(1))

    def _legal_choices(self) -> Flags:
        legal = np.zeros((self.num_games, self.seats, len(_STEPS)), np.bool_)
        legal[:, :, :_MOVES] = True
        legal[:, self._hunters :, _MOVES:] = (self._recharge == 0)[:, :, None]
        return legal

    def _features(self) -> Floats:
        games = self.num_games
        present = np.ones((games, self.seats, 1), np.float32)
        present[:, self._hunters :, 0] = self._free

        # From each seat (the second axis) to each other one (the third).
        offsets = (self._places[:, None] - self._places[:, :, None]) / _FIELD
        others = np.empty((games, self.seats, self.seats, 3), np.float32)
        others[..., :1] = present[:, None]
        others[..., 1:] = offsets * present[:, None]

        features = np.zeros((games, self.seats, _OWN_FEATURES + 3 * self.seats), np.float32)
        features[:, self._hunters :, 0] = 1
        features[:, :, 1:3] = self._places
        features[:, self._hunters :, 3] = 1 - self._recharge / _RECHARGE
        features[:, :, 4] = (1 - self._age / self._steps)[:, None]
        features[:, :, _OWN_FEATURES:] = others.reshape(games, self.seats, -1)
        return features.reshape(self.num_envs, -1)
