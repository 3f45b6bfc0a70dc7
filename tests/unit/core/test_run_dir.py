"""Folders of a run, and the locks that tell who lives."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core import run_dir
from penstock.core.run_dir import (
    MARKER,
    RUNTIME_NAME,
    RUNTIME_PREFIX,
    check_not_replaced,
    default_run_dir,
    run_folder,
    runtime_folder,
    sweep,
)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place for temporary files: a short path, which pytest's own need not have."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


def test_a_run_folder_is_made_with_its_logs(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first"
    with run_folder(path, "no"):
        assert [p.name for p in path.iterdir()] == ["logs"]
        modes = [p.stat().st_mode & 0o777 for p in (path, path / "logs")]
    assert modes == [0o700, 0o700]


def test_the_mode_of_a_users_folder_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with run_folder(tmp_path, "no"):
        pass
    assert tmp_path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("files", "holds_a_run"),
    [
        ({"config.yaml": "a file of somebody else"}, True),
        ({"metrics.jsonl": '{"time_s": 1}'}, True),
        ({"config.yaml": "env:", "metrics.jsonl": "", "checkpoints/last/meta.json": "{}"}, True),
        ({"checkpoints/best/meta.json": "{}"}, True),
        ({"config.yaml": "env:", "metrics.jsonl": "", "summary.json": "{}"}, False),
        ({"notes.txt": "nothing of ours"}, False),
    ],
)
def test_what_a_run_has_written_is_never_overwritten(
    tmp_path: Path, files: dict[str, str], holds_a_run: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if holds_a_run:
        with pytest.raises(UserError, match="already holds a run"), run_folder(tmp_path, "no"):
            pass
    else:
        with run_folder(tmp_path, "no"):
            pass
    with run_folder(tmp_path, "auto"):
        pass


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_users_file_is_not_taken_for_that_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a file of somebody else")
    with pytest.raises(UserError, match=f"{name} is not of a run"):
        check_not_replaced(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    check_not_replaced(tmp_path)


def test_must_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="has no checkpoint to resume from"),
        run_folder(tmp_path, "must"),
    ):
        pass
    last = tmp_path / "checkpoints" / "last"
    last.mkdir(parents=True)
    (last / ".checkpoint.safetensors.tmp").touch()  # a crash within the first save
    with pytest.raises(UserError, match="has no checkpoint"), run_folder(tmp_path, "must"):
        pass
    (last / "checkpoint.safetensors").touch()
    with run_folder(tmp_path, "must"):
        pass


def test_one_run_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    with run_folder(tmp_path, "no") as lock:
        held = os.dup(lock)  # as a learner that outlives its supervisor holds it
        with pytest.raises(UserError, match="in use by a run"), run_folder(tmp_path, "no"):
            pass
    with pytest.raises(UserError, match="in use by a run"), run_folder(tmp_path, "no"):
        pass
    os.close(held)
    with run_folder(tmp_path, "no"):
        pass


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be made: Not a directory"),
        run_folder(tmp_path / "file" / "run", "no"),
    ):
        pass


def test_default_run_dirs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20300102-030405")
    first = default_run_dir("pong")
    assert first == Path("runs/pong-20300102-030405")
    first.mkdir(parents=True)
    assert default_run_dir("pong") == Path("runs/pong-20300102-030405-2")


def test_a_runtime_folder_is_ours_alone_and_goes_away(temporary: Path) -> None:
    with runtime_folder() as path:
        assert path.parent == temporary
        assert RUNTIME_NAME.fullmatch(path.name)
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
    assert list(temporary.iterdir()) == []


def a_stale_folder(place: Path) -> Path:
    """A runtime folder whose supervisor has ended without removing it."""
    path, lock = run_dir._make([place])
    (path / "learner-0.sock").touch()
    os.close(lock)
    return path


def test_runtime_folders_without_a_holder_are_swept(temporary: Path) -> None:
    stale = a_stale_folder(temporary)
    with runtime_folder() as living:
        assert not stale.exists()
        sweep(temporary)
        assert living.is_dir()


def test_a_sweep_that_was_cut_short_is_resumed(temporary: Path) -> None:
    stale = a_stale_folder(temporary)
    (stale / "learner-0.sock").unlink()
    sweep(temporary)
    assert not stale.exists()


def without_a_marker(stale: Path) -> Path:
    (stale / MARKER).unlink()
    return stale


def with_the_marker_of_another(stale: Path) -> Path:
    copy = stale.with_name(RUNTIME_PREFIX + "0" * 20)
    shutil.copytree(stale, copy)
    return copy


def renamed(stale: Path) -> Path:
    return stale.rename(stale.with_name(RUNTIME_PREFIX + "1" * 20))


def with_another_name(stale: Path) -> Path:
    return stale.rename(stale.with_name("penstock-foo"))


def of_another_mode(stale: Path) -> Path:
    stale.chmod(0o755)
    return stale


def with_a_folder_in_it(stale: Path) -> Path:
    (stale / "data").mkdir()
    (stale / "data" / "set").write_text("mine")
    return stale


def with_a_marker_elsewhere(stale: Path) -> Path:
    (stale / MARKER).rename(stale.parent / "marker")
    (stale / MARKER).symlink_to(stale.parent / "marker")
    return stale


@pytest.mark.parametrize(
    "of_the_user",
    [
        without_a_marker,
        with_the_marker_of_another,
        renamed,
        with_another_name,
        of_another_mode,
        with_a_folder_in_it,
        with_a_marker_elsewhere,
    ],
)
def test_a_folder_that_may_be_the_users_is_not_swept(
    temporary: Path, of_the_user: Callable[[Path], Path]
) -> None:
    kept = of_the_user(a_stale_folder(temporary))
    sweep(temporary)
    assert kept.is_dir()
    assert of_the_user is not with_a_folder_in_it or (kept / "data" / "set").is_file()


def test_checkouts_and_links_named_like_ours_are_not_swept(temporary: Path) -> None:
    for name in ("penstock-foo", "penstock-run-foo", "penstock-replay", "elsewhere"):
        (temporary / name).mkdir(mode=0o700)
        (temporary / name / "README.md").write_text("mine")
    stale = a_stale_folder(temporary)
    link = temporary / (RUNTIME_PREFIX + "2" * 20)
    link.symlink_to(temporary / "elsewhere")
    to_stale = temporary / (RUNTIME_PREFIX + "3" * 20)
    to_stale.symlink_to(stale)
    before = {path for path in temporary.rglob("*") if stale not in (path, *path.parents)}
    with runtime_folder():
        pass
    assert {*temporary.rglob("*")} == before


def test_a_runtime_folder_that_was_replaced_is_left_alone(temporary: Path) -> None:
    with runtime_folder() as path:
        path.rename(temporary / "moved")
        path.mkdir()
        (path / "mine").touch()
    assert (path / "mine").is_file()


def test_a_long_temporary_path_gives_way_to_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with runtime_folder() as path:
        assert path.parent == Path("/tmp")
    assert list(long.iterdir()) == []


def test_a_file_system_without_locks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(UserError, match=r"cannot be locked: No locks available; set run\.dir"),
        run_folder(tmp_path / "run", "no"),
    ):
        pass
