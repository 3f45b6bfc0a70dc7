"""Games of several seats: what their metadata says, and which options do not fit them.

A row of such a vector of environments is a seat: row ``game * seats + seat`` of
``num_envs = games * seats``. All seats are played by the same policy, but for those of opponents
(penstock.actors.matches). A row acts, waits or is out:

- One that acts has its legal choices, and its own reward.
- One that waits, since another seat acts, has exactly one legal choice, which does nothing. It has
  the reward of what happens to it meanwhile, and its recurrent state runs on: it watches.
- One that is out does not play: its episode has ended, or the step only resets it. It has no
  reward, is not `alive` in the slot, and its recurrent state is forgotten.

All seats of a game begin again in the step after the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.league import LeagueConfig
from penstock.configs.transports import TRANSPORTS

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from penstock.configs.schema import Config

# Keys of a vector environment's metadata: the number of rows that belong to one game; the side of
# each seat; the names of the scripted players that `bot` of the vector has.
SEATS = "seats"
SIDES = "sides"
BOTS = "bots"
# And for each seat the keys by which a person plays it: names of keys, as pygame has them, with the
# number of the choice, or of the button among several.
KEYS = "keys"
# Keys of the `info` of a step or reset: the rows within an episode after it, bool [num_envs], which
# is left out where all seats of a game end together; and the result of each row's episode, -1 to 1,
# which is read where an episode ends.
PLAYING = "playing"
OUTCOME = "outcome"
# Opponents of an evaluation: the beginning of a scripted player's name, and the policy before
# training.
BOT = "bot:"
INITIAL = "initial"

# A share of the rows that is so close to a whole number of games is one.
SMALL_REMAINDER = 1e-6
# A larger number of rows, which all shares divide, is looked for up to so many times the rows, and
# among so many numbers.
MOST_TIMES_ROWS = 16
MOST_CANDIDATES = 4096


class Seating(NamedTuple):
    """The seats of a game, as its metadata says."""

    seats: int = 1
    """Rows that belong to one game."""
    sides: tuple[int, ...] = (0,)
    """The side of each seat, counted from 0. Seats of one side play together."""
    bots: tuple[str, ...] = ()
    """Names of the scripted players."""

    @property
    def side_count(self) -> int:
        return len({*self.sides})

    @property
    def has_opponents(self) -> bool:
        """Whether seats of a game play against each other."""
        return self.side_count > 1


ONE_SEAT = Seating()
"""The seats of an environment that is no game of several."""


def seating_of(name: str, metadata: Mapping[str, Any]) -> Seating:
    """Returns the seats of a vector environment; one seat where the metadata does not say it.

    Args:
        name: of the environment, for messages.
        metadata: of the vector environment.

    Raises:
        UserError: if the entries do not fit together.
    """
    seats = metadata.get(SEATS, 1)
    if type(seats) is not int or seats < 1:
        raise UserError(
            f"environment {name} has metadata[{SEATS!r}] {seats!r:.80}, and it must be the number "
            "of seats of a game, 1 or more"
        )

    # Without an entry each seat is a side of its own.
    sides = tuple(metadata.get(SIDES, range(seats)))
    counted = range(max((side for side in sides if type(side) is int), default=-1) + 1)
    if len(sides) != seats or {*sides} != {*counted}:
        raise UserError(
            f"environment {name} has metadata[{SIDES!r}] {sides!r:.80}, and it must have a side "
            f"for each of the {seats} seats, counted from 0, as in {tuple(range(seats))}"
        )

    bots = metadata.get(BOTS, ())
    if isinstance(bots, str) or not all(isinstance(bot, str) for bot in bots):
        raise UserError(
            f"environment {name} has metadata[{BOTS!r}] {bots!r:.80}, and it must have the names "
            'of the scripted players, as in ("random",)'
        )
    return Seating(seats, sides, tuple(bots))


def check_rows(name: str, rows: int, seats: int) -> None:
    """Raise UserError unless so many ``rows`` are whole games of the environment ``name``."""
    if rows % seats:
        more_rows = -(-rows // seats) * seats
        raise UserError(
            f"actors.envs {rows} is not divisible by {seats}, and environment {name} has games of "
            f"{seats} seats, each a row of its own; set actors.envs={more_rows}"
        )


class RowShares(NamedTuple):
    """How many learning rows of an actor are in which games."""

    mirror: int
    """In games that the newest weights play alone."""
    bots: Mapping[str, int]
    """In games against each scripted player."""
    pool: int
    """In games against members of the pool."""


def chairs_of(actor: int, chairs: int) -> tuple[int, ...]:
    """Returns the policy ids of the chairs that an actor plays against, of ``chairs``: two at most.

    Args:
        actor: its number on its host.
        chairs: those of the run, policies 1 to ``chairs``.
    """
    return tuple(1 + (2 * actor + i) % chairs for i in range(min(2, chairs)))


def keys_of(env_id: str, vector: VectorEnv, seat: int) -> Mapping[str, int]:
    """Returns the keys by which a person plays a seat of a game, each with its choice or button.

    Args:
        env_id: of the environment, for messages.
        vector: of the games.
        seat: that the person plays.

    Raises:
        UserError: if the game has no such seat, or no keys for it.
    """
    seats = seating_of(env_id, vector.metadata).seats
    if seats == 1:
        raise UserError(
            f"environment {env_id} has one seat, so there is nobody to play against; leave out "
            "--seat to watch the agent"
        )
    if seat >= seats:
        raise UserError(f"environment {env_id} has no seat {seat}; choose from 0 to {seats - 1}")
    keys = vector.metadata.get(KEYS)
    if not keys:
        raise UserError(
            f"environment {env_id} does not say by which keys a person plays it; give it "
            f'metadata[{KEYS!r}], a map for each seat, as in ({{"left": 0, "right": 1}},) * {seats}'
        )
    if len(keys) != seats or not all(isinstance(each, Mapping) for each in keys):
        raise UserError(
            f"environment {env_id} has metadata[{KEYS!r}] {keys!r:.80}, and it must have a map of "
            f"keys for each of the {seats} seats"
        )
    return dict(keys[seat])


def turns_of(seating: Seating, seats: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Returns the seats that learn in turn, where opponents play the others.

    They are the sides, each with the same number of seats; if ``seats`` are given, these alone.

    Raises:
        UserError: if the sides are of unlike size, or if there are no such ``seats``.
    """
    if seats is not None:
        missing = [seat for seat in seats if seat >= seating.seats]
        if missing:
            raise UserError(
                f"league.seats {seats} has seat {missing[0]}, and the game has {seating.seats}, "
                "counted from 0; name seats that it has"
            )
        if len({*seats}) < len(seats) or len(seats) == seating.seats:
            raise UserError(
                f"league.seats {seats} must be different seats, and leave one of "
                f"{seating.seats} to an opponent"
            )
        return (tuple(sorted(seats)),)

    sides = range(seating.side_count)
    turns = [tuple(seat for seat, of in enumerate(seating.sides) if of == side) for side in sides]
    if len({len(turn) for turn in turns}) > 1:
        raise UserError(
            f"the sides of the game have {' and '.join(str(len(turn)) for turn in turns)} seats, "
            "so the policy cannot play them in turn against an opponent; set league.seats to those "
            f"that it plays, such as league.seats={[*turns[0]]}"
        )
    return tuple(turns)


