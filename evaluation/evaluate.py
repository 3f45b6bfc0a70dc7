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
from penstock.envs.space_difference import difference
from penstock.evaluation import exported
from penstock.evaluation.estimates import way_of
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import PLAY
from penstock.learner.checkpoints.checkpoint_spaces import check_spaces
from penstock.models.acting.policy import Policy

ENVS = 16
MOST_DROPPED = 10  # failed episodes for each that is asked for
SEEDS_APART = 10_007  # between the games of one `seed` and the next: more than are played

Choose = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
Flags = npt.NDArray[np.bool_]
Begin = Callable[[Flags], None]


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

    def policy(self, game: BatchedEnv, seed: int) -> Policy:
        """Returns the policy with its weights, over the environments of ``envs``.

        ``seed`` is that of its random actions. Raises UserError as `weights` does.
        """
        # Weights first: a config from elsewhere may ask for a network of any size.
        weights = self.weights(game)
        actors = self.config.actors.model_copy(update={"envs": game.count})
        policy = make_policy(self.config.model_copy(update={"actors": actors}), game.info, seed)
        policy.load(weights)
        return policy


class Episode(NamedTuple):
    """One episode: its raw return, its length in agent steps, and whether it was cut there."""

    episode_return: float
    length: int
    cut: bool = False


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
        allow: as of `find_policy`.

    Returns: the returns and lengths of the episodes with their `summary`, and how they were played.

    Raises:
        UserError: if there is no such policy, or the environment cannot be played.
    """
    source = find_policy(run_dir, which, allow)
    config = source.config
    most = max_steps or config.eval.max_episode_steps
    if sample is None:
        sample = source.sampled
    count = min(episodes, ENVS)
    game = make(config.env, count, config.actors.env_threads)
    try:
        policy = source.policy(game, seed)
        choose: Choose = policy.act if sample else policy.greedy
        played = play(game, choose, episodes, seed, most, policy.reset)
    finally:
        game.close()
    returns, lengths, cut = zip(*played, strict=True)
    return {
        "run_dir": run_dir,
        "checkpoint": source.name,
        "episodes": episodes,
        "sample": sample,
        "seed": seed,
        "return": summary(returns),
        "length": summary(lengths),
        "cut": sum(cut),
        "max_episode_steps": most,
        "returns": returns,
        "lengths": lengths,
    }


def seed_runs(folder: str) -> list[str]:
    """Returns the runs in a folder of `train --seeds`, by seed; none if it is a run itself."""
    base = Path(folder)
    if (base / CONFIG_FILE).is_file():
        return []
    found = [str(path.parent) for path in base.glob(f"seed-*/{CONFIG_FILE}")]
    return sorted(found, key=lambda name: (len(name), name))


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

    Arguments are those of `evaluate`, but for the folder.

    Returns: the results of the runs in "runs"; the `summary` of the means of the runs in "return"
        and "length"; and in "failed" the runs that could not be evaluated, with the reason.

    Raises:
        UserError: if no run can be evaluated.
    """
    runs, failed = [], []
    for run_dir in seed_runs(folder):
        try:
            runs.append(evaluate(run_dir, episodes, which, sample, seed, max_steps, allow))
        except UserError as error:
            failed.append({"run_dir": run_dir, "error": str(error)})
    if not runs:
        raise UserError(failed[0]["error"])
    means = {
        name: summary(tuple(run[name]["mean"] for run in runs)) for name in ("return", "length")
    }
    return {"run_dir": folder, "runs": runs, "failed": failed, **means}


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
        return _of_file(Path(source), allow)
    config, folder = load_run(source), checkpoint_folder(source, which)
    used_names.check(references(config), allow, str(source))
    sampled = way_of(checkpoint_format.read_meta(folder).get(PLAY)) == "sampled"
    return of_checkpoint(config, folder, sampled)


