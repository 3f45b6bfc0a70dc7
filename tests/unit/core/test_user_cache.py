"""The user's cache: its folder, lock and files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core import user_cache
from penstock.core.user_cache import (
    cache_folder,
    locked,
    read_cached,
    write_cached,
)


def test_the_folder_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "penstock"


def test_cached_value_is_read_back_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked(folder) as is_locked:
        assert is_locked
        write_cached(folder / "a.json", {"a": [1, 2.5]})
    assert read_cached(folder / "a.json") == {"a": [1, 2.5]}
    assert read_cached(folder / "absent.json") is None
    assert (folder / "a.json").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {"a.json", "lock"}


def test_a_folder_that_cannot_be_made_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with locked(tmp_path / "file" / "forms") as is_locked:
        assert not is_locked
    write_cached(tmp_path / "file" / "a.json", 1)
    with locked(None) as is_locked:
        assert not is_locked


def test_cache_lock_is_held_by_one_process_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "WAIT_S", 0.05)
    descriptors = len(os.listdir("/proc/self/fd"))
    with locked(tmp_path) as first, locked(tmp_path) as second:  # a lock is of a descriptor
        assert (first, second) == (True, False)
    with locked(tmp_path) as third:
        assert third
    assert len(os.listdir("/proc/self/fd")) == descriptors
