"""Runs to watch: long files of metrics, and living runs of many processes on many hosts.

The lines are those of a real run, with counters that continue and figures that vary. A living run
has a real socket of a supervisor, which reports processes that do not exist.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.configs.load import CONFIG_FILE
from penstock.core.interfaces import Handle
from penstock.core.interfaces.engine import RoleStatus, RoleUsage, ThreadUsage
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor.run_folder.record import METRICS, SUMMARY

Line = dict[str, Any]

STEPS = 100_000  # between two lines
TURN_S = 0.02
THREADS = {"learner": ("main", "prefetch", "reduce"), "actor": ("main",)}
PARTS = {"learner": ("compute", "wait_data", "publish"), "actor": ("step", "infer", "wait")}


def train(folder: Path, seconds: float = 6.0) -> Path:
    """Train CartPole for a moment; returns the folder of the run."""
    options = [f"run.dir={folder}", f"stop.minutes={seconds / 60}", "run.interval_s=0.25"]
    subprocess.run(
        [sys.executable, "-m", "penstock", "train", "cartpole", "stop.return=null", *options],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return folder


def lines_like(real: Path, seed: int = 0) -> Iterator[Line]:
    """Lines of metrics without end, one a second, made of those of the run ``real``."""
    found = [json.loads(line) for line in (real / METRICS).read_text().splitlines()]
    found = [line for line in found if line["learner_steps"] > 0][1:-1]
    rng = random.Random(seed)
    number = 0
    while True:
        for line in found:
            number += 1
            steps = STEPS * number
            figures = {
                name: value * rng.uniform(0.8, 1.2) if isinstance(value, float) else value
                for name, value in line.items()
            }
            yield figures | {
                "time_s": float(number),
                "interval_s": 1.0,
                "env_steps": steps,
                "env_frames": steps,
                "trained_steps": steps - STEPS // 10,
                "learner_steps": 50 * number,
                "episode_return_mean": 500.0 * number / (number + 5000) + rng.gauss(0.0, 20.0),
            }


def with_processes(line: Line, names: list[str]) -> Line:
    """A line with the ledger and the processor time of each process."""
    ledgers = {name: dict.fromkeys(PARTS[name.partition("-")[0]], 0.3) for name in names}
    return line | {"ledgers": ledgers, "cpu": dict.fromkeys(names, 0.9)}


def long_runs(folder: Path, real: Path, runs: int, lines: int) -> list[Path]:
    """Ended runs of so many lines each. The lines are one file on the disk, with a link from each
    run, as 50 runs of 100,000 lines are 16 GB."""
    made: list[Path] = []
    for number in range(runs):
        run = folder / f"run-{number:02}"
        (run / "logs").mkdir(parents=True)
        for name in (CONFIG_FILE, SUMMARY, "versions.json", "logs/events.jsonl"):
            shutil.copy(real / name, run / name)
        if not made:
            with (run / METRICS).open("w") as file:
                for _, line in zip(range(lines), lines_like(real), strict=False):
                    file.write(json.dumps(line) + "\n")
        else:
            os.link(made[0] / METRICS, run / METRICS)
        made.append(run)
    return made


@dataclass
class SimulatedProcess:
    """What the status server asks of the handle of a role: that of a process that does not
    exist."""

    spec: RoleSpec
    host: str
    pid: int
    began_s: float
    silent: bool = False
    incarnation: int = 0

    def status(self) -> RoleStatus:
        now_s = time.monotonic()
        alive_s = self.began_s if self.silent else now_s
        return RoleStatus(True, self.incarnation, "play", self.began_s, alive_s, 0, 0, 0, 0, 0, 0)

    def usage(self) -> RoleUsage:
        age_s = time.monotonic() - self.began_s
        part = PARTS[self.spec.role][0]
        seconds = {part: 0.9 * age_s}
        threads = tuple(ThreadUsage(n, part, 0.01, seconds) for n in THREADS[self.spec.role])
        at_ns = time.perf_counter_ns()
        return RoleUsage(self.pid, "running", 0.9 * age_s, age_s + 600.0, threads, 0.0, at_ns)


def simulated_processes(count: int, hosts: int) -> dict[str, SimulatedProcess]:
    """Processes by name: a learner, and actors on ``hosts`` hosts. One is silent, one was
    restarted twice."""
    here = socket.gethostname()
    found: dict[str, SimulatedProcess] = {}
    for number in range(count):
        role, stage = ("actor", Stage.ACTORS) if number else ("learner", Stage.LEARNER)
        spec = RoleSpec(role, max(0, number - 1), "nothing:main", stage)
        host = f"node-{number % hosts:02}" if number % hosts else here
        found[spec.name] = SimulatedProcess(spec, host, 1 << 24 | number, time.monotonic() - 600.0)
    names = [*found]
    found[names[len(names) // 3]].silent = True
    found[names[len(names) // 2]].incarnation = 2
    return found


class LivingRun:
    """A run in progress, without processes: `feed` appends lines of metrics, as a thread does once
    a second with those of ``source``. It serves the status of ``processes``, of which ``gone`` do
    not run."""

    def __init__(
        self,
        folder: Path,
        real: Path,
        processes: dict[str, SimulatedProcess],
        source: Iterator[Line] | None = None,
    ) -> None:
        self.folder = folder
        self.processes = processes
        self.gone: set[str] = set()
        self._source = source
        (folder / "logs").mkdir(parents=True)
        shutil.copy(real / CONFIG_FILE, folder / CONFIG_FILE)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def feed(self, lines: list[Line]) -> None:
        """Append lines of metrics."""
        with (self.folder / METRICS).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def __enter__(self) -> LivingRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="status-") as runtime,
            SupervisorServer(self.folder, Path(runtime)) as server,
        ):
            due_s = time.monotonic() + 1.0
            while not self._ended.wait(TURN_S):
                if self._source is not None and time.monotonic() > due_s:
                    due_s += 1.0
                    self.feed([next(self._source)])
                running = {n: p for n, p in self.processes.items() if n not in self.gone}
                server.serve_clients(self.processes, cast(dict[str, Handle], running))
