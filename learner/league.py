"""The league of one run: whom its actors play against, how that ended, and what enters the pool.

A *chair* is a policy id above 0. Its board shows the weights of one member of the pool, which some
actors play against. A *draw* puts a member on a chair; actors record the draw's number with each
episode, and so tell how its games ended. After `league.games` of them the chair is drawn anew, by
the rule `league.draw` and the results so far. Now and then the present weights become a member of
the pool themselves, as a by-product of a checkpoint: the member's file is written first, then the
checkpoint whose state knows it. That state is JSON beside the weights, so a resumed run continues
with the results and opponents that belong to them.

Each of several learners draws and counts for its own actors. The one that saves adds members.

Every run of a game with several sides has a league, if only one that fills its pool. `pool.py` is
the pool on the disk; the rules are in `penstock.league`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig
from penstock.core.draws import bot_index, draw_number
from penstock.core.notes import note_logger
from penstock.core.params import Arrays, Float32, Stamp
from penstock.envs.seats import Seating
from penstock.league.matchmaking import Candidate, probabilities
from penstock.league.payoffs import Payoffs
from penstock.league.results import GameCounts, Results
from penstock.league.solve import nash_weights
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.pool import PolicyPool, PoolMember, member_id, pool_folder
from penstock.learner.state import WEIGHTS, follow_lr_factor, set_weights, weights_of
from penstock.transport.shm.weights_board import WeightsBoard

REMEMBERED_DRAWS = 1024
"""The last so many draws are known by their numbers; results of older ones are not counted."""
EARLY_SHARE = 10
"""With `league.snapshot_win_rate` a snapshot may be due after this fraction of the steps."""
LATEST_S = 30.0
"""Seconds after which the latest weights are shown to other lines again."""
WAIT_S = 0.2
"""Seconds between two looks for the first member of another line."""
SHOWN_TO = ("newest", "main_exploiter")
"""The rules of lines that play against the latest weights of others."""
SESSIONS_SINCE_S = 1_577_836_800
"""Sessions are numbered by the seconds since 2020, for which 30 bits last until 2054."""

logger = note_logger(__name__)


class Playable(NamedTuple):
    """A policy that this run may play against."""

    candidate: Candidate
    """What the rules know of it."""
    member: PoolMember
    """Where its weights are."""


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


class League:
    """Draws opponents, counts results and adds members, for the learner that trains ``trainer``.

        league = League(trainer, pool)        # before the trainer is resumed
        league.load_state_dict(state)         # of the resumed checkpoint, if any
        league.open(new_session())            # before actors attach
        league.count_results(results)         # of each batch
        league.turn(now_s)                    # after it
        league.snapshot()                     # in each save, before `state_dict`

    Everything is called by the thread that trains.
    """

    def __init__(
        self,
        trainer: BaseTrainer[Any],
        pool: PolicyPool,
        *,
        rank: int = 0,
        shared: bool = True,
        event: Callable[..., object] = lambda kind, text, **fields: logger.info("%s", text),
    ) -> None:
        """Make the boards of the chairs, and keep the initial weights.

        Args:
            trainer: as it is before training and before a resume.
            pool: the pool of the run.
            rank: of the learner.
            shared: whether other processes read the boards.
            event: is called as `RoleContext.event`.

        Raises:
            UserError: if no line plays the seats of the others.
        """
        config = trainer.config
        self._config: LeagueConfig = config.league
        self._trainer = trainer
        self._progress = trainer.progress
        self._pool = pool
        self._rank = rank
        self._ranks = config.learner.most_count
        self._event = event
        self._bots = trainer.info.seating.bots

        self._initial: Arrays = {WEIGHTS: weights_of(trainer)}
        """The state before training; without `league.reset` only its weights."""
        if self._config.reset:
            self._initial |= {name: array.copy() for name, array in trainer.state_dict().items()}
        self._initial_member = PoolMember(
            member_id(self._initial[WEIGHTS]), self._config.name, 0, 0.0, initial=True
        )

        chairs = self._config.chair_count
        self._lines = playable_lines(self._config, trainer.info.seating) if chairs else {}
        """The rule of each line that this one plays against, by name."""
        self.boards = [
            WeightsBoard.create(trainer.layout.size, shared=shared, policy_id=chair)
            for chair in range(1, chairs + 1)
        ]
        """The boards of the chairs, whose policy ids are 1, 2, ..."""
        self._draws: list[ChairDraw | None] = [None] * chairs
        """The present draw of each chair; None before the first."""
        self._session = 0
        """Distinguishes the draws of this process from those of earlier ones."""
        self._drawn = 0
        """Draws so far."""
        self._opponents: dict[int, str] = {}
        """Opponents of the last draws by their numbers, the oldest first."""
        self._random = np.random.default_rng([config.run.seed, rank])
        self._payoffs: Payoffs | None = None
        """Games between frozen members, which the rule `nash` needs."""
        self._equilibrium: Mapping[str, float] = {}
        """Their equilibrium, when it was last computed."""

        self._results = Results()
        self._games = 0
        """Games against members and bots that were counted."""
        self._interval = GameCounts(0, 0, 0)
        """Games against members since the last `figures`."""
        self._playable: list[Playable] = []
        """Whom this run may play against, at the last draw."""
        self._wins_enough = False
        """Whether the policy won so often against each that `league.snapshot_win_rate` was reached,
        at the last draw since the last snapshot."""

        self._own_members = 0
        """Members of this line."""
        self._known_members: int | None = None
        """The same when the resumed checkpoint was written; None without one."""
        self._snapshot_steps = 0
        """Trained steps of the last of them."""
        self._write_failed = False
        """Whether the last attempt to add a member failed; the next save tries it again."""
        self._was_reset = False
        others = self._config.lines.values()
        self._shows_latest = rank == 0 and any(line.draw in SHOWN_TO for line in others)
        self._next_latest_s = 0.0
        self._list_failed = False
        """Whether an event was written about a list of the pool that cannot be read."""

    def open(
        self,
        session: int | None = None,
        *,
        beat: Callable[[], None] = lambda: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add the initial policy to a pool without members of this line, and publish all chairs.

        Waits until each other line that this one plays against has a member, or ``stopping()``
        holds.

        Args:
            session: from `new_session`, so that no actor confuses draws of this process with those
                of an earlier one; None continues the numbers of the resumed run.
            beat: is called again and again during the wait.
            stopping: whether to end the wait.

        Raises:
            UserError: if the pool holds another network, cannot be read, or has no member that can.
        """
        self._check_networks()
        self._read_own()
        if self._rank == 0 and not (self._progress.generation and self._own_members):
            try:
                self._add_initial()
            except UserError as error:
                self._on_write_failed(error)

        # The run may have ended between a snapshot and the checkpoint that follows the reset.
        known_members = self._known_members
        if self._config.reset and known_members is not None and self._own_members > known_members:
            self.reset()

        if not self._wait_for_lines(beat, stopping):
            return
        self._check_networks()
        self._playable = self._find_playable()
        if session is not None:
            self._session = max(session, self._session + 1)
        for chair, draw in enumerate(self._draws):
            if not self._continue(chair, draw, renumber=session is not None):
                self._draw(chair)
        if unread := [draw for draw in self._draws if draw is None]:
            raise UserError(
                f"none of the members of {self._pool.folder} can be read, and {len(unread)} chairs "
                "need one; restore them, or set league.pool to another folder"
            )

    def count_results(self, results: Mapping[int, GameCounts]) -> None:
        """Count games by the number of their draw, or of their bot. Unknown draws are ignored."""
        if not results:
            return

        for number, counts in results.items():
            bot = bot_index(number)
            if bot is None:
                opponent = self._opponents.get(number)
                if opponent is None:
                    continue
                self._interval = self._interval.plus(counts)
            elif bot < len(self._bots):
                opponent = f"bot:{self._bots[bot]}"
            else:
                continue
            self._results.add(opponent, counts)
            self._games += counts.games

        for draw in self._draws:
            if draw is not None and draw.number in results:
                draw.games += results[draw.number].games

    def turn(self, now_s: float) -> None:
        """Draw one chair anew if it has had its games; show the latest weights if that is due.

        ``now_s`` is a time of CLOCK_MONOTONIC in seconds. A pool that cannot be read or written
        keeps everything as it is, and is an event.
        """
        for chair, draw in enumerate(self._draws):
            if draw is not None and draw.games >= self._config.games:
                draw.games = 0
                self._draw_again(chair)
                break
        if self._shows_latest and now_s >= self._next_latest_s:
            self._next_latest_s = now_s + LATEST_S
            self._show_latest()

    def snapshot_is_due(self) -> bool:
        """Whether the present weights should become a member, so that a checkpoint is due."""
        return not self._write_failed and self._is_due()

    def snapshot(self) -> None:
        """Add the present weights to the pool if that is due.

        A pool that cannot be written is an event, and training continues.
        """
        self._write_failed = False
        try:
            self._read_own()  # another learner may have saved since
            if not self._own_members:
                self._add_initial()
            if self._is_due():
                self._add_snapshot()
        except UserError as error:
            self._on_write_failed(error)

    def take_reset(self) -> bool:
        """Returns whether weights and optimizer were reset since the last call."""
        was_reset, self._was_reset = self._was_reset, False
        return was_reset

    def reset(self) -> None:
        """Return weights and optimizer to their initial state; the progress goes on.

        Unrolls that were played before are too old for the trainer from then on.
        """
        state = dict(self._initial)
        set_weights(self._trainer, state.pop(WEIGHTS))
        self._trainer.load_state_dict(state)
        follow_lr_factor(self._trainer)
        self._progress.version += self._trainer.config.transport.max_policy_lag + 1
        self._was_reset = True

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run continues with, as JSON."""
        return {
            "results": self._results.to_json(),
            "games": self._games,
            "draws": [None if draw is None else _draw_to_json(draw) for draw in self._draws],
            "opponents": [list(each) for each in self._opponents.items()],
            "session": self._session,
            "drawn": self._drawn,
            "random": self._random.bit_generator.state,
            "members": self._own_members,
            "wins_enough": self._wins_enough,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; chairs beyond those of before are drawn anew.

        Raises LookupError, TypeError or ValueError for another value.
        """
        self._results = Results(state["results"])
        self._games = state["games"]
        draws = [None if each is None else _draw_from_json(each) for each in state["draws"]]
        chairs = len(self.boards)
        self._draws = [*draws[:chairs], *[None] * (chairs - len(draws))]
        self._opponents = {number: opponent for number, opponent in state["opponents"]}
        self._session = state["session"]
        self._drawn = state["drawn"]
        self._random.bit_generator.state = state["random"]
        self._known_members = state["members"]
        self._wins_enough = state["wins_enough"]

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the interval for metrics.jsonl.

        In a run without matches only the number of members.
        """
        if not self._config.has_matches:
            return {"league_members": self._own_members}

        members = [each for each in self._playable if not each.candidate.latest]
        played = [each.candidate.id for each in members if self._results.games(each.candidate.id)]
        interval, self._interval = self._interval, GameCounts(0, 0, 0)
        score = interval.wins + interval.draws / 2
        now_s = time.monotonic()
        ages_s = [now_s - draw.drawn_s for draw in self._draws if draw is not None and draw.games]
        figures: dict[str, Any] = {
            "league_members": len(members) if self._lines else self._own_members,
            "league_games": self._games,
            "win_rate": score / interval.games if interval.games else None,
            "win_rate_worst": min(map(self._results.win_rate, played), default=None),
            "opponent_age_s": sum(ages_s) / len(ages_s) if ages_s else None,
        }
        if self._config.bots:
            figures["bot_win_rates"] = {
                bot: self._results.win_rate(f"bot:{bot}") for bot in sorted(self._config.bots)
            }
        return figures

    def close(self) -> None:
        """Close the boards."""
        for board in self.boards:
            board.close()

    def _read_own(self) -> None:
        """Read this line's list. Raises UserError if it is damaged."""
        own = self._pool.members(self._config.name)
        self._own_members = len(own)
        self._snapshot_steps = own[-1].steps if own else 0

    def _add_initial(self) -> None:
        """Add the policy before training. Raises UserError if it cannot be written."""
        checkpoint = self._checkpoint_of(self._initial[WEIGHTS])
        self._pool.add(self._config.name, checkpoint, steps=0, time_s=0.0, initial=True)
        self._read_own()

    def _is_due(self) -> bool:
        """Whether the steps since the last snapshot, and the win rates, ask for another one."""
        every = self._config.snapshot_steps
        if every is None:
            return False
        steps = self._progress.trained_steps - self._snapshot_steps
        return steps >= every or (self._wins_enough and steps >= every // EARLY_SHARE)

    def _add_snapshot(self) -> None:
        """Add the present weights. Raises UserError if they cannot be written."""
        steps = self._progress.trained_steps
        member = self._pool.add(
            self._config.name,
            self._checkpoint_of(weights_of(self._trainer)),
            steps=steps,
            time_s=self._progress.time_s,
        )
        self._read_own()
        self._wins_enough = False
        self._event(
            "member",
            f"the policy after {steps:,} steps is member {self._own_members} of line "
            f"{self._config.name} in the pool",
            member=member.id,
            line=member.line,
            steps=steps,
        )
        if self._config.reset:
            self.reset()

    def _show_latest(self) -> None:
        """Show the present weights to other lines. A failure is an event."""
        try:
            self._pool.set_latest(
                self._config.name,
                self._checkpoint_of(weights_of(self._trainer)),
                steps=self._progress.trained_steps,
                time_s=self._progress.time_s,
            )
        except UserError as error:
            self._on_write_failed(error)
            self._shows_latest = False

    def _checkpoint_of(self, weights: Float32) -> Checkpoint:
        """Returns weights of this run as a checkpoint of the pool."""
        meta = {
            ENV: self._trainer.config.env.identity(),
            SPACES: spaces_as_json(self._trainer.info),
        }
        return Checkpoint(self._trainer.layout, weights, meta=meta)

    def _on_write_failed(self, error: UserError) -> None:
        """Report that nothing could be added to the pool; a save tries it again."""
        self._write_failed = True
        self._event("pool", f"the pool stays as it was, and the run continues: {error}")

    def _wait_for_lines(self, beat: Callable[[], None], stopping: Callable[[], bool]) -> bool:
        """Wait until each line that this one plays against has a member.

        Returns False if the run stops before.
        """
        others = [name for name in self._lines if name != self._config.name]
        is_noted = False
        while missing := [name for name in others if not self._pool.members(name)]:
            if not is_noted:
                lines = ", ".join(missing)
                logger.info("waits for the first member of %s in %s", lines, self._pool.folder)
                is_noted = True
            if stopping():
                return False
            beat()
            time.sleep(WAIT_S)
        return True

    def _check_networks(self) -> None:
        """Raise UserError if a member that this run may play against is of another network.

        If this line has nothing but a policy before training, a fresh run replaces that.
        """
        for line in sorted({self._config.name, *self._lines}):
            members = self._pool.members(line)
            if line == self._config.name and all(member.initial for member in members):
                continue
            for member in members:
                self._pool.check_network(member, self._trainer.layout)

    def _continue(self, chair: int, draw: ChairDraw | None, *, renumber: bool) -> bool:
        """Publish the member that sat on a chair when the run was saved.

        Returns False if there was none, or it cannot be read.
        """
        if draw is None or draw.member.line not in self._lines:
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

    def _draw_again(self, chair: int) -> None:
        """Draw for a chair during the run, which keeps its opponent if the pool cannot be read."""
        try:
            self._draw(chair)
        except UserError as error:
            if not self._list_failed:
                self._list_failed = True
                self._event("pool", f"opponents stay as they are, and the run continues: {error}")

    def _draw(self, chair: int) -> None:
        """Draw a member for a chair, and publish its weights.

        Members that cannot be read are left out. If none can, the chair stays as it is. Raises
        UserError for a list of the pool that is damaged.
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
        for line, rule in self._lines.items():
            is_own = line == self._config.name
            members = self._pool.members(line)
            if is_own and not members:  # it could not be written yet
                members = [self._initial_member]

            for order, member in enumerate(members):
                playable.append(Playable(Candidate(member.id, line, order, rule), member))
            latest = None if is_own else self._pool.latest(line)
            if latest is not None and latest.steps > max(each.steps for each in members):
                # Results go on when the latest weights are replaced.
                candidate = Candidate(f"{line}/latest", line, len(members), rule, latest=True)
                playable.append(Playable(candidate, latest))
        return playable

    def _weights(self, member: PoolMember) -> Float32 | None:
        """Returns the weights of a member; None if they cannot be read."""
        if member.id == self._initial_member.id:
            weights: Float32 = self._initial[WEIGHTS]
            return weights
        return self._pool.weights(member, self._trainer.layout)

    def _nash(self, candidates: list[Candidate]) -> Mapping[str, float] | None:
        """Returns the equilibrium of the frozen games between members, for the rule `nash`."""
        if self._config.draw != "nash":
            return None
        is_new = self._payoffs is None
        if self._payoffs is None:
            self._payoffs = Payoffs(self._pool.folder)
        if self._payoffs.refresh() or is_new:
            self._equilibrium = nash_weights(self._payoffs, [each.id for each in candidates])
        return self._equilibrium

    def _compare_win_rates(self, candidates: list[Candidate], shares: np.ndarray[Any, Any]) -> None:
        """Note whether the policy wins often enough against each that may be drawn."""
        enough = self._config.snapshot_win_rate
        if enough is not None:
            drawn = [each for each, share in zip(candidates, shares, strict=True) if share > 0]
            self._wins_enough = all(self._results.win_rate(each.id) >= enough for each in drawn)


def make_league(
    trainer: BaseTrainer[Any],
    run_dir: Path,
    event: Callable[..., object],
    *,
    rank: int = 0,
    shared: bool = True,
) -> League | None:
    """Returns the league of a run; None where the game has one side. Arguments are as of `League`.

    Raises UserError as `League`.
    """
    if not trainer.info.seating.has_opponents:
        return None
    pool = PolicyPool(pool_folder(trainer.config, run_dir), event)
    return League(trainer, pool, rank=rank, shared=shared, event=event)


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
