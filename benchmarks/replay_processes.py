"""What benchmarks/replay.py measures beyond one process: sharing, growth, size, import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from common import ONE_THREAD
from peers.replay import BATCH, FRAMES, Case, steps
from penstock.replay import Replay, Sequences, Writer
from replay_rates import rate_of

F32 = {"obs": (np.float32, (4,)), "action": (np.int64, ())}
ATARI = {"obs": (np.uint8, (FRAMES, 84, 84)), "action": (np.int64, ())}
ENVS, LENGTH, SEQUENCES = 64, 80, 64
SMALL, LARGE = 10_000, 10_000_000
IMPORT = """
import numpy, time
began_s = time.perf_counter()
import penstock.replay
print(time.perf_counter() - began_s)
"""


def between_processes(seconds: float) -> dict[str, Any]:
    """f32 rows that another process adds and this one samples, each alone and at once."""
    case = Case("add", "f32", BATCH, 1_000_000)
    result: dict[str, Any] = {}
    for shared in (False, True):
        replay = Replay(F32, case.capacity, envs=case.envs, shared=shared, seed=0)
        child = None
        if shared:
            command = [sys.executable, __file__, "write", replay.serve(), str(case.envs)]
            child = subprocess.Popen(command, env=os.environ | ONE_THREAD)
        else:
            fill(replay, case)
        while len(replay) < case.capacity:
            time.sleep(0.05)
        if child is not None:
            before, began_s = replay.stats()["inserted"], time.perf_counter()
            time.sleep(seconds)
            added = replay.stats()["inserted"] - before
            result["f32 added"] = added / (time.perf_counter() - began_s)
            child.terminate()
            child.wait()
        name = "f32 sampled" if shared else "limit"  # the limit: all of it in one process
        result[name] = rate_of([partial(replay.sample, BATCH)], BATCH, seconds)
        if not shared:
            made = steps(case, np.random.default_rng(0))
            calls = [partial(replay.add, **step) for step in made]
            result["limit added"] = rate_of(calls, BATCH, seconds)
        replay.close()
    return result


def write(address: str, envs: int) -> None:
    """The other process: add until told to end."""
    made = steps(Case("add", "f32", envs, 0), np.random.default_rng(0))
    with Writer.attach(address) as writer:
        while True:
            for step in made:
                writer.add(**step)


def growing_sequences(seconds: float) -> dict[str, Any]:
    """Sequences of 80 steps per second, small and large, beside a take of as many rows."""
    result: dict[str, Any] = {}
    for capacity, name in ((SMALL, "1e4 rows"), (LARGE, "1e7 rows")):
        replay = Replay(F32, capacity, envs=10, sequences=Sequences(LENGTH), seed=0)
        fill(replay, Case("add", "f32", 10, capacity), spread=True)
        result[f"f32, {name}"] = rate_of([partial(replay.sample, SEQUENCES)], SEQUENCES, seconds)
        replay.close()
        result[f"limit, {name}"] = rate_of([bare_take(capacity)], SEQUENCES, seconds)
    growth = result["f32, 1e4 rows"] / result["f32, 1e7 rows"]
    limit = result["limit, 1e4 rows"] / result["limit, 1e7 rows"]
    return result | {"growth": growth, "growth of a take": limit, "ratio": growth / limit}


def bare_take(capacity: int) -> Callable[[], object]:
    table = np.ones((capacity, 48), np.uint8)
    out = np.empty((SEQUENCES * LENGTH, 48), np.uint8)
    rng, offsets = np.random.default_rng(0), np.arange(LENGTH)

    def take() -> None:
        rows = rng.integers(0, capacity - LENGTH, SEQUENCES)[:, None] + offsets
        np.take(table, rows.reshape(-1), axis=0, out=out, mode="clip")

    return take


def fill(replay: Replay, case: Case, *, spread: bool = False) -> None:
    """Fill it; ``spread``: episodes of 500 steps, so that there are sequences."""
    made = steps(case, np.random.default_rng(0))
    for i in range(case.capacity // case.envs + 1):
        step = made[i % len(made)]
        if spread:
            step = step | {"terminated": np.full(case.envs, i % 500 == 499)}
        replay.add(**step)


def size(seconds: float) -> dict[str, Any]:
    """Bytes of memory per Atari transition that is kept, 64 environments and 1."""
    result: dict[str, Any] = {}
    for envs in (64, 1):
        replay = Replay(ATARI, 100_000, envs=envs, frame_stack=FRAMES)
        result[f"atari, {envs} environments"] = replay.stats()["nbytes"] / 100_000
        replay.close()
    return result | {"limit": 84 * 84.0}


def import_time(seconds: float) -> dict[str, Any]:
    """Milliseconds that importing takes once numpy is there."""
    command = [sys.executable, "-c", IMPORT]
    runs = [
        float(
            subprocess.run(
                command, capture_output=True, check=True, env=os.environ | ONE_THREAD
            ).stdout
        )
        for _ in range(7)
    ]
    return {"ms beyond numpy": 1000 * float(np.median(runs))}


CASES: dict[str, Callable[[float], dict[str, Any]]] = {
    "between processes": between_processes,
    "sequence of 80": growing_sequences,
    "bytes per transition": size,
    "import": import_time,
}

if __name__ == "__main__":
    write(sys.argv[2], int(sys.argv[3]))
