"""Earlier policies that play seats of games: those that the learner shows on its chairs.

Invariants:
- A game goes on with the draw with which it began, also if its chair shows another one meanwhile.
- A chair has the weights of `MOST_DRAWS` draws at most. A game that outlasts so many goes on with
  newer weights and has no result. So no slow game holds up a chair, or takes memory without end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.schema import Config
from penstock.core.draws import NO_DRAW, draw_number
from penstock.core.interfaces import ReadPolicy
from penstock.core.observations import Spaces
from penstock.core.params import Array, Float32, Stamp
from penstock.serving.match_draws import MIRROR
from penstock.serving.seats import Indices

MOST_DRAWS = 4
NO_POLICY = -1
"""The number of the policy that plays against nobody."""


def make_opponents(config: Config, spaces: Spaces, most_games: int, seed: int) -> Opponents:
    """Returns the opponents of games of several sides, without weights.

    Args:
        config: of a run with matches against chairs.
        spaces: of its games.
        most_games: at the same time.
        seed: of the random numbers of their actions.
    """
    seeds = np.random.SeedSequence(seed)

    def make(weights: Float32) -> BatchPolicy:
        [own_seed] = seeds.spawn(1)
        return BatchPolicy(config, spaces, weights, int(own_seed.generate_state(1)[0]))

    return Opponents(
        chairs=config.league.chair_count,
        size=network_shape(config, spaces).layout.size,
        games=most_games,
        make=make,
    )


class Opponents:
    """The opponents of all games of a service. A policy has a number, which its draws share.

    opponents = Opponents(chairs=2, size=layout.size, games=1000, make=make_policy)
    opponents.refresh(link.read_weights)      # until it returns True; later between turns
    opponents.begin(game, opponent=1)
    actions, state = opponents.decide(opponents.policies[games], observations, state)
    opponents.end(game)
    """

    def __init__(
        self, *, chairs: int, size: int, games: int, make: Callable[[Float32], BatchPolicy]
    ) -> None:
        """Create opponents without weights.

        Args:
            chairs: that the learner publishes, as policies 1 to so many.
            size: of the flat vector of weights.
            games: at the same time, at most.
            make: returns a policy of the run's network with some weights, float32 ``[size]``.
        """
        self.policies = np.full(games, NO_POLICY)
        """The number of the policy that plays in each game, or `NO_POLICY`."""
        self.draws = np.full(games, NO_DRAW, np.uint64)
        """The number of its draw (penstock.core.draws); NO_DRAW also where it has no result."""

        # By chair.
        self._stamps: list[Stamp | None] = [None] * chairs  # newest weights that were read
        self._newest = [NO_POLICY] * chairs  # policies that games begin with

        # By the number of a policy; those of a chair follow each other.
        self._policies: list[BatchPolicy | None] = [None] * (MOST_DRAWS * chairs)
        self._draw_of = [NO_DRAW] * (MOST_DRAWS * chairs)
        self._games = [0] * (MOST_DRAWS * chairs)  # games in progress

        self._make = make
        self._weights = np.zeros(size, np.float32)

    def refresh(self, read: ReadPolicy) -> bool:
        """Take newer draws; returns whether each chair has one. ``read`` is `Link.read_weights`."""
        for chair, stamp in enumerate(self._stamps):
            newer_stamp = read(self._weights, stamp, policy_id=1 + chair)
            if newer_stamp is not None:
                self._stamps[chair] = newer_stamp
                self._show(chair, draw_number(newer_stamp))
        return NO_POLICY not in self._newest

    def begin(self, game: int, opponent: int) -> None:
        """Have an opponent play in a game from its beginning: a chair, or `MIRROR` for nobody."""
        if opponent == MIRROR:
            self.policies[game] = NO_POLICY
            self.draws[game] = NO_DRAW
            return
        number = self._newest[opponent - 1]
        self._games[number] += 1
        self.policies[game] = number
        self.draws[game] = self._draw_of[number]

    def end(self, game: int) -> None:
        """Note that a game is over."""
        number = self.policies[game]
        if number != NO_POLICY:
            self._games[number] -= 1
            self.policies[game] = NO_POLICY

    def decide(
        self, numbers: Indices, observations: Array, state: Float32
    ) -> tuple[Array, Float32]:
        """Decide for B observations. Actions are sampled, as in training.

        Args:
            numbers: of the policies that decide, int64 ``[B]``; B > 0.
            observations: as of `BatchPolicy.decide`.
            state: as of `BatchPolicy.decide`.

        Returns: as `BatchPolicy.decide`.
        """
        order = np.argsort(numbers, kind="stable")
        different, starts = np.unique(numbers[order], return_index=True)
        decisions = [
            self._policy(number).decide(observations[rows], state[rows], sample=True)
            for number, rows in zip(different, np.split(order, starts[1:]), strict=True)
        ]
        actions, next_state = (np.concatenate(parts) for parts in zip(*decisions, strict=True))
        places = np.argsort(order)
        return actions[places], next_state[places]

    def _policy(self, number: int) -> BatchPolicy:
        """Returns a policy that has weights."""
        policy = self._policies[number]
        assert policy is not None
        return policy

    def _show(self, chair: int, draw: int) -> None:
        """Let the games of a chair begin with the weights that were just read, those of a draw."""
        # A policy without games takes them, or else the one of the oldest draw.
        numbers = range(chair * MOST_DRAWS, (chair + 1) * MOST_DRAWS)
        number = min(
            (number for number in numbers if number != self._newest[chair]),
            key=lambda number: (
                self._games[number] > 0,
                self._policies[number] is None,
                self._draw_of[number],
            ),
        )
        self.draws[self.policies == number] = NO_DRAW

        policy = self._policies[number]
        if policy is None:
            self._policies[number] = self._make(self._weights.copy())
        else:
            policy.load(self._weights, untrained=False)
        self._draw_of[number] = draw
        self._newest[chair] = number
