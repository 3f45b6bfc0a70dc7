"""Decides for the seats of all games: rows come in, one batch is decided, actions go out.

It knows nothing of connections and loops (`port.py`), so it is tested without them. In each turn
its owner calls `take` for rows as often as some arrive, then `decide` once, which ends the turn.
All that happens to a seat passes through these two calls and `leave`, and with a `Recorder` all of
it is recorded for a learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.params import Array, Float32, Stamp
from penstock.envs.space_difference import difference
from penstock.envs.space_json import SPACE_NBYTES, claimed_nbytes, to_json
from penstock.envs.vector_env import action_map
from penstock.evaluation.loaded_policy import LoadedPolicy
from penstock.serving.figures import ServiceFigures
from penstock.serving.messages import (
    FIRST,
    LEAVES,
    PROTOCOL,
    TERMINATED,
    TRUNCATED,
    Hello,
    MessageError,
)
from penstock.serving.recorder import Recorder
from penstock.serving.rows import ObservationReader, RowLayout, Rows, describe_layouts
from penstock.serving.seats import (
    DECIDE,
    END,
    FAULTS,
    FIRST_FAULT,
    IDLE,
    IGNORE,
    Bools,
    Indices,
    RowOutcome,
    SeatTable,
    StepRows,
)

MOST_SEATS = 65_536
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
        recorder: Recorder | None = None,
    ) -> None:
        """Create a service without games.

        Args:
            policy: decides, greedy or sampled as its `sample` says.
            name: of the run or the file that it comes from, which games are told.
            most_seats: of all games together.
            recorder: records what is played, for a learner. The policy must sample, and rows wait
                for its first weights (`load`). None if nobody learns.
        """
        if recorder is not None:
            assert policy.sample, "a learner trains on sampled actions"
            most_seats = min(most_seats, recorder.capacity)
        self.recorder = recorder
        self.policy = policy
        self.name = name
        self.figures = ServiceFigures()
        self._batch_policy = policy.batch_policy
        state_size = self._batch_policy.state_size
        if state_size:
            most_seats = min(most_seats, max(STATE_NBYTES // (4 * state_size), 1))
        self.seats = SeatTable(most_seats, state_size)
        env_id = policy.config.env.id
        self.observations = ObservationReader(env_id, policy.observation_space, policy.action_space)
        self.actions = RowLayout(policy.action_space, "action")
        self.most_space_nbytes = 2 * max(
            claimed_nbytes(to_json(space)) + SPACE_NBYTES
            for space in (policy.observation_space, policy.action_space)
        )
        """The most memory that a space in HELLO may take: one that fits takes no more."""
        self._to_env_actions = action_map(policy.action_space)
        self._pending: list[_Pending] = []
        self._stamp: Stamp | None = None
        """Of the weights that `load` got."""

    def load(self, weights: Float32, stamp: Stamp) -> None:
        """Decide by other weights of the learner from the next batch on; between two turns."""
        self._batch_policy.load(weights, untrained=stamp.version == 0)
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

        places = self.seats.allocate(hello.seats, game)
        if places is None:
            raise MessageError(
                "seats",
                f"there is no room for {hello.seats} seats, as {self.seats.taken} of "
                f"{self.seats.capacity} are taken; ask for fewer",
            )
        return places

    def leave(self, places: range) -> None:
        """Free the places of a game that has left; not between `take` and `decide`."""
        if self.recorder is not None:
            self.recorder.leave(np.arange(places.start, places.stop))
            # A row that waits for a place that is held must not be decided for the next game.
            self.seats.phase[places.start : places.stop] = IDLE
            self._keep_waiting()
        self.seats.release(places)

    def welcome(self, seats: int) -> dict[str, Any]:
        """Returns the content of the WELCOME for a game with so many seats."""
        return {
            "protocol": PROTOCOL,
            **self.describe(),
            "seats": seats,
            "learns": self.recorder is not None,
        }

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

        Returns: the rows at fault. Their seats must begin new episodes.
        """
        outcomes = self.seats.take(rows)
        if not outcomes.any():  # all go on, as most do
            packed, faults = self._take_shown(rows.seat, observations)
            if self.recorder is not None:
                self._record(rows, outcomes, np.arange(len(outcomes)), packed, faults)
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
        packed = np.zeros(0)
        if len(shown):
            goes_on = outcomes[shown] == DECIDE
            packed, further = self._take_shown(rows.seat[shown], observations[shown], goes_on)
            faults += [fault._replace(row=int(shown[fault.row])) for fault in further]
        if self.recorder is not None:
            self._record(rows, outcomes, shown, packed, faults)
        return faults

    def _take_shown(
        self, seat: Indices, observations: Rows, goes_on: Bools | None = None
    ) -> tuple[Array, list[RowFault]]:
        """Read observations, and keep those of rows that go on; all do if it is None.

        Returns: the packed observations, and the rows at fault.
        """
        packed, reasons = self.observations.read(observations)
        if reasons:
            self.seats.fail(seat[list(reasons)])
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
        packed: Array,
        faults: Sequence[RowFault],
    ) -> None:
        """Record rows that were taken.

        Args:
            rows: of all seats.
            outcomes: what became of each, uint8 [rows].
            shown: the rows whose observations were read.
            packed: these observations, ``[len(shown), *shape]``.
            faults: the rows at fault that are told; those of bad observations are among them.
        """
        assert self.recorder is not None
        is_sound = outcomes <= END
        is_sound[[fault.row for fault in faults]] = False
        place_in_packed = np.zeros(len(outcomes), np.int64)
        place_in_packed[shown] = np.arange(len(shown))

        # The first rows of all seats are recorded at once, then the second ones, and so on.
        left = np.flatnonzero(is_sound)
        while len(left):
            chosen = left
            if not self.seats.are_different(rows.seat[left]):
                _, firsts = np.unique(rows.seat[left], return_index=True)
                chosen = left[firsts]
            self._record_different(rows.select(chosen), packed, place_in_packed[chosen])
            left = np.setdiff1d(left, chosen)

        is_at_fault = ~is_sound & (outcomes != IGNORE)
        if is_at_fault.any():
            self.recorder.abandon(rows.seat[is_at_fault])

    def _record_different(self, rows: StepRows, packed: Array, places: Indices) -> None:
        """Record rows of seats none of which occurs twice; ``packed[places]`` is what they saw."""
        recorder = self.recorder
        assert recorder is not None
        if not rows.flags.any():  # all go on, as most do
            goes_on = np.zeros(len(places), np.bool_)
            recorder.outcome(rows.seat, rows.reward, goes_on, goes_on, packed[places])
            return

        # What came of actions. A seat that leaves may have none outstanding, and sees nothing more.
        flags = rows.flags
        is_first = flags & FIRST != 0
        leaves = flags & LEAVES != 0
        terminated = flags & TERMINATED != 0
        truncated = flags & TRUNCATED != 0
        acted = np.flatnonzero(~is_first & ~leaves)
        recorder.outcome(
            rows.seat[acted],
            rows.reward[acted],
            terminated[acted],
            truncated[acted],
            packed[places[acted]],
        )
        last = np.flatnonzero(leaves & (terminated | truncated) & recorder.are_decided(rows.seat))
        if len(last):
            recorder.outcome(
                rows.seat[last],
                rows.reward[last],
                terminated[last],
                truncated[last],
                recorder.observations(rows.seat[last]),
            )

        # The return of an episode that was cut off goes on with the value of what was seen last.
        cut_off = truncated & ~terminated
        cut_off[leaves] = False
        cut_off[last] = (truncated & ~terminated)[last]
        if cut_off.any():
            self._decide_last(rows.seat[cut_off])

        if is_first.any():
            recorder.first(rows.seat[is_first], packed[places[is_first]])
        if leaves.any():
            recorder.leave(rows.seat[leaves])

    def _decide_last(self, seat: Indices) -> None:
        """Record what the policy says of the last observations of episodes."""
        assert self.recorder is not None
        assert self._stamp is not None
        state: Float32 = self.seats.state[seat]
        batch = self._batch_policy.act(self.recorder.observations(seat), state, seat)
        self.recorder.decided(seat, batch, state, self._stamp)

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
        if self.recorder is not None:
            is_held = self.recorder.are_held(seat) | (self._stamp is None)
            if is_held.any():
                self._pending = [_Pending(seat[is_held], observations[is_held])]
                seat = seat[~is_held]
                observations = observations[~is_held]
        if not len(seat):
            self.seats.finish_turn(seat)
            return None

        state: Float32 = self.seats.state[seat]
        if self.recorder is None:
            actions, next_state = self._batch_policy.decide(
                observations, state, sample=self.policy.sample
            )
        else:
            assert self._stamp is not None
            batch = self._batch_policy.act(observations, state, seat)
            self.recorder.decided(seat, batch, state, self._stamp)
            actions = batch.actions
            next_state = batch.next_state
        self.seats.state[seat] = next_state
        self.seats.finish_turn(seat)
        self.figures.count_batch(len(seat))

        action_rows = np.zeros((len(seat), self.actions.nbytes), np.uint8)
        self.actions.write(self._to_env_actions(actions), action_rows)
        return DecidedRows(seat, action_rows)
