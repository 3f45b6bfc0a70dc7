"""A run of `penstock serve-env` with the games of `pole_clients.py`, for benchmarks of games."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
START_S = 120.0
END_S = 60.0


class GamesRun:
    """The command, and the process of its games; both have ended when the context is left."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        """Start the command, with its run in ``folder``."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.folder = folder
        # With a token no connection is looked up among those of the system.
        os.environ["PENSTOCK_TOKEN"] = secrets.token_hex(16)
        self._log = open(folder.with_name("log.txt"), "w")  # noqa: SIM115
        self._command = subprocess.Popen(
            [
                *(sys.executable, "-m", "penstock", "serve-env", "CartPole-v1"),
                *("--bind", f"tcp://127.0.0.1:{self.port}", "--token", "env:PENSTOCK_TOKEN"),
                *(f"run.dir={folder}", "stop.return=null", "run.interval_s=1"),
                *(*overrides, "--json"),
            ],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._games: subprocess.Popen[str] | None = None
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()

    def start_games(self, games: int, period_s: float, killed_per_minute: float) -> None:
        """Start the games, which connect as soon as they can."""
        program = [sys.executable, str(HERE / "pole_clients.py"), str(self.port)]
        options = [str(games), str(period_s), str(killed_per_minute)]
        self._games = subprocess.Popen([*program, *options], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read_reports, daemon=True).start()

    def _read_reports(self) -> None:
        """Read what the games report."""
        assert self._games is not None
        assert self._games.stdout is not None
        for line in self._games.stdout:
            self._reports.put(json.loads(line))

    def next_report(self) -> dict[str, Any]:
        """Returns the next report of the games, or raises queue.Empty."""
        return self._reports.get(timeout=START_S)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl so far."""
        path = self.folder / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    @property
    def updates(self) -> int:
        """The optimizer steps of the last report."""
        lines = self.metrics()
        return int(lines[-1]["learner_steps"]) if lines else 0

    def wait_for_training(self, more: int = 1) -> float:
        """Wait until the learner has taken so many further steps; returns the seconds."""
        began_s = time.monotonic()
        target = self.updates + more
        while self.updates < target:
            assert self._command.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < began_s + START_S, "the run does not train"
            time.sleep(0.05)
        return time.monotonic() - began_s

    def process_of(self, role: str) -> psutil.Process:
        """Returns the process of a role, which must be alive."""
        for process in psutil.Process(self._command.pid).children(recursive=True):
            words = process.cmdline()
            if "penstock.launch.role" in words and "-c" not in words and role in words:
                return process
        raise LookupError(role)

    def end(self) -> dict[str, Any]:
        """End the run while games play; returns the summary."""
        self._command.send_signal(signal.SIGTERM)
        out, _ = self._command.communicate(timeout=END_S)
        summary: dict[str, Any] = json.loads(out.splitlines()[-1])
        return summary

    def __enter__(self) -> GamesRun:
        return self

    def __exit__(self, *error: object) -> None:
        if self._command.poll() is None:
            self._command.terminate()
            self._command.communicate()
        if self._games is not None:
            self._games.kill()
            self._games.wait()
        self._log.close()


def unaccounted(accounting: dict[str, Any]) -> int:
    """Returns how many produced steps are neither trained, dropped, lost nor in flight."""
    went = accounting["trained"] + accounting["in_flight"]
    went += sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    return int(accounting["produced"] - went)
