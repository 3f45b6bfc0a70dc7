"""Folders of a run, and the locks that tell who lives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.launch.folders import default_run_dir, run_folder, runtime_folder, sweep


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


def test_must_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="has no checkpoint to resume from"),
        run_folder(tmp_path, "must"),
    ):
        pass
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
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
        assert path.name.startswith("penstock-")
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
    assert list(temporary.iterdir()) == []


def test_runtime_folders_without_a_holder_are_swept(temporary: Path) -> None:
    stale = temporary / "penstock-stale"
    (stale / "sub").mkdir(parents=True)
    with runtime_folder() as living:
        assert not stale.exists()
        sweep(temporary)
        assert living.is_dir()


def test_a_long_temporary_path_gives_way_to_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with runtime_folder() as path:
        assert path.parent == Path("/tmp")
    assert list(long.iterdir()) == []