def of_checkpoint(config: Config, folder: Path, sampled: bool = False) -> PolicySource:
    """Returns the checkpoint in ``folder``, of a run with ``config``, as the source of a policy."""

    def weights(game: BatchedEnv) -> Float32:
        return fitted(config, folder, checkpoint_format.load(folder), game)

    return PolicySource(config, folder.name, sampled, weights)


def fitted(config: Config, folder: Path, stored: Checkpoint, game: BatchedEnv) -> Float32:
    """Returns the weights of a checkpoint, after a check that they fit ``envs``.

    It does what `PolicySource.weights` says. ``folder`` is the place of the checkpoint, for
    messages.
    """
    game.pack_as(check_spaces(folder, stored, game.info, config.env.id))
    layout = network_shape(config, game.info).layout
    checkpoint_format.check_layout(folder / checkpoint_format.FILE, stored.layout, layout)
    return stored.weights


def _of_file(path: Path, allow: Sequence[str]) -> PolicySource:
    """Returns an exported file as the source of a policy, with the arguments of `find_policy`."""
    stored = exported.read(path, allow, plays=True)

    def weights(game: BatchedEnv) -> Float32:
        if differs := difference(stored.spaces, game.info.spaces):
            raise UserError(
                f"{path} is a policy for {stored.config.env.id} with other observations or actions "
                f"than that environment has here: {differs.column} {differs.trained} in training, "
                f"{differs.present} here; install the version that it was trained with"
            )
        game.pack_as(stored.spaces[0])
        return stored.weights

    return PolicySource(stored.config, "file", way_of(stored.play) == "sampled", weights)


