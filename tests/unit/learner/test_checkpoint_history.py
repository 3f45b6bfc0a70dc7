"""Older checkpoints are kept, replace a damaged one, and survive a crash."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.params import ParamLayout
from penstock.envs import probe
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints import checkpoint_history as history
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.trainer import Trainer

LAYOUT = ParamLayout((("x", (4,)),))


def save(last: Path, steps: int, keep: int = 3) -> None:
    """As a learner does after so many optimizer steps."""
    found = Checkpoint(
        LAYOUT, np.full(4, steps, np.float32), {}, {"progress": {"learner_steps": steps}}
    )
    history.keep_previous(last, steps)
    checkpoint_format.save(last, found)
    history.prune(last, keep)


def steps_in(folder: Path) -> int:
    return int(checkpoint_format.load(folder).meta["progress"]["learner_steps"])


def names(last: Path) -> list[str]:
    return sorted(path.name for path in last.parent.iterdir())


def damage(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[-1] ^= 1
    (folder / FILE).write_bytes(data)


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "last"


def test_last_checkpoints_are_kept_by_their_steps(last: Path) -> None:
    for steps in range(1, 13):
        save(last, steps)
    assert names(last) == ["last", "step-10", "step-11"]
    assert [steps_in(path) for path in (last, *history.older(last))] == [12, 11, 10]
    save(last, 13, keep=1)
    assert names(last) == ["last"]


def test_saving_the_same_step_again_keeps_one_copy(last: Path) -> None:
    save(last, 1)
    save(last, 1)
    assert names(last) == ["last"]


@pytest.mark.parametrize("call", ["link", "replace", "fsync", "unlink", "rmdir", "mkdir"])
@pytest.mark.parametrize("number", range(4))
def test_crash_at_any_call_leaves_the_newest_checkpoint_intact(
    last: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in range(1, 4):
        save(last, steps)
    owner = os if call in ("link", "fsync") else Path
    real, calls = getattr(owner, call), [0]

    def crash(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > number:
            raise KeyboardInterrupt
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, crash)
        with suppress(KeyboardInterrupt):
            save(last, 4)
    folder, _, damaged = history.newest_undamaged(last)
    assert (folder, damaged) == (last, [])
    assert steps_in(last) in (3, 4)
    for steps in (5, 6, 7):
        save(last, steps)
    assert [steps_in(path) for path in (last, *history.older(last))] == [7, 6, 5]


def test_foreign_files_and_links_are_neither_removed_nor_followed(
    last: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    checkpoint_format.save(
        elsewhere, Checkpoint(LAYOUT, np.zeros(4, np.float32), {}, {"progress": {}})
    )
    last.parent.mkdir()
    (last.parent / "step-0").symlink_to(elsewhere)
    notes = last.parent / "step-1" / "notes.txt"
    for steps in range(1, 4):
        save(last, steps)
    notes.write_text("of the user")
    (last.parent / "step-100000").mkdir()
    (last.parent / "step-100000" / "data.bin").write_text("of the user")
    save(last, 4)
    assert names(last) == ["last", "step-0", "step-1", "step-100000", "step-2", "step-3"]
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    assert checkpoint_format.exists(elsewhere)


def test_checkpoints_are_copied_without_hard_links(
    last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    for steps in (1, 2):
        save(last, steps)
    assert [steps_in(path) for path in (last, *history.older(last))] == [2, 1]


def test_newest_intact_checkpoint_replaces_a_damaged_one(last: Path) -> None:
    for steps in (1, 2, 3):
        save(last, steps)
    damage(last)
    damage(last.with_name("step-2"))
    folder, found, damaged = history.newest_undamaged(last)
    assert (folder.name, found.weights[0], len(damaged)) == ("step-1", 1, 2)
    assert [path.name for path in history.restore(last, folder)] == ["damaged-1", "damaged-2"]
    assert steps_in(last) == 1
    save(last, 4)
    assert names(last) == ["damaged-1", "damaged-2", "last", "step-1"]


def test_checkpoint_damaged_during_the_run_is_set_aside_by_the_next_save(last: Path) -> None:
    save(last, 1)
    (last / FILE).write_bytes(b"half of it")
    save(last, 2)
    assert names(last) == ["damaged-1", "last"]
    assert (last.with_name("damaged-1") / FILE).read_bytes() == b"half of it"


def test_no_file_changes_if_every_checkpoint_is_damaged(last: Path) -> None:
    for steps in (1, 2, 3):
        save(last, steps)
    for folder in (last, *history.older(last)):
        damage(folder)
    before = names(last)
    with pytest.raises(UserError, match=r"none of the 3 checkpoints .* is whole.*--resume-from"):
        history.newest_undamaged(last)
    assert names(last) == before


def test_beginning_from_an_older_checkpoint_keeps_the_newer_ones(last: Path) -> None:
    for steps in (1, 2, 3):
        save(last, steps)
    history.make_newest(last, last.with_name("step-1"))
    assert steps_in(last) == 1
    assert names(last) == ["last", "step-1", "step-2-before-1", "step-3-before-1"]
    for steps in (2, 3, 4):
        save(last, steps)
    assert [steps_in(path) for path in (last, *history.older(last))] == [4, 3, 2]


def test_crash_while_beginning_from_a_checkpoint_keeps_that_checkpoint(
    last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second name of its file is left, which is the temporary name of the next save."""
    for steps in (1, 2):
        save(last, steps)
    best = last.with_name("best")
    history.link(last / FILE, best)
    save(last, 3)

    replace = Path.replace

    def crash(self: Path, target: Path) -> Path:
        if target == last / FILE:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            history.make_newest(last, best)
    save(last, 4)
    assert (steps_in(last), steps_in(best)) == (4, 2)


