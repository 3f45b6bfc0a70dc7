"""Decides for the seats of all games: rows come in, one batch is decided, actions go out.

It knows nothing of connections and loops (`port.py`), so it is tested without them. In each turn
its owner calls `take` for rows as often as some arrive, then `decide` once, which ends the turn.
All that happens to a seat passes through these two calls: what records games for a learner belongs
there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.core.params import Array, Float32
from penstock.envs.space_difference import difference
from penstock.envs.space_json import SPACE_NBYTES, claimed_nbytes, to_json
from penstock.envs.vector_env import action_map
from penstock.evaluation.loaded_policy import LoadedPolicy
from penstock.serving.figures import ServiceFigures
from penstock.serving.messages import LEAVES, PROTOCOL, Hello, MessageError
from penstock.serving.rows import ObservationReader, RowLayout, Rows, describe_layouts
from penstock.serving.seats import (
    DECIDE,
    END,
    FAULTS,
    FIRST_FAULT,
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

    def __init__(self, policy: LoadedPolicy, name: str = "", most_seats: int = MOST_SEATS) -> None:
        """Create a service without games.

        Args:
            policy: decides, greedy or sampled as its `sample` says.
            name: of the run or the file that it comes from, which games are told.
            most_seats: of all games together.
        """
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
        self.seats.release(places)

    def welcome(self, seats: int) -> dict[str, Any]:
        """Returns the content of the WELCOME for a game with so many seats."""
        return {"protocol": PROTOCOL, **self.describe(), "seats": seats, "learns": False}

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
            return self._take_shown(rows.seat, observations)

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
            further = self._take_shown(rows.seat[shown], observations[shown], goes_on)
            faults += [fault._replace(row=int(shown[fault.row])) for fault in further]
        return faults

    def _take_shown(
        self, seat: Indices, observations: Rows, goes_on: Bools | None = None
    ) -> list[RowFault]:
        """Read observations, and keep those of rows that go on; all do if it is None."""
        packed, reasons = self.observations.read(observations)
        if reasons:
            self.seats.fail(seat[list(reasons)])
        if goes_on is None:
            self._pending.append(_Pending(seat, packed))
        else:
            self._pending.append(_Pending(seat[goes_on], packed[goes_on]))
        return [RowFault(row, "observation", reason) for row, reason in reasons.items()]

    def decide(self) -> DecidedRows | None:
        """Decide for all rows that wait, and end the turn; None if no row waits."""
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
        if not len(seat):
            self.seats.finish_turn(seat)
            return None

        state: Float32 = self.seats.state[seat]
        actions, next_state = self._batch_policy.decide(
            observations, state, sample=self.policy.sample
        )
        self.seats.state[seat] = next_state
        self.seats.finish_turn(seat)
        self.figures.count_batch(len(seat))

        action_rows = np.zeros((len(seat), self.actions.nbytes), np.uint8)
        self.actions.write(self._to_env_actions(actions), action_rows)
        return DecidedRows(seat, action_rows)
