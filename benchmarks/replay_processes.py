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

from common import ONE_THREAD, compile_package
from peers.replay import BATCH, FRAMES, Case, steps
from penstock.replay import Replay, Sequences, Writer
from replay_rates import Calls, rate_of, rates_of

F32 = {"obs": (np.float32, (4,)), "action": (np.int64, ())}
ATARI = {"obs": (np.uint8, (FRAMES, 84, 84)), "action": (np.int64, ())}
ENVS, LENGTH, SEQUENCES = 64, 80, 64
SMALL, LARGE = 10_000, 10_000_000
LOOKS = 4  # at what another process adds: slots come whole, so short looks would mislead
IMPORT = """
import numpy, time
began_s = time.perf_counter()
import penstock.replay
print(time.perf_counter() - began_s)
"""


def between_processes(seconds: float) -> dict[str, Any]:
    """Rows that another process adds and this one samples. The limit: all in one process."""
    result: dict[str, Any] = {}
    for kind, columns, capacity in (("f32", F32, 1_000_000), ("atari", ATARI, 100_000)):
        case = Case("add", kind, 256 if kind == "f32" else ENVS, capacity)
        stack = FRAMES if case.atari else 1
        one, shared = (
            Replay(columns, capacity, envs=case.envs, frame_stack=stack, shared=flag, seed=0)
            for flag in (False, True)
        )
        made = steps(case, np.random.default_rng(0))
        calls = [partial(one.add, **step) for step in made]
        result[f"{kind} added"] = added_from_elsewhere(shared, case, seconds)
        for _ in range(capacity // case.envs // len(made) * 5 // 4):
            for call in calls:
                call()
        result[f"{kind} added, limit"] = rate_of(calls, case.envs, seconds)
        sampling = {f"{kind} sampled": [partial(shared.sample, BATCH)]}
        sampling[f"{kind} sampled, limit"] = [partial(one.sample, BATCH)]
        result |= rates_of(sampling, BATCH, seconds)
        one.close()
        shared.close()
    return result


def added_from_elsewhere(replay: Replay, case: Case, seconds: float) -> float:
    """Rows per second that a process of its own adds, the best of several looks, once the replay
    is full and has been for a while."""
    command = [sys.executable, __file__, "write", replay.serve(), case.kind, str(case.envs)]
    child = subprocess.Popen(command, env=os.environ | ONE_THREAD)
    best = 0.0
    try:
        while replay.stats()["inserted"] < case.capacity * 5 // 4:
            time.sleep(0.05)
        for _ in range(LOOKS):
            before, began_s = replay.stats()["inserted"], time.perf_counter()
            time.sleep(seconds / LOOKS)
            added = replay.stats()["inserted"] - before
            best = max(best, added / (time.perf_counter() - began_s))
    finally:
        child.terminate()
        child.wait()
    return best


def write(address: str, kind: str, envs: int) -> None:
    """The other process: add until told to end."""
    made = steps(Case("add", kind, envs, 0), np.random.default_rng(0))
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
        calls: dict[str, Calls] = {f"f32, {name}": [partial(replay.sample, SEQUENCES)]}
        calls[f"limit, {name}"] = [bare_take(capacity)]
        result |= rates_of(calls, SEQUENCES, seconds)
        replay.close()
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
    """Milliseconds that importing takes after numpy's import."""
    compile_package()
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
    write(sys.argv[2], sys.argv[3], int(sys.argv[4]))
