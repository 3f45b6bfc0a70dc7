"""Play whole episodes with the weights of a run, and say how they went.

Environments play side by side, and each owes a share of the episodes that is fixed beforehand: were
the first to end counted, short episodes would be over-represented.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.envs import VectorGame, find_bad_observation, make
from penstock.launch.figures import number
from penstock.learner import checkpoint
from penstock.models.fitting import net_shape
from penstock.models.policy import Policy, make_policy

ENVS = 16

Choose = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
Begin = Callable[[npt.NDArray[np.bool_]], None]


class Episode(NamedTuple):
    """One complete episode: its raw return, and its length in agent steps."""

    episode_return: float
    length: int


def evaluate(run_dir: str, episodes: int, which: str, sample: bool, seed: int) -> dict[str, Any]:
    """Returns and lengths over ``episodes``, by the weights of checkpoint "best" or "last".

    Actions are the likeliest ones, or with ``sample`` drawn as in training. The same seed plays the
    same games. Raises UserError.
    """
    config = load_run(run_dir)
    folder = checkpoint_folder(run_dir, which)
    count = min(episodes, ENVS)
    game = make(config.env, count, config.actors.env_threads)
    try:
        policy = trained_policy(config, game, folder, seed)
        choose: Choose = policy.act if sample else policy.greedy
        played = play(game, choose, episodes, seed, policy.begin)
    finally:
        game.close()
    returns, lengths = zip(*played, strict=True)
    return {
        "run_dir": run_dir,
        "checkpoint": folder.name,
        "episodes": episodes,
        "sample": sample,
        "seed": seed,
        "return": summary(returns),
        "length": summary(lengths),
        "returns": returns,
        "lengths": lengths,
    }


def checkpoint_folder(run_dir: str | Path, which: str) -> Path:
    """Where the checkpoint "best" or "last" of a run is: the best may not be known yet."""
    folder = Path(run_dir) / "checkpoints" / which
    if which == "best" and not checkpoint.exists(folder):
        folder = folder.with_name("last")
    return folder


def trained_policy(config: Config, game: VectorGame, folder: Path, seed: int) -> Policy:
    """The policy of a checkpoint, for the environments of ``game``. Raises UserError where it is of
    another network than theirs."""
    actors = config.actors.model_copy(update={"envs": game.count})
    policy = make_policy(config.model_copy(update={"actors": actors}), game.info, seed)
    layout = net_shape(config, game.info).layout
    policy.load(checkpoint.load(folder, layout).weights)
    return policy


def play(
    game: VectorGame, choose: Choose, episodes: int, seed: int, begin: Begin | None = None
) -> list[Episode]:
    """Exactly ``episodes`` complete episodes, environment by environment. ``begin`` is told of the
    environments, bool ``[count]``, in which one begins."""
    count = game.count
    owed = [episodes // count + (i < episodes % count) for i in range(count)]
    played: list[list[Episode]] = [[] for _ in range(count)]
    space = game.info.observation_space
    obs = np.empty((count, *space.shape), space.dtype)
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    resetting, first = np.zeros(count, np.bool_), np.ones(count, np.bool_)
    parts = game.info.parts
    game.reset_into(seed, obs)
    while any(len(done) < n for done, n in zip(played, owed, strict=True)):
        if bad := find_bad_observation(obs[None], parts, ~resetting[None]):
            raise UserError(f"there is {bad}; correct the environment")
        if begin is not None and first.any():
            begin(first)
        first = resetting  # the step after an episode's end only resets
        reward, terminated, truncated = game.step_into(choose(obs), obs)
        returns += reward
        lengths += ~resetting
        resetting = terminated | truncated
        for i in np.flatnonzero(resetting):
            if len(played[i]) < owed[i]:
                played[i].append(Episode(float(returns[i]), int(lengths[i])))
        returns[resetting] = lengths[resetting] = 0
    return [episode for done in played for episode in done]


def summary(values: tuple[float, ...]) -> dict[str, float]:
    """Mean, median, standard deviation of the values themselves, least and greatest."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
        "min": min(values),
        "max": max(values),
    }


def describe(result: dict[str, Any]) -> str:
    """Three lines for a person."""
    how = "sampled" if result["sample"] else "likeliest"
    title = (
        f"{result['run_dir']}, checkpoint {result['checkpoint']}: {result['episodes']} episodes, "
    )
    lines = [title + f"{how} actions, seed {result['seed']}"]
    for name in ("return", "length"):
        lines.append(f"{name:6}  " + "  ".join(f"{k} {number(v)}" for k, v in result[name].items()))
    return "\n".join(lines)
