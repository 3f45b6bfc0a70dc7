"""`penstock` as a user runs it, and what its run folder says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

SMALL = (
    *("actors.envs=8", "actors.unroll=8", "run.interval_s=0.1", "stop.return=null"),
    "eval.every_steps=null",  # no evaluator, unless a test wants one
)
WAIT_S = 100.0  # of a machine that does much else
STOP_S = 20.0  # for a command to end when it is asked to, and to remove its runtime folder


class Command:
    """A running ``penstock`` command in the folder of the test, or another Python module."""

    started: ClassVar[list[Command]] = []
    """Those of the present test; `stop_commands` takes them away."""

    def __init__(self, folder: Path, *arguments: str, module: str = "penstock") -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(self)

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Waits for the end; returns exit code, the object on the last stdout line, and stderr."""
        out, err = self.process.communicate(timeout=WAIT_S)
        lines = out.splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}, err

    def stop(self) -> None:
        """Ends the command, unless it has ended, and waits for it."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def wait_until(self, condition: Callable[[], object], wait_s: float = WAIT_S) -> None:
        ends_s = time.monotonic() + wait_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.05)

    def pid_of(self, name: str) -> int:
        """Returns the pid of a role, or 0 while it has no process."""
        return pid_of(self.process.pid, name)


def stop_commands() -> None:
    """Stops every command of a test: one that fails leaves them running."""
    while Command.started:
        Command.started.pop().stop()


def address_of(watch: Command) -> str:
    """Returns the address that `penstock watch --json` prints once the page is ready."""
    assert watch.process.stdout is not None
    line = watch.process.stdout.readline()
    assert line, watch.process.communicate()
    return str(json.loads(line)["address"])


def pid_of(supervisor: int, name: str) -> int:
    """Returns the pid of a role, by the last words of its command; 0 while it has no process."""
    for process in psutil.Process(supervisor).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:  # it has ended meanwhile
            continue
        if "penstock.launch.role" in words and "-c" not in words and name in words:
            return int(process.pid)
    return 0


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file that may be growing; none while there is no file."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics.jsonl so far."""
    return json_lines(run_dir / "metrics.jsonl")


def updates(run_dir: Path) -> int:
    """Returns the number of optimizer steps so far."""
    return max((m["learner_steps"] for m in metrics(run_dir)), default=0)


def last(run_dir: Path) -> dict[str, Any]:
    """Returns the newest line of a run's metrics."""
    return metrics(run_dir)[-1]


def trained(run_dir: Path) -> bool:
    """Returns whether the run has trained while two actors were alive."""
    return any(m["learner_steps"] > 0 and m["actors_alive"] == 2 for m in metrics(run_dir))


def run_command(folder: Path, *words: str) -> dict[str, Any]:
    """Runs a command in a folder to its end; returns what it prints with ``--json``."""
    command = [sys.executable, "-m", "penstock", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def train(folder: Path, target: str, *options: str) -> dict[str, Any]:
    """Trains in a folder to the end of the run; returns its summary."""
    summary = run_command(folder, "train", target, "run.dir=run", *options)
    assert_balanced(summary)
    return summary


def assert_balanced(summary: dict[str, Any]) -> None:
    """Asserts that every produced step is trained, dropped, lost or in flight."""
    a = summary["accounting"]
    went = a["trained"] + sum(a["dropped"].values()) + sum(a["lost"].values()) + a["in_flight"]
    assert a["produced"] == went
    assert a["trained"] > 0


Penstock = Callable[..., Command]
