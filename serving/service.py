"""Decides for the seats of all games: rows come in, one batch is decided, actions go out.

It knows nothing of connections and loops (`port.py`), so it is tested without them. In each turn
its owner calls `take` for rows as often as some arrive, then `decide` once, which ends the turn.
All that happens to a seat passes through these two calls and `leave`, and a `GameRecorder` records
all of it for a learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.slots import OPPONENT, OUTCOME
from penstock.core.params import Array, Float32, Stamp
from penstock.envs.space_difference import difference
from penstock.envs.space_json import SPACE_NBYTES, claimed_nbytes, to_json
from penstock.envs.vector_env import action_map
from penstock.evaluation.loaded_policy import LoadedPolicy
from penstock.serving.figures import ServiceFigures
from penstock.serving.game_recorder import GameRecorder
from penstock.serving.match_draws import MatchDraws
from penstock.serving.messages import (
    FIRST,
    LEAVES,
    PROTOCOL,
    TERMINATED,
    TRUNCATED,
    Hello,
    MessageError,
)
from penstock.serving.opponents import NO_POLICY, Opponents
from penstock.serving.rows import ObservationReader, RowLayout, Rows, describe_layouts
from penstock.serving.seats import (
    DECIDE,
    END,
    END_REFUSED,
    FAULTS,
    FIRST_FAULT,
    IDLE,
    IGNORE,
    REFUSED,
    Bools,
    Indices,
    RowOutcome,
    SeatTable,
    StepRows,
)
from penstock.serving.sided_seats import SidedSeats

MOST_SEATS = 65_536
FIRST_OR_LEAVES = FIRST | LEAVES
# The most rows at fault of one game in one turn; one with more is closed.
MOST_FAULTS = 256
# The most memory for what networks remember of seats.
STATE_NBYTES = 1 << 30


class RowFault(NamedTuple):
    """Why a row was not taken."""

    row: int
    """Its number among the rows that were given."""
    field: str
    reason: str
    is_told: bool = True
    """Whether the game is told now; else it is by the answer to the seat's next row."""


class DecidedRows(NamedTuple):
    """The actions of one batch."""

    seat: Indices
    """Places in the table of seats, in the order in which their rows were taken."""
    actions: Rows
    """A row of bytes for each."""


class _Pending(NamedTuple):
    """Rows that wait to be decided."""

    seat: Indices
    observations: Array
    """Packed, ``[rows, *shape]``."""


