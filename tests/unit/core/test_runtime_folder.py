"""Private folders for sockets: mode, owner, and cleanup after a killed owner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.core import runtime_folder
from penstock.core.runtime_folder import NAME, PREFIX, RuntimeFolder, sweep


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place for temporary files: a short path, which pytest's own need not have."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


def test_runtime_folder_is_private_and_removed_at_the_end(temporary: Path) -> None:
    with RuntimeFolder() as path:
        assert path.parent == temporary
        assert NAME.fullmatch(path.name)
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
    assert list(temporary.iterdir()) == []


def a_stale_folder(place: Path) -> Path:
    """A runtime folder whose supervisor has ended without removing it."""
    path, lock = runtime_folder._make([place])
    (path / "learner-0.sock").touch()
    os.close(lock)
    return path


def test_runtime_folders_without_a_holder_are_swept(temporary: Path) -> None:
    stale = a_stale_folder(temporary)
    with RuntimeFolder() as living:
        assert not stale.exists()
        sweep(temporary)
        assert living.is_dir()


def test_a_sweep_that_was_cut_short_is_resumed(temporary: Path) -> None:
    stale = a_stale_folder(temporary)
    (stale / "learner-0.sock").unlink()
    sweep(temporary)
    assert not stale.exists()


def with_another_name(stale: Path) -> Path:
    return stale.rename(stale.with_name("penstock-foo"))


def of_another_mode(stale: Path) -> Path:
    stale.chmod(0o755)
    return stale


def with_a_folder_in_it(stale: Path) -> Path:
    (stale / "data").mkdir()
    (stale / "data" / "set").write_text("mine")
    return stale


@pytest.mark.parametrize(
    "of_the_user",
    [
        with_another_name,
        of_another_mode,
        with_a_folder_in_it,
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
    link = temporary / (PREFIX + "2" * 20)
    link.symlink_to(temporary / "elsewhere")
    to_stale = temporary / (PREFIX + "3" * 20)
    to_stale.symlink_to(stale)
    before = {path for path in temporary.rglob("*") if stale not in (path, *path.parents)}
    with RuntimeFolder():
        pass
    assert {*temporary.rglob("*")} == before


def test_a_runtime_folder_that_was_replaced_is_left_alone(temporary: Path) -> None:
    with RuntimeFolder() as path:
        path.rename(temporary / "moved")
        path.mkdir()
        (path / "mine").touch()
    assert (path / "mine").is_file()


def test_too_long_temporary_path_is_replaced_by_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with RuntimeFolder() as path:
        assert path.parent == Path("/tmp")
    assert list(long.iterdir()) == []
