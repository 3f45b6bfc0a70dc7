"""Games between frozen members of a pool: `payoff.jsonl` in the folder of the pool.

A line of the file has some games of one pair, and those of a pair add up. So processes may append
at the same time, and a line that a killed process left torn is no more than some lost games.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.files import open_private, open_regular
from penstock.league.results import GameCounts

Floats = npt.NDArray[np.float64]

FILE = "payoff.jsonl"


class Meeting(NamedTuple):
    """Games of one member, the row, against another, the column."""

    counts: GameCounts
    """How they ended for the row."""
    returns: float
    """The sum of the row's returns."""

    def plus(self, other: Meeting) -> Meeting:
        """Returns these games and those of ``other``."""
        return Meeting(self.counts.plus(other.counts), self.returns + other.returns)

    def reversed(self) -> Meeting:
        """Returns the same games as the column saw them: what one side gains, the other loses."""
        counts = GameCounts(
            wins=self.counts.losses, draws=self.counts.draws, losses=self.counts.wins
        )
        return Meeting(counts, -self.returns)


NO_GAMES = Meeting(GameCounts(0, 0, 0), 0.0)


class Payoffs:
    """The games of all pairs of a pool."""

    def __init__(self, pool: Path) -> None:
        """Read the games in the folder ``pool``; there need be none. Raises as `refresh`."""
        self._path = pool / FILE
        self._nbytes = 0  # bytes of the file that were read
        self._meetings: dict[tuple[str, str], Meeting] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Read what was appended since the last time; returns whether there was anything.

        Raises UserError if the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                file.seek(self._nbytes)
                appended = file.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be read ({error.strerror}), which has the games between "
                "members; restore it, or remove it to play them again"
            ) from error

        # The last line may be in the making.
        complete = appended[: appended.rfind(b"\n") + 1]
        self._nbytes += len(complete)
        for line in complete.splitlines():
            self._count(line)
        return bool(complete)

    def append(self, row: str, column: str, meeting: Meeting) -> None:
        """Add games of a pair to the file.

        Raises OSError if they cannot be written.
        """
        record = {"row": row, "column": column, **meeting.counts._asdict()}
        line = json.dumps({**record, "returns": meeting.returns}) + "\n"
        with open(self._path, "ab+", buffering=0, opener=open_private) as file:
            # A torn line of a killed process must not join this one.
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = "\n" + line
            file.write(line.encode())
        self.refresh()

    def meeting(self, row: str, column: str) -> Meeting:
        """Returns all games of a pair, whoever was the row in the file."""
        as_row = self._meetings.get((row, column), NO_GAMES)
        as_column = self._meetings.get((column, row), NO_GAMES)
        return as_row.plus(as_column.reversed())

    def mean_returns(self, members: Sequence[str]) -> Floats:
        """Returns the mean return of each member against each, ``[n, n]``; 0 without a game."""
        table = np.zeros((len(members), len(members)))
        for i, row in enumerate(members):
            for j, column in enumerate(members[:i]):
                meeting = self.meeting(row, column)
                table[i, j] = meeting.returns / max(meeting.counts.games, 1)
        return table - table.T

    def wins(self, members: Sequence[str]) -> Floats:
        """Returns how many games each member won against each, ``[n, n]``; a draw is half a win."""
        table = np.zeros((len(members), len(members)))
        for i, row in enumerate(members):
            for j, column in enumerate(members):
                if i != j:
                    counts = self.meeting(row, column).counts
                    table[i, j] = counts.wins + counts.draws / 2
        return table

    def _count(self, line: bytes) -> None:
        """Count the games of a line of the file; none of a torn one."""
        try:
            record = json.loads(line)
            pair = record["row"], record["column"]
            counts = GameCounts(record["wins"], record["draws"], record["losses"])
            meeting = Meeting(counts, record["returns"])
            self._meetings[pair] = self._meetings.get(pair, NO_GAMES).plus(meeting)
        except (ValueError, LookupError, TypeError):
            return
