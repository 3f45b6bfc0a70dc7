"""The chairs of a run: which members of the pool its actors play against, and with what results.

A *chair* is a policy id above 0. Its board shows the weights of one member of the pool, which some
actors play against. A *draw* puts a member on a chair; actors record the draw's number with each
episode, and so tell how its games ended. After `league.games` of them the chair is drawn anew, by
the rule `league.draw` and the results so far.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig
from penstock.core.draws import bot_index, draw_number
from penstock.core.params import Float32, Floats, ParamLayout, Stamp
from penstock.envs.seats import Seating
from penstock.league.matchmaking import Candidate, probabilities
from penstock.league.payoffs import Payoffs
from penstock.league.results import GameCounts, Results
from penstock.league.solve import nash_weights
from penstock.learner.pool import PolicyPool, PoolMember
from penstock.transport.shm.weights_board import WeightsBoard

REMEMBERED_DRAWS = 1024
"""The last so many draws are known by their numbers; results of older ones are not counted."""
SESSIONS_SINCE_S = 1_577_836_800
"""Sessions are numbered by the seconds since 2020, for which 30 bits last until 2054."""


class Playable(NamedTuple):
    """A policy that this run may play against."""

    candidate: Candidate
    """What the rules know of it."""
    member: PoolMember
    """Where its weights are."""


class InitialPolicy(NamedTuple):
    """The policy before training, which is in memory where the pool could not be written."""

    member: PoolMember
    weights: Float32


@dataclass
class ChairDraw:
    """The present draw of a chair."""

    number: int
    """What actors record (`core.draws`)."""
    opponent: str
    """The id by which results against the member are counted."""
    member: PoolMember
    games: int = 0
    """Games of this draw that were counted."""
    drawn_s: float = 0.0
    """When it was drawn (CLOCK_MONOTONIC)."""


class Chairs:
    """Draws members of the pool, and counts the games against them; not thread-safe.

    chairs = Chairs(config.league, seating, layout, pool, initial, seed=seed)
    chairs.seat_all(new_session())        # before actors attach
    chairs.count_results(results)         # of each batch
    chairs.draw_one()                     # after it
    """

    def __init__(
        self,
        config: LeagueConfig,
        seating: Seating,
        layout: ParamLayout,
        pool: PolicyPool,
        initial: InitialPolicy,
        *,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        shared: bool = True,
    ) -> None:
        """Make the boards.

        Args:
            config: the section `league`.
            seating: of the game.
            layout: of the run's network, which all members have.
            pool: the pool.
            initial: stands for the members of this line while it has none.
            seed: of the random numbers.
            rank: of this learner, which draws for its own actors.
            ranks: of the run, at most.
            shared: whether other processes read the boards.

        Raises:
            UserError: if no line plays the seats of the others.
        """
        self._config = config
        self._bots = seating.bots
        self._layout = layout
        self._pool = pool
        self._initial = initial
        self._rank = rank
        self._ranks = ranks
        self.lines = playable_lines(config, seating) if config.chair_count else {}
        """The rule of each line that this one plays against, by name."""
        self.boards = [
            WeightsBoard.create(layout.size, shared=shared, policy_id=chair)
            for chair in range(1, config.chair_count + 1)
        ]
        """The boards, whose policy ids are 1, 2, ..."""

        # Draws.
        self._draws: list[ChairDraw | None] = [None] * config.chair_count
        """The present draw of each chair; None before the first."""
        self._session = 0
        """Distinguishes the draws of this process from those of earlier ones."""
        self._drawn = 0
        """Draws so far."""
        self._opponents: dict[int, str] = {}
        """Opponents of the last draws by their numbers, the oldest first."""
        self._random = np.random.default_rng([seed, rank])
        self._playable: list[Playable] = []
        """Whom this run may play against, at the last draw."""
        self._payoffs = Payoffs(pool.folder) if config.draw == "nash" else None
        """Games between frozen members, which the rule `nash` needs."""
        self._equilibrium: Mapping[str, float] = {}
        """Their equilibrium, when it was last computed."""

        # Results.
        self._results = Results()
        self._games = 0
        """Games against members and bots that were counted."""
        self._interval = GameCounts(0, 0, 0)
        """Games against members since the last `figures`."""
        self._played: set[int] = set()
        """Indices of the chairs that some actor of this learner plays against."""
        self.wins_enough = False
        """Whether the policy won at least `league.snapshot_win_rate` of the games against each that
        might be drawn, at the last draw. Whoever adds a member, which was not beaten yet, sets it
        to False."""

    def seat_all(self, session: int | None) -> None:
        """Publish all chairs: the members of the resumed run, or new draws.

        Args:
            session: from `new_session`, so that no actor confuses draws of this process with those
                of an earlier one; None continues the numbers of the resumed run.

        Raises:
            UserError: if the pool cannot be read, or has no member that can.
        """
        self._playable = self._find_playable()
        if session is not None:
            self._session = max(session, self._session + 1)

        for chair, draw in enumerate(self._draws):
            if not self._continue(chair, draw, renumber=session is not None):
                self._draw(chair)
            if self._draws[chair] is None:
                raise UserError(
                    f"none of the members of {self._pool.folder} can be read, and opponents are "
                    "drawn from them; restore them, or set league.pool to another folder"
                )

    def count_results(self, results: Mapping[int, GameCounts]) -> None:
        """Count games by the number of their draw, or of their bot. Unknown draws are ignored."""
        if not results:
            return

        for number, counts in results.items():
            bot = bot_index(number)
            if bot is None:
                opponent = self._opponents.get(number)
            else:
                opponent = _bot_id(self._bots[bot]) if bot < len(self._bots) else None
            if opponent is None:
                continue
            self._results.add(opponent, counts)
            self._games += counts.games
            if bot is None:
                self._interval = self._interval.plus(counts)

        for chair, draw in enumerate(self._draws):
            if draw is not None and draw.number in results:
                draw.games += results[draw.number].games
                self._played.add(chair)

    def draw_one(self) -> bool:
        """Draw one chair anew, if one has had its games; returns whether one has.

        Raises UserError, with all chairs as they were, for a pool that cannot be read.
        """
        for chair, draw in enumerate(self._draws):
            if draw is not None and draw.games >= self._config.games:
                draw.games = 0  # it has as many again where nobody else can be drawn
                self._draw(chair)
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run continues with, as JSON."""
        return {
            "draws": [None if draw is None else _draw_to_json(draw) for draw in self._draws],
            "session": self._session,
            "drawn": self._drawn,
            "opponents": [list(each) for each in self._opponents.items()],
            "random": self._random.bit_generator.state,
            "results": self._results.to_json(),
            "games": self._games,
            "wins_enough": self.wins_enough,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; chairs beyond those of before are drawn anew.

        Raises LookupError, TypeError or ValueError for another value.
        """
        draws = [None if each is None else _draw_from_json(each) for each in state["draws"]]
        chairs = len(self.boards)
        self._draws = [*draws[:chairs], *[None] * (chairs - len(draws))]
        self._session = state["session"]
        self._drawn = state["drawn"]
        self._opponents = {number: opponent for number, opponent in state["opponents"]}
        if self._rank == 0:  # the state is that of the first learner, and others draw others
            self._random.bit_generator.state = state["random"]
        self._results = Results(state["results"])
        self._games = state["games"]
        self.wins_enough = state["wins_enough"]

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the interval for metrics.jsonl."""
        members = [each.candidate.id for each in self._playable if not each.candidate.latest]
        win_rates = [self._results.win_rate(id_) for id_ in members if self._results.games(id_)]
        interval, self._interval = self._interval, GameCounts(0, 0, 0)
        score = interval.wins + interval.draws / 2

        now_s = time.monotonic()
        draws = [self._draws[chair] for chair in self._played]
        ages_s = [now_s - draw.drawn_s for draw in draws if draw is not None]
        figures: dict[str, Any] = {
            "league_games": self._games,
            "win_rate": score / interval.games if interval.games else None,
            "win_rate_worst": min(win_rates, default=None),
            "opponent_age_s": sum(ages_s) / len(ages_s) if ages_s else None,
        }
        if self.lines:
            figures["league_members"] = len(members)
        if bots := sorted(self._config.bots):
            figures["bot_win_rates"] = {bot: self._results.win_rate(_bot_id(bot)) for bot in bots}
        return figures

    def close(self) -> None:
        """Close the boards."""
        for board in self.boards:
            board.close()

    def _continue(self, chair: int, draw: ChairDraw | None, *, renumber: bool) -> bool:
        """Publish the member that sat on a chair when the run was saved.

        Returns False if there was none, or it cannot be read or played against any more.
        """
        if draw is None or draw.member.line not in self.lines:
            return False
        weights = self._weights(draw.member)
        if weights is None:
            return False

        if renumber:
            self._seat(chair, draw.opponent, draw.member, weights, games=draw.games)
        else:
            draw.drawn_s = time.monotonic()
            self.boards[chair].publish(weights, _stamp_of(draw.number), chair + 1)
        return True

    def _draw(self, chair: int) -> None:
        """Draw a member for a chair, and publish its weights.

        Members that cannot be read are left out. If the rule draws none of the others, the chair
        stays as it is. Raises UserError for a list of the pool that is damaged.
        """
        self._playable = self._find_playable()
        remaining = self._playable
        while remaining:
            candidates = [each.candidate for each in remaining]
            shares = probabilities(
                self._config.draw,
                candidates,
                self._results,
                name=self._config.name,
                nash=self._nash(candidates),
            )
            if not shares.any():
                return
            self._compare_win_rates(candidates, shares)

            drawn = remaining[int(self._random.choice(len(remaining), p=shares))]
            weights = self._weights(drawn.member)
            if weights is not None:
                self._seat(chair, drawn.candidate.id, drawn.member, weights)
                return
            remaining = [each for each in remaining if each is not drawn]

    def _seat(
        self, chair: int, opponent: str, member: PoolMember, weights: Float32, games: int = 0
    ) -> None:
        """Publish a member on a chair, as a new draw."""
        self._drawn += 1
        stamp = Stamp(self._session, self._drawn * self._ranks + self._rank)
        draw = ChairDraw(draw_number(stamp), opponent, member, games, time.monotonic())
        self._draws[chair] = draw
        self._opponents[draw.number] = opponent
        if len(self._opponents) > REMEMBERED_DRAWS:
            del self._opponents[next(iter(self._opponents))]
        self.boards[chair].publish(weights, stamp, chair + 1)

    def _find_playable(self) -> list[Playable]:
        """Returns whom this run may play against now. Raises UserError for a damaged list."""
        playable = []
        for line, rule in self.lines.items():
            is_own = line == self._config.name
            members = self._pool.members(line)
            if is_own and not members:  # it could not be written yet
                members = [self._initial.member]
            for order, member in enumerate(members):
                playable.append(Playable(Candidate(member.id, line, order, rule), member))

            # Results against the latest weights go on when these are replaced.
            latest = None if is_own else self._pool.latest(line)
            if latest is None or not members:
                continue
            if latest.steps > max(member.steps for member in members):
                candidate = Candidate(f"{line}/latest", line, len(members), rule, latest=True)
                playable.append(Playable(candidate, latest))
        return playable

    def _weights(self, member: PoolMember) -> Float32 | None:
        """Returns the weights of a member; None if they cannot be read."""
        if member.id == self._initial.member.id:
            return self._initial.weights
        return self._pool.weights(member, self._layout)

    def _nash(self, candidates: list[Candidate]) -> Mapping[str, float] | None:
        """Returns the equilibrium of the frozen games between members, for the rule `nash`."""
        if self._payoffs is None:
            return None
        if self._payoffs.refresh() or not self._equilibrium:
            self._equilibrium = nash_weights(self._payoffs, [each.id for each in candidates])
        return self._equilibrium

    def _compare_win_rates(self, candidates: list[Candidate], shares: Floats) -> None:
        """Note whether the policy wins often enough against each that may be drawn."""
        enough = self._config.snapshot_win_rate
        if enough is not None:
            drawn = [each for each, share in zip(candidates, shares, strict=True) if share > 0]
            self.wins_enough = all(self._results.win_rate(each.id) >= enough for each in drawn)


def new_session() -> int:
    """Returns a number for the draws of this process that no earlier process of the run has had.

    It is the time in seconds, since a learner takes longer to start, and a number in the pool could
    not be written to a full disk.
    """
    return int(time.time()) - SESSIONS_SINCE_S


def playable_lines(league: LeagueConfig, seating: Seating) -> dict[str, str]:
    """Returns the lines whose members this line plays against, with their rules, sorted by name.

    They play all seats that this line does not: any seats, or exactly those.

    Raises:
        UserError: if there is none.
    """
    lines = {name: (line.draw, line.seats) for name, line in league.lines.items()}
    lines[league.name] = (league.draw, league.seats)
    if league.seats is None:
        return {name: rule for name, (rule, seats) in sorted(lines.items()) if seats is None}

    others = {*range(seating.seats)} - {*league.seats}
    playable = {
        name: rule
        for name, (rule, seats) in sorted(lines.items())
        if seats is None or {*seats} == others
    }
    if not playable:
        raise UserError(
            f"line {league.name} plays the seats {sorted(league.seats)}, and no line of "
            f"league.lines plays the seats {sorted(others)}, which its opponents need; name one in "
            "league.lines, or set league.mirror so that no rows play against the pool"
        )
    return playable


def _bot_id(bot: str) -> str:
    """Returns the id by which results against a scripted player are counted."""
    return f"bot:{bot}"


def _stamp_of(number: int) -> Stamp:
    """Returns the stamp of a draw's number, the inverse of `draw_number`."""
    return Stamp(number >> 32, number & 0xFFFFFFFF)


def _draw_to_json(draw: ChairDraw) -> dict[str, Any]:
    """Returns a draw as JSON, without its time."""
    return {
        "number": draw.number,
        "opponent": draw.opponent,
        "member": draw.member._asdict(),
        "games": draw.games,
    }


def _draw_from_json(value: Mapping[str, Any]) -> ChairDraw:
    """The inverse of `_draw_to_json`."""
    return ChairDraw(
        number=value["number"],
        opponent=value["opponent"],
        member=PoolMember(**value["member"]),
        games=value["games"],
    )
