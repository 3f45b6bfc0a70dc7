"""Games between the members of a pool, all of them frozen.

Each two members play many games with sampled actions, in which the sides take turns. What comes out
is appended to the pool's `payoff.jsonl`, by which `ratings` and `league.draw: nash` go. So a member
that is new plays against all others, and no game is played again.

A pair of two lines is played by that whose name comes first, so that the evaluators of a league
share the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.league import opposing_lines
from penstock.configs.schema import Config
from penstock.core.notes import note_logger
from penstock.envs import BatchedEnv, make
from penstock.envs.make import FirstIndex
from penstock.evaluation.evaluate import Choose, Episode, games_of, play_policy
from penstock.evaluation.opponents import OpponentSource
from penstock.evaluation.policy_source import PolicySource, of_checkpoint
from penstock.league.payoffs import Meeting, Payoffs
from penstock.league.results import GameCounts
from penstock.learner.pool import PolicyPool, PoolMember
from penstock.models.acting.policy import Policy

ROWS = 256
"""Rows of the environments, at least; a game takes one for each seat. With 64 a core plays a fifth
as many games of Kuhn poker in a second, whose step is nearly as long."""
GAMES_TOGETHER = 512
"""Games of a pair in one go. Of a game with two seats each row plays four, half of them from each
side."""
SEED = 4_100_000
"""Apart from those of evaluations."""
SEEDS = 1_000_000

logger = note_logger(__name__)


class Pair(NamedTuple):
    """Two members that play against each other."""

    row: PoolMember
    """Of the line that has the pair played."""
    column: PoolMember
    games: int
    """Games that they have played so far."""


class Tournament:
    """Plays the games of some lines of a pool.

    tournament = Tournament(pool, {"main": config})
    while pair := tournament.next_pair(200):
        tournament.play(pair, 64)
    """

    def __init__(
        self,
        pool: PolicyPool,
        configs: Mapping[str, Config],
        *,
        first: int = FirstIndex.COMMAND,
        beat: Callable[[], object] | None = None,
    ) -> None:
        """Make a tournament, without its environments.

        Args:
            pool: of the members.
            configs: of the lines whose pairs are played, by name; those of one league, so that
                they have the same environment.
            first: index of the first environment, as of `envs.make`.
            beat: is called while environments are made.
        """
        self.payoffs = Payoffs(pool.folder)
        self._pool = pool
        self._configs = configs
        self._first = first
        self._beat = beat
        self._opposing = opposing_lines(config.league for config in configs.values())
        self._unreadable: set[str] = set()
        """Ids of members that cannot be played."""
        self._without_end: set[tuple[str, str]] = set()
        """Pairs of which no game has had a result."""

    def next_pair(self, games: int) -> Pair | None:
        """Returns the pair with the fewest games, the newest first; None if all have ``games``.

        Raises UserError if the pool's lists are damaged.
        """
        # Two lines may have begun with the same weights.
        members = {member.id: member for member in reversed(self._pool.members())}
        for unreadable in self._unreadable:
            members.pop(unreadable, None)
        if len(members) < 2:
            return None

        self.payoffs.refresh()
        in_order = sorted(members.values(), key=lambda member: (member.line, -member.steps))
        fewest = None
        for row, column in combinations(in_order, 2):
            is_ours = row.line in self._configs and column.line in self._opposing[row.line]
            if not is_ours or (row.id, column.id) in self._without_end:
                continue
            played = self.payoffs.meeting(row.id, column.id).counts.games
            if played < (games if fewest is None else fewest.games):
                fewest = Pair(row, column, played)
        return fewest

    def play(
        self,
        pair: Pair,
        games: int,
        choose: Callable[[Policy], Choose] = lambda policy: policy.act,
    ) -> bool:
        """Play some games of a pair, and append the results.

        Args:
            pair: from `next_pair`.
            games: how many to play; an even number gives each side as many.
            choose: returns what chooses the actions of the pair's row.

        Returns: whether there are results. There are none if a member cannot be read, which a note
            says, or if no game ended within `eval.max_episode_steps`; `next_pair` leaves out such a
            member or pair from then on.

        Raises:
            UserError: as `evaluate.play`.
            OSError: if the results cannot be written.
        """
        row = self._source(pair.row)
        column = self._source(pair.column)
        if row is None or column is None:
            return False

        number = f"{pair.row.id} {pair.column.id} {pair.games}"
        played = play_policy(
            self.env,
            row,
            [OpponentSource(pair.column.id, column)],
            games,
            choose=choose,
            seed=SEED + zlib.crc32(number.encode()) % SEEDS,
            max_steps=row.config.eval.max_episode_steps,
        )
        meeting = meeting_of(played)
        if meeting.counts.games == 0:
            self._without_end.add((pair.row.id, pair.column.id))
            return False
        self.payoffs.append(pair.row.id, pair.column.id, meeting)
        return True

    def close(self) -> None:
        """Close the environments, if there are some."""
        if "env" in self.__dict__:
            self.env.close()

    @cached_property
    def env(self) -> BatchedEnv:
        """The environments, with rows for all seats."""
        config = next(iter(self._configs.values()))
        return make(
            config.env,
            ROWS,
            config.actors.env_threads,
            whole_games=True,
            first=self._first,
            beat=self._beat,
        )

    def _source(self, member: PoolMember) -> PolicySource | None:
        """Returns the policy of a member; None if it cannot be read, which a note says."""
        config = self._configs.get(member.line) or next(iter(self._configs.values()))
        source = of_checkpoint(config, self._pool.checkpoint_folder(member)).read_once()
        try:
            source.weights(self.env)
        except UserError as error:
            self._unreadable.add(member.id)
            logger.info("member %s of line %s plays no games: %s", member.id, member.line, error)
            return None
        return source


def meeting_of(played: list[Episode]) -> Meeting:
    """Returns the games of a member, given the episodes of all its seats.

    A game without a known result, such as one that was cut, does not count.
    """
    wins = draws = losses = 0
    returns = 0.0
    for episodes in games_of(played):
        outcomes = [each.outcome for each in episodes if each.outcome is not None]
        if not outcomes:
            continue
        outcome = fmean(outcomes)
        wins += outcome > 0
        draws += outcome == 0
        losses += outcome < 0
        returns += fmean(each.episode_return for each in episodes)
    return Meeting(GameCounts(wins, draws, losses), returns)
