"""A full disk costs checkpoints, but neither the run nor the cause of its end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.learner.checkpoints import checkpoint_format
from train_command import SMALL, Penstock, assert_balanced, updates

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def saved_steps(run_dir: Path) -> int:
    last = run_dir / "checkpoints" / "last"
    if not checkpoint_format.exists(last):
        return 0
    return int(checkpoint_format.load(last).meta["progress"]["learner_steps"])


def test_run_survives_a_full_disk_and_saves_once_there_is_space(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock(
        *("train", "cartpole", *SMALL, "run.dir=run", "checkpoint.every_steps=20", "--json")
    )
    folder = tmp_path / "run"
    run.wait_until(lambda: saved_steps(folder))
    learner, (_, most) = run.pid_of("learner-0"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(learner, resource.RLIMIT_FSIZE, (1000, most))  # no file of it may be larger
    saved = saved_steps(folder)
    run.wait_until(lambda: updates(folder) > saved + 100)
    kept = saved_steps(folder)  # whole; a save may have been under way
    run.wait_until(lambda: updates(folder) > kept + 100)
    assert saved_steps(folder) == kept
    resource.prlimit(learner, resource.RLIMIT_FSIZE, (most, most))
    run.wait_until(lambda: saved_steps(folder) > kept)
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    assert_balanced(answer)
    assert saved_steps(folder) == answer["learner_steps"]
    assert "this checkpoint could not be saved, and the run continues: checkpoint" in err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk can be mounted by root only")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a disk."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            return filler


def test_cause_of_the_end_is_reported_when_the_last_checkpoint_does_not_fit(
    penstock: Penstock, disk: Path
) -> None:
    folder = disk / "run"
    run = penstock("train", "cartpole", *SMALL, f"run.dir={folder}", "--json")
    run.wait_until(lambda: updates(folder) > 20)
    fill(disk)
    time.sleep(1.0)  # metrics and events do not fit either
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code in (1, 2), err
    assert "could not be written (No space left on device)" in answer["error"]
    assert "could not be written (No space left on device)" in err
    assert_balanced(answer)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["error"] == answer["error"]
    assert summary["accounting"] == answer["accounting"]


def test_events_wait_for_room_on_the_disk(penstock: Penstock, disk: Path) -> None:
    folder = disk / "run"
    run = penstock("train", "cartpole", *SMALL, f"run.dir={folder}", "--json")
    run.wait_until(lambda: updates(folder) > 20)
    filler = fill(disk)
    os.kill(run.pid_of("actor-0"), signal.SIGKILL)
    time.sleep(1.5)
    filler.unlink()
    run.wait_until(lambda: "was killed by SIGKILL" in (folder / "logs/events.jsonl").read_text())
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    assert_balanced(answer)
    lines = [json.loads(line) for line in (folder / "logs/events.jsonl").read_text().splitlines()]
    died = next(line for line in lines if line["kind"] == "exit")
    assert (died["role"], died["data"]["signal"]) == ("actor-0", "SIGKILL")
    assert "cannot be written: No space left on device" in str(lines)
