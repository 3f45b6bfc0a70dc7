"""The echo game, by which `penstock check-client` proves a client: docs/games-protocol.md.

    python echo_game.py HOST PORT [EPISODES]

It plays whatever spaces the service has, without a clock and random numbers: what it shows is
counted, and its rewards are checksums of the actions that it gets.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from penstock_game import FIRST, TERMINATED, TRUNCATED, Game, Lost, Rows

SEATS = 3
EPISODES = 20


class Column(NamedTuple):
    """One array of an observation."""

    name: str
    low: Any
    """Of whole numbers, the least one of each element."""
    count: Any
    """Of whole numbers, how many different ones; 0 for other numbers, which are v / 97."""
    elements: Any
    """Number of each element, counted over all columns."""

    def values(self, seat: int, row: int) -> Any:
        """Returns what a seat shows in its row of this number."""
        if self.name == "action_mask":
            return 1
        values = (31 * row + 7 * seat + 3 * self.elements) % 97
        return np.where(self.count, self.low + values % np.maximum(self.count, 1), values / 97)


def columns_of(welcome: dict[str, Any]) -> list[Column]:
    """Returns the columns of an observation, with the bounds of their spaces."""
    columns: list[Column] = []
    first = 0
    spaces = leaves_of(welcome["observation"])
    for (name, dtype, shape, _), (kind, content) in zip(welcome["row"], spaces, strict=True):
        elements = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += elements.size
        low, count = 0, 2
        if kind == "Discrete":
            count, low = content
        elif kind == "MultiDiscrete":
            count, low = map(np.array, content[:2])
        elif kind == "Box" and dtype != "|b1":
            low, high = map(np.array, content[:2])
            count = high - low + 1 if dtype[1] in "iu" else 0
        columns.append(Column(name, low=low, count=count, elements=elements))
    return columns


def leaves_of(space: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the content of each space that is one array."""
    ((kind, content),) = space.items()
    if kind in ("Dict", "Tuple"):
        for part in content:
            yield from leaves_of(part[1] if kind == "Dict" else part)
    else:
        yield kind, content


class Seat:
    """One seat of the game."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.episode = 0
        self.is_playing = False
        self.actions = 0  # got in this episode
        self.rows = 0  # sent since the program began
        self.reward = 0.0

    def write(self, rows: Rows, place: int, columns: list[Column]) -> None:
        """Write its next row."""
        if not self.is_playing:
            rows.flags[place] = FIRST
            self.is_playing = True
            self.actions = 0
        else:
            rows.reward[place] = self.reward
            if self.actions == 3 + (self.number + 2 * self.episode) % 5:
                rows.flags[place] = TRUNCATED if self.episode % 2 else TERMINATED
                self.is_playing = False
                self.episode += 1
        for column in columns:
            rows.obs[column.name][place] = column.values(self.number, self.rows)
        self.rows += 1

    def take(self, action: bytes) -> None:
        """Take the bytes of an action: their checksum is the next reward."""
        checksum = 0
        for byte in action:
            checksum = (checksum * 33 + byte) % 1009
        self.reward = checksum / 1009
        self.actions += 1

    def give_up(self) -> None:
        """End the episode that it is in, if it is in one."""
        self.episode += self.is_playing
        self.is_playing = False


def play(game: Game, episodes: int) -> None:
    """Play so many episodes of each seat."""
    columns = columns_of(game.welcome)
    seats = [Seat(number) for number in range(SEATS)]
    rows_of = {numbers: game.rows(numbers) for numbers in subsets()}
    turn = 0
    while numbers := tuple(seat.number for seat in seats if seat.episode < episodes):
        # In each third round the last seat has a message of its own.
        steps = [numbers]
        if turn % 3 == 2 and 2 in numbers:
            steps = [step for step in (numbers[:-1], (2,)) if step]
        turn += 1

        parts = [rows_of[step] for step in steps]
        for rows in parts:
            for place, number in enumerate(rows.seats):
                seats[number].write(rows, place, columns)
        try:
            for fault in game.step(*parts):
                seats[fault.seat].give_up()
        except Lost:
            game.reconnect()
            for seat in seats:
                seat.give_up()
            continue
        for rows in parts:
            for place in np.flatnonzero(rows.is_answered):
                action = rows.action[place].tobytes().ljust(game.welcome["action_nbytes"], b"\0")
                seats[rows.seats[place]].take(action)


def subsets() -> list[tuple[int, ...]]:
    """Returns all sets of seats, each in order."""
    return [tuple(seat for seat in range(SEATS) if bits >> seat & 1) for bits in range(1, 8)]


def main() -> None:
    """Play against the service at HOST PORT."""
    host, port, *rest = sys.argv[1:]
    game = Game(host, int(port), seats=SEATS)
    play(game, int(rest[0]) if rest else EPISODES)
    game.close()


if __name__ == "__main__":
    main()
