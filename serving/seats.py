"""The seats of all games in one table: what each may send next, and what the network remembers.

A seat is idle, is acting in an episode, or waits for its action. `outcome_of` says what a row does
to it; all else is that rule for many rows at once. A seat at fault is deaf until the turn ends, as
the rows behind the fault were sent before the game could know of it.

A fault answers a row that awaits an answer. One that ends an episode does not, and the seat's next
row may be under way already, whose answer the fault would be taken for. So that one is refused, and
tells the fault.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.envs.packing import MOST_REWARD
from penstock.models.core_inputs import CoreInputs
from penstock.serving.messages import ALL_FLAGS, ENDED, FIRST, LEAVES

# The most rows of a seat that are taken in one turn: it can end an episode, leave, and begin the
# next.
MOST_ROWS_A_TURN = 3

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


class SeatPhase(IntEnum):
    """What a seat does."""

    IDLE = 0
    ACTING = 1
    """It is in an episode, and has the action for its last row."""
    WAITING = 2
    """It is in an episode, and its row is not decided yet."""
    AT_FAULT = 3
    """Its rows are ignored until the turn ends."""
    REFUSED = 4
    """Its last row ended an episode and was at fault, which the answer to its next row says."""


class RowOutcome(IntEnum):
    """What becomes of a row."""

    DECIDE = 0
    END = 1
    IGNORE = 2
    # From here on, faults.
    UNKNOWN_FLAG = 3
    FIRST_AND_LAST = 4
    NOT_BEGUN = 5
    NOT_ANSWERED = 6
    REPEATED = 7
    REWARD = 8
    # Of games of several sides (`sided_seats.py`).
    GAME_IS_OVER = 9
    ENDS_APART = 10
    GAME_GOES_ON = 11
    # Of a row behind one that ended an episode and was at fault.
    END_REFUSED = 12


# Plain numbers for arithmetic with many rows, as in `messages`.
IDLE, ACTING, WAITING, AT_FAULT, REFUSED = map(int, SeatPhase)
DECIDE = int(RowOutcome.DECIDE)
END = int(RowOutcome.END)
IGNORE = int(RowOutcome.IGNORE)
FIRST_FAULT = int(RowOutcome.UNKNOWN_FLAG)
END_REFUSED = int(RowOutcome.END_REFUSED)
FAULTS = {
    RowOutcome.UNKNOWN_FLAG: ("flags", f"flags has bits above {ALL_FLAGS}; send the known ones"),
    RowOutcome.FIRST_AND_LAST: (
        "flags",
        "a row begins an episode and ends it; send two rows, as a first one awaits its action",
    ),
    RowOutcome.NOT_BEGUN: ("flags", "the seat is in no episode; begin one by a row with flag 1"),
    RowOutcome.NOT_ANSWERED: ("seat", "the seat waits for an action; send its row after the ACT"),
    RowOutcome.REPEATED: ("seat", "the seat has two rows in one STEP; send one"),
    RowOutcome.REWARD: (
        "reward",
        f"the reward is not between {-MOST_REWARD:g} and {MOST_REWARD:g}; scale it",
    ),
    RowOutcome.GAME_IS_OVER: (
        "flags",
        "the game of the seat is over, as another of its seats began anew or was at fault; begin "
        "by a row with flag 1",
    ),
    RowOutcome.ENDS_APART: (
        "flags",
        "another seat of the game plays on, and the returns of all say who has won; end all seats "
        "of a game in one STEP, and let a seat that is out wait until then",
    ),
    RowOutcome.GAME_GOES_ON: (
        "flags",
        "the seat has ended, and others of its game play on; begin when all have ended",
    ),
    RowOutcome.END_REFUSED: (
        "flags",
        "the row before it ended an episode and was at fault; begin by a row with flag 1",
    ),
}
"""The field and the sentence of each fault."""


def outcome_of(phase: SeatPhase, flags: int) -> RowOutcome:
    """Returns what becomes of a row with ``flags`` of a seat in ``phase``."""
    if phase is SeatPhase.AT_FAULT:
        return RowOutcome.IGNORE
    if flags & ~ALL_FLAGS:
        return RowOutcome.UNKNOWN_FLAG
    if phase is SeatPhase.WAITING:
        return RowOutcome.NOT_ANSWERED

    is_first = bool(flags & FIRST)
    if flags & ENDED:
        if is_first:
            return RowOutcome.FIRST_AND_LAST
        is_idle = phase in (SeatPhase.IDLE, SeatPhase.REFUSED)
        return RowOutcome.NOT_BEGUN if is_idle and not flags & LEAVES else RowOutcome.END
    if phase is SeatPhase.REFUSED:
        return RowOutcome.END_REFUSED
    return RowOutcome.DECIDE if is_first or phase is SeatPhase.ACTING else RowOutcome.NOT_BEGUN


_OUTCOMES = np.array(
    [[outcome_of(phase, flags) for flags in range(256)] for phase in SeatPhase], np.uint8
)
_NEXT_PHASE = np.full(len(RowOutcome), SeatPhase.AT_FAULT, np.uint8)
_NEXT_PHASE[RowOutcome.DECIDE] = SeatPhase.WAITING
_NEXT_PHASE[RowOutcome.END] = SeatPhase.IDLE


class StepRows(NamedTuple):
    """Rows of STEPs, each array [rows]."""

    seat: Indices
    """Places in the table."""
    flags: npt.NDArray[np.uint8]
    reward: npt.NDArray[np.float32]
    message: Indices
    """Number of the STEP that each is of."""

    def select(self, chosen: Indices | Bools) -> StepRows:
        """Returns some of the rows."""
        return StepRows(
            self.seat[chosen],
            flags=self.flags[chosen],
            reward=self.reward[chosen],
            message=self.message[chosen],
        )


class SeatTable:
    """All seats, by their place."""

    def __init__(
        self, capacity: int, state_size: int, core_inputs: CoreInputs | None = None
    ) -> None:
        """Create a table.

        Args:
            capacity: seats of all games together.
            state_size: numbers that the network remembers of each.
            core_inputs: what of the last action and reward these have; None for nothing.
        """
        self.capacity = capacity
        self.phase = np.zeros(capacity, np.uint8)
        self.state = np.zeros((capacity, state_size), np.float32)
        self.game = np.zeros(capacity, np.int64)
        """Number of the game that each belongs to."""
        self.taken = 0
        """Seats that belong to a game."""
        self._core_inputs = core_inputs
        self._free = [range(capacity)]
        self._at_fault: list[Indices] = []
        # The last row that names a place, for `are_different`.
        self._last_row = np.zeros(capacity, np.int64)

    def allocate(self, count: int, game: int) -> range | None:
        """Returns ``count`` adjacent places for a game, idle; None if there are not so many."""
        for i, free in enumerate(self._free):
            if len(free) < count:
                continue
            places = free[:count]
            self._free[i : i + 1] = [free[count:]] if len(free) > count else []
            self.phase[places.start : places.stop] = IDLE
            self.game[places.start : places.stop] = game
            self.taken += count
            return places
        return None

    def release(self, places: range) -> None:
        """Free the places of a game that has left."""
        self.taken -= len(places)
        merged: list[range] = []
        for free in sorted([*self._free, places], key=lambda free: free.start):
            if merged and merged[-1].stop == free.start:
                merged[-1] = range(merged[-1].start, free.stop)
            else:
                merged.append(free)
        self._free = merged

    def take(self, rows: StepRows) -> npt.NDArray[np.uint8]:
        """Move the seats of ``rows`` on; returns the `RowOutcome` of each row, uint8 [rows].

        Rows of the same seat are taken in their order.
        """
        if self.are_different(rows.seat):
            return self._take_different(rows)

        count = len(rows.seat)
        numbers = np.arange(count)
        # The first rows of all seats are taken at once, then the second ones, and so on.
        by_seat = np.argsort(rows.seat, kind="stable")
        sorted_seat = rows.seat[by_seat]
        sorted_message = rows.message[by_seat]
        is_repeated = np.zeros(count, np.bool_)
        is_repeated[1:] = sorted_seat[1:] == sorted_seat[:-1]
        starts = np.flatnonzero(~is_repeated)
        ranks = numbers - starts.repeat(np.diff(np.append(starts, count)))

        outcomes = np.full(count, RowOutcome.NOT_ANSWERED, np.uint8)
        for rank in range(MOST_ROWS_A_TURN):
            chosen = by_seat[ranks == rank]
            outcomes[chosen] = self._take_different(rows.select(chosen))

        # A row behind another one of its seat must come from another STEP.
        is_same_step = is_repeated
        is_same_step[1:] &= sorted_message[1:] == sorted_message[:-1]
        outcomes[by_seat[is_same_step]] = RowOutcome.REPEATED
        self.fail(rows.seat[by_seat[is_same_step | (ranks >= MOST_ROWS_A_TURN)]])
        return outcomes

    def are_different(self, seats: Indices) -> bool:
        """Returns whether no seat occurs twice."""
        numbers = np.arange(len(seats))
        self._last_row[seats] = numbers
        return bool((self._last_row[seats] == numbers).all())

    def fail(self, seats: Indices) -> None:
        """Note that these seats are at fault, until the turn ends."""
        self.phase[seats] = AT_FAULT
        self._at_fault.append(seats)

    def refuse(self, seats: Indices) -> None:
        """Note that the observations of these seats' rows are at fault, which were taken."""
        has_ended = self.phase[seats] == IDLE
        self.phase[seats[has_ended]] = REFUSED
        self.fail(seats[~has_ended])

    def are_waiting(self, seats: Indices) -> Bools:
        """Returns which of these seats wait for an action."""
        return np.asarray(self.phase[seats] == WAITING)

    def finish_turn(self, answered: Indices) -> None:
        """Note that the seats in ``answered`` have their action; the turn ends."""
        self.phase[answered] = ACTING
        for seats in self._at_fault:
            self.phase[seats] = IDLE
        self._at_fault.clear()

    def _take_different(self, rows: StepRows) -> npt.NDArray[np.uint8]:
        """Move seats on, none of which occurs twice; returns the outcomes."""
        outcomes = self._outcomes_of(rows)
        next_phase = _NEXT_PHASE[outcomes]
        if outcomes.max(initial=0) >= FIRST_FAULT:
            is_at_fault = outcomes >= FIRST_FAULT
            ends = (rows.flags & ENDED != 0) & (rows.flags & FIRST == 0)
            is_refused = is_at_fault & ends & (self.phase[rows.seat] != WAITING)
            next_phase[is_refused] = REFUSED
            self._at_fault.append(rows.seat[is_at_fault & ~is_refused])
        self.phase[rows.seat] = next_phase
        if self.state.shape[1]:
            begins = (rows.flags & FIRST != 0) & (outcomes == DECIDE)
            self.state[rows.seat[begins]] = 0
            if self._core_inputs is not None and self._core_inputs.reads_reward:
                paid = rows.select(~begins & (outcomes <= END))
                self.state[paid.seat, -1] = self._core_inputs.adjusted(paid.reward)
        return outcomes

    def _outcomes_of(self, rows: StepRows) -> npt.NDArray[np.uint8]:
        """Returns the outcomes of rows of different seats."""
        outcomes: npt.NDArray[Any] = _OUTCOMES[self.phase[rows.seat], rows.flags]
        # Comparing a signalling NaN would warn.
        with np.errstate(invalid="ignore"):
            is_sound = np.abs(rows.reward) <= MOST_REWARD
        if not is_sound.all():
            # The reward of a row that begins an episode means nothing.
            is_taken = (outcomes < FIRST_FAULT) & (outcomes != IGNORE)
            has_reward = rows.flags & FIRST == 0
            outcomes[is_taken & has_reward & ~is_sound] = RowOutcome.REWARD
        return outcomes
