"""A refused attempt to train restores the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core.run_dir import run_folder
from penstock.launch.run_attempt import REPLACED, Attempt, missing_folders, undone_on_user_error


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def try_again(run: Path) -> None:
    """What a try writes that ends before its first step."""
    (run / "config.yaml").write_text("of the try")
    (run / "summary.json").write_text('{"exit_reason": "user_error"}')
    (run / "versions.json").write_text('{"starts": []}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 0}\n')


def a_run(folder: Path) -> Path:
    (folder / "checkpoints" / "last").mkdir(parents=True)
    (folder / "checkpoints" / "last" / "checkpoint.safetensors").write_text("weights")
    for name, text in (("config.yaml", "first"), ("summary.json", "{}"), ("metrics.jsonl", "{}\n")):
        (folder / name).write_text(text)
    (folder / "versions.json").write_text("{}")
    return folder


@pytest.mark.parametrize("how", ["undo", "restore_earlier_run"])
def test_refused_attempt_restores_the_files_of_the_run(tmp_path: Path, how: str) -> None:
    run = a_run(tmp_path / "run")
    before = contents(run)
    attempt = Attempt(run, missing_folders(run))
    try_again(run)
    getattr(attempt, how)()
    after = contents(run)
    assert after.pop("metrics.jsonl").startswith(before.pop("metrics.jsonl"))
    assert after == before
    assert {(run / name).stat().st_mode & 0o777 for name in REPLACED} == {0o600}


def test_refused_attempt_removes_its_new_folder_and_empty_parents(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "group" / "seed-0"
    (tmp_path / "runs").mkdir()

    def refused() -> None:
        with undone_on_user_error(run, missing_folders(run)):
            (run / "logs").mkdir(parents=True)
            try_again(run)
            raise UserError("no such game")

    with pytest.raises(UserError, match="no such game"):
        refused()
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs"]


def test_refused_attempt_keeps_a_parent_folder_with_other_content(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "seed-1"
    attempt = Attempt(run, missing_folders(run))
    run.mkdir(parents=True)
    (tmp_path / "runs" / "seed-0").mkdir()
    attempt.undo()
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs", tmp_path / "runs" / "seed-0"]


def test_refused_attempt_keeps_the_run_of_another_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    attempt = Attempt(run, missing_folders(run))
    for folder in (run, run / "rank-1"):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "learner-0.log").write_text("")
        try_again(folder)
    other = contents(run / "rank-1")
    attempt.undo()
    assert contents(run / "rank-1") == other
    assert [*run.iterdir()] == [run / "rank-1"]


def test_refused_attempt_keeps_files_of_the_user(tmp_path: Path) -> None:
    run = tmp_path / "run"
    attempt = Attempt(run, missing_folders(run))
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "actor-0.log").touch()
    try_again(run)
    (run / "checkpoints" / "last").mkdir(parents=True)
    (run / "checkpoints" / "last" / "checkpoint.safetensors").touch()
    mine = ["notes.txt", "data/set.npy", "logs/notes.log", "checkpoints/mine.pt"]
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    attempt.undo()
    assert contents(run) == dict.fromkeys(mine, "mine")
    assert not (run / "checkpoints" / "last").exists()


def test_refused_attempt_keeps_an_existing_folder_without_the_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    attempt = Attempt(tmp_path, missing_folders(tmp_path))
    a_run(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "checkpoints").rename(tmp_path / "checkpoints")
    try_again(tmp_path)
    attempt.undo()
    assert {"notes.txt"} == {path.name for path in tmp_path.iterdir()} - {"elsewhere"}


def test_fault_of_a_new_run_keeps_its_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    attempt = Attempt(run, missing_folders(run))
    with run_folder(run, "no"):
        try_again(run)
        attempt.restore_earlier_run()
    assert contents(run)["config.yaml"] == "of the try"
