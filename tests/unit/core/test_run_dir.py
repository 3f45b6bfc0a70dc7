"""Folders of a run, and the locks that show whether a run is alive."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core.run_dir import (
    check_not_replaced,
    default_run_dir,
    run_folder,
)


def test_run_folder_is_created_with_its_logs(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first"
    with run_folder(path, "no"):
        assert [p.name for p in path.iterdir()] == ["logs"]
        modes = [p.stat().st_mode & 0o777 for p in (path, path / "logs")]
    assert modes == [0o700, 0o700]


def test_mode_of_a_users_folder_is_unchanged(tmp_path: Path) -> None:
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
def test_folder_with_files_of_a_run_is_refused_for_a_new_one(
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


def test_folder_in_use_by_a_run_is_refused(tmp_path: Path) -> None:
    with run_folder(tmp_path, "no") as lock:
        held = os.dup(lock)  # as a learner that outlives its supervisor holds it
        with pytest.raises(UserError, match="in use by a run"), run_folder(tmp_path, "no"):
            pass
    with pytest.raises(UserError, match="in use by a run"), run_folder(tmp_path, "no"):
        pass
    os.close(held)
    with run_folder(tmp_path, "no"):
        pass


def test_uncreatable_run_folder_is_a_user_error(tmp_path: Path) -> None:
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


def test_file_system_without_locks_is_refused_in_one_sentence(
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
