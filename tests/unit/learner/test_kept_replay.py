"""Replay snapshots kept with a run's checkpoints: in the background, complete, and optional."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from full_disk import full_disk
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
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


def kept_replay(
    replay: Replay, mode: bool | Literal["auto"] = True, grace_s: float = 10.0
) -> KeptReplay:
    return KeptReplay(replay, mode=mode, grace_s=grace_s)


def keep(replay: Replay, folder: Path) -> None:
    """Write a snapshot to a folder."""
    kept_replay(replay).finish(folder, lambda: None)


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
    kept = kept_replay(replay)
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
    kept = kept_replay(replay)
    kept.begin(tmp_path)
    replay.add(obs=[0, 0], next_obs=[1, 1], action=0, reward=0, terminated=0, truncated=0)
    slow.set()
    kept.finish(tmp_path, lambda: None)
    assert Replay.load(tmp_path).stats()["inserted"] == 31


def test_background_write_error_is_raised_at_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = kept_replay(made())
    kept.begin(tmp_path / "file")
    while kept.saving:
        time.sleep(0.01)
    with pytest.raises(ReplayError, match="could not be written"):
        kept.begin(tmp_path / "file")


def test_last_snapshot_is_written_after_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "last").write_text("in the way")
    kept = kept_replay(made())
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
    kept = kept_replay(made())
    with pytest.raises(MemoryError, match="no room for a piece"):
        kept.finish(tmp_path, lambda: None)


def test_resumed_replay_continues_with_the_stored_steps(tmp_path: Path) -> None:
    replay = made()
    keep(replay, tmp_path)
    again = made(0, seed=7)
    assert kept_replay(again).resume(tmp_path) == "the replay continues with 30 stored steps"
    np.testing.assert_array_equal(again.sample(20).action, replay.sample(20).action)


def test_replay_without_a_snapshot_begins_empty_with_a_note(tmp_path: Path) -> None:
    replay = made()
    keep(replay, tmp_path / "last")
    empty = made(0)
    text = kept_replay(empty, mode=False).resume(tmp_path / "last")
    assert text.startswith("the replay begins empty, as replay.checkpoint is false")
    text = kept_replay(empty).resume(tmp_path / "nowhere")
    assert text.startswith("the replay begins empty: ")
    assert len(empty) == 0
    kept_replay(replay, mode=False).finish(tmp_path / "last", lambda: None)
    assert not (tmp_path / "last").exists(), "it would be older than its checkpoint"


def test_snapshot_with_another_slot_layout_is_refused(tmp_path: Path) -> None:
    keep(made(), tmp_path)
    with pytest.raises(
        UserError, match=r"another replay: .*; or begin .* replay\.checkpoint=false"
    ):
        kept_replay(made(0, unroll=5)).resume(tmp_path)


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
    keep(replay, tmp_path)
    again, other = limited()
    kept_replay(again).resume(tmp_path)
    assert [other.may_sample(24), other.may_sample(25)] == [True, False]
    assert [other.may_insert(8), other.may_insert(9)] == [True, False]
    assert other.counts.stored == 20
    again.stats()  # counts nothing twice
    assert other.counts.stored == 20
    # With another ratio only what comes from now on counts by it: 3 inserts are worth 3 samples.
    third, new = limited(ratio=1.0)
    kept_replay(third).resume(tmp_path)
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
    unwanted = kept_replay(replay, mode=False)
    unwanted.begin(folder)
    assert (folder / "notes.txt").exists()
    keep(replay, folder)
    unwanted.begin(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    keep(replay, folder)
    (tmp_path / "linked").symlink_to(folder)
    unwanted.begin(tmp_path / "linked")
    assert Replay.load(folder).stats()["inserted"] == 30
    unwanted.begin(folder)
    assert not folder.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def large() -> Replay:
    """A replay of about 0.7 MiB, half of which is filled."""
    replay = made(0, capacity=10_000, unroll=100)
    for i in range(5_000):
        replay.add(obs=[i, i], next_obs=[i, i], action=i, reward=0, terminated=0, truncated=0)
    return replay


def test_by_default_a_resume_keeps_the_replay() -> None:
    assert resolve("cartpole_dqn").replay.checkpoint == "auto"
    assert resolve("cartpole_dqn", ["replay.checkpoint=false"]).replay.checkpoint is False
    assert resolve("cartpole_dqn", ["replay.checkpoint=true"]).replay.checkpoint is True


def test_the_run_says_at_its_start_what_is_kept_on_which_room(tmp_path: Path) -> None:
    text = kept_replay(made(), "auto").plan(tmp_path / "last" / "replay" / "0")
    assert text.startswith("checkpoints keep the replay, with up to 0 MiB, and twice that while")
    assert text.endswith("GiB are free (replay.checkpoint)")
    assert kept_replay(made(), mode=False).plan(tmp_path) == ""


def test_a_disk_without_room_for_three_buffers_keeps_no_replay(small_disk: Path) -> None:
    folder = small_disk / "last" / "replay" / "0"
    with large() as replay:
        keep(replay, folder)
        kept = kept_replay(replay, "auto")
        assert kept.plan(folder).startswith("checkpoints do not keep the replay: three times its ")
        kept.begin(folder)
        kept.finish(folder, lambda: None)
        assert not kept.saving
        assert not folder.exists(), "it would be older than its checkpoint"


def test_a_disk_that_fills_up_during_the_run_keeps_the_snapshot_of_before(
    small_disk: Path, notes: list[str]
) -> None:
    folder = small_disk / "last" / "replay" / "0"
    replay = made(0, capacity=3_000, unroll=100)
    kept = kept_replay(replay, "auto")
    assert kept.plan(folder).startswith("checkpoints keep the replay")
    for i in range(1_000):
        replay.add(obs=[i, i], next_obs=[i, i], action=i, reward=0, terminated=0, truncated=0)
    kept.finish(folder, lambda: None)
    status = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - (64 << 10)))

    for i in range(1_000):
        replay.add(obs=[i, i], next_obs=[i, i], action=i, reward=0, terminated=0, truncated=0)
    kept.finish(folder, lambda: None)
    assert "of the 0 MiB free at" in notes[-1]
    assert notes[-1].endswith("the one of before stays")
    assert Replay.load(folder).stats()["inserted"] == 1_000


def test_a_snapshot_that_cannot_be_written_does_not_end_an_auto_run(
    tmp_path: Path, notes: list[str]
) -> None:
    with large() as replay:
        kept = kept_replay(replay, "auto")
        kept.finish(tmp_path, lambda: None)
        with full_disk(1000):
            kept.finish(tmp_path, lambda: None)
        assert "could not be written" in notes[-1]
        assert Replay.load(tmp_path).stats()["inserted"] == 5_000


def test_the_last_snapshot_is_given_up_when_the_grace_ends(
    tmp_path: Path, slow: threading.Event, notes: list[str]
) -> None:
    slow.set()
    with large() as replay:
        kept = kept_replay(replay, "auto", grace_s=1.0)
        kept.finish(tmp_path, lambda: None)
        files = sorted(tmp_path.rglob("*"))
        slow.clear()
        threading.Timer(0.6, slow.set).start()  # the disk hangs for longer than 0.3 of a second

        began_s = time.monotonic()
        kept.finish(tmp_path, lambda: None)
        assert time.monotonic() - began_s < 5.0
        assert "must be written" in notes[-1] or "was not written within 300 ms" in notes[-1]
        assert "continues with that of an earlier checkpoint" in notes[-1]
        assert sorted(tmp_path.rglob("*")) == files, "nothing of it is left"


def test_snapshots_take_a_small_share_of_the_time(tmp_path: Path, slow: threading.Event) -> None:
    replay = made()
    kept = kept_replay(replay, "auto")
    kept.begin(tmp_path)
    time.sleep(0.2)
    slow.set()
    while kept.saving:
        time.sleep(0.01)
    kept.begin(tmp_path)
    assert not kept.saving, "the next one may begin after fifty times 0.2 s"


def test_auto_begins_empty_where_the_snapshot_is_of_another_layout(tmp_path: Path) -> None:
    keep(made(), tmp_path)
    other = made(0, unroll=5)
    text = kept_replay(other, "auto").resume(tmp_path)
    assert text.startswith("the replay begins empty, and is filled first: ")
    other.add(obs=[0, 0], next_obs=[1, 1], action=0, reward=0, terminated=0, truncated=0)
    assert len(other) == 1


def test_auto_does_not_continue_with_a_damaged_snapshot(tmp_path: Path) -> None:
    keep(made(), tmp_path)
    file = max(tmp_path.glob("*/*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged.*; or begin .* replay\.checkpoint=false"):
        kept_replay(made(0), "auto").resume(tmp_path)
