"""Play whole episodes with the weights of a run, and report their returns.

Environments run in parallel, and each plays a share of the episodes that is fixed in advance: if
the first episodes to end were counted, short ones would be over-represented. An episode that does
not end is cut at a number of steps, so that every evaluation ends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.actors.matches import Matches, outcomes_of
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE
from penstock.core.formatting import aligned, number
from penstock.envs import BatchedEnv, find_bad_observation, make
from penstock.envs.seats import Seating, check_opposed
from penstock.evaluation.estimates import win_rate
from penstock.evaluation.opponents import OpponentSource, find_opponent, pairings_of
from penstock.evaluation.policy_source import PolicySource, find_policy
from penstock.models.acting.policy import Policy

ENVS = 16
"""Environments of an evaluation, at most."""
MOST_DROPPED = 10
"""Failed episodes for each episode that is asked for; with more the evaluation fails."""
SEEDS_APART = 10_007
"""Distance between the seeds of environments for two values of ``seed``: more than are played."""

PlayedEnvs = BatchedEnv | Matches
"""Environments whose rows are seats of games: all seats, or those that a policy plays."""
Choose = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns the actions for observations ``[count, *shape]``."""
Flags = npt.NDArray[np.bool_]
Begin = Callable[[Flags], None]
"""Receives the environments in which an episode begins, bool ``[count]``."""
TakeRewards = Callable[[npt.NDArray[Any]], None]
"""Receives what the last actions were paid, raw ``[count]``."""


class Episode(NamedTuple):
    """One episode: its raw return, its length in agent steps, and whether it was cut there."""

    episode_return: float
    length: int
    cut: bool = False
    game: int = 0
    """Number of its game among those that were played side by side."""
    seat: int = 0
    """The seat of its game that was played."""
    outcome: float | None = None
    """The result of its game for that seat, from -1 (lost) to 1 (won); None if the environment does
    not say it, and seats do not end together or have no opponents."""
    number: int = 0
    """Its number among the episodes of its row."""
    opponent: str = ""
    """Who played the seats that the policy did not; empty if it played all."""


