"""Results of games, as the policy that is trained sees them: wins, draws and losses by opponent.

They serve matchmaking. The policy changes while it plays, so old games count less and less. How
strong frozen policies are is another question, which `payoffs` and `ratings` answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.99
"""What a game counts after each further game against the same opponent."""
PRIOR_GAMES = 2
"""Games, half of them won, that are assumed against each opponent, so that the first result does
not decide (Laplace's rule of succession)."""


class GameCounts(NamedTuple):
    """Numbers of games by how they ended for one player."""

    wins: int
    draws: int
    losses: int

    @property
    def games(self) -> int:
        """Number of all games."""
        return self.wins + self.draws + self.losses

    def plus(self, other: GameCounts) -> GameCounts:
        """Returns these games and those of ``other``."""
        return GameCounts(
            self.wins + other.wins, self.draws + other.draws, self.losses + other.losses
        )


class Results:
    """Decayed numbers of wins, draws and losses by the id of the opponent."""

    def __init__(self, counts: Mapping[str, Sequence[float]] | None = None) -> None:
        """Begin with the counts that `to_json` returned, or with none."""
        self._counts = {member: list(each) for member, each in (counts or {}).items()}

    def add(self, member: str, counts: GameCounts) -> None:
        """Count games against ``member`` that ended in any order."""
        if counts.games == 0:
            return

        # What a game counts depends on the games after it. In a batch their order is not known, so
        # each counts the mean of 1, DECAY, DECAY², …
        remaining = DECAY**counts.games
        weight = (1 - remaining) / (1 - DECAY) / counts.games
        earlier = self._counts.get(member, [0.0, 0.0, 0.0])
        self._counts[member] = [
            remaining * count + weight * new for count, new in zip(earlier, counts, strict=True)
        ]

    def games(self, member: str) -> float:
        """Returns the decayed number of games against ``member``, less than 1 / (1 - DECAY)."""
        return sum(self._counts.get(member, ()))

    def win_rate(self, member: str) -> float:
        """Returns the share of games against ``member`` that were won; a draw is half a win."""
        wins, draws, _ = self._counts.get(member, (0.0, 0.0, 0.0))
        return (wins + draws / 2 + PRIOR_GAMES / 2) / (self.games(member) + PRIOR_GAMES)

    def to_json(self) -> dict[str, list[float]]:
        """Returns all counts as plain data, from which the constructor makes equal results."""
        return {member: list(each) for member, each in self._counts.items()}
