"""`penstock runs`: the table of runs below a folder."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.monitor import runs
from penstock.monitor.curves import load_run
from penstock.monitor.run_folder.checkpoints import best

CONFIG = "env:\n  id: Maze-v0\nalgo:\n  name: dqn\n"


def make_run(folder: Path, exit_reason: str | None = None, **last: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    lines = [{"env_steps": 5, "time_s": 1.0}, {"env_steps": 90, "time_s": 75.0, **last}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"env_st')
    if exit_reason is not None:
        (folder / "summary.json").write_text(json.dumps({"exit_reason": exit_reason}))
    return folder


def living(folder: Path, path: str, host: str | None = None) -> None:
    about = {"pid": 1, "host": host or socket.gethostname(), "socket": path}
    (folder / "supervisor.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("return", "ended"),
        ("minutes", "ended"),
        ("callback", "ended"),
        ("interrupted", "stopped"),
        ("fault", "died"),
        ("user_error", "died"),
        (None, "died"),
    ],
)
def test_state_of_a_run_follows_its_files(tmp_path: Path, reason: str | None, state: str) -> None:
    assert runs.row(make_run(tmp_path / "run", reason))["state"] == state


def test_run_is_running_while_its_supervisor_listens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "interrupted")  # resumed since
    path = f"{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        living(folder, path)
        assert runs.row(folder)["state"] == "running"
    assert runs.row(folder)["state"] == "died"
    living(folder, path, host="elsewhere")
    assert runs.row(folder)["state"] == "running"


def test_row_of_an_ended_run_follows_its_summary(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", episode_return_mean=17.5)
    summary = {"exit_reason": "return", "episode_return_mean": 18.0, "env_steps": 95}
    (folder / "summary.json").write_text(json.dumps(summary))
    ended = runs.row(folder)
    assert (ended["return_last"], ended["env_steps"], ended["seconds"]) == (18.0, 95, 75.0)
    living(folder, "nowhere", host="elsewhere")  # resumed since
    assert (runs.row(folder)["return_last"], runs.row(folder)["env_steps"]) == (17.5, 90)


def test_row_shows_the_progress_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "return", episode_return_mean=17.5)
    layout = ParamLayout((("w", (1,)),))
    best = Checkpoint(layout, np.zeros(1, np.float32), {}, {"best_return": 19.25})
    checkpoint_format.save(folder / "checkpoints" / "best", best)
    found = runs.row(folder)
    assert found.pop("started") == pytest.approx(os.stat(folder / "config.yaml").st_mtime)
    assert found == {
        "run_dir": str(folder),
        "env": "Maze-v0",
        "algorithm": "dqn",
        "state": "ended",
        "env_steps": 90,
        "return_last": 17.5,
        "return_best": 19.25,
        "seconds": 75.0,
    }


def test_evaluated_return_takes_precedence_in_a_row(tmp_path: Path) -> None:
    assert runs.row(make_run(tmp_path / "run", eval_return_best=12.0))["return_best"] == 12.0


def test_runs_and_groups_are_listed_oldest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, name in ((10, "group/seed-1"), (30, "old"), (20, "group/seed-0")):
        config = make_run(tmp_path / name) / "config.yaml"
        os.utime(config, (1_700_000_000 - age, 1_700_000_000 - age))
    found = runs.find(str(tmp_path))
    names = [Path(row["run_dir"]).name for row in found]
    assert names == ["old", "seed-0", "seed-1"]
    runs.show(found)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["run", "environment", "algorithm", "state"]
    assert lines[0].split()[1:8] == ["Maze-v0", "dqn", "died", "90", "-", "-", "1:15"]


def test_run_that_has_not_begun_is_listed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    [found] = runs.find(str(tmp_path))
    assert (found["state"], found["env_steps"], found["seconds"]) == ("died", None, None)


def test_unreadable_config_affects_only_its_row(tmp_path: Path) -> None:
    make_run(tmp_path / "good", "return")
    bad = make_run(tmp_path / "bad", "return") / "config.yaml"
    for text in (b"env: [", b"env: {id: 3}", b"env: {id: \xff}", b"3"):
        bad.write_bytes(text)
        found = runs.find(str(tmp_path))
        games = {Path(row["run_dir"]).name: row["env"] for row in found}
        assert games == {"good": "Maze-v0", "bad": None}
        runs.show(found)


@pytest.mark.parametrize(
    ("text", "state"),
    [("[]", "ended"), ('{"pid": 3}', "died"), ('{"host": 3, "socket": 4}', "running")],
)
def test_malformed_supervisor_file_is_ignored(tmp_path: Path, text: str, state: str) -> None:
    (make_run(tmp_path / "run", "return") / "supervisor.json").write_text(text)
    assert runs.row(tmp_path / "run")["state"] == state


@pytest.mark.parametrize(
    "name", ["config.yaml", "summary.json", "supervisor.json", "metrics.jsonl", "evaluations.jsonl"]
)
@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.timeout(20)
def test_a_fifo_or_a_device_among_the_files_of_a_run_is_not_read(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = make_run(tmp_path / "run", "return") / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert len(runs.find(str(tmp_path))) == 1
    load_run(path.parent)


def test_a_fifo_in_place_of_the_best_checkpoint_is_not_read(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", "return") / "checkpoints/best/checkpoint.safetensors"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert best(tmp_path / "run", follow_links=True) is None


def test_control_characters_in_run_names_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run\x1b[2J\udcff", "return")
    (folder / "config.yaml").write_text("env:\n  id: \x1b]0;title\a\n")
    runs.show(runs.find(str(tmp_path)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"run\x1b[2J\udcff" in shown
    assert r"\x1b]0;title\x07" in shown


def test_broken_line_does_not_hide_earlier_lines(tmp_path: Path) -> None:
    metrics = make_run(tmp_path / "run", "return") / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b"\n\xff\n[3]\n")
    assert runs.row(tmp_path / "run")["env_steps"] == 90


def test_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no folder .*; give a folder that contains runs"):
        runs.find(str(tmp_path / "runs"))
