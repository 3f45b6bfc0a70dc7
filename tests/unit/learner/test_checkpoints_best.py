"""When a checkpoint becomes the best, and that the best is never lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.slots import UnrollSummary
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE
from penstock.learner.checkpoints.checkpoint_history import best_locked, checkpoint_folder
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.trainer import Trainer

UNEVALUATED = ("eval.every_steps=null", "stop.confirm_episodes=0")
OTHER_GAME = "env.kwargs={sutton_barto_reward: true}"


class Learned:
    """A learner of CartPole, of whose play the returns alone are made up."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        config = resolve("cartpole", ["learner.device=cpu", "stop.return=5", *options])
        self.folder = run_dir / "checkpoints"
        self.best = self.folder / "best"
        self.trainer = Trainer(config, probe(config.env))
        self.progress = self.trainer.progress
        self.told: list[dict[str, Any]] = []
        self.checkpoints = CheckpointManager(run_dir, self.trainer, self._hear)

    def play(self, episodes: int, episode_return: float) -> None:
        """So many episodes of one step each, and a save."""
        arrays = {
            "alive": np.ones((1, episodes), bool),
            "policy_version": np.zeros((1, episodes), np.uint32),
            "terminated": np.ones((1, episodes), bool),
            "truncated": np.zeros((1, episodes), bool),
            "episode_return": np.full((1, episodes), episode_return, np.float32),
            "episode_length": np.full((1, episodes), 7, np.int32),
        }
        self.progress.count_unrolls(UnrollSummary.of(arrays), episodes)
        self.progress.commit(self.progress.growth(), self.progress.growth())
        self.checkpoints.save()

    @property
    def best_return(self) -> float | None:
        found: float | None = checkpoint_format.load(self.best).meta["best_return"]
        return found

    def _hear(self, kind: str, **about: Any) -> None:
        self.told.append({"kind": kind, **about})


def resumed(run_dir: Path, *options: str) -> Learned:
    learned = Learned(run_dir, *options)
    assert learned.checkpoints.resume("must")
    return learned


@pytest.mark.parametrize("options", [(), ("eval.every_s=60",), ("eval.every_steps=null",)])
def test_no_best_is_saved_before_a_hundred_episodes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    learned = Learned(tmp_path, *options)
    learned.play(0, 0.0)
    learned.play(99, 5.0)  # fewer than a hundred may be luck
    assert not learned.best.exists()
    assert checkpoint_folder(tmp_path, "best").name == "last"
    learned.play(1, 5.0)
    learned.play(100, 4.0)
    assert [told["best"] for told in learned.told] == [False, False, True, False]
    assert learned.best_return == 5.0


def test_the_best_by_evaluation_is_not_replaced_by_a_return_in_training(tmp_path: Path) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    stored = checkpoint_format.load(learned.best)
    env = learned.trainer.config.env.model_dump(mode="json")
    meta = {**stored.meta, "evaluation": {"env": env, "mean": 4.0}}
    checkpoint_format.save(learned.best, replace(stored, meta=meta))  # as an evaluator does
    learned.play(100, 6.0)
    assert not learned.told[-1]["best"]
    assert checkpoint_format.load(learned.best).meta["evaluation"]["mean"] == 4.0


def test_best_is_not_written_while_an_evaluator_writes_it(tmp_path: Path) -> None:
    learned = Learned(tmp_path)
    with best_locked(learned.best, wait=True):
        learned.play(100, 5.0)
    assert not learned.told[-1]["best"]
    assert not learned.best.exists()
    learned.play(100, 6.0)
    assert learned.told[-1]["best"]


def test_a_checkpoint_names_its_request_and_how_the_policy_is_played(tmp_path: Path) -> None:
    learned = Learned(tmp_path)
    requests = learned.checkpoints.begin_evaluation_requests()
    idle = {"kind": "evaluator", "every": 100, "done": 0, "play": {"way": "sampled"}}
    requests.handle_messages([idle])
    learned.play(100, 5.0)
    assert learned.progress.stop_reason() is None
    assert requests.due() == "closing"  # to confirm stop.return
    learned.checkpoints.save_for_evaluation()
    meta = checkpoint_format.load(learned.folder / ".requested").meta
    assert (meta["evaluate"], meta["play"]) == ("closing", {"way": "sampled"})
    assert requests.due() is None
    assert "evaluate" not in checkpoint_format.load(learned.folder / "last").meta
    assert resumed(tmp_path).checkpoints.play == {"way": "sampled"}
    assert resumed(tmp_path, OTHER_GAME).checkpoints.play is None


def test_failed_write_keeps_the_best_and_allows_the_next(tmp_path: Path) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    for name in ("last", "best"):
        in_the_way = learned.folder / name / f".{FILE}.tmp"
        in_the_way.mkdir()
        with pytest.raises(UserError, match="could not be written"):
            learned.play(100, {"last": 6.0, "best": 7.0}[name])
        in_the_way.rmdir()
        assert learned.best_return == 6.0
    again = resumed(tmp_path)  # from before these
    assert again.progress.return_mean == 5.0
    again.play(100, 5.5)
    assert again.best_return == 6.0
    again.play(100, 6.5)
    assert again.best_return == 6.5


