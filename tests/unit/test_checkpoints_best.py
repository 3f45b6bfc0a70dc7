"""When a checkpoint is the best, and that none is before one can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.launch.evaluate import checkpoint_folder
from penstock.learner import checkpoint
from penstock.learner.checkpoints import Checkpoints
from penstock.learner.trainer import Trainer


@pytest.mark.parametrize("evaluated", [False, True])
def test_none_is_the_best_before_one_was_judged(tmp_path: Path, evaluated: bool) -> None:
    options = ["learner.device=cpu", *(["eval.every_s=60"] if evaluated else [])]
    config = resolve("cartpole", options)
    trainer = Trainer(config, probe(config.env))
    told = []
    checkpoints = Checkpoints(tmp_path, trainer, lambda kind, **about: told.append(about["best"]))

    def play(episodes: int, episode_return: float) -> None:
        trainer.progress.returns.extend([episode_return] * episodes)
        trainer.progress.lengths.extend([7] * episodes)
        trainer.progress.grow(trainer.progress.growth(), trainer.progress.growth())
        checkpoints.save()

    best = tmp_path / "checkpoints" / "best"
    play(0, 0.0)
    play(99, 5.0)  # fewer than a hundred may be luck
    assert not best.exists()
    assert checkpoint_folder(tmp_path, "best").name == "last"
    play(1, 5.0)
    play(100, 4.0)
    assert told == [False, False, not evaluated, False]
    if evaluated:
        assert not best.exists()  # its evaluator writes it
    else:
        assert checkpoint.load(best).meta["best_return"] == 5.0