class Service:
    """One policy, and the seats that it decides for."""

    def __init__(
        self,
        policy: LoadedPolicy,
        name: str = "",
        most_seats: int = MOST_SEATS,
        recorder: GameRecorder | None = None,
        opponents: Opponents | None = None,
    ) -> None:
        """Create a service without games.

        Args:
            policy: decides, greedy or sampled as its `sample` says.
            name: of the run or the file that it comes from, which games are told.
            most_seats: of all games together.
            recorder: records what is played, for a learner. The policy must sample, and rows wait
                for its first weights (`load`). None if nobody learns.
            opponents: play some seats of games of several sides; they have weights. None if the
                policy plays all.
        """
        if recorder is not None:
            assert policy.sample, "a learner trains on sampled actions"
            most_seats = min(most_seats, recorder.capacity)
        self.recorder = recorder
        self.policy = policy
        self.name = name
        self.figures = ServiceFigures()
        self._batch_policy = policy.batch_policy

        # The seats, and who plays them.
        state_size = self._batch_policy.state_size
        if state_size:
            most_seats = min(most_seats, max(STATE_NBYTES // (4 * state_size), 1))
        core_inputs = self._batch_policy.core_inputs
        self.seats = SeatTable(most_seats, state_size, core_inputs)
        self._seating = policy.info.seating
        self._opponents = opponents
        self._sided: SidedSeats | None = None
        """The same seats, where opponents play some of them."""
        if opponents is not None:
            self._sided = SidedSeats(
                most_seats,
                state_size,
                core_inputs,
                seating=self._seating,
                draws=MatchDraws(policy.config.league, self._seating),
                opponents=opponents,
            )
            self.seats = self._sided

        # Observations and actions as games send them.
        env_id = policy.config.env.id
        self.observations = ObservationReader(
            env_id,
            policy.observation_space,
            policy.action_space,
            embed_above=policy.info.embed_above,
        )
        self.actions = RowLayout(policy.action_space, "action")
        self.most_space_nbytes = 2 * max(
            claimed_nbytes(to_json(space)) + SPACE_NBYTES
            for space in (policy.observation_space, policy.action_space)
        )
        """The most memory that a space in HELLO may take: one that fits takes no more."""
        self._to_env_actions = action_map(policy.action_space)

        # What changes from turn to turn.
        self._pending: list[_Pending] = []
        self._untold: dict[int, RowFault] = {}
        """By place: the faults of rows that ended episodes, which games are told later."""
        self._stamp: Stamp | None = None
        """Of the weights that `load` got."""

    def load(self, weights: Float32, stamp: Stamp) -> None:
        """Decide by other weights of the learner from the next batch on; between two turns."""
        untrained = stamp.version == 0
        self._batch_policy.load(weights, untrained=untrained, number=stamp.version)
        self._stamp = stamp

    def join(self, hello: Hello, game: int) -> range:
        """Returns the places of the seats of a new game, whose number is ``game``.

        Raises:
            MessageError: its spaces are not those of the policy, or there is no room for its seats.
        """
        policy = self.policy
        trained = (policy.observation_space, policy.action_space)
        # A space without parts has the length 0, so `or` would take it for none.
        present = (
            policy.observation_space if hello.observation is None else hello.observation,
            policy.action_space if hello.action is None else hello.action,
        )
        if differs := difference(trained, present):
            raise MessageError(
                "action" if differs.column.startswith("actions") else "observation",
                f"the {differs.column} of the game are {differs.present}, and this policy was "
                f"trained on {policy.config.env.id}, whose {differs.column} are {differs.trained}",
            )

        self._check_sides(hello)
        places = self.seats.allocate(hello.seats, game)
        if places is None:
            raise MessageError(
                "seats",
                f"there is no room for {hello.seats} seats, as {self.seats.taken} of "
                f"{self.seats.capacity} are taken; ask for fewer",
            )
        return places

    def _check_sides(self, hello: Hello) -> None:
        """Raise MessageError unless the seats of a game are those of the run."""
        sides = self._seating.sides
        if self.recorder is not None and hello.sides not in (None, sides):
            raise MessageError(
                "sides",
                f"the sides of the game are {[*(hello.sides or ())]}, and those of this run are "
                f"{[*sides]}; start another run for it",
            )
        if self._sided is not None and hello.seats % len(sides):
            raise MessageError(
                "seats",
                f"{hello.seats} seats are no whole games of {len(sides)} seats, some of which "
                f"opponents play; ask for a multiple of {len(sides)}",
            )

    def leave(self, places: range) -> None:
        """Free the places of a game that has left; not between `take` and `decide`."""
        for place in [place for place in self._untold if place in places]:
            del self._untold[place]
        if self.recorder is not None:
            self.recorder.leave(np.arange(places.start, places.stop))
            # A row that waits for a place that is held must not be decided for the next game.
            self.seats.phase[places.start : places.stop] = IDLE
            self._keep_waiting()
        self.seats.release(places)

    def welcome(self, seats: int) -> dict[str, Any]:
        """Returns the content of the WELCOME for a game with so many seats."""
        content = {
            "protocol": PROTOCOL,
            **self.describe(),
            "seats": seats,
            "learns": self.recorder is not None,
        }
        if self._sided is not None:
            content["sides"] = [*self._seating.sides]
        return content

    def describe(self) -> dict[str, Any]:
        """Returns the policy, the spaces and the layouts of rows, as JSON."""
        return {
            **describe_layouts(self.observations.layout, self.actions),
            "policy": {
                "run": self.name,
                "env": self.policy.config.env.id,
                "play": "sampled" if self.policy.sample else "greedy",
            },
        }

    def take(self, rows: StepRows, observations: Rows) -> list[RowFault]:
        """Take rows of STEPs: those of seats that go on are decided with the next batch.

        Args:
            rows: their seats, flags and rewards.
            observations: their observations as bytes, ``[rows, nbytes]``, writable.

        Returns: the rows at fault. Their seats must begin new episodes when they are told.
        """
        packed: Array | None = None
        outcomes = self.seats.take(rows)
        if not outcomes.any():  # all go on, as most do
            packed, faults = self._take_shown(rows.seat, observations)
            if self.recorder is None:
                return faults
            if faults or rows.flags.any() or self._sided is not None:
                self._record(rows, outcomes, np.arange(len(outcomes)), packed, faults)
            else:
                self.recorder.outcome(rows.seat, rows.reward, None, None)
                self.recorder.show(rows.seat, packed)
            return faults

        at_fault = np.flatnonzero(outcomes >= FIRST_FAULT)
        if len(at_fault) > MOST_FAULTS:
            # Rows of a game lie together. One with more faults is closed, so they need no words.
            game = self.seats.game[rows.seat[at_fault]]
            is_told = np.ones(len(game), np.bool_)
            is_told[MOST_FAULTS + 1 :] = game[MOST_FAULTS + 1 :] != game[: -MOST_FAULTS - 1]
            at_fault = at_fault[is_told]
        faults = [RowFault(int(row), *FAULTS[RowOutcome(outcomes[row])]) for row in at_fault]

        # An observation is checked also where an episode ends.
        is_shown = (outcomes == DECIDE) | ((outcomes == END) & (rows.flags & LEAVES == 0))
        shown = np.flatnonzero(is_shown)
        if len(shown):
            goes_on = outcomes[shown] == DECIDE
            packed, further = self._take_shown(rows.seat[shown], observations[shown], goes_on)
            faults += [fault._replace(row=int(shown[fault.row])) for fault in further]
        if self.recorder is not None:
            self._record(rows, outcomes, shown, packed, faults)
        return [self._when_told(rows.seat, outcomes, fault) for fault in faults]

    def _when_told(
        self, seat: Indices, outcomes: npt.NDArray[np.uint8], fault: RowFault
    ) -> RowFault:
        """Returns what a game is told now of a fault; that of a row that ended an episode waits."""
        place = int(seat[fault.row])
        if self.seats.phase[place] == REFUSED:
            self._untold[place] = fault
            return fault._replace(is_told=False)
        untold = self._untold.pop(place, None)
        if outcomes[fault.row] != END_REFUSED:
            return fault
        if untold is None:  # it was told just now, as both rows have arrived together
            return fault._replace(is_told=False)
        return untold._replace(row=fault.row)

    def _take_shown(
        self, seat: Indices, observations: Rows, goes_on: Bools | None = None
    ) -> tuple[Array, list[RowFault]]:
        """Read observations, and keep those of rows that go on; all do if it is None.

        Returns: the packed observations, and the rows at fault.
        """
        packed, reasons = self.observations.read(observations, goes_on)
        if reasons:
            self.seats.refuse(seat[list(reasons)])
        if goes_on is None:
            self._pending.append(_Pending(seat, packed))
        else:
            self._pending.append(_Pending(seat[goes_on], packed[goes_on]))
        return packed, [RowFault(row, "observation", reason) for row, reason in reasons.items()]

    def _record(
        self,
        rows: StepRows,
        outcomes: npt.NDArray[np.uint8],
        shown: Indices,
        packed: Array | None,
        faults: Sequence[RowFault],
    ) -> None:
        """Record rows that were taken.

        Args:
            rows: of all seats.
            outcomes: what became of each, uint8 [rows].
            shown: the rows whose observations were read.
            packed: these observations, ``[len(shown), *shape]``; None if there are none.
            faults: the rows at fault that are told; those of bad observations are among them.
        """
        recorder = self.recorder
        assert recorder is not None
        is_all_shown = len(shown) == len(outcomes)
        if (
            packed is not None
            and is_all_shown
            and not faults
            and self._sided is None
            and self.seats.are_different(rows.seat)
        ):
            self._record_different(recorder, rows, packed)
            return

        # A row without an observation shows what its seat saw last.
        seen = recorder.observations(rows.seat)
        if packed is not None:
            seen[shown] = packed
        is_sound = outcomes <= END
        is_sound[[fault.row for fault in faults]] = False
        is_at_fault = ~is_sound & (outcomes != IGNORE)
        if self._sided is not None:
            is_sound &= self._are_of_learners(rows)

        # The first rows of all seats are recorded at once, then the second ones, and so on.
        remaining = np.flatnonzero(is_sound)
        while not self.seats.are_different(rows.seat[remaining]):
            _, firsts = np.unique(rows.seat[remaining], return_index=True)
            chosen = remaining[firsts]
            self._record_different(recorder, rows.select(chosen), seen[chosen])
            remaining = np.delete(remaining, firsts)
        self._record_different(recorder, rows.select(remaining), seen[remaining])

        if is_at_fault.any():
            recorder.abandon(rows.seat[is_at_fault])
        if self._sided is not None:
            recorder.abandon(self._sided.take_abandoned())

    def _are_of_learners(self, rows: StepRows) -> Bools:
        """Returns which rows, of games of several sides, are not those of opponents."""
        assert self._sided is not None
        is_first = rows.flags & FIRST != 0
        outcomes = self._sided.outcomes(rows.seat)
        return np.where(is_first, self._sided.learns[rows.seat], outcomes.learns)

    def _game_columns(self, seats: Indices) -> dict[str, Array]:
        """Returns what the last rows of ``seats`` record of their games, by column."""
        if self._sided is None:
            return {}
        outcomes = self._sided.outcomes(seats)
        return {OPPONENT: outcomes.draw, OUTCOME: outcomes.outcome}

    def _record_different(self, recorder: GameRecorder, rows: StepRows, packed: Array) -> None:
        """Record rows of seats none of which occurs twice; ``packed`` is what each sees."""
        flags = rows.flags
        seat = rows.seat

        # A seat that leaves may have no action outstanding.
        acted = flags & FIRST_OR_LEAVES == 0
        leaves = flags & LEAVES != 0
        any_leaves = bool(leaves.any())
        if any_leaves:
            acted |= leaves & (flags & (TERMINATED | TRUNCATED) != 0) & recorder.are_decided(seat)
        chosen = np.flatnonzero(acted)
        of_acted = flags[chosen]
        truncated = of_acted & TRUNCATED != 0
        recorder.outcome(
            seat[chosen],
            rows.reward[chosen],
            terminated=of_acted & TERMINATED != 0,
            truncated=truncated,
            recorded=self._game_columns(seat[chosen]),
        )
        if len(chosen) < len(seat):
            recorder.first(seat[flags & FIRST != 0])
        if not any_leaves:
            recorder.show(seat, packed)
        else:
            is_shown = acted | ~leaves
            recorder.show(seat[is_shown], packed[is_shown])

        # The return of an episode that was cut off goes on with the value of what was seen last.
        if truncated.any():
            self._decide_last(seat[chosen[of_acted & (TERMINATED | TRUNCATED) == TRUNCATED]])
        if any_leaves:
            recorder.leave(seat[leaves])

    def _decide_last(self, seat: Indices) -> None:
        """Record what the policy says of the last observations of episodes."""
        if not len(seat):  # all have terminated too
            return
        assert self.recorder is not None
        assert self._stamp is not None
        state: Float32 = self.seats.state[seat]
        batch = self._batch_policy.act(self.recorder.observations(seat), state, seat)
        self.recorder.looked(seat, batch, state, self._stamp)

    def _keep_waiting(self) -> None:
        """Forget pending rows of seats that do not wait any more."""
        pending = []
        for rows in self._pending:
            waits = self.seats.are_waiting(rows.seat)
            pending.append(_Pending(rows.seat[waits], rows.observations[waits]))
        self._pending = [rows for rows in pending if len(rows.seat)]

    def decide(self) -> DecidedRows | None:
        """Decide for all rows that wait, and end the turn; None if no row waits.

        Rows of places that the recorder holds wait for a later turn, and before the learner's first
        weights all do.
        """
        pending, self._pending = self._pending, []
        if not pending:
            self.seats.finish_turn(np.zeros(0, np.int64))
            return None

        if len(pending) == 1:
            [(seat, observations)] = pending
        else:
            seat = np.concatenate([rows.seat for rows in pending])
            observations = np.concatenate([rows.observations for rows in pending])
        # A seat may have been at fault after its row was taken.
        waits = self.seats.are_waiting(seat)
        if not waits.all():
            seat = seat[waits]
            observations = observations[waits]
        if self.recorder is not None and (self.recorder.is_holding or self._stamp is None):
            is_held = self.recorder.are_held(seat)
            if self._sided is not None:
                is_held &= self._sided.are_recorded(seat)
            is_held |= self._stamp is None
            if is_held.any():
                self._pending = [_Pending(seat[is_held], observations[is_held])]
                seat = seat[~is_held]
                observations = observations[~is_held]
        if not len(seat):
            self.seats.finish_turn(seat)
            return None

        state: Float32 = self.seats.state[seat]
        if self._sided is not None:
            actions, next_state = self._act_among_opponents(seat, observations, state)
        elif self.recorder is not None:
            actions, next_state = self._act(seat, observations, state)
        else:
            actions, next_state = self._batch_policy.decide(
                observations, state, sample=self.policy.sample
            )
        self.seats.state[seat] = next_state
        self.seats.finish_turn(seat)
        self.figures.count_batch(len(seat))

        action_rows = np.zeros((len(seat), self.actions.nbytes), np.uint8)
        self.actions.write(self._to_env_actions(actions), action_rows)
        return DecidedRows(seat, action_rows)

    def _act(self, seat: Indices, observations: Array, state: Float32) -> tuple[Array, Float32]:
        """Decide for seats that learn, and record it; returns actions and the next state."""
        assert self.recorder is not None
        assert self._stamp is not None
        batch = self._batch_policy.act(observations, state, seat)
        if self._sided is not None:
            # The game of a seat may be over since its row was taken.
            plays = self._sided.are_recorded(seat)
            if not plays.all():
                self.recorder.decided(seat[plays], batch.select(plays), state[plays], self._stamp)
                return batch.actions, batch.next_state
        self.recorder.decided(seat, batch, state, self._stamp)
        return batch.actions, batch.next_state

    def _act_among_opponents(
        self, seat: Indices, observations: Array, state: Float32
    ) -> tuple[Array, Float32]:
        """Decide for seats of which opponents play some; returns actions and the next state."""
        assert self._sided is not None
        assert self._opponents is not None
        numbers = self._sided.opponents_of(seat)
        is_own = numbers == NO_POLICY
        if is_own.all():
            return self._act(seat, observations, state)
        actions, next_state = self._opponents.decide(
            numbers[~is_own], observations[~is_own], state[~is_own]
        )
        if not is_own.any():
            return actions, next_state

        own_actions, own_state = self._act(seat[is_own], observations[is_own], state[is_own])
        all_actions = np.empty((len(seat), *actions.shape[1:]), actions.dtype)
        all_actions[is_own] = own_actions
        all_actions[~is_own] = actions
        all_states = np.empty_like(state)
        all_states[is_own] = own_state
        all_states[~is_own] = next_state
        return all_actions, all_states
