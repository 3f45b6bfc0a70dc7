"""Unusual environments and users' mistakes, as a command meets them: each works, or ends with one
sentence and its exit code, and leaves nothing behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from train_command import SMALL, Penstock, trained

pytestmark = [pytest.mark.system, pytest.mark.timeout(100)]

GAMES = """
import socket, subprocess, sys, threading, time
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Game(gymnasium.Env):
    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(3)
    metadata = None
    age = 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}
    def step(self, action):
        self.age += 1
        shown = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return shown, self.pay(), self.age == 9, False, {}
    def pay(self):
        return 1.0

class Port(Game):
    def __init__(self, index):
        self.server = socket.create_server(("127.0.0.1", 21004 + index))
    def close(self):
        self.server.close()

class Leaves(Game):
    def __init__(self):
        subprocess.Popen(["sh", "-c", "sh -c 'while :; do echo noise; sleep 0.05; done' &"])
        threading.Thread(target=time.sleep, args=(1000,)).start()

class PaysNone(Game):
    def pay(self):
        return None

class PaysArray(Game):
    def pay(self):
        return np.array([1.0])
"""
PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--level", type=int, default=3)
level = parser.parse_args().level
from games import Game
"""
RAISES = "raise RuntimeError('a module of the user, in place of another one')"
SHORT = (*SMALL, "actors.count=2", "stop.learner_steps=3", "run.dir=run")


class Case(NamedTuple):
    arguments: tuple[str, ...]
    code: int
    part: str = ""
    """Of what the command prints as JSON."""


CASES = {
    # The module `random` of this folder disturbs none of these.
    "ports": Case(("train", "games:Port", *SHORT), 0),
    "programs and threads": Case(
        ("check-env", "games:Leaves", "--steps", "50"), 0, '"problems": []'
    ),
    "no reward": Case(
        ("train", "games:PaysNone", *SHORT), 2, "a reward of nan, and rewards must lie"
    ),
    "a reward in an array": Case(
        ("train", "games:PaysArray", *SHORT), 2, "could not be read (setting an array"
    ),
    "arguments": Case(("check-env", "parses:Game", "--steps", "50"), 0, '"problems": []'),
    "a file": Case(("check-env", "games.py:Game", "--steps", "50"), 0, '"problems": []'),
    "a name of Python's": Case(
        ("check-env", "queue:make"), 2, "not queue.py of this folder; rename"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"games": GAMES, "parses": PARSES, "queue": RAISES, "random": RAISES}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", CASES)
def test_odd_environment_works_or_is_refused_in_one_sentence(penstock: Penstock, name: str) -> None:
    case = CASES[name]
    process = penstock(*case.arguments, "--json").process
    out, err = process.communicate(timeout=90)
    assert process.returncode == case.code, err
    assert case.part in out.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("closed", [True, False])
def test_closed_stdout_does_not_disturb_a_run(
    tmp_path: Path, nothing_left_behind: None, closed: bool
) -> None:
    command = [sys.executable, "-m", "penstock", "train", "games:Game", *SHORT]
    shell = (
        f"exec {' '.join(command)} >&-" if closed else f"({' '.join(command)}; echo $? >code) | :"
    )
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    code = done.returncode if closed else int((tmp_path / "code").read_text())
    assert (code, done.stderr) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists()


def test_removed_run_folder_ends_the_run_with_a_sentence(penstock: Penstock, folder: Path) -> None:
    command = penstock("train", "games:Game", *SMALL, "actors.count=2", "run.dir=run", "--json")
    command.wait_until(lambda: trained(folder / "run"))
    shutil.rmtree(folder / "run")
    code, summary, err = command.end()
    assert code == 2, err
    assert "was removed or replaced while its run went on" in summary["error"]
    assert "Traceback" not in err
