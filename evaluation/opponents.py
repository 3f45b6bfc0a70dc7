"""Opponents of an evaluation, and matches against them.

An opponent is one of

    bot:NAME         a scripted player of the environment
    initial          the policy of the same run before training, the first member of its pool
    runs/other       the best checkpoint of a run, or its last one without a best
    agent.safetensors    a file that `penstock export` wrote

It plays all other seats of the game. A policy samples its actions, so that games differ. The sides
rotate from episode to episode. Where sides have unlike numbers of seats, each side is played in
matches of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.actors.matches import Matches, Plan
from penstock.actors.opponent import BotPlayer, FrozenPlayer
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.params import Float32
from penstock.envs import BatchedEnv
from penstock.envs.seats import BOT, INITIAL, Seating, check_bot
from penstock.evaluation.policy_source import PolicySource, find_policy, of_checkpoint
from penstock.learner.checkpoints.checkpoint_format import DamagedCheckpointError
from penstock.learner.pool import PolicyPool, pool_folder

OPPONENT_SEEDS = 7_919
"""Distance between the seed of a policy and that of its opponent's actions."""


class OpponentSource(NamedTuple):
    """Where an opponent comes from."""

    name: str
    """As the user wrote it."""
    source: PolicySource | None
    """Of its weights; None for a scripted player."""

    def matches(self, env: BatchedEnv, plan: Plan, seed: int, *, sample: bool = True) -> Matches:
        """Returns the games ``env`` as matches against this opponent.

        Args:
            env: the games, for which observations are packed already.
            plan: who plays which seats.
            seed: of the policy that plays against it.
            sample: whether a policy samples its actions.

        Raises:
            UserError: if the environment has no such scripted player, or other spaces than the
                policy was trained with.
        """
        (rows,) = plan.opponent_rows
        if self.source is None:
            check_bot(self.name, env.info.seating)
            return Matches(env, plan, [BotPlayer(env, self.name.removeprefix(BOT), rows)])

        parts = env.info.parts
        policy = self.source.policy(env, seed + OPPONENT_SEEDS, rows)
        if env.info.parts != parts:
            raise UserError(
                f"{self.name} was trained with the parts of its observations in another order than "
                "this policy; train both with one version of the environment"
            )
        return Matches(env, plan, [FrozenPlayer(policy, sample=sample)])

    def identity(self, env: BatchedEnv) -> str:
        """Returns what tells this opponent from others, also from later weights of the same name.

        Raises UserError as `matches` does.
        """
        if self.source is None:
            check_bot(self.name, env.info.seating)
            return self.name
        weights = self.source.weights(env)
        return f"{self.name} {hashlib.sha256(weights.tobytes()).hexdigest()[:16]}"


class MissingInitialError(UserError):
    """The pool of a run has no policy of before training, or not yet."""


def find_opponent(
    name: str, config: Config, run_dir: Path | None, allow: Sequence[str] = ()
) -> OpponentSource:
    """Returns the opponent of this name.

    Args:
        name: of the opponent.
        config: of the policy that plays against it.
        run_dir: folder of that policy's run; None if it is of a file.
        allow: patterns of names that may be imported (`find_policy`).

    Raises:
        MissingInitialError: `initial` is not in the run's pool.
        UserError: if there is no such opponent. Of a scripted player the environment decides that,
            when it plays.
    """
    if name.startswith(BOT):
        return OpponentSource(name, None)
    if name == INITIAL:
        return OpponentSource(name, _initial_policy(config, run_dir).read_once())
    if not Path(name).exists():
        raise UserError(
            f"there is no opponent {name}; give bot:NAME for a scripted player of the environment, "
            f"{INITIAL} for the policy before training, the folder of a run, or an exported file"
        )
    source = _of_same_game(name, find_policy(name, "best", allow), config.env.id)
    return OpponentSource(name, source.read_once())


def check_opponents(config: Config) -> None:
    """Raise UserError if `eval.against` names a run or a file that is none."""
    for name in config.eval.against or ():
        if name != INITIAL:
            find_opponent(name, config, None)


class Pairing(NamedTuple):
    """Who plays a policy's episodes: the policy alone, or with an opponent."""

    opponent: str
    """Name of the opponent; empty if the policy plays all rows itself."""
    envs: BatchedEnv | Matches
    """The rows that the policy plays."""


def pairings_of(
    env: BatchedEnv,
    opponents: Sequence[OpponentSource],
    *,
    seats: Sequence[int] | None,
    seed: int,
) -> list[Pairing]:
    """Returns the pairings of a policy with each opponent, which use ``env`` one after another.

    Without opponents there is one, of the environments themselves.

    Args:
        env: the environments, for which observations are packed as the policy needs them.
        opponents: who plays the other seats.
        seats: the only seats that the policy plays against opponents; None: it plays each side.
        seed: of the policy.

    Raises:
        UserError: if an opponent does not fit the environment.
    """
    if not opponents:
        return [Pairing("", env)]

    seating = env.info.seating
    plans = _plans(seating, env.count // seating.seats, seats)
    return [
        Pairing(opponent.name, opponent.matches(env, plan, seed))
        for opponent in opponents
        for plan in plans
    ]


def _plans(seating: Seating, games: int, seats: Sequence[int] | None) -> list[Plan]:
    """Returns the plans of ``games`` against one opponent; ``seats`` as of `pairings_of`."""
    sides = [
        [seat for seat, side_of_seat in enumerate(seating.sides) if side_of_seat == side]
        for side in range(seating.side_count)
    ]
    if seats is not None or len({len(side) for side in sides}) == 1:
        return [Plan.against(seating, games, seats)]
    return [Plan.against(seating, games, side) for side in sides]


def _of_same_game(name: str, source: PolicySource, env_id: str) -> PolicySource:
    """Returns the source of an opponent, which says so if it was trained on another game.

    ``name`` is the opponent's, and ``env_id`` the game that is played.
    """

    def weights(envs: BatchedEnv) -> Float32:
        try:
            return source.weights(envs)
        except DamagedCheckpointError:
            raise
        except UserError as error:
            trained_id = source.config.env.id
            if trained_id == env_id:
                raise
            raise UserError(
                f"{name} was trained on {trained_id}, which has other observations or actions than "
                f"{env_id}; name an opponent that plays this game"
            ) from error

    return source._replace(weights=weights)


def _initial_policy(config: Config, run_dir: Path | None) -> PolicySource:
    """Returns the policy of a run before training.

    Raises MissingInitialError if it is not in the pool, UserError for a policy that has no pool.
    """
    if run_dir is None:
        raise UserError(
            f"{INITIAL} is in the pool of a run, and an exported file has none; give another "
            "opponent, or the folder of the run"
        )
    pool = PolicyPool(pool_folder(config, run_dir))
    line = config.league.name
    for member in pool.members(line):
        if member.initial:
            return of_checkpoint(config, pool.checkpoint_folder(member))
    raise MissingInitialError(
        f"{pool.folder} has no policy of line {line} from before training, which {INITIAL} means; "
        "give another opponent"
    )
