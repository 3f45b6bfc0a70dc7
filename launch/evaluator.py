"""The role that evaluates a run as it goes: every `eval.every_s` seconds the newest checkpoint.

It takes weights from `checkpoints/last` and not from the learner's memory: so it costs the learner
nothing, works alike for every transport, pace and number of learners, and what it has evaluated
can become `checkpoints/best`, complete, with a rename. What it evaluates stays on disk under a name
of its own (a hard link) while the learner goes on saving.

Every evaluation plays the same games, so that two of them compare weights and nothing else. Heavy
libraries are imported at the first one: they must not delay the start of a run.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.schema import Config
from penstock.core.role import RoleContext
from penstock.launch.record import EVALUATIONS, lines
from penstock.profiling.status import Phase

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.launch.evaluate import Episode

CHECKPOINTS = "checkpoints"
HELD = ".evaluated"
SEED = 1_000_000  # apart from the games of `penstock eval`, by default
POLL_S = 0.1


class StoppedError(Exception):
    """The run ends in the middle of an evaluation."""


def run(ctx: RoleContext) -> None:
    """Evaluate until told to stop; reports an "evaluation" each time."""
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
        finally:
            evaluator.let_go()


class Evaluator:
    """Evaluates `checkpoints/last`, and keeps the best as `checkpoints/best`."""

    def __init__(self, ctx: RoleContext, config: Config) -> None:
        self._ctx = ctx
        self._config = config
        folder = ctx.run_dir / CHECKPOINTS
        self._last, self._best, self._held = (folder / name for name in ("last", "best", HELD))
        self._best_mean = best_so_far(ctx.run_dir)
        self._seen: tuple[int, int] | None = None
        self._game: Any = None

    def has_news(self) -> bool:
        """Whether there is a checkpoint that was not evaluated."""
        found = self._identity()
        return found is not None and found != self._seen

    def evaluate(self) -> dict[str, Any]:
        """Play `eval.episodes` episodes with the newest checkpoint: how they went. Raises UserError
        as an actor would, and `StoppedError`."""
        from penstock.launch.evaluate import summary

        began_s = time.monotonic()
        meta, played = self._play()
        returns, lengths = zip(*played, strict=True)
        about = summary(returns)
        best = self._best_mean is None or about["mean"] > self._best_mean
        if best:
            self._best_mean = about["mean"]
            _move(self._held, self._best)
        progress = meta["progress"]
        self._ctx.status.produced_steps += sum(lengths)  # not barren, should it die later
        return {
            **{name: progress[name] for name in ("time_s", "trained_steps", "learner_steps")},
            "episodes": len(returns),
            "return": about,
            "length": summary(lengths),
            "best": best,
            "best_return_mean": self._best_mean,
            "seconds": time.monotonic() - began_s,
        }

    def let_go(self) -> None:
        """Of the checkpoint that was evaluated."""
        shutil.rmtree(self._held, ignore_errors=True)

    def _play(self) -> tuple[Any, list[Episode]]:
        from penstock.envs import make
        from penstock.launch.evaluate import ENVS, play, trained_policy
        from penstock.learner import checkpoint

        config = self._config
        if self._game is None:
            self._game = make(config.env, min(config.eval.episodes, ENVS))
        found = None
        while found is None or found != self._seen:  # it may be replaced meanwhile
            self._seen = self._identity()
            _hold(self._last, self._held, checkpoint.FILE)
            found = self._identity()
        seed = SEED + config.run.seed
        policy = trained_policy(config, self._game, self._held, seed)

        def choose(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
            self._ctx.status.beat()
            if self._ctx.stopping():
                raise StoppedError
            return policy.greedy(obs)

        meta = checkpoint.load(self._held).meta
        return meta, play(self._game, choose, config.eval.episodes, seed, policy.begin)

    def _identity(self) -> tuple[int, int] | None:
        """What tells one checkpoint from the next, which has another file."""
        try:
            [found] = [path.stat() for path in self._last.glob("*.safetensors")]
        except (OSError, ValueError):
            return None
        return found.st_ino, found.st_mtime_ns


def best_so_far(run_dir: Path) -> float | None:
    """The highest mean return of the evaluations that a run has written down; None before any."""
    means = [line["return"]["mean"] for line in lines(run_dir / EVALUATIONS)]
    return max((mean for mean in means if mean is not None), default=None)


def _hold(source: Path, held: Path, name: str) -> None:
    """Keep the checkpoint that is there now, whatever replaces it."""
    held.mkdir(exist_ok=True)
    path = held / name
    path.unlink(missing_ok=True)
    try:
        os.link(source / name, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source / name, path)


def _move(held: Path, best: Path) -> None:
    best.mkdir(exist_ok=True)
    for path in held.iterdir():
        path.replace(best / path.name)
