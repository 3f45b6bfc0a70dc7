"""Games in which others than the newest weights play some seats.

`Matches` is a vector of environments whose rows are only those that learn. It plays all other seats
itself, by opponents (penstock.actors.opponent).

Invariants:
- The first games are mirror games, in which all seats learn. Each other game belongs to one
  opponent, for ever. Which of its seats learn changes where the game begins again, in the step that
  only resets, so the final observation of an episode is still that of the old seat.
- A game is played by one draw from its first step to its last.
- An opponent forgets its recurrent state in each row where an episode begins.
- The environments write to memory of this vector, never to that of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.actors.opponent import BotPlayer, Chair, Opponent
from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.autotune.forms import with_acting_form
from penstock.configs.league import LeagueConfig
from penstock.configs.schema import Config
from penstock.core.interfaces import Environments, ReadPolicy
from penstock.core.params import Array, Float32
from penstock.envs import BatchedEnv, make, probe
from penstock.envs.make import first_index
from penstock.envs.seats import Seating, chairs_of, divide_rows, turns_of
from penstock.models.acting.policy import Policy
from penstock.profiling.ledger import Part, TimeLedger

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

# Returns are rounded to so many decimals before they say who has won.
RETURN_DECIMALS = 6


class Plan(NamedTuple):
    """Which seats of which games learn, and who plays the others; fixed but for whose turn it is.

    Mirror games come first, then those against each opponent.
    """

    seating: Seating
    turns: tuple[tuple[int, ...], ...]
    """The seats that learn in a game against an opponent, in turn by episode. Game g begins with
    number ``g % len(turns)``."""
    mirror_games: int
    opponent_games: tuple[int, ...]
    """The number of games against each opponent."""
    chairs: tuple[int, ...] = ()
    """The policy ids of the opponents that are chairs, which come first."""
    bots: tuple[str, ...] = ()
    """The names of the opponents that are scripted players, which come next."""

    @classmethod
    def of(cls, league: LeagueConfig, seating: Seating, rows: int, actor: int, chairs: int) -> Plan:
        """Plan the games of an actor.

        Args:
            league: the config's section.
            seating: of the game.
            rows: the learning rows, `actors.envs`.
            actor: its number on its host, by which its chairs differ from those of others.
            chairs: the number of chairs that the learner publishes.

        Raises:
            UserError: if the rows cannot be divided as the shares say.
        """
        shares = divide_rows(league, seating, rows)
        turns = turns_of(seating, league.seats)
        learning = len(turns[0])
        own_chairs = chairs_of(actor, chairs) if shares.pool else ()
        chair_games = (shares.pool // (learning * len(own_chairs)) for _ in own_chairs)
        bot_games = (bot_rows // learning for bot_rows in shares.bots.values())

        return cls(
            seating=seating,
            turns=turns,
            mirror_games=shares.mirror // seating.seats,
            opponent_games=(*chair_games, *bot_games),
            chairs=own_chairs,
            bots=tuple(shares.bots),
        )

    @classmethod
    def against(cls, seating: Seating, games: int, seats: Sequence[int] | None = None) -> Plan:
        """Plan games in which one opponent plays all other seats.

        Args:
            seating: of the game.
            games: their number.
            seats: those that are not the opponent's; by default the sides take turns.

        Raises:
            UserError: if the sides are of unlike size and no seats are given, or for seats that
                the game does not have.
        """
        return cls(
            seating=seating, turns=turns_of(seating, seats), mirror_games=0, opponent_games=(games,)
        )

    @property
    def games(self) -> int:
        """The number of all games; the environment has ``games * seating.seats`` rows."""
        return self.mirror_games + sum(self.opponent_games)

    @property
    def rows(self) -> int:
        """The number of learning rows."""
        in_matches = sum(self.opponent_games) * len(self.turns[0])
        return self.mirror_games * self.seating.seats + in_matches

    @property
    def opponent_rows(self) -> tuple[int, ...]:
        """The number of rows that each opponent plays."""
        seats = self.seating.seats - len(self.turns[0])
        return tuple(games * seats for games in self.opponent_games)


class _Roles:
    """Which rows of the environments learn now, and which each opponent plays.

    The arrays are the same all the time; `take_turns` writes to them.
    """

    learning: Rows
    """The rows that learn, ``[count]``."""
    opposing: list[Rows]
    """The rows of each opponent, game by game."""
    turn: Rows
    """The turn of each game against an opponent: the place in `Plan.turns` of those who learn."""

    def __init__(self, plan: Plan) -> None:
        """Assign the rows. No game has begun: each is a turn behind its first one."""
        seats = plan.seating.seats
        learning = len(plan.turns[0])
        mirror_rows = plan.mirror_games * seats
        matches = np.arange(plan.mirror_games, plan.games)

        self._mirror_games = plan.mirror_games
        self._first_rows = matches[:, None] * seats
        self._learning_seats = np.array(plan.turns)
        every_seat = np.arange(seats)
        self._other_seats = np.array([np.setdiff1d(every_seat, turn) for turn in plan.turns])
        self.turn = matches % len(plan.turns) - 1

        # Views of the same memory: all rows, and those of a game.
        self.learning = np.arange(plan.rows)
        self._learning_of_game = self.learning[mirror_rows:].reshape(len(matches), learning)
        self._opposing_of_game = np.zeros((len(matches), seats - learning), np.int64)
        ends = np.cumsum(plan.opponent_games)[:-1]
        of_opponents = np.split(self._opposing_of_game, ends)
        self.opposing = [rows.reshape(-1) for rows in of_opponents]
        self._assign(np.arange(len(matches)))

    def take_turns(self, new_games: Flags) -> None:
        """Let others learn in games that have begun, bool ``[games]``."""
        matches = np.flatnonzero(new_games[self._mirror_games :])
        self.turn[matches] = (self.turn[matches] + 1) % len(self._learning_seats)
        self._assign(matches)

    def restore(self, turn: Rows) -> None:
        """Continue with these turns."""
        self.turn[...] = turn
        self._assign(np.arange(len(self.turn)))

    def _assign(self, matches: Rows) -> None:
        """Write the rows of these games against opponents."""
        turn = self.turn[matches]
        first_rows = self._first_rows[matches]
        self._learning_of_game[matches] = first_rows + self._learning_seats[turn]
        self._opposing_of_game[matches] = first_rows + self._other_seats[turn]


def outcomes_of(returns: Floats, over: Flags, sides: tuple[int, ...]) -> Float32:
    """Returns who has won, by the returns of all seats.

    A seat has won if its return is higher than the mean of those of the other sides.

    Args:
        returns: of the present episodes, ``[rows]``, with a row for each seat.
        over: bool ``[rows]``, the rows whose episode is over. Others have a result without meaning.
        sides: the side of each seat, of several sides.

    Returns: -1, 0 or 1, ``[rows]``; NaN where it is not known, as seats end apart.
    """
    lead = np.round(returns.reshape(-1, len(sides)) @ _comparison(sides), RETURN_DECIMALS)
    ends_together = over.reshape(lead.shape).all(1, keepdims=True)
    return np.where(ends_together, np.sign(lead), np.nan).reshape(-1).astype(np.float32)


@cache
def _comparison(sides: tuple[int, ...]) -> Floats:
    """Returns the matrix ``[seats, seats]`` that turns returns into leads over the other sides."""
    others = np.not_equal.outer(sides, sides)
    return np.asarray(np.eye(len(sides)) - others / others.sum(0))


class _Results:
    """Who has won: as the environment says, or by the returns of all seats."""

    def __init__(self, seating: Seating, rows: int) -> None:
        self._seating = seating
        self.returns = np.zeros(rows)
        """Of the present episodes, ``[rows]``."""

    def begin(self, new_games: Flags) -> None:
        """Games have begun, bool ``[games]``."""
        self.returns.reshape(len(new_games), -1)[new_games] = 0.0

    def of_ended(self, over: Flags, stated: Array | None) -> Float32:
        """Returns the results of the episodes that are over, ``[rows]``.

        Args:
            over: bool ``[rows]``. Others have a result without meaning.
            stated: what the environment says, ``[rows]``, or None.

        Returns: -1 to 1; NaN where it is not known, as seats end apart.
        """
        if stated is not None:
            return np.asarray(stated, np.float32)
        return outcomes_of(self.returns, over, self._seating.sides)


class Matches:
    """`Environments` whose rows learn; opponents play the other seats of their games.

    The rows of mirror games come first. A game against an opponent has one row for each seat that
    learns:

        env = make(config.env, plan.games * plan.seating.seats)
        matches = Matches(env, plan, [FrozenPlayer(policy)])
    """

    # The wrappers that set these are of single environments, which have no opponents.
    life_lost: Flags | None = None
    shortened: Flags | None = None
    dropped: Flags | None = None
    playing: Flags | None = None
    outcome: Float32
    """The results of the episodes that ended in the last step, float32 ``[count]``, from -1 (lost)
    to 1 (won); 0 in other rows. NaN where it is not known: seats of the game end apart, and the
    environment does not say it."""
    recorded: Mapping[str, Array]
    """As `Environments.recorded`, with two more: "opponent", the number of the draw that plays
    against each row (penstock.core.draws), and "outcome"."""

    def __init__(
        self,
        env: BatchedEnv,
        plan: Plan,
        opponents: Sequence[Opponent],
        ledger: TimeLedger | None = None,
    ) -> None:
        """Take over the environments.

        Args:
            env: the environments, which `close` closes.
            plan: of all its games.
            opponents: those of the plan, in its order.
            ledger: the time ledger of the calling thread.
        """
        assert env.count == plan.games * plan.seating.seats, "the plan is of other games"
        self.info = env.info
        self.count = plan.rows
        self.env = env
        """All rows."""
        self._plan = plan
        self._opponents = opponents
        self._ledger = ledger or TimeLedger()
        self._seats = plan.seating.seats
        self._roles = _Roles(plan)
        self._results = _Results(plan.seating, env.count)
        self.game_of = self._roles.learning // self._seats
        """The game of each learning row, int ``[count]``."""

        # The state between two steps, besides that of the above.
        space = env.info.action_space
        dtype = np.float32 if space.dtype.kind == "f" else np.int32
        self._actions = np.zeros((env.count, *(space.shape or ())), dtype)
        self._obs = np.zeros((env.count, 0), np.float32)  # observations of all rows
        self._plays = np.ones(env.count, np.bool_)  # rows whose next step is a decision

        # What a step writes.
        self.outcome = np.zeros(self.count, np.float32)
        self._opponent = np.zeros(self.count, np.uint64)
        self.recorded = {
            **{name: np.zeros(self.count, of.dtype) for name, of in env.recorded.items()},
            "opponent": self._opponent,
            "outcome": self.outcome,
        }

    @property
    def seat_of(self) -> Rows:
        """The seat that each learning row plays now, int ``[count]``.

        It changes in the step that resets the game.
        """
        return self._roles.learning % self._seats

    def reset_into(self, seed: int, out: Array) -> None:
        self._obs = np.zeros((self.env.count, *out.shape[1:]), out.dtype)
        seeds = np.random.SeedSequence(seed).generate_state(len(self._opponents))
        for opponent, opponent_seed in zip(self._opponents, seeds, strict=True):
            opponent.reset(int(opponent_seed))

        self.env.reset_into(seed, self._obs)
        no_rows = np.zeros(self.env.count, np.bool_)
        self._plays = self._playing_rows(no_rows)
        self._begin(self._plays, new_games=np.ones(self._plan.games, np.bool_))
        self._hand_over(out)

    def step_into(self, actions: Array, out: Array) -> tuple[npt.NDArray[Any], Flags, Flags]:
        # The opponents decide.
        self._ledger.switch(Part.INFER)
        learning = self._roles.learning
        self._actions[learning] = actions
        for opponent, rows in zip(self._opponents, self._roles.opposing, strict=True):
            self._actions[rows] = opponent.act(self._obs.take(rows, 0), rows)

        # All rows are stepped. What happened belongs to those that have learned until now.
        self._ledger.switch(Part.STEP)
        rewards, terminated, truncated = self.env.step_into(self._actions, self._obs)
        own_results = rewards[learning], terminated[learning], truncated[learning]
        for opponent, rows in zip(self._opponents, self._roles.opposing, strict=True):
            opponent.take_rewards(rewards[rows])
        over = terminated | truncated
        self._results.returns += rewards
        self._take_outcome(over)
        for name, values in self.env.recorded.items():
            values.take(learning, 0, out=self.recorded[name], mode="clip")

        # Games begin again, and what follows belongs to the rows that learn from now on.
        self._begin_after_step(over)
        self._hand_over(out)
        return own_results

    def refresh(self, read: ReadPolicy) -> bool:
        are_ready = [opponent.refresh(read) for opponent in self._opponents]
        self._note_draws()
        return all(are_ready)

    def forget(self) -> None:
        for opponent in self._opponents:
            opponent.forget()

    def watch_precision(self) -> None:
        self.env.watch_precision()

    def state_dict(self) -> Any:
        return {
            "env": self.env.state_dict(),
            "obs": self._obs.copy(),
            "turn": self._roles.turn.copy(),
            "plays": self._plays.copy(),
            "returns": self._results.returns.copy(),
            "opponents": [opponent.state_dict() for opponent in self._opponents],
        }

    def load_state_dict(self, state: Any) -> None:
        self.env.load_state_dict(state["env"])
        self._obs[...] = state["obs"]
        self._roles.restore(state["turn"])
        self._plays = np.array(state["plays"], np.bool_)
        self._results.returns[...] = state["returns"]
        for opponent, opponent_state in zip(self._opponents, state["opponents"], strict=True):
            opponent.load_state_dict(opponent_state)
        self._note_draws()

    def pictures(self) -> list[Array]:
        return [*self.env.pictures()]

    def close(self) -> None:
        self.env.close()

    # ------------------------------------------------------------------------------ one step

    def _take_outcome(self, over: Flags) -> None:
        """Write the results of the episodes that have ended, by the rows that are over."""
        learning = self._roles.learning
        self.outcome[:] = 0.0
        ended = over[learning]
        if ended.any():
            outcomes = self._results.of_ended(over, self.env.outcome)
            self.outcome[ended] = outcomes[learning[ended]]

    def _begin_after_step(self, over: Flags) -> None:
        """Begin the episodes that the last step has reset.

        Args:
            over: the rows whose episode has ended with it.
        """
        previously = self._plays
        self._plays = self._playing_rows(over)
        if previously.all():
            return

        first = self._plays & ~previously
        if first.any():
            was_live = previously.reshape(-1, self._seats).any(1)
            is_live = self._plays.reshape(-1, self._seats).any(1)
            self._begin(first, np.asarray(is_live & ~was_live))

    def _playing_rows(self, over: Flags) -> Flags:
        """Returns the rows whose next step is a decision, by those whose episode is over."""
        playing = self.env.playing
        return ~over if playing is None else playing.copy()

    def _begin(self, first: Flags, new_games: Flags) -> None:
        """Begin episodes: others learn in games that have begun, and opponents are told.

        Args:
            first: the rows whose next observation is the first of an episode.
            new_games: the games that have begun.
        """
        self._results.begin(new_games)
        self._roles.take_turns(new_games)

        new_rows = new_games.repeat(self._seats)
        for opponent, rows in zip(self._opponents, self._roles.opposing, strict=True):
            first_of_opponent = first[rows]
            new_of_opponent = new_rows[rows]
            if first_of_opponent.any() or new_of_opponent.any():
                opponent.begin(first_of_opponent, new_of_opponent)
        self._note_draws()

    def _note_draws(self) -> None:
        """Record who plays each game, in its first row that learns; the others have none."""
        seats = self._seats - len(self._plan.turns[0])
        draws = [opponent.draws[::seats] for opponent in self._opponents]
        mirror_rows = self._plan.mirror_games * self._seats
        self._opponent[mirror_rows :: len(self._plan.turns[0])] = np.concatenate(draws)

    def _hand_over(self, out: Array) -> None:
        """Write the observations of the rows that learn, and which of them play."""
        learning = self._roles.learning
        self._obs.take(learning, 0, out=out, mode="clip")
        if self.env.playing is not None:
            self.playing = self.env.playing[learning]


def make_environments(
    config: Config,
    actor: int,
    ledger: TimeLedger,
    beat: Callable[[], object] | None = None,
    *,
    first: int | None = None,
    timed: bool = True,
) -> Environments:
    """Make the environments of an actor, and those who play against it.

    Args:
        config: of the run.
        actor: its number on its host.
        ledger: the time ledger of the thread that steps them.
        beat: as of `envs.make`.
        first: as of `envs.make`; by default that of the actor.
        timed: whether opponents compute in the form that is fastest on this host
            (`autotune.forms`), where the options leave it open.

    Raises:
        UserError: as `envs.make`, or if the options do not fit the game.
    """
    threads = config.actors.env_threads
    make_env = partial(make, config.env, threads=threads, stagger=True, beat=beat)
    rows = config.actor_envs
    league = config.league
    if not league.has_matches:
        return make_env(rows, first=first_index(actor, rows) if first is None else first)

    # Only a game that has been made says how many seats it has.
    seating = probe(config.env, threads).seating
    plan = Plan.of(league, seating, rows, actor, league.chair_count)
    env_rows = plan.games * seating.seats
    env = make_env(env_rows, first=first_index(actor, env_rows) if first is None else first)
    if timed:
        config, _ = with_acting_form(config, env.info)

    size = network_shape(config, env.info).layout.size
    chair_rows = plan.opponent_rows[: len(plan.chairs)]
    bot_rows = plan.opponent_rows[len(plan.chairs) :]
    chairs = [
        Chair(policy_id, count, size, _policy_maker(config, env, count, actor))
        for policy_id, count in zip(plan.chairs, chair_rows, strict=True)
    ]
    bots = [BotPlayer(env, bot, count) for bot, count in zip(plan.bots, bot_rows, strict=True)]
    return Matches(env, plan, [*chairs, *bots], ledger)


def _policy_maker(
    config: Config, env: BatchedEnv, rows: int, actor: int
) -> Callable[[int], Policy]:
    """Returns a function of a seed that makes the run's policy over so many ``rows`` of ``env``."""
    actors = config.actors.model_copy(update={"envs": rows})
    config = config.model_copy(update={"actors": actors})
    return lambda seed: make_policy(config, env.info, seed, actor)