def divide_rows(league: LeagueConfig, seating: Seating, rows: int) -> RowShares:
    """Divide the learning rows of an actor into those of mirror games and those of matches.

    Args:
        league: the config's section.
        seating: of the game.
        rows: the learning rows, `actors.envs`.

    Raises:
        UserError: if a share is no whole number of games, as `turns_of`, or for a scripted player
            that the game does not have.
    """
    for bot in league.bots:
        if bot not in seating.bots:
            bots = f"those of the game are {', '.join(seating.bots)}; name one of them"
            raise UserError(
                f"league.bots has {bot}, and "
                f"{bots if seating.bots else 'the game has no scripted players; leave it out'}"
            )

    shares = [*_shares(league, seating)]
    if not rows_fit(league, seating, rows):
        raise _odd_split(shares, rows)
    mirror, *of_bots, pool = (round(share.of_rows * rows) for share in shares)
    return RowShares(mirror, dict(zip(league.bots, of_bots, strict=True)), pool)


def rows_fit(league: LeagueConfig, seating: Seating, rows: int) -> bool:
    """Whether so many learning rows can be divided into whole games, as `divide_rows` does."""
    if not league.has_matches:
        return rows % seating.seats == 0
    return all(share.divides(rows) for share in _shares(league, seating))


class _Share(NamedTuple):
    """A share of the learning rows."""

    name: str
    """What it is, for messages."""
    of_rows: float
    unit: int
    """So many rows belong together."""
    unit_name: str
    """The same in words, which continue "whole games of"."""

    def divides(self, rows: int) -> bool:
        """Whether the share of so many ``rows`` is a whole number of units."""
        units = self.of_rows * rows / self.unit
        return abs(units - round(units)) < SMALL_REMAINDER


def _shares(league: LeagueConfig, seating: Seating) -> Iterator[_Share]:
    """Yields the shares of mirror games, of each scripted player and of the pool."""
    learning = len(turns_of(seating, league.seats)[0])
    chairs = len(chairs_of(0, league.chairs))

    yield _Share("league.mirror", league.mirror_share, seating.seats, f"{seating.seats}")
    for bot, share in league.bots.items():
        yield _Share(f"league.bots.{bot}", share, learning, f"{learning}")
    pool = "what league.mirror and league.bots leave to the pool,"
    each_chair = f"{learning}, as many for each of {chairs} chairs"
    yield _Share(pool, league.pool_share, learning * chairs, each_chair)


