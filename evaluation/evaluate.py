"""Play whole episodes with the weights of a run, and report their returns.

Environments run in parallel, and each plays a share of the episodes that is fixed in advance: if
the first episodes to end were counted, short ones would be over-represented. An episode that does
not end is cut at a number of steps, so that every evaluation ends.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.formatting import aligned, number
from penstock.core.params import Float32
from penstock.envs import BatchedEnv, find_bad_observation, make
from penstock.envs.seats import ONE_SEAT, Seating
from penstock.envs.space_difference import difference
from penstock.evaluation import exported
from penstock.evaluation.estimates import way_of
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import PLAY
from penstock.learner.checkpoints.checkpoint_spaces import check_spaces
from penstock.models.acting.policy import Policy

ENVS = 16
"""Environments of an evaluation, at most."""
MOST_DROPPED = 10
"""Failed episodes for each episode that is asked for; with more the evaluation fails."""
SEEDS_APART = 10_007
"""Distance between the seeds of environments for two values of ``seed``: more than are played."""

Choose = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns the actions for observations ``[count, *shape]``."""
Flags = npt.NDArray[np.bool_]
Begin = Callable[[Flags], None]
"""Receives the environments in which an episode begins, bool ``[count]``."""


class PolicySource(NamedTuple):
    """Where the weights of a policy are: in a checkpoint of a run, or in an exported file."""

    config: Config
    name: str
    """Name of the checkpoint; "file" for an exported file."""
    sampled: bool
    """Whether it is played with sampled actions by default."""
    weights: Callable[[BatchedEnv], Float32]
    """Returns the flat vector of weights for environments, which from then on pack observations as
    in training. Raises UserError if these have other spaces than in training, or another network.
    """

    def policy(self, envs: BatchedEnv, seed: int) -> Policy:
        """Returns the policy with its weights, over the environments of ``envs``.

        ``seed`` gives the random numbers of its actions. Raises UserError as `weights` does.
        """
        # Weights first: a config from elsewhere may ask for a network of any size.
        weights = self.weights(envs)
        actors = self.config.actors.model_copy(update={"envs": envs.count})
        policy = make_policy(self.config.model_copy(update={"actors": actors}), envs.info, seed)
        policy.load(weights)
        return policy


class Episode(NamedTuple):
    """One episode: its raw return, its length in agent steps, and whether it was cut there."""

    episode_return: float
    length: int
    cut: bool = False
    game: int = 0
    """Number of the game of several seats among those that were played side by side."""
    seat: int = 0
    """The seat of its game that was played."""
    outcome: float | None = None
    """The result of its game for that seat, from -1 (lost) to 1 (won); None if the environment does
    not say it, and seats do not end together or have no opponents."""


def evaluate(
    run_dir: str,
    episodes: int,
    which: str,
    sample: bool | None,
    seed: int,
    max_steps: int | None,
    allow: Sequence[str] = (),
) -> dict[str, Any]:
    """Play episodes with the weights of a run, or of an exported file.

    Args:
        run_dir: folder of the run, or path of the file.
        episodes: how many to play.
        which: the checkpoint of a run, "best" or "last".
        sample: True draws actions as in training, False takes the most probable ones, and None
            does what the run's evaluation found to be better.
        seed: the same one plays the same episodes.
        max_steps: agent steps at which an episode is cut; None takes `eval.max_episode_steps`.
        allow: patterns of names that may be imported (`find_policy`).

    Returns: the returns and lengths of the episodes with their `summary`, and how they were played.

    Raises:
        UserError: if there is no such policy, or the environment cannot be played.
    """
    source = find_policy(run_dir, which, allow)
    config = source.config
    step_limit = max_steps or config.eval.max_episode_steps
    if sample is None:
        sample = source.sampled

    rows = min(episodes, ENVS)
    envs = make(config.env, rows, config.actors.env_threads, whole_games=True)
    try:
        policy = source.policy(envs, seed)
        choose: Choose = policy.act if sample else policy.greedy
        played = play(envs, choose, episodes, seed=seed, max_steps=step_limit, begin=policy.reset)
    finally:
        envs.close()

    returns = tuple(episode.episode_return for episode in played)
    lengths = tuple(episode.length for episode in played)
    result = {
        "run_dir": run_dir,
        "checkpoint": source.name,
        "episodes": episodes,
        "sample": sample,
        "seed": seed,
        "return": summary(returns),
        "length": summary(lengths),
        "cut": sum(episode.cut for episode in played),
        "max_episode_steps": step_limit,
        "returns": returns,
        "lengths": lengths,
    }
    if envs.info.seating.seats > 1:
        result["seats"] = by_seat(played)
    return result


