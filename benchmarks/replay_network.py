"""What benchmarks/replay.py measures over the network: `penstock replay serve` and its clients.

Server and client are processes of their own and talk through a TCP socket of this host, which is
not encrypted. Batches have 256 rows. Atari frames are noise, which snappy cannot make smaller, so
they travel whole; frames of a game become ten times smaller.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import ONE_THREAD
from peers.replay import BATCH, FRAMES, Case, steps
from penstock.replay.remote import ReplayClient

# Reverb over localhost, in batches of 256, as measured in another run than this.
REVERB = {"reverb added, stated": 9_000.0, "reverb sampled, stated": 87_000.0}
F32 = Case("add", "f32", BATCH, 1_000_000)
ATARI = Case("add", "atari", 64, 100_000)
SPECS: dict[str, dict[str, Any]] = {
    "f32": {"columns": {"obs": ["float32", [4]], "action": ["int64", []]}},
    "atari": {
        "columns": {"obs": ["uint8", [FRAMES, 84, 84]], "action": ["int64", []]},
        "frame_stack": FRAMES,
    },
}


def over_the_network(seconds: float, reverb: str | None = None) -> dict[str, Any]:
    """Transitions per second that one client adds, and that one samples. ``reverb``: a Python that
    has Reverb, to be measured beside."""
    result: dict[str, Any] = {}
    peers: dict[str, float] = {} if reverb else REVERB
    for case in (F32, ATARI):
        with served(case) as address:
            fill(address, case)
            for operation in ("added", "sampled"):
                told = client(address, operation, case.kind, seconds)
                result[f"{case.kind} {operation}"] = float(told)
        if reverb:
            peers |= reverb_rates(reverb, case.kind, seconds)
    return result | {"peers": peers}


def reverb_rates(python: str, kind: str, seconds: float) -> dict[str, float]:
    """The same of Reverb, measured by its own process."""
    program = Path(__file__).parent / "peers/over_reverb.py"
    command = [python, str(program), kind, "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {f"reverb {kind} {operation}": rate for operation, rate in told.items()}


@contextmanager
def served(case: Case) -> Iterator[str]:
    """A server's address."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(json.dumps(SPECS[case.kind] | {"envs": case.envs}))  # JSON is YAML too
        command = [sys.executable, "-m", "penstock", "replay", "serve"]
        command += ["--bind", "tcp://127.0.0.1:*", "--spec", str(spec)]
        command += ["--capacity", str(case.capacity)]
        server = subprocess.Popen(
            command,
            env=os.environ | ONE_THREAD,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        try:
            yield server.stderr.readline().split()[-1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


def fill(address: str, case: Case) -> None:
    """Until the replay is full and has been for a while."""
    made = steps(case, np.random.default_rng(0))
    with ReplayClient(address) as writer:
        for i in range(case.capacity // case.envs * 5 // 4):
            writer.add(**made[i % len(made)])
        writer.flush()


def client(address: str, operation: str, kind: str, seconds: float) -> str:
    """What a process of its own found."""
    command = [sys.executable, __file__, operation, address, kind, str(seconds)]
    done = subprocess.run(
        command, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=True
    )
    return done.stdout


def added(address: str, kind: str, seconds: float) -> float:
    """Rows per second that the server has stored."""
    case = F32 if kind == "f32" else ATARI
    made, count = steps(case, np.random.default_rng(0)), 0
    with ReplayClient(address) as writer:
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            writer.add(**made[count % len(made)])
            count += 1
        writer.flush()
        return count * case.envs / (time.perf_counter() - began_s)


def sampled(address: str, kind: str, seconds: float) -> float:
    """Rows per second that a reader gets, asking ahead."""
    with ReplayClient(address) as reader:
        for _ in range(64):
            reader.sample(BATCH)
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() < began_s + seconds:
            reader.sample(BATCH)
            count += 1
        return count * BATCH / (time.perf_counter() - began_s)


if __name__ == "__main__":
    measure = {"added": added, "sampled": sampled}[sys.argv[1]]
    print(measure(sys.argv[2], sys.argv[3], float(sys.argv[4])))
