"""Replay snapshots kept with a run's checkpoints: in the background, complete, and optional."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.learner.sources.kept_replay import KeptReplay
from penstock.replay import RateLimiter, Replay, ReplayError
from penstock.replay.snapshot import FolderWriter

COLUMNS: dict[str, Any] = {"obs": (np.float32, (2,)), "action": (np.int64, ())}


def made(rows: int = 30, **options: Any) -> Replay:
    replay = Replay(COLUMNS, **({"capacity": 100, "unroll": 10, "seed": 0} | options))
    for i in range(rows):
        flags: dict[str, Any] = {"terminated": False, "truncated": False}
        replay.add(obs=[i, i], next_obs=[i + 1, i + 1], action=i, reward=1.0, **flags)
    return replay


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk writes nothing until this is set."""
    go_on, append = threading.Event(), FolderWriter.append

    def wait(self: Any, name: str, array: Any) -> None:
        assert go_on.wait(10.0)
        append(self, name, array)

    monkeypatch.setattr(FolderWriter, "append", wait)
    return go_on


def test_replay_is_written_in_the_background_and_awaited_at_the_end(
    tmp_path: Path, slow: threading.Event
) -> None:
    replay = made()
    kept = KeptReplay(replay, mode=True, grace_s=10.0)
    kept.begin(tmp_path)
    kept.begin(tmp_path)  # one is still being written: no second
    assert kept.saving
    assert len(replay.sample(10).action) == 10
    beats = list[bool]()

    def beat() -> None:
        beats.append(kept.saving)
        slow.set()

    kept.finish(tmp_path, beat)
    assert beats
    assert not kept.saving
    assert Replay.load(tmp_path).stats()["inserted"] == 30


def test_last_snapshot_contains_the_final_steps(tmp_path: Path, slow: threading.Event) -> None:
    replay = made()
    kept = KeptReplay(replay, mode=True, grace_s=10.0)
    kept.begin(tmp_path)
    replay.add(obs=[0, 0], next_obs=[1, 1], action=0, reward=0, terminated=0, truncated=0)
    slow.set()
    kept.finish(tmp_path, lambda: None)
    assert Replay.load(tmp_path).stats()["inserted"] == 31


def test_background_write_error_is_raised_at_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = KeptReplay(made(), mode=True, grace_s=10.0)
    kept.begin(tmp_path / "file")
    while kept.saving:
        time.sleep(0.01)
    with pytest.raises(ReplayError, match="could not be written"):
        kept.begin(tmp_path / "file")


def test_last_snapshot_is_written_after_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "last").write_text("in the way")
    kept = KeptReplay(made(), mode=True, grace_s=10.0)
    with pytest.raises(ReplayError, match="could not be written"):
        kept.finish(tmp_path / "last", lambda: None)
    kept.begin(tmp_path / "last")
    while kept.saving:
        time.sleep(0.01)
    (tmp_path / "last").unlink()
    kept.finish(tmp_path / "last", lambda: None)
    assert Replay.load(tmp_path / "last").stats()["inserted"] == 30


def test_any_fault_of_the_background_write_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, name: str, array: Any) -> None:
        raise MemoryError("no room for a piece")

    monkeypatch.setattr(FolderWriter, "append", broken)
    kept = KeptReplay(made(), mode=True, grace_s=10.0)
    with pytest.raises(MemoryError, match="no room for a piece"):
        kept.finish(tmp_path, lambda: None)


def test_resumed_replay_continues_with_the_stored_steps(tmp_path: Path) -> None:
    replay = made()
    KeptReplay(replay, mode=True, grace_s=10.0).finish(tmp_path, lambda: None)
    again = made(0, seed=7)
    assert (
        KeptReplay(again, mode=True, grace_s=10.0).resume(tmp_path)
        == "the replay continues with 30 stored steps"
    )
    np.testing.assert_array_equal(again.sample(20).action, replay.sample(20).action)


def test_replay_without_a_snapshot_begins_empty_with_a_note(tmp_path: Path) -> None:
    replay = made()
    KeptReplay(replay, mode=True, grace_s=10.0).finish(tmp_path / "last", lambda: None)
    empty = made(0)
    text = KeptReplay(empty, mode=False, grace_s=10.0).resume(tmp_path / "last")
    assert text.startswith("the replay begins empty, as replay.checkpoint is false")
    text = KeptReplay(empty, mode=True, grace_s=10.0).resume(tmp_path / "nowhere")
    assert text.startswith("the replay begins empty: ")
    assert len(empty) == 0
    KeptReplay(replay, mode=False, grace_s=10.0).finish(tmp_path / "last", lambda: None)
    assert not (tmp_path / "last").exists(), "it would be older than its checkpoint"


def test_snapshot_with_another_slot_layout_is_refused(tmp_path: Path) -> None:
    KeptReplay(made(), mode=True, grace_s=10.0).finish(tmp_path, lambda: None)
    with pytest.raises(
        UserError, match=r"another replay: .*; or begin .* replay\.checkpoint=false"
    ):
        KeptReplay(made(0, unroll=5), mode=True, grace_s=10.0).resume(tmp_path)


def limited(min_size: int = 10, ratio: float = 2.0) -> tuple[Replay, RateLimiter]:
    limiter = RateLimiter(ratio, min_size, band=20.0)
    return made(0, limiter=limiter, timeout_s=0.01), limiter


def test_resume_restores_the_balance_of_samples_and_inserts(tmp_path: Path) -> None:
    """2 samples an insert from the 11th on: 20 inserts and 16 samples leave 4; the band is 20."""
    replay, limiter = limited()
    for _ in range(20):
        replay.add(obs=[0, 0], next_obs=[1, 1], action=0, reward=0, terminated=0, truncated=0)
    for _ in range(2):
        replay.sample(8)
    assert [limiter.may_sample(24), limiter.may_sample(25)] == [True, False]
    KeptReplay(replay, mode=True, grace_s=10.0).finish(tmp_path, lambda: None)
    again, other = limited()
    KeptReplay(again, mode=True, grace_s=10.0).resume(tmp_path)
    assert [other.may_sample(24), other.may_sample(25)] == [True, False]
    assert [other.may_insert(8), other.may_insert(9)] == [True, False]
    assert other.counts.stored == 20
    again.stats()  # counts nothing twice
    assert other.counts.stored == 20
    # With another ratio only what comes from now on counts by it: 3 inserts are worth 3 samples.
    third, new = limited(ratio=1.0)
    KeptReplay(third, mode=True, grace_s=10.0).resume(tmp_path)
    assert [new.may_insert(16), new.may_insert(17)] == [True, False]


def test_snapshot_without_a_limiter_resumes_balanced(tmp_path: Path) -> None:
    made(50).save(tmp_path)
    again, limiter = limited()
    again.restore(tmp_path)
    assert [limiter.may_sample(20), limiter.may_sample(21)] == [True, False]
    assert [limiter.may_insert(10), limiter.may_insert(11)] == [True, False]


def test_unwanted_snapshot_is_removed_without_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "replay" / "0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("of the user")
    replay = made()
    unwanted = KeptReplay(replay, mode=False, grace_s=10.0)
    unwanted.begin(folder)
    assert (folder / "notes.txt").exists()
    KeptReplay(replay, mode=True, grace_s=10.0).finish(folder, lambda: None)
    unwanted.begin(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    KeptReplay(replay, mode=True, grace_s=10.0).finish(folder, lambda: None)
    (tmp_path / "linked").symlink_to(folder)
    unwanted.begin(tmp_path / "linked")
    assert Replay.load(folder).stats()["inserted"] == 30
    unwanted.begin(folder)
    assert not folder.exists()