def test_another_run_begins_from_a_copy_of_the_checkpoint(last: Path, tmp_path: Path) -> None:
    save(last, 7)
    other = tmp_path / "other" / "checkpoints" / "last"
    history.make_newest(other, last)
    assert steps_in(other) == 7
    assert not (other / FILE).samefile(last / FILE)


@pytest.mark.parametrize("progress", [[], {"learner_steps": "7"}, {"learner_steps": float("inf")}])
def test_run_does_not_begin_from_a_checkpoint_without_run_state(
    last: Path, tmp_path: Path, progress: Any
) -> None:
    save(last, 5)
    other = Checkpoint(LAYOUT, np.zeros(4, np.float32), {}, {"progress": progress})
    checkpoint_format.save(tmp_path / "other", other)
    with pytest.raises(UserError, match="holds weights, but not the state of a run; resume from"):
        history.make_newest(last, tmp_path / "other")
    assert (steps_in(last), names(last)) == (5, ["last"])


def test_copied_and_set_aside_checkpoints_are_private(last: Path, tmp_path: Path) -> None:
    save(last, 1)
    save(last, 2)
    other = tmp_path / "other" / "checkpoints" / "last"
    history.make_newest(other, last)
    aside = history.set_aside(last)
    modes = [path.stat().st_mode & 0o777 for path in (other / FILE, aside / FILE)]
    assert modes == [0o600, 0o600]
    folders = [other, aside, last.with_name("step-1")]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700] * 3


class Run:
    """A learner of CartPole in a run's folder."""

    def __init__(self, run_dir: Path) -> None:
        config = resolve("cartpole", ["learner.device=cpu"])
        self.trainer = Trainer(config, probe(config.env))
        self.told: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.checkpoints = CheckpointManager(
            run_dir,
            self.trainer,
            lambda kind, **about: self.told.append(about.get("text", kind)),
            lambda kind, text, **_: self.events.append((kind, text)),
        )

    def save(self, steps: int, epoch: int = 0) -> None:
        self.trainer.progress.learner_steps = steps
        self.trainer.progress.trained_steps = steps
        self.checkpoints.save(epoch=epoch)


@pytest.mark.parametrize("how", ["auto", "must"])
def test_resume_falls_back_to_an_intact_checkpoint_with_a_note(tmp_path: Path, how: str) -> None:
    run, last = Run(tmp_path), tmp_path / "checkpoints" / "last"
    for steps in (10, 20):
        run.save(steps)
    damage(last)
    again = Run(tmp_path)
    assert again.checkpoints.resume(how)
    assert again.trainer.progress.learner_steps == 10
    [(kind, text)] = again.events
    assert kind == "rollback"
    assert "the checksum of" in text
    assert text.endswith(f"the run resumes from {last.with_name('step-10')}, the newest that is "
                         "whole")  # fmt: skip
    assert checkpoint_format.exists(last.with_name("damaged-1"))
    assert Run(tmp_path).checkpoints.resume(how)  # from now on without a word
    again.save(30)
    assert steps_in(last) == 30


@pytest.mark.parametrize("how", ["auto", "must"])
def test_run_with_only_damaged_checkpoints_is_not_restarted(tmp_path: Path, how: str) -> None:
    run, last = Run(tmp_path), tmp_path / "checkpoints" / "last"
    run.save(10)
    (last / FILE).write_bytes(b"")
    with pytest.raises(UserError, match="none of the 1 checkpoints"):
        Run(tmp_path).checkpoints.resume(how)
    assert (last / FILE).read_bytes() == b""