def evaluate(
    run_dir: str,
    episodes: int,
    which: str,
    sample: bool | None,
    seed: int,
    max_steps: int | None,
    allow: Sequence[str] = (),
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Play episodes with the weights of a run, or of an exported file.

    Args:
        run_dir: folder of the run, or path of the file.
        episodes: how many to play.
        which: the checkpoint of a run, "best" or "last".
        sample: True draws actions as in training, False takes the most probable ones, and None
            does what the run's evaluation found to be better. Against another policy None samples,
            as that does: neither then has an advantage, and games differ.
        seed: the same one plays the same episodes.
        max_steps: agent steps at which an episode is cut; None takes `eval.max_episode_steps`.
        allow: patterns of names that may be imported (`find_policy`).
        against: opponents in a game of several sides (`evaluation.opponents`), each of which gets
            an equal share of the episodes. Without any the policy plays all seats itself.

    Returns: the returns and lengths of the episodes with their `summary`, and how they were played.

    Raises:
        UserError: if there is no such policy, or the environment cannot be played.
    """
    source = find_policy(run_dir, which, allow)
    config = source.config
    step_limit = max_steps or config.eval.max_episode_steps
    folder = None if source.name == "file" else Path(run_dir)
    opponents = [find_opponent(name, config, folder, allow) for name in against]
    if sample is None:
        has_policies = any(opponent.source is not None for opponent in opponents)
        sample = source.sampled or has_policies

    def choose(policy: Policy) -> Choose:
        return policy.act if sample else policy.greedy

    rows = min(share_of(episodes, max(1, len(opponents))), ENVS)
    envs = make(config.env, rows, config.actors.env_threads, whole_games=True)
    seating = envs.info.seating
    try:
        if against:
            check_opposed(config.env.id, against, seating)
        played = play_policy(
            envs,
            source,
            opponents,
            episodes,
            choose=choose,
            seed=seed,
            max_steps=step_limit,
        )
    finally:
        envs.close()

    returns = tuple(episode.episode_return for episode in played)
    lengths = tuple(episode.length for episode in played)
    result = {
        "run_dir": run_dir,
        "checkpoint": source.name,
        "episodes": len(played),
        "sample": sample,
        "seed": seed,
        "return": summary(returns),
        "length": summary(lengths),
        "cut": sum(episode.cut for episode in played),
        "max_episode_steps": step_limit,
        "returns": returns,
        "lengths": lengths,
    }
    if opponents:
        result["against"] = by_opponent(played)
    elif seating.seats > 1:
        result["seats"] = by_seat(played)
    return result


def by_opponent(played: Sequence[Episode]) -> list[dict[str, Any]]:
    """Returns the episodes against each opponent in figures, in the order of the opponents.

    They are the "opponent", the number of "episodes", the `summary` of their "return", the shares
    of games that were "won", "drawn" and "lost" with the `estimates.WinRate` as "win_rate", None
    where outcomes are not known, and the figures `by_seat` as "seats".
    """
    figures = []
    for opponent in dict.fromkeys(episode.opponent for episode in played):
        episodes = [episode for episode in played if episode.opponent == opponent]
        figures.append(
            {
                "opponent": opponent,
                "episodes": len(episodes),
                "return": summary(tuple(episode.episode_return for episode in episodes)),
                **shares_of(episodes),
                "seats": by_seat(episodes),
            }
        )
    return figures


def shares_of(played: Sequence[Episode]) -> dict[str, Any]:
    """Returns the shares of games that were "won", "drawn" and "lost", and the "win_rate".

    None where outcomes are not known. A game counts once.
    """
    outcomes = [
        fmean(outcomes)
        for episodes in games_of(played)
        if (outcomes := [each.outcome for each in episodes if each.outcome is not None])
    ]
    if not outcomes:
        return dict.fromkeys(("won", "drawn", "lost", "win_rate"))

    games = len(outcomes)
    return {
        "won": sum(outcome > 0 for outcome in outcomes) / games,
        "drawn": sum(outcome == 0 for outcome in outcomes) / games,
        "lost": sum(outcome < 0 for outcome in outcomes) / games,
        "win_rate": win_rate(outcomes)._asdict(),
    }


def games_of(played: Sequence[Episode]) -> list[list[Episode]]:
    """Returns the episodes of each game: of one in which the policy plays a seat, a single one.

    Seats that play together are paid alike, so an interval must not count them as independent.
    """
    games: dict[tuple[int, int], list[Episode]] = {}
    for episode in played:
        games.setdefault((episode.game, episode.number), []).append(episode)
    return [*games.values()]


def by_seat(played: Sequence[Episode]) -> list[dict[str, Any]]:
    """Returns the episodes of each seat of a game in figures, for seats that have some.

    They are "seat", the number of "episodes", the `summary` of their "return", and the shares that
    were "won", "drawn" and "lost" with the "win_rate" (`shares_of`).
    """
    figures = []
    for seat in sorted({episode.seat for episode in played}):
        episodes = [episode for episode in played if episode.seat == seat]
        figures.append(
            {
                "seat": seat,
                "episodes": len(episodes),
                "return": summary(tuple(episode.episode_return for episode in episodes)),
                **shares_of(episodes),
            }
        )
    return figures


def seed_runs(folder: str) -> list[str]:
    """Returns the runs in a folder of `train --seeds`, by seed; none if it is a run itself."""
    base = Path(folder)
    if (base / CONFIG_FILE).is_file():
        return []

    run_dirs = [str(path.parent) for path in base.glob(f"seed-*/{CONFIG_FILE}")]
    # Shorter names first, so that seed-10 follows seed-9.
    return sorted(run_dirs, key=lambda name: (len(name), name))


def evaluate_seeds(
    folder: str,
    episodes: int,
    which: str,
    sample: bool | None,
    seed: int,
    max_steps: int | None,
    allow: Sequence[str] = (),
    against: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate each run in a folder of `train --seeds`.

    The arguments have the same meaning as in `evaluate`, but for the ``folder`` of the runs.

    Returns: the results of the runs in "runs"; the `summary` of the means of the runs in "return"
        and "length"; and in "failed" the runs that could not be evaluated, with the reason.

    Raises:
        UserError: if no run can be evaluated.
    """
    runs = []
    failed = []
    for run_dir in seed_runs(folder):
        try:
            runs.append(evaluate(run_dir, episodes, which, sample, seed, max_steps, allow, against))
        except UserError as error:
            failed.append({"run_dir": run_dir, "error": str(error)})
    if not runs:
        raise UserError(failed[0]["error"])

    return {
        "run_dir": folder,
        "runs": runs,
        "failed": failed,
        "return": summary(tuple(run["return"]["mean"] for run in runs)),
        "length": summary(tuple(run["length"]["mean"] for run in runs)),
    }


def play(
    envs: PlayedEnvs,
    choose: Choose,
    episodes: int,
    seed: int,
    max_steps: int,
    begin: Begin | None = None,
    take_rewards: TakeRewards | None = None,
) -> list[Episode]:
    """Play exactly ``episodes`` episodes, each complete or cut at ``max_steps`` agent steps.

    A single environment cannot be reset alone, so one whose episode was cut waits for the others.

    Args:
        envs: the environments, each of which plays its share of the episodes. Of games against
            opponents they are the rows that do not belong to these.
        choose: returns the actions.
        episodes: how many to play.
        seed: the episodes of two values have nothing in common.
        max_steps: agent steps at which an episode is cut.
        begin: called where episodes begin, for instance to reset a recurrent state.
        take_rewards: called after each step, for a policy that reads its last reward.

    Returns: the episodes, one environment after another.

    Raises:
        UserError: for an observation or a reward that is not sound, or if far more episodes fail
            than are asked for.
    """
    tally = _Tally(envs.game_of, episodes, max_steps, envs.info.seating)
    space = envs.info.observation_space
    obs = np.empty((envs.count, *space.shape), space.dtype)
    parts = envs.info.parts
    counts = envs.info.counts
    seeds = itertools.count(seed * SEEDS_APART, envs.count)

    while unfinished := tally.unfinished():
        # At first, and whenever each of these waits after a cut episode, all are reset together.
        if tally.all_wait(unfinished):
            envs.reset_into(next(seeds), obs)
            tally.on_reset()
            begins = np.ones(envs.count, np.bool_)
            resetting = ~begins if envs.playing is None else ~envs.playing
        if bad := find_bad_observation(obs[None], parts, ~resetting[None], counts):
            raise UserError(f"there is {bad}; correct the environment")
        if begin is not None and begins.any():
            begin(begins)

        # The step after an episode's end only resets: its reward and action count for nothing.
        idle = resetting
        seats = envs.seat_of.copy()
        rewards, terminated, truncated = envs.step_into(choose(obs), obs)
        _check_rewards(rewards)
        if take_rewards is not None:
            take_rewards(rewards)

        # The loss of a life ends an episode in training only.
        over = terminated | truncated
        ended = over if envs.life_lost is None else over & ~envs.life_lost
        resetting = over if envs.playing is None else ~envs.playing
        begins = idle & ~resetting
        if envs.dropped is not None:
            # The step has reset these environments, and their failed episodes are no results.
            begins |= envs.dropped
            tally.on_dropped(envs.dropped)
            idle = idle | envs.dropped
        tally.on_step(rewards, seats, played=~idle, ended=ended, outcome=envs.outcome)
    return [episode for of_one_env in tally.episodes for episode in of_one_env]


def play_policy(
    env: BatchedEnv,
    source: PolicySource,
    opponents: Sequence[OpponentSource],
    episodes: int,
    *,
    choose: Callable[[Policy], Choose],
    seed: int,
    max_steps: int,
) -> list[Episode]:
    """Play episodes of a policy, equally many against each opponent.

    Args:
        env: the environments, with rows for all seats of a game.
        source: of the policy.
        opponents: who plays the other seats; without any the policy plays all seats itself.
        episodes: how many to play; against several opponents they are rounded up to equal shares.
        choose: returns what chooses the actions of the policy.
        seed: the episodes of two values have nothing in common.
        max_steps: agent steps at which an episode is cut.

    Returns:
        The episodes, which have the names of their opponents.

    Raises:
        UserError: as `play`, and if an opponent does not fit the environment.
    """
    # The policy comes first, as it decides how observations are packed.
    source = source.read_once()
    source.weights(env)
    pairings = pairings_of(env, opponents, seats=source.config.league.seats, seed=seed)
    share = share_of(episodes, len(pairings))

    played: list[Episode] = []
    games = 0
    for pairing in pairings:
        policy = source.policy(env, seed, pairing.envs.count)
        found = play(
            pairing.envs,
            choose(policy),
            share,
            seed=seed,
            max_steps=max_steps,
            begin=policy.reset,
            take_rewards=policy.take_rewards,
        )
        for episode in found:
            game = games + episode.game
            played.append(episode._replace(opponent=pairing.opponent, game=game))
        games += env.count // env.info.seating.seats
    return played


def share_of(episodes: int, pairings: int) -> int:
    """Returns the episodes of each of so many pairings."""
    return math.ceil(episodes / pairings)


def _check_rewards(rewards: npt.NDArray[Any]) -> None:
    """Raise UserError for a reward that is not finite.

    No mean is higher than NaN, so a best with such a return would stay for ever.
    """
    finite = np.isfinite(rewards)
    if not finite.all():
        raise UserError(
            f"the environment gave a reward of {rewards[~finite][0]}; correct what "
            "the environment returns"
        )


class _Tally:
    """Counts the episodes of each environment until it has played its share."""

    def __init__(
        self, games: npt.NDArray[Any], episodes: int, max_steps: int, seating: Seating
    ) -> None:
        """Begin before the first reset.

        Args:
            games: the game of each environment, int ``[count]``.
            episodes: how many to play.
            max_steps: agent steps at which an episode is cut.
            seating: the seats of a game.
        """
        env_count = len(games)
        self.episodes: list[list[Episode]] = [[] for _ in range(env_count)]
        """The episodes that each environment has played."""
        share, remainder = divmod(episodes, env_count)
        self._shares = [share + 1 if i < remainder else share for i in range(env_count)]
        self._max_steps = max_steps
        self._games = games
        self._seating = seating
        self._dropped = 0  # failed episodes of all environments
        # The present episode of each. Before the first reset all wait, as after a cut episode.
        self._returns = np.zeros(env_count)
        self._lengths = np.full(env_count, max_steps)

    def unfinished(self) -> list[int]:
        """Returns the environments that have not played all of their episodes."""
        return [i for i, share in enumerate(self._shares) if len(self.episodes[i]) < share]

    def all_wait(self, envs: list[int]) -> bool:
        """Whether the present episode of each of these ``envs`` was cut, or none has begun."""
        return bool((self._lengths[envs] >= self._max_steps).all())

    def on_reset(self) -> None:
        """Every environment has been reset."""
        self._returns[:] = 0
        self._lengths[:] = 0

    def on_dropped(self, envs: Flags) -> None:
        """The present episodes of ``envs``, bool ``[count]``, failed, and others have begun.

        Raises UserError if far more have failed than are to be played.
        """
        self._returns[envs] = 0
        self._lengths[envs] = 0

        self._dropped += int(np.count_nonzero(envs))
        if self._dropped > MOST_DROPPED * sum(self._shares):
            raise UserError(
                f"{self._dropped} episodes failed while {sum(map(len, self.episodes))} of "
                f"{sum(self._shares)} ended, and env.on_error=drop_episode is for rare errors; "
                "correct the environment"
            )

    def on_step(
        self,
        rewards: npt.NDArray[Any],
        seats: npt.NDArray[Any],
        played: Flags,
        ended: Flags,
        outcome: npt.NDArray[Any] | None = None,
    ) -> None:
        """All environments have made a step.

        Args:
            rewards: ``[count]``.
            seats: int ``[count]``, the seats that the environments played in it.
            played: bool ``[count]``, whether it was a step of an episode, not one that resets.
            ended: bool ``[count]``, whether the episode has ended with it.
            outcome: ``[count]``, the environment's word on the games that have ended. Without it
                returns decide (`outcomes_of`).
        """
        self._returns += rewards
        self._lengths += played

        # An environment that waits after a cut is beyond the limit, so its end does not count.
        cut = ~ended & played & (self._lengths == self._max_steps)
        is_result = cut | ended & (self._lengths <= self._max_steps)
        outcomes = self._outcomes(ended, outcome)
        for i in np.flatnonzero(is_result):
            if len(self.episodes[i]) < self._shares[i]:
                episode = Episode(
                    float(self._returns[i]),
                    int(self._lengths[i]),
                    cut=bool(cut[i]),
                    game=int(self._games[i]),
                    seat=int(seats[i]),
                    outcome=None if np.isnan(outcomes[i]) else float(outcomes[i]),
                    number=len(self.episodes[i]),
                )
                self.episodes[i].append(episode)
        self._returns[ended] = 0
        self._lengths[ended] = 0

    def _outcomes(
        self, ended: Flags, stated: npt.NDArray[Any] | None
    ) -> npt.NDArray[np.floating[Any]]:
        """Returns the outcomes of the episodes that have ended, ``[count]``; NaN if not known.

        They are those that the environment has ``stated``, or else follow from the returns.
        """
        if stated is not None:
            return np.where(ended, stated, np.nan)
        if not self._seating.has_opponents:
            return np.full(len(ended), np.nan)
        return outcomes_of(self._returns, ended, self._seating.sides)


def summary(values: tuple[float, ...]) -> dict[str, float]:
    """Returns the mean, the median, the population's standard deviation, least and greatest."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def of_checkpoint_text(result: dict[str, Any]) -> str:
    """Returns ", checkpoint best" for the result of a run, and nothing for that of a file."""
    return "" if result["checkpoint"] == "file" else f", checkpoint {result['checkpoint']}"


def describe(result: dict[str, Any]) -> str:
    """Returns the result of `evaluate` as text.

    It is three lines, one for each seat of a game of several, for each opponent one more with those
    of the seats played against it, and one if episodes were cut.
    """
    actions = "sampled" if result["sample"] else "greedy"
    policy = f"{result['run_dir']}{of_checkpoint_text(result)}"
    lines = [f"{policy}: {result['episodes']} episodes, {actions} actions, seed {result['seed']}"]
    for name in ("return", "length"):
        figures = "  ".join(f"{key} {number(value)}" for key, value in result[name].items())
        lines.append(f"{name:6}  {figures}")
    lines += [f"seat {seat['seat']}  {_games_text(seat)}" for seat in result.get("seats", ())]
    for opponent in result.get("against", ()):
        lines.append(f"against {opponent['opponent']}: {_games_text(opponent)}")
        lines += [f"  seat {seat['seat']}  {_games_text(seat)}" for seat in opponent["seats"]]
    if result["cut"]:
        lines.append(_cut_line(result["cut"], result["episodes"], result["max_episode_steps"]))
    return "\n".join(lines)


def _games_text(figures: dict[str, Any]) -> str:
    """Returns the figures of a seat, or of the games against an opponent, as text."""
    mean_return = number(figures["return"]["mean"])
    text = f"{figures['episodes']} episodes, mean return {mean_return}"
    win_rate = figures["win_rate"]
    if win_rate is None:
        return text
    shares = ", ".join(f"{name} {figures[name]:.0%}" for name in ("won", "drawn", "lost"))
    low, high = win_rate["lower"], win_rate["upper"]
    return f"{text}, {shares}: win rate {win_rate['mean']:.0%} ({low:.0%} to {high:.0%})"


def describe_seeds(result: dict[str, Any]) -> str:
    """Returns the result of `evaluate_seeds` as text.

    It is a table with a line for each run and a line with their mean, then the spread of the runs'
    means, and the runs that could not be evaluated.
    """
    runs = result["runs"]
    has_opponents = "against" in runs[0]
    episodes = sum(run["episodes"] for run in runs)
    rows: list[tuple[str, ...]] = [
        ("run", "checkpoint", "actions", "episodes", "return", "std", "length")
    ]
    for run in runs:
        rows.append(
            (
                Path(run["run_dir"]).name,
                run["checkpoint"],
                "sampled" if run["sample"] else "greedy",
                str(run["episodes"]),
                number(run["return"]["mean"]),
                number(run["return"]["std"]),
                number(run["length"]["mean"]),
                *([_win_rate_text(run)] if has_opponents else []),
            )
        )
    mean_return = number(result["return"]["mean"])
    mean_length = number(result["length"]["mean"])
    rows.append(("mean", "", "", str(episodes), mean_return, "", mean_length))
    if has_opponents:
        rows[0] += ("win rate",)
        rows[-1] += ("",)
    lines = [f"{result['run_dir']}: {len(runs)} runs", *aligned(rows)]

    if len(runs) > 1:
        spread = statistics.stdev(run["return"]["mean"] for run in runs)
        lines.append(f"standard deviation between the runs: {number(spread)}")
    lines += [f"{each['run_dir']} was not evaluated: {each['error']}" for each in result["failed"]]
    if cut := sum(run["cut"] for run in runs):
        lines.append(_cut_line(cut, episodes, runs[0]["max_episode_steps"]))
    return "\n".join(lines)


def _win_rate_text(result: dict[str, Any]) -> str:
    """Returns the win rate against each opponent as text: "93% v bot:random"."""
    return ", ".join(
        f"{each['win_rate']['mean']:.0%} v {each['opponent']}"
        for each in result["against"]
        if each["win_rate"] is not None
    )


def _cut_line(cut: int, episodes: int, max_steps: int) -> str:
    """Returns `were_cut` for a command that takes the limit as an option."""
    return were_cut(cut, episodes, max_steps, option="--max-episode-steps")


def were_cut(cut: int, episodes: int, max_steps: int, option: str) -> str:
    """Returns a sentence on the episodes that were cut; ``option`` sets the limit."""
    return (
        f"{cut} of {episodes} episodes had to be cut at {max_steps:,} steps, with the return so "
        f"far; give the game a time limit (gymnasium's TimeLimit), or raise {option}"
    )