def _odd_split(shares: Sequence[_Share], rows: int) -> UserError:
    """Returns the error for so many ``rows`` of which a share is no whole number of games."""
    odd = next(share for share in shares if not share.divides(rows))
    candidates = range(rows + 1, MOST_TIMES_ROWS * rows)[:MOST_CANDIDATES]
    more_rows = next((n for n in candidates if all(each.divides(n) for each in shares)), None)
    remedy = "choose shares that are" if more_rows is None else f"set actors.envs={more_rows}"
    return UserError(
        f"{odd.name} {odd.of_rows:g} of actors.envs {rows} is {odd.of_rows * rows:g} rows, and "
        f"they must be whole games of {odd.unit_name}; {remedy}"
    )


def check_options(config: Config, seating: Seating) -> None:
    """Check a run's options with the seats of its environment.

    Raises:
        UserError: for a number of rows that is not divisible by the seats, for options of a league
            or opponents of evaluations that do not fit the game, and for `stop.return` in a game
            of several sides that is never evaluated.
    """
    _check_league(config, seating)
    _check_against(config, seating)
    if seating.has_opponents and config.stop.return_ is not None and not _is_evaluated(config):
        evaluate = "set eval.every_steps=100000 and transport.kind=auto, or "
        raise UserError(
            f"stop.return {config.stop.return_:g} is reached by evaluations in a game of several "
            "sides, since returns in training against oneself tell nothing of its strength, and "
            f"there are no evaluations; {'set ' if config.actors.games else evaluate}"
            "stop.return=null with stop.minutes or stop.env_steps"
        )


def _check_league(config: Config, seating: Seating) -> None:
    """Raise UserError if the rows, or the options of a league, do not fit the game."""
    league = config.league
    if not seating.has_opponents:
        defaults = LeagueConfig()
        for option, value in league:
            if value != getattr(defaults, option):
                raise UserError(
                    f"league.{option} is for a game of several sides, and environment "
                    f"{config.env.id} has one; leave it out"
                )
    if league.seats is not None and league.mirror_share > 0:
        raise UserError(
            f"league.seats {league.seats} leaves the other seats to opponents, and league.mirror "
            f"{league.mirror_share:g} lets the policy play all of them; set league.mirror=0"
        )

    if config.actors.games:
        if league.has_matches:  # games come and go, so no number of rows is to be divided
            turns_of(seating, league.seats)
    elif league.has_matches:
        divide_rows(league, seating, config.actor_envs)
    else:
        check_rows(config.env.id, config.actor_envs, seating.seats)


def _check_against(config: Config, seating: Seating) -> None:
    """Raise UserError for opponents of evaluations that a game with these seats cannot have."""
    if not config.eval.against:
        return
    check_opposed(config.env.id, config.eval.against, seating)
    for name in config.eval.against:
        check_bot(name, seating)


def check_opposed(env_id: str, opponents: Sequence[str], seating: Seating) -> None:
    """Raise UserError if there are to be ``opponents`` in a game of one side."""
    if not seating.has_opponents:
        raise UserError(
            f"environment {env_id} has one side, against which {', '.join(opponents):.80} cannot "
            "play; leave out the opponent (eval.against=null)"
        )


def check_bot(opponent: str, seating: Seating) -> None:
    """Raise UserError if ``opponent`` is `bot:NAME`, and the game has no such scripted player."""
    bot = opponent.removeprefix(BOT)
    if not opponent.startswith(BOT) or bot in seating.bots:
        return
    names = ", ".join(f"{BOT}{name}" for name in seating.bots)
    advice = f"choose from {names}" if names else "name a run or a file, as it has none"
    raise UserError(f"the environment has no scripted player {bot!r:.80}; {advice}")


def _is_evaluated(config: Config) -> bool:
    """Whether a run has evaluations whose results reach its learner."""
    has_times = config.evaluates_by_steps or config.eval.every_s is not None
    return has_times and not TRANSPORTS.one_process(config.transport.kind)


def ranking_note(config: Config, seating: Seating) -> str:
    """Returns a sentence on what ranks the checkpoints of a game of several sides; else empty."""
    if not seating.has_opponents:
        return ""
    reason = (
        f"the game has {seating.side_count} sides, so the mean return in training does not rank "
        "checkpoints"
    )
    if not config.has_evaluator:
        return (
            f"{reason}: without evaluations checkpoints/best is not written, and a command that "
            "takes the best takes the last"
        )
    opponents = ", ".join(config.eval.against or (INITIAL,))
    return f"{reason}: evaluations against {opponents} do, and write checkpoints/best"