def by_seat(played: Sequence[Episode]) -> list[dict[str, Any]]:
    """Returns the episodes of each seat of a game in figures, for seats that have some.

    They are "seat", the number of "episodes", the `summary` of their "return", and the
    shares that were "won" and "lost", None where outcomes are not known.
    """
    figures = []
    for seat in sorted({episode.seat for episode in played}):
        episodes = [episode for episode in played if episode.seat == seat]
        outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
        won = sum(outcome > 0 for outcome in outcomes)
        lost = sum(outcome < 0 for outcome in outcomes)
        figures.append(
            {
                "seat": seat,
                "episodes": len(episodes),
                "return": summary(tuple(episode.episode_return for episode in episodes)),
                "won": won / len(outcomes) if outcomes else None,
                "lost": lost / len(outcomes) if outcomes else None,
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
            runs.append(evaluate(run_dir, episodes, which, sample, seed, max_steps, allow))
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


def checkpoint_folder(run_dir: str | Path, which: str) -> Path:
    """Returns the folder of the checkpoint "best" or "last" of a run.

    For "best" that is the last one if there is no best yet.
    """
    folder = Path(run_dir) / "checkpoints" / which
    if which == "best" and not checkpoint_format.exists(folder):
        folder = folder.with_name("last")
    return folder


def find_policy(source: str | Path, which: str, allow: Sequence[str] = ()) -> PolicySource:
    """Returns the checkpoint ``which`` of a run, or the policy of an exported file.

    Args:
        source: folder of the run, or path of the file.
        which: "best" or "last"; of no effect for a file.
        allow: patterns of names that may be imported. A file may name no code without them; a
            run's folder may name what runs of this user have used.

    Raises:
        UserError: if there is no policy, or if it names code that must not be imported.
    """
    if Path(source).is_file():
        return _file_source(Path(source), allow)

    config = load_run(source)
    folder = checkpoint_folder(source, which)
    used_names.check(references(config), allow, str(source))
    sampled = way_of(checkpoint_format.read_meta(folder).get(PLAY)) == "sampled"
    return of_checkpoint(config, folder, sampled)


def of_checkpoint(config: Config, folder: Path, sampled: bool = False) -> PolicySource:
    """Returns the checkpoint in ``folder``, of a run with ``config``, as the source of a policy."""

    def weights(envs: BatchedEnv) -> Float32:
        return fitting_weights(config, folder, checkpoint_format.load(folder), envs)

    return PolicySource(config, folder.name, sampled, weights)


def fitting_weights(config: Config, folder: Path, stored: Checkpoint, envs: BatchedEnv) -> Float32:
    """Returns the weights of a checkpoint, after a check that they fit ``envs``.

    It does what `PolicySource.weights` says. ``folder`` is the place of the checkpoint, for
    messages.
    """
    envs.pack_as(check_spaces(folder, stored, envs.info, config.env.id))
    layout = network_shape(config, envs.info).layout
    checkpoint_format.check_layout(folder / checkpoint_format.FILE, stored.layout, layout)
    return stored.weights


def _file_source(path: Path, allow: Sequence[str]) -> PolicySource:
    """Returns an exported file as the source of a policy, with the arguments of `find_policy`."""
    stored = exported.read(path, allow, plays=True)

    def weights(envs: BatchedEnv) -> Float32:
        if differs := difference(stored.spaces, envs.info.spaces):
            raise UserError(
                f"{path} is a policy for {stored.config.env.id} with other observations or actions "
                f"than that environment has here: {differs.column} {differs.trained} in training, "
                f"{differs.present} here; install the version that it was trained with"
            )
        envs.pack_as(stored.spaces[0])
        return stored.weights

    return PolicySource(stored.config, "file", way_of(stored.play) == "sampled", weights)


def play(
    envs: BatchedEnv,
    choose: Choose,
    episodes: int,
    seed: int,
    max_steps: int,
    begin: Begin | None = None,
) -> list[Episode]:
    """Play exactly ``episodes`` episodes, each complete or cut at ``max_steps`` agent steps.

    A single environment cannot be reset alone, so one whose episode was cut waits for the others.

    Args:
        envs: the environments, each of which plays its share of the episodes.
        choose: returns the actions.
        episodes: how many to play.
        seed: the episodes of two values have nothing in common.
        max_steps: agent steps at which an episode is cut.
        begin: called where episodes begin, for instance to reset a recurrent state.

    Returns: the episodes, one environment after another.

    Raises:
        UserError: for an observation or a reward that is not sound, or if far more episodes fail
            than are asked for.
    """
    tally = _Tally(envs.count, episodes, max_steps, envs.info.seating)
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
        rewards, terminated, truncated = envs.step_into(choose(obs), obs)
        _check_rewards(rewards)

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
        tally.on_step(rewards, played=~idle, ended=ended, outcome=envs.outcome)
    return [episode for of_one_env in tally.episodes for episode in of_one_env]


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
        self, env_count: int, episodes: int, max_steps: int, seating: Seating = ONE_SEAT
    ) -> None:
        self.episodes: list[list[Episode]] = [[] for _ in range(env_count)]
        """The episodes that each environment has played."""
        share, remainder = divmod(episodes, env_count)
        self._shares = [share + 1 if i < remainder else share for i in range(env_count)]
        self._max_steps = max_steps
        self._seats = seating.seats
        self._sides = np.array(seating.sides)
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
        played: Flags,
        ended: Flags,
        outcome: npt.NDArray[Any] | None = None,
    ) -> None:
        """All environments have made a step.

        Args:
            rewards: ``[count]``.
            played: bool ``[count]``, whether it was a step of an episode, not one that resets.
            ended: bool ``[count]``, whether the episode has ended with it.
            outcome: ``[count]``, the environment's word on the games that have ended.
        """
        self._returns += rewards
        self._lengths += played

        # An environment that waits after a cut is beyond the limit, so its end does not count.
        cut = ~ended & played & (self._lengths == self._max_steps)
        is_result = cut | ended & (self._lengths <= self._max_steps)
        for i in np.flatnonzero(is_result):
            if len(self.episodes[i]) < self._shares[i]:
                episode = Episode(
                    float(self._returns[i]),
                    int(self._lengths[i]),
                    cut=bool(cut[i]),
                    game=int(i // self._seats) if self._seats > 1 else 0,
                    seat=int(i % self._seats),
                    outcome=None if cut[i] else self._outcome(int(i), ended, outcome),
                )
                self.episodes[i].append(episode)
        self._returns[ended] = 0
        self._lengths[ended] = 0

    def _outcome(self, row: int, ended: Flags, outcome: npt.NDArray[Any] | None) -> float | None:
        """Returns the outcome of the episode that has ended in a row.

        Without the environment's word it is the sign of the row's return minus the mean of the
        other sides, if all seats of the game have ended.
        """
        if outcome is not None:
            return float(outcome[row])

        seat = row % self._seats
        game = slice(row - seat, row - seat + self._seats)
        others = self._sides != self._sides[seat]
        if not others.any() or not ended[game].all():
            return None
        return float(np.sign(self._returns[row] - self._returns[game][others].mean()))


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

    It is three lines, one for each seat of a game of several, and one if episodes were cut.
    """
    actions = "sampled" if result["sample"] else "greedy"
    policy = f"{result['run_dir']}{of_checkpoint_text(result)}"
    lines = [f"{policy}: {result['episodes']} episodes, {actions} actions, seed {result['seed']}"]
    for name in ("return", "length"):
        figures = "  ".join(f"{key} {number(value)}" for key, value in result[name].items())
        lines.append(f"{name:6}  {figures}")
    for seat in result.get("seats", ()):
        line = f"seat {seat['seat']}  {seat['episodes']} episodes, mean return "
        line += number(seat["return"]["mean"])
        if seat["won"] is not None:
            line += f", won {seat['won']:.0%}, lost {seat['lost']:.0%}"
        lines.append(line)
    if result["cut"]:
        lines.append(_cut_line(result["cut"], result["episodes"], result["max_episode_steps"]))
    return "\n".join(lines)


def describe_seeds(result: dict[str, Any]) -> str:
    """Returns the result of `evaluate_seeds` as text.

    It is a table with a line for each run and a line with their mean, then the spread of the runs'
    means, and the runs that could not be evaluated.
    """
    runs = result["runs"]
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
            )
        )
    mean_return = number(result["return"]["mean"])
    mean_length = number(result["length"]["mean"])
    rows.append(("mean", "", "", str(episodes), mean_return, "", mean_length))
    lines = [f"{result['run_dir']}: {len(runs)} runs", *aligned(rows)]

    if len(runs) > 1:
        spread = statistics.stdev(run["return"]["mean"] for run in runs)
        lines.append(f"standard deviation between the runs: {number(spread)}")
    lines += [f"{each['run_dir']} was not evaluated: {each['error']}" for each in result["failed"]]
    if cut := sum(run["cut"] for run in runs):
        lines.append(_cut_line(cut, episodes, runs[0]["max_episode_steps"]))
    return "\n".join(lines)


def _cut_line(cut: int, episodes: int, max_steps: int) -> str:
    """Returns `were_cut` for a command that takes the limit as an option."""
    return were_cut(cut, episodes, max_steps, option="--max-episode-steps")


def were_cut(cut: int, episodes: int, max_steps: int, option: str) -> str:
    """Returns a sentence on the episodes that were cut; ``option`` sets the limit."""
    return (
        f"{cut} of {episodes} episodes had to be cut at {max_steps:,} steps, with the return so "
        f"far; give the game a time limit (gymnasium's TimeLimit), or raise {option}"
    )