def play(
    game: BatchedEnv,
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
    tally = _Tally(game.count, episodes, max_steps)
    space, seeds = game.info.observation_space, itertools.count(seed * SEEDS_APART, game.count)
    obs, parts = np.empty((game.count, *space.shape), space.dtype), game.info.parts
    counts = game.info.counts
    while owing := tally.owing():
        if tally.all_wait(owing):  # as they do at first
            game.reset_into(next(seeds), obs)
            tally.begin_anew()
            first = np.ones(game.count, np.bool_)
            resetting = ~first if game.playing is None else ~game.playing
        if bad := find_bad_observation(obs[None], parts, ~resetting[None], counts):
            raise UserError(f"there is {bad}; correct the environment")
        if begin is not None and first.any():
            begin(first)
        idle = resetting  # the step after an episode's end only resets
        reward, terminated, truncated = game.step_into(choose(obs), obs)
        if not np.isfinite(reward).all():  # no mean is above NaN: such a best would stay
            raise UserError(
                f"the environment gave a reward of {reward[~np.isfinite(reward)][0]}; correct what "
                "the environment returns"
            )
        over = terminated | truncated
        ends = over if game.life_lost is None else over & ~game.life_lost
        resetting = over if game.playing is None else ~game.playing
        first = idle & ~resetting
        if game.dropped is not None:  # the step has reset them, and their episodes are no results
            first |= game.dropped
            tally.forget(game.dropped)
            idle = idle | game.dropped
        tally.step(reward, ~idle, ends)
    return [episode for done in tally.played for episode in done]


class _Tally:
    """Counts the episodes of each environment until it has played its share."""

    def __init__(self, count: int, episodes: int, max_steps: int) -> None:
        self.played: list[list[Episode]] = [[] for _ in range(count)]
        self._owed = [episodes // count + (i < episodes % count) for i in range(count)]
        self._max_steps = max_steps
        self._dropped = 0
        self._returns, self._lengths = np.zeros(count), np.full(count, max_steps)

    def owing(self) -> list[int]:
        """Returns the environments that have not played all of their episodes."""
        return [i for i, owed in enumerate(self._owed) if len(self.played[i]) < owed]

    def all_wait(self, owing: list[int]) -> bool:
        """Whether the present episode of each of these ``envs`` was cut, or none has begun."""
        return bool((self._lengths[owing] >= self._max_steps).all())

    def begin_anew(self) -> None:
        """Every environment has been reset."""
        self._returns[:] = self._lengths[:] = 0

    def forget(self, envs: Flags) -> None:
        """The present episodes of ``envs``, bool ``[count]``, failed, and others have begun.

        Raises UserError if far more have failed than are to be played.
        """
        self._returns[envs] = self._lengths[envs] = 0
        self._dropped += int(np.count_nonzero(envs))
        if self._dropped > MOST_DROPPED * sum(self._owed):
            raise UserError(
                f"{self._dropped} episodes failed while {sum(map(len, self.played))} of "
                f"{sum(self._owed)} ended, and env.on_error=drop_episode is for rare errors; "
                "correct the environment"
            )

    def step(self, reward: npt.NDArray[Any], plays: Flags, ends: Flags) -> None:
        """All environments have made a step.

        Args:
            rewards: ``[count]``.
            played: bool ``[count]``, whether it was a step of an episode, not one that resets.
            ended: bool ``[count]``, whether the episode has ended with it.
        """
        self._returns += reward
        self._lengths += plays
        cut = ~ends & plays & (self._lengths == self._max_steps)
        for i in np.flatnonzero(cut | ends & (self._lengths <= self._max_steps)):
            if len(self.played[i]) < self._owed[i]:
                episode = Episode(float(self._returns[i]), int(self._lengths[i]), bool(cut[i]))
                self.played[i].append(episode)
        self._returns[ends] = self._lengths[ends] = 0


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
    """Returns the result of `evaluate` as three lines of text, or four if episodes were cut."""
    how = "sampled" if result["sample"] else "greedy"
    title = f"{result['run_dir']}{of_checkpoint_text(result)}: {result['episodes']} episodes, "
    lines = [title + f"{how} actions, seed {result['seed']}"]
    for name in ("return", "length"):
        lines.append(f"{name:6}  " + "  ".join(f"{k} {number(v)}" for k, v in result[name].items()))
    if result["cut"]:
        most = result["max_episode_steps"]
        lines.append(were_cut(result["cut"], result["episodes"], most, "--max-episode-steps"))
    return "\n".join(lines)


def describe_seeds(result: dict[str, Any]) -> str:
    """Returns the result of `evaluate_seeds` as text.

    It is a table with a line for each run and a line with their mean, then the spread of the runs'
    means, and the runs that could not be evaluated.
    """
    runs = result["runs"]
    rows: list[tuple[str, ...]] = [
        ("run", "checkpoint", "actions", "episodes", "return", "std", "length")
    ]
    for run in runs:
        figures = (run["return"]["mean"], run["return"]["std"], run["length"]["mean"])
        name = Path(run["run_dir"]).name
        way = "sampled" if run["sample"] else "greedy"
        rows.append((name, run["checkpoint"], way, str(run["episodes"]), *map(number, figures)))
    episodes = str(sum(run["episodes"] for run in runs))
    mean, length = (number(result[name]["mean"]) for name in ("return", "length"))
    rows.append(("mean", "", "", episodes, mean, "", length))
    lines = aligned(rows)
    if len(runs) > 1:
        between = statistics.stdev(run["return"]["mean"] for run in runs)
        lines.append(f"standard deviation between the runs: {number(between)}")
    lines += [f"{each['run_dir']} was not evaluated: {each['error']}" for each in result["failed"]]
    if cut := sum(run["cut"] for run in runs):
        played = sum(run["episodes"] for run in runs)
        most = runs[0]["max_episode_steps"]
        lines.append(were_cut(cut, played, most, "--max-episode-steps"))
    return "\n".join([f"{result['run_dir']}: {len(runs)} runs", *lines])


def were_cut(cut: int, episodes: int, max_steps: int, option: str) -> str:
    """Returns a sentence on the episodes that were cut; ``option`` sets the limit."""
    return (
        f"{cut} of {episodes} episodes had to be cut at {max_steps:,} steps, with the return so "
        f"far; give the game a time limit (gymnasium's TimeLimit), or raise {option}"
    )
