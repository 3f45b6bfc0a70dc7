"""The seats of games of several sides, some of which opponents play.

Seats lie together: places ``seats * g`` to ``seats * g + seats - 1`` of the table are game g.

Invariants:
- A game begins with the first row that begins an episode while none of its seats plays. Others join
  it by their own first rows, at once or when it is their turn. It is over when no seat plays.
- A game is played by one draw from its beginning to its end, and the same seats learn.
- Where opponents play, who has won is told by the returns of all seats, so these end in one STEP.
- A game has no result if a seat leaves it, begins anew in it, or is at fault.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.actors.matches import outcomes_of
from penstock.core.draws import NO_DRAW
from penstock.envs.seats import Seating
from penstock.models.core_inputs import CoreInputs
from penstock.serving.match_draws import MIRROR, MatchDraws
from penstock.serving.messages import FIRST, LEAVES
from penstock.serving.opponents import NO_POLICY, Opponents
from penstock.serving.seats import (
    DECIDE,
    END,
    FIRST_FAULT,
    Bools,
    Indices,
    RowOutcome,
    SeatTable,
    StepRows,
)


class GameOutcomes(NamedTuple):
    """What the game says of rows, each array [rows]."""

    learns: Bools
    """Whether the row is one of the policy that is trained, in a game. Of others the rest has no
    meaning."""
    draw: npt.NDArray[np.uint64]
    """The number of the draw that plays against it (penstock.core.draws)."""
    outcome: npt.NDArray[np.int8]
    """Who has won: -1 lost, 0 drawn, 1 won; 0 where the episode goes on."""


class SidedSeats(SeatTable):
    """All seats, and who plays each."""

    def __init__(
        self,
        capacity: int,
        state_size: int,
        core_inputs: CoreInputs | None = None,
        *,
        seating: Seating,
        draws: MatchDraws,
        opponents: Opponents,
    ) -> None:
        """Create a table.

        Args:
            capacity: as of `SeatTable`; of it whole games are used.
            state_size: as of `SeatTable`.
            core_inputs: as of `SeatTable`.
            seating: of a game.
            draws: say who plays a game that begins.
            opponents: play the seats that do not learn; they have weights.
        """
        games = capacity // seating.seats
        capacity = games * seating.seats
        super().__init__(capacity, state_size, core_inputs)
        self.seating = seating
        self._draws = draws
        self._opponents = opponents
        every_seat = np.arange(seating.seats)
        self._learning = np.array([np.isin(every_seat, turn) for turn in draws.turns])
        """By turn: the seats that learn in a match, bool ``[turns, seats]``."""

        # By place.
        self.plays = np.zeros(capacity, np.bool_)
        """Whether the seat is in an episode of its game."""
        self.learns = np.ones(capacity, np.bool_)
        """Whether the policy that is trained plays it in its present game, or the last one."""
        self._has_ended = np.zeros(capacity, np.bool_)  # whether it has been in its present game
        self._returns = np.zeros(capacity)
        self._counts_result = np.zeros(capacity, np.bool_)  # first learning seat of a match
        # What is recorded of the last row in which it played on or ended; a turn has one at most.
        self._row_learns = np.zeros(capacity, np.bool_)
        self._row_draw = np.zeros(capacity, np.uint64)
        self._row_outcome = np.zeros(capacity, np.int8)

        # By game.
        self._playing = np.zeros(games, np.int64)
        """Number of seats that play."""
        self._opponent = np.full(games, MIRROR)
        self._has_result = np.zeros(games, np.bool_)
        self._rows = np.zeros(games, np.int64)  # learning rows of the present game

        self._abandoned: list[Indices] = []

    def release(self, places: range) -> None:
        """Free the places of a connection that has left; its games are over without a result."""
        seats = np.arange(places.start, places.stop)
        self._abandon_games(np.unique(seats // self.seating.seats))
        self._abandoned.clear()
        super().release(places)

    def fail(self, seats: Indices) -> None:
        """Note that these seats are at fault, until the turn ends; their games are over."""
        super().fail(seats)
        self._abandon(seats)

    def are_recorded(self, seats: Indices) -> Bools:
        """Returns which seats play a game that they learn from."""
        return np.asarray(self.plays[seats] & self.learns[seats])

    def outcomes(self, seats: Indices) -> GameOutcomes:
        """Returns what is known of the last rows of ``seats``, which begin no episode and were
        taken by the last `take`."""
        return GameOutcomes(
            learns=self._row_learns[seats],
            draw=self._row_draw[seats],
            outcome=self._row_outcome[seats],
        )

    def take_abandoned(self) -> Indices:
        """Returns the seats whose recorded episode is over without a result since the last call."""
        if not self._abandoned:
            return np.zeros(0, np.int64)
        abandoned, self._abandoned = self._abandoned, []
        seats = np.unique(np.concatenate(abandoned))
        return seats[~self.are_recorded(seats)]  # the others have begun anew

    def opponents_of(self, seats: Indices) -> Indices:
        """Returns the numbers of the opponents that decide for ``seats``, as `Opponents.decide`
        takes them; `NO_POLICY` where the policy that is trained does."""
        numbers = self._opponents.policies[seats // self.seating.seats]
        return np.where(self.learns[seats], NO_POLICY, numbers)

    # ---------------------------------------------------------------------------- rows

    def _outcomes_of(self, rows: StepRows) -> npt.NDArray[np.uint8]:
        """Returns the outcomes of rows of different seats, also by the rules of games."""
        outcomes = super()._outcomes_of(rows)
        self._abandon(rows.seat[outcomes >= FIRST_FAULT])

        begins = (outcomes == DECIDE) & (rows.flags & FIRST != 0)
        self._take_rest(rows, outcomes, np.flatnonzero(~begins))
        if begins.any():
            self._begin(rows.seat, outcomes, np.flatnonzero(begins))
        decided = rows.seat[outcomes == DECIDE]
        learning = decided[self.learns[decided]]
        np.add.at(self._rows, learning // self.seating.seats, 1)
        return outcomes

    def _take_rest(self, rows: StepRows, outcomes: npt.NDArray[np.uint8], chosen: Indices) -> None:
        """Take the ``chosen`` rows, which begin no episode; ``outcomes`` is changed."""
        chosen = chosen[(outcomes[chosen] == DECIDE) | (outcomes[chosen] == END)]
        seats = rows.seat[chosen]
        plays = self.plays[seats]
        if not plays.all():
            # A seat that plays no game may say that it leaves. If it has ended just before, what is
            # recorded of that row stays.
            may_leave = (outcomes[chosen] == END) & (rows.flags[chosen] & LEAVES != 0)
            self._row_learns[seats] &= self._has_ended[seats]
            outcomes[chosen[~plays & ~may_leave]] = RowOutcome.GAME_IS_OVER
            chosen = chosen[plays]
            seats = seats[plays]
        self._returns[seats] += rows.reward[chosen]
        draws = self._opponents.draws[seats // self.seating.seats]
        self._row_learns[seats] = self.learns[seats]
        self._row_draw[seats] = np.where(self._counts_result[seats], draws, NO_DRAW)
        self._row_outcome[seats] = 0

        ends = outcomes[chosen] == END
        if ends.any():
            ended = chosen[ends]
            leaves = rows.flags[ended] == LEAVES
            self._leave(rows.seat[ended[leaves]])
            self._end(rows, outcomes, ended[~leaves])

    def _end(self, rows: StepRows, outcomes: npt.NDArray[np.uint8], ended: Indices) -> None:
        """Take rows that end the episodes of seats; ``outcomes`` is changed.

        All seats of a game that play end in the same STEP.
        """
        if not len(ended):
            return
        games = rows.seat[ended] // self.seating.seats
        # Rows of the same game and the same STEP.
        together = games * (rows.message.max() + 1) + rows.message[ended]
        _, group, size = np.unique(together, return_inverse=True, return_counts=True)
        is_apart = size[group] < self._playing[games]
        if is_apart.any():
            outcomes[ended[is_apart]] = RowOutcome.ENDS_APART
            self._abandon(rows.seat[ended[is_apart]])
            ended = ended[~is_apart]
            games = games[~is_apart]
            if not len(ended):
                return

        # The results are those of all seats, also of those that never came to play.
        self._note_results(np.unique(games))
        self._leave(rows.seat[ended])

    def _note_results(self, games: Indices) -> None:
        """Write who has won ``games``, which differ and end now."""
        places = self._places_of(games)
        returns = self._returns[places].reshape(-1)
        is_over = np.ones(returns.size, np.bool_)
        outcomes = outcomes_of(returns, is_over, self.seating.sides)
        self._row_outcome[places] = outcomes.reshape(places.shape)
        self._row_draw[places[~self._has_result[games]]] = NO_DRAW

    def _leave(self, seats: Indices) -> None:
        """Note that these seats, which play, have ended their episodes."""
        self.plays[seats] = False
        self._has_ended[seats] = True
        games = seats // self.seating.seats
        np.subtract.at(self._playing, games, 1)
        self._has_result[games] = False  # it is noted already, or unknown for ever
        for game in np.unique(games[self._playing[games] == 0]).tolist():
            self._finish(game)

    def _begin(self, seat: Indices, outcomes: npt.NDArray[np.uint8], chosen: Indices) -> None:
        """Take the ``chosen`` rows, which begin episodes; ``outcomes`` is changed."""
        seats = seat[chosen]
        self._abandon(seats)  # those that play begin anew
        games = seats // self.seating.seats
        for game in np.unique(games[self._playing[games] == 0]).tolist():
            self._begin_game(game)

        goes_on = self._has_ended[seats]
        outcomes[chosen[goes_on]] = RowOutcome.GAME_GOES_ON
        joining = seats[~goes_on]
        self.plays[joining] = True
        np.add.at(self._playing, games[~goes_on], 1)

    # ---------------------------------------------------------------------------- games

    def _begin_game(self, game: int) -> None:
        """Draw who plays a game."""
        draw = self._draws.begin()
        self._opponents.begin(game, draw.opponent)
        self._opponent[game] = draw.opponent
        self._has_result[game] = True
        self._rows[game] = 0

        places = slice(game * self.seating.seats, (game + 1) * self.seating.seats)
        self._has_ended[places] = False
        self._returns[places] = 0.0
        self._counts_result[places] = False
        self.learns[places] = True
        if draw.opponent != MIRROR:
            self.learns[places] = self._learning[draw.turn]
            first_learning = game * self.seating.seats + self._draws.turns[draw.turn][0]
            self._counts_result[first_learning] = True

    def _finish(self, game: int) -> None:
        """Note that a game is over, as no seat plays."""
        self._draws.end(int(self._opponent[game]), int(self._rows[game]))
        self._opponents.end(game)

    def _abandon(self, seats: Indices) -> None:
        """End the games of those of these seats that play, without a result."""
        playing = seats[self.plays[seats]]
        if len(playing):
            self._abandon_games(np.unique(playing // self.seating.seats))

    def _abandon_games(self, games: Indices) -> None:
        """End those of these different games in which some seat plays, without a result."""
        games = games[self._playing[games] > 0]
        places = self._places_of(games).reshape(-1)
        playing = places[self.plays[places]]
        self._abandoned.append(playing[self.learns[playing]])
        self.plays[playing] = False
        self._playing[games] = 0
        for game in games.tolist():
            self._finish(game)

    def _places_of(self, games: Indices) -> Indices:
        """Returns the places of games, ``[games, seats]``."""
        seats = self.seating.seats
        return games[:, None] * seats + np.arange(seats)
