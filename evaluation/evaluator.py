"""The role that evaluates a run as it goes: every `eval.every_s` seconds the newest checkpoint.

It takes weights from `checkpoints/last` and not from the learner's memory: so it costs the learner
nothing, works alike for every transport, pace and number of learners, and an evaluated checkpoint
can become `checkpoints/best`, complete. The checkpoint in evaluation stays on disk under a name of
its own (a hard link) while the learner saves further ones.

Every evaluation plays the same games, so that two of them compare weights and nothing else. How the
best did in which games stands in its own file: the two are replaced together or not at all. A best
of which that is not known, as it was found in training or in other games, plays these first.

Heavy libraries are imported at the first evaluation: they must not delay the start of a run.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.same_env import settings
from penstock.configs.schema import Config
from penstock.core.notes import note_logger
from penstock.core.role import RoleContext
from penstock.profiling.status import Phase

logger = note_logger(__name__)

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.envs import BatchedEnv
    from penstock.evaluation.evaluate import Episode

CHECKPOINTS = "checkpoints"
HELD = ".evaluated"
SEED = 1_000_000  # apart from the games of `penstock eval`, by default
POLL_S = 0.1


class StoppedError(Exception):
    """The run ends in the middle of an evaluation."""


def run(ctx: RoleContext) -> None:
    """Evaluate until asked to stop; reports an "evaluation" each time."""
    from penstock.learner.checkpoints.checkpoint_format import DamagedCheckpointError

    config = ctx.config
    assert config is not None
    every_s = config.eval.every_s
    assert every_s is not None
    evaluator = Evaluator(ctx, config)
    ctx.report("ready")
    due_s = time.monotonic() + every_s
    while not ctx.stopping():
        ctx.status.beat()
        ctx.status.phase = Phase.WAITING
        if time.monotonic() < due_s or not evaluator.has_news():
            time.sleep(POLL_S)
            continue
        due_s = time.monotonic() + every_s
        ctx.status.phase = Phase.ENVIRONMENT
        try:
            ctx.report("evaluation", **evaluator.evaluate())
        except StoppedError:
            return
        except (
            DamagedCheckpointError
        ) as error:  # the learner goes on from another one, and saves again
            logger.info("%s: %s; the next checkpoint is evaluated", ctx.name, error.fault)
        finally:
            evaluator.let_go()


class Evaluator:
    """Evaluates `checkpoints/last`, and keeps the best as `checkpoints/best`."""

    def __init__(self, ctx: RoleContext, config: Config) -> None:
        self._ctx = ctx
        self._config = config
        folder = ctx.run_dir / CHECKPOINTS
        self._last, self._best, self._held = (folder / name for name in ("last", "best", HELD))
        self._how = {
            "env": settings(config.env),
            "episodes": config.eval.episodes,
            "seed": SEED + config.run.seed,
            "max_episode_steps": config.eval.max_episode_steps,
        }
        self._best_mean: float | None = None
        self._knows_best = False
        self._told_cut = False
        self._seen: tuple[int, int] | None = None
        self._game: BatchedEnv | None = None

    def has_news(self) -> bool:
        """Whether there is a checkpoint that was not evaluated."""
        found = self._identity()
        return found is not None and found != self._seen

    def evaluate(self) -> dict[str, Any]:
        """Play `eval.episodes` episodes with the newest checkpoint: how they went. Raises UserError
        as an actor would, and `StoppedError`."""
        from penstock.evaluation.evaluate import summary
        from penstock.learner.checkpoints import checkpoint_format

        if not self._knows_best:
            self._find_best()
        began_s = time.monotonic()
        self._hold_newest()
        played = self._play(self._held)
        returns, lengths, cut = zip(*played, strict=True)
        about = summary(returns)
        better = self._best_mean is None or about["mean"] > self._best_mean
        best = better and self._keep(self._held, about["mean"])
        progress = checkpoint_format.read_meta(self._held)["progress"]
        return {
            **{name: progress[name] for name in ("time_s", "trained_steps", "learner_steps")},
            "episodes": len(returns),
            "return": about,
            "length": summary(lengths),
            "cut": sum(cut),
            "best": best,
            "best_return_mean": self._best_mean,
            "seconds": time.monotonic() - began_s,
            "env": self._how["env"],
        }

    def let_go(self) -> None:
        """Of the checkpoint that was evaluated."""
        from penstock.learner.checkpoints.checkpoint_format import FILE

        with suppress(OSError):
            (self._held / FILE).unlink(missing_ok=True)
            self._held.rmdir()

    def _find_best(self) -> None:
        """Learn how `checkpoints/best` does in these games, if there is one from before."""
        from penstock.algos.samples import network_shape
        from penstock.core.formatting import number
        from penstock.evaluation.evaluate import summary
        from penstock.learner.checkpoints.checkpoint_history import EVALUATION, best_meta

        config = self._config
        layout = network_shape(config, self._made_game().info).layout
        meta = best_meta(self._best, layout, config.env)
        if meta is not None:
            known = meta.get(EVALUATION, {})
            self._best_mean = known.get("mean")
            if self._best_mean is None or {**known, **self._how} != known:
                returns = tuple(episode.episode_return for episode in self._play(self._best))
                mean = summary(returns)["mean"]
                logger.info("%s was evaluated first: mean return %s", self._best, number(mean))
                self._keep(self._best, mean)
                self._best_mean = mean
        self._knows_best = True

    def _keep(self, folder: Path, mean: float) -> bool:
        """Make what is in ``folder`` the best, with its ``mean``; whether there was room for it."""
        from penstock.learner.checkpoints import checkpoint_format
        from penstock.learner.checkpoints.checkpoint_history import EVALUATION

        found = checkpoint_format.load(folder)
        meta = {**found.meta, EVALUATION: {**self._how, "mean": mean}}
        try:
            checkpoint_format.save(self._best, replace(found, meta=meta))
        except UserError as error:  # a disk that is full now need not be so for ever
            logger.info("%s stays as it was: %s", self._best, error)
            return False
        self._best_mean = mean
        return True

    def _hold_newest(self) -> None:
        from penstock.learner.checkpoints.checkpoint_format import FILE

        found = None
        while found is None or found != self._seen:  # it may be replaced meanwhile
            self._seen = self._identity()
            _hold(self._last, self._held, FILE)
            found = self._identity()

    def _made_game(self) -> BatchedEnv:
        from penstock.envs import make
        from penstock.evaluation.evaluate import ENVS

        if self._game is None:
            self._game = make(self._config.env, min(self._config.eval.episodes, ENVS))
        return self._game

    def _play(self, folder: Path) -> list[Episode]:
        from penstock.evaluation.evaluate import play, trained_policy, were_cut

        config, game, seed = self._config, self._made_game(), SEED + self._config.run.seed
        episodes, most = config.eval.episodes, config.eval.max_episode_steps
        policy = trained_policy(config, game, folder, seed)

        def choose(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
            self._ctx.status.beat()
            if self._ctx.stopping():
                raise StoppedError
            return policy.greedy(obs)

        played = play(game, choose, episodes, seed, most, policy.reset)
        # Not barren, should it die later.
        self._ctx.status.produced_steps += sum(episode.length for episode in played)
        cut = sum(episode.cut for episode in played)
        if cut and not self._told_cut:
            option = "eval.max_episode_steps"
            logger.info("in an evaluation %s", were_cut(cut, episodes, most, option))
            self._told_cut = True
        return played

    def _identity(self) -> tuple[int, int] | None:
        """Inode and time of the checkpoint's file, which differ for each checkpoint."""
        try:
            [found] = [path.stat() for path in self._last.glob("*.safetensors")]
        except (OSError, ValueError):
            return None
        return found.st_ino, found.st_mtime_ns


def _hold(source: Path, held: Path, name: str) -> None:
    """Keep the present checkpoint on disk after it is replaced."""
    held.mkdir(mode=0o700, exist_ok=True)
    path = held / name
    path.unlink(missing_ok=True)
    try:
        os.link(source / name, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source / name, path)
