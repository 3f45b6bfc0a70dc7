"""The section `league`: against whom a policy of a game with several sides plays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.configs.section import Section
from penstock.configs.value_types import (
    Chairs,
    Count,
    Folder,
    Fraction,
    Share,
    SmallNatural,
    Switch,
    Text,
    ValueDescription,
)

ROUNDING = 1e-9  # shares that differ by less are equal
# Rules by which a chair is drawn (`penstock.league.matchmaking`). `uniform` may have a number.
DRAWS = (
    "newest",
    "uniform",
    "pfsp:squared",
    "pfsp:linear",
    "pfsp:capped",
    "pfsp:variance",
    "nash",
    "main",
    "main_exploiter",
    "league_exploiter",
)


_LINE_NAME = re.compile(r"\w[\w.-]{0,63}")


def is_line_name(name: str) -> bool:
    """Whether files and folders of a line can have this name."""
    return _LINE_NAME.fullmatch(name) is not None


def _line_name(name: str) -> str:
    """Returns the name. Raises ValueError if it cannot be that of a line."""
    if is_line_name(name):
        return name
    raise ValueError("files have the name of a line: use up to 64 letters, digits, _, . and -")


def _known_rule(rule: str) -> str:
    """Returns the rule. Raises ValueError if there is none of this name."""
    name, _, number = rule.partition(":")
    if rule in DRAWS or (name == "uniform" and number.isdecimal() and int(number) > 0):
        return rule
    raise ValueError(f"the rules are {', '.join(DRAWS)} and uniform:K, over the K newest")


Draw = Annotated[
    Text,
    AfterValidator(_known_rule),
    ValueDescription(f"one of {', '.join(f'`{rule}`' for rule in DRAWS)}, or `uniform:K`"),
]
SeatList = Annotated[
    list[SmallNatural],
    Field(min_length=1),
    ValueDescription("a list of seats, counted from 0, such as [0, 1, 2]"),
]
Bots = Annotated[
    dict[str, Share], ValueDescription("a map of scripted players to shares, such as {random: 0.1}")
]
LineName = Annotated[
    Text,
    AfterValidator(_line_name),
    ValueDescription("a name of up to 64 letters, digits, `_`, `.` and `-`"),
]


class LineConfig(Section):
    """Another line of the league."""

    draw: Draw = "pfsp:squared"
    """Its rule for opponents."""
    seats: SeatList | None = None
    """The seats that it plays; null: any, as sides are alike."""


Lines = Annotated[
    dict[LineName, LineConfig],
    ValueDescription("a map of names of up to 64 letters, digits, `_`, `.` and `-` to lines"),
]


class LeagueConfig(Section):
    """Against whom the policy plays, in a game of several sides. By default it plays all seats
    itself. See docs/leagues.md."""

    mirror: Fraction | None = None
    """Share of the learning rows (`actors.envs`) in games that the newest weights play alone. In
    the others opponents play the other sides: scripted players (`bots`), and for the rest members
    of the pool, which are earlier weights. null: all that `bots` leave, so no members."""
    bots: Bots = Field(default_factory=dict)
    """Shares of the learning rows in games against scripted players of the environment."""
    draw: Draw = "pfsp:squared"
    """How a member of the pool is drawn as an opponent: `newest`; `uniform`, or `uniform:K` over
    the K newest; `pfsp:squared`, `pfsp:linear`, `pfsp:capped` or `pfsp:variance`, by the win rates
    against the members; `nash`, by their equilibrium; `main`, `main_exploiter` and
    `league_exploiter`, which are AlphaStar's."""
    chairs: Chairs = 4
    """Members that the run plays against at a time; an actor plays against two of them. More give
    more variety, and cost memory for weights on each host."""
    games: Count = 200
    """Finished games against a member after which another is drawn in its place. More make its win
    rate more precise, and opponents change less often."""
    snapshot_steps: Count | None = 1_000_000
    """Agent steps trained on between two snapshots of the policy, which become members of the
    pool; null: the pool has only the policy before training."""
    snapshot_win_rate: Share | None = 0.8
    """A snapshot is added after a tenth of `snapshot_steps` already, if the policy wins so often
    against each member; null: never earlier."""
    reset: Switch = False
    """Whether weights and optimizer begin anew after each snapshot, as in PSRO."""
    name: LineName = "main"
    """The name of this run's line in the pool."""
    seats: SeatList | None = None
    """The seats that this line learns, where sides are unlike; null: sides are alike, and the line
    plays them in turn."""
    lines: Lines = Field(default_factory=dict)
    """The other lines of the league, with whose members the pool is shared."""
    pool: Folder | None = None
    """Folder of the pool; null: `pool` in the run's folder."""

    @property
    def mirror_share(self) -> float:
        """The share of the learning rows in games among the newest weights."""
        return 1.0 - sum(self.bots.values()) if self.mirror is None else self.mirror

    @property
    def pool_share(self) -> float:
        """The share of the learning rows in games against members of the pool."""
        share = 1.0 - self.mirror_share - sum(self.bots.values())
        return share if share > ROUNDING else 0.0

    @property
    def chair_count(self) -> int:
        """The number of chairs whose weights the learner publishes, as policies 1 to so many."""
        return self.chairs if self.pool_share else 0

    @property
    def has_matches(self) -> bool:
        """Whether others than the newest weights play some seats."""
        return bool(self.bots) or self.pool_share > 0.0


def opposing_lines(leagues: Iterable[LeagueConfig]) -> dict[str, list[str]]:
    """Returns the lines whose members each line meets, sorted, by its name.

    Where sides are alike each line meets all, also itself. A line with `league.seats` meets those
    that play all the other seats.
    """
    seats: dict[str, Sequence[int] | None] = {}
    for league in leagues:
        seats |= {name: line.seats for name, line in league.lines.items()}
        seats[league.name] = league.seats

    every_seat = {seat for of_line in seats.values() for seat in of_line or ()}

    def are_opposed(line_seats: Sequence[int] | None, other: Sequence[int] | None) -> bool:
        if line_seats is None or other is None:
            return other is None
        return {*line_seats} ^ {*other} == every_seat

    return {
        name: [other for other in sorted(seats) if are_opposed(line_seats, seats[other])]
        for name, line_seats in sorted(seats.items())
    }