def test_best_that_was_never_written_does_not_count(tmp_path: Path) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    (learned.best / FILE).unlink()  # its machine has failed after `last`, in an older version
    again = resumed(tmp_path)
    again.play(100, 4.0)
    assert again.best_return == 4.0


def test_another_environment_keeps_weights_and_resets_returns(
    tmp_path: Path, notes: list[str]
) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    assert learned.progress.goal.solved_at_s is not None
    other = resumed(tmp_path, OTHER_GAME)
    assert (other.progress.return_mean, other.progress.goal.solved_at_s) == (None, None)
    assert (other.progress.trained_steps, other.progress.episodes) == (100, 100)
    other.checkpoints.save()  # it ends before its first step, and may be resumed as it was
    assert resumed(tmp_path).progress.return_mean == 5.0
    other.play(99, 3.0)
    assert not other.best.exists()
    assert checkpoint_format.load(learned.folder / "best-before-1").meta["best_return"] == 5.0
    other.play(1, 3.0)
    assert other.best_return == 3.0
    assert "the environment (env.*) differs from" in notes[0]
    assert notes[1].endswith("best-before-1")
    assert len(notes) == 2
    again = resumed(tmp_path, OTHER_GAME)
    assert (again.progress.return_mean, len(notes)) == (3.0, 2)
    back = resumed(tmp_path)
    back.play(100, 2.0)
    assert (back.best_return, len(list(learned.folder.glob("best-before-?")))) == (2.0, 2)


def test_an_order_to_save_before_the_first_step_in_another_game_is_answered(tmp_path: Path) -> None:
    Learned(tmp_path).play(100, 5.0)
    other = resumed(tmp_path, OTHER_GAME)
    other.checkpoints.handle_messages([{"kind": "save"}])
    other.checkpoints.save()
    assert [(message["kind"], message["error"]) for message in other.told] == [
        ("save_failed", "nothing was trained on yet in the environment (env.*) of the resumed run")
    ]
    assert not other.checkpoints.is_due()


def test_best_evaluated_here_but_trained_elsewhere_has_no_training_return(
    tmp_path: Path,
) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    other = resumed(tmp_path, OTHER_GAME, *UNEVALUATED)
    stored = checkpoint_format.load(learned.best)
    env = other.trainer.config.env.model_dump(mode="json")
    meta = {**stored.meta, "evaluation": {"env": env, "mean": 4.0}}
    checkpoint_format.save(learned.best, replace(stored, meta=meta))  # as an evaluator does
    other.play(100, 3.0)
    assert other.best_return == 3.0
    assert not (learned.folder / "best-before-1").exists()


def test_checkpoint_without_an_environment_counts_as_of_the_same(
    tmp_path: Path, notes: list[str]
) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    for name in ("last", "best"):
        stored = checkpoint_format.load(learned.folder / name)
        meta = {key: value for key, value in stored.meta.items() if key != "env"}
        checkpoint_format.save(learned.folder / name, replace(stored, meta=meta))
    again = resumed(tmp_path)
    assert again.progress.return_mean == 5.0
    again.play(100, 4.0)
    assert (again.best_return, notes) == (5.0, [])


def test_unreadable_best_is_set_aside_and_does_not_count(tmp_path: Path, notes: list[str]) -> None:
    learned = Learned(tmp_path)
    learned.play(100, 5.0)
    (learned.best / FILE).write_bytes(b"half of it")
    again = resumed(tmp_path)
    again.play(100, 4.0)
    assert again.best_return == 4.0
    assert (learned.folder / "best-before-1" / FILE).read_bytes() == b"half of it"
    assert "is damaged" in notes[0]


def test_checkpoint_of_another_policy_id_is_not_resumed(tmp_path: Path) -> None:
    run = Learned(tmp_path)
    run.checkpoints.save()
    last = run.folder / "last"
    checkpoint_format.save(last, replace(checkpoint_format.load(last), policy_id=3))
    with pytest.raises(UserError, match="holds policy 3, and a run trains policy 0; resume from"):
        run.checkpoints.resume("must")


def test_learner_whose_folder_was_replaced_does_not_overwrite_the_new_run(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mine, theirs = Learned(run_dir), Learned(run_dir)
    run_dir.rename(tmp_path / "moved")
    run_dir.mkdir()
    theirs.checkpoints = CheckpointManager(run_dir, theirs.trainer)
    theirs.checkpoints.save()
    saved = (run_dir / "checkpoints" / "last" / FILE).read_bytes()
    with pytest.raises(UserError, match=str(run_dir)):
        mine.checkpoints.save()
    assert (run_dir / "checkpoints" / "last" / FILE).read_bytes() == saved
