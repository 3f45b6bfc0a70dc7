"""The echo game: what it sends, to the byte, for what it was answered.

Every client in `clients/` ships this game in its own language. It knows no clock and no random
numbers, its observations are counted and its rewards are checksums of the actions that it got. So
`client_check.py` knows each of its messages in advance (docs/games-protocol.md, "The echo game").
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.observations import MASK
from penstock.envs.packing import leaves_of
from penstock.serving.messages import ENDED, FIRST, RowFlag
from penstock.serving.rows import RowLayout

SEATS = 3
EPISODES = 20  # of each seat
TURN_SEAT = 2  # has a STEP of its own in each third round
TURN_ROUNDS = 3
VALUES = 97  # the most different values of an element
CHECKSUMS = 1009

Array = npt.NDArray[Any]


class EchoRow(NamedTuple):
    """A row that the echo game sends."""

    seat: int
    flags: int
    reward: np.float32
    number: int
    """Of the rows that this seat has sent since the game began."""
    reason: str
    """Why the seat begins an episode; "" if that is no matter of the service."""

    @property
    def goes_on(self) -> bool:
        """Whether it is answered."""
        return not self.flags & ENDED


class ObservationRule:
    """What a seat sees in each of its rows."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.layout = RowLayout(space, "obs")
        self._leaves = [leaf for _, leaf in leaves_of(space)]

    def row(self, seat: int, number: int) -> Array:
        """Returns the bytes of a seat's row with this number, uint8 [row_nbytes]."""
        row: Array = np.zeros(self.layout.nbytes, np.uint8)
        record = row.view(self.layout.dtype)[0]
        first_element = 0
        for column, leaf in zip(self.layout.columns, self._leaves, strict=True):
            size = math.prod(column.shape)
            elements = np.arange(first_element, first_element + size).reshape(column.shape)
            values = (number * 31 + seat * 7 + elements * 3) % VALUES
            record[column.name] = 1 if column.name == MASK else _in_space(values, leaf)
            first_element += size
        return row


def _in_space(values: Array, space: spaces.Space[Any]) -> Array:
    """Returns values of 0 to 96 as elements of a space, each at its place."""
    match space:
        case spaces.Discrete(n=n, start=start):
            return np.asarray(start + values % n)
        case spaces.MultiDiscrete(nvec=nvec, start=start):
            return np.asarray(start + values % nvec)
        case spaces.Box(dtype=dtype, low=low, high=high) if dtype.kind in "iu":
            counts = np.minimum(high.astype(np.int64) - low + 1, VALUES)
            return np.asarray(low + values % counts)
        case spaces.Box(dtype=dtype) if dtype.kind == "f":
            return values / VALUES
    return values % 2


def checksum_reward(action: bytes) -> np.float32:
    """Returns the reward for an action, whose row these bytes are."""
    checksum = 0
    for byte in action:
        checksum = (checksum * 33 + byte) % CHECKSUMS
    return np.float32(checksum / CHECKSUMS)


class EchoSeat:
    """One seat of the echo game."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_acting = False
        self._rows = 0
        self._episode = 0
        self._actions = 0  # of the episode
        self._last_action = b""
        self._reason = ""

    @property
    def has_finished(self) -> bool:
        """Whether it has played all of its episodes."""
        return self._episode == EPISODES

    def next_row(self) -> EchoRow:
        """Move on to its next row, and return it."""
        flags = 0
        reward = np.float32(0)
        reason = ""
        if not self.is_acting:
            flags = FIRST
            reason, self._reason = self._reason, ""
            self.is_acting = True
            self._actions = 0
        else:
            reward = checksum_reward(self._last_action)
            if self._actions == 3 + (self.number + 2 * self._episode) % 5:
                is_even = self._episode % 2 == 0
                flags = int(RowFlag.TERMINATED if is_even else RowFlag.TRUNCATED)
                self.is_acting = False
                self._episode += 1

        row = EchoRow(self.number, flags=flags, reward=reward, number=self._rows, reason=reason)
        self._rows += 1
        return row

    def take(self, action: bytes) -> None:
        """Take the row of its action."""
        self._last_action = action
        self._actions += 1

    def give_up(self, reason: str) -> None:
        """End the episode that it is in, if it is in one, and begin the next one."""
        if self.is_acting:
            self.is_acting = False
            self._episode += 1
            self._reason = reason


class EchoGame:
    """All seats of the echo game, in rounds."""

    def __init__(self) -> None:
        self.seats = [EchoSeat(number) for number in range(SEATS)]
        self.round = -1
        """Number of the round that has begun last."""

    def next_round(self) -> list[list[EchoRow]]:
        """Returns the rows of the next round, by STEP; none if all seats have finished."""
        self.round += 1
        rows = [seat.next_row() for seat in self.seats if not seat.has_finished]
        if self.round % TURN_ROUNDS != TURN_ROUNDS - 1:
            return [rows] if rows else []
        together = [row for row in rows if row.seat != TURN_SEAT]
        alone = [row for row in rows if row.seat == TURN_SEAT]
        return [step for step in (together, alone) if step]

    def lose_connection(self) -> None:
        """All seats begin anew."""
        for seat in self.seats:
            seat.give_up("the connection was lost")