def test_checkpoint_of_a_network_with_another_scale_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).save(10)
    again = Run(tmp_path)
    again.trainer.scales = [[0.0, 0.1]]
    with pytest.raises(
        UserError, match=r"scaled by bytes, and now it is \[\[0.0, 0.1\]\]; set model.scale and"
    ):
        again.checkpoints.resume("must")


def test_missing_checkpoint_file_falls_back_to_the_previous(tmp_path: Path) -> None:
    run, last = Run(tmp_path), tmp_path / "checkpoints" / "last"
    for steps in (10, 20):
        run.save(steps)
    (last / FILE).unlink()
    again = Run(tmp_path)
    assert again.checkpoints.resume("auto")
    assert again.trainer.progress.learner_steps == 10
    assert checkpoint_format.exists(last)


def test_only_one_learner_repairs_damaged_checkpoints(tmp_path: Path) -> None:
    run, last = Run(tmp_path), tmp_path / "checkpoints" / "last"
    for steps in (10, 20):
        run.save(steps)
    damage(last)
    again = Run(tmp_path)
    assert again.checkpoints.resumes_same_env()
    assert again.checkpoints.resume("auto", repair=False)
    assert again.events == []
    assert not last.with_name("damaged-1").exists()


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(10)
    last = tmp_path / "checkpoints" / "last"
    found = checkpoint_format.load(last)
    arrays: dict[str, Any] = dict(found.arrays) | {"optimizer/exp_avg": np.zeros(1, np.float32)}
    checkpoint_format.save(last, Checkpoint(found.layout, found.weights, arrays, found.meta))
    with pytest.raises(UserError, match=r"saved by another optimizer \(exp_avg of shape"):
        Run(tmp_path).checkpoints.resume("must")
    checkpoint_format.save(last, Checkpoint(found.layout, found.weights, found.arrays, {}))
    with pytest.raises(UserError, match="not the state of a run"):
        Run(tmp_path).checkpoints.resume("must")


def test_learner_of_an_earlier_group_does_not_replace_a_later_checkpoint(tmp_path: Path) -> None:
    """As on a disk of several hosts, where one that fell silent still runs."""
    silent, others, last = Run(tmp_path), Run(tmp_path), tmp_path / "checkpoints" / "last"
    silent.save(10, epoch=1)
    others.save(20, epoch=2)
    with pytest.raises(UserError, match="is of generation 0, epoch 2 of the run"):
        silent.save(30, epoch=1)
    assert steps_in(last) == 20
    resumed = Run(tmp_path)
    assert resumed.checkpoints.resume("must")  # a later life of the run, whose epochs begin anew
    resumed.save(40, epoch=1)
    with pytest.raises(UserError, match="is of generation 1, epoch 1 of the run"):
        others.save(50, epoch=2)
    assert steps_in(last) == 40


def test_named_saver_replaces_the_checkpoint_of_a_restarted_learner(tmp_path: Path) -> None:
    """With a parameter server a learner that is restarted resumes alone, so the others are of an
    earlier generation."""
    first, other = Run(tmp_path), Run(tmp_path)
    first.checkpoints.save()
    restarted = Run(tmp_path)
    assert restarted.checkpoints.resume("auto")
    restarted.checkpoints.save()
    other.trainer.progress.learner_steps = 7
    with pytest.raises(UserError):
        other.checkpoints.save()
    other.checkpoints.save(is_named=True)
    last = Run(tmp_path)
    assert last.checkpoints.resume("auto")
    assert last.trainer.progress.learner_steps == 7
    assert last.trainer.progress.generation == 2


def test_an_order_to_save_is_due_once_and_its_failure_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not run.checkpoints.is_due()
    run.checkpoints.handle_messages([{"kind": "actors", "alive": 1}])
    assert not run.checkpoints.is_due()
    run.checkpoints.handle_messages([{"kind": "save"}])
    assert run.checkpoints.is_due(by_time=False)
    run.save(10)
    run.checkpoints.on_order_done()
    assert not run.checkpoints.is_due()
    run.checkpoints.postpone("full")  # of a checkpoint that was not ordered
    assert run.told == ["checkpoint"]
    run.checkpoints.handle_messages([{"kind": "save"}])
    run.checkpoints.postpone("full")
    assert run.told == ["checkpoint", "save_failed"]
    assert not run.checkpoints.is_due()
