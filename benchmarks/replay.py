"""The replay library against the limits of numpy, and against other libraries.

Rates are transitions per second, one thread, batches of 256, n_step 1. "f32" holds observations of
four floats, a million transitions, full; "atari" stacks of four frames, a hundred thousand. Each
rate is the median of five turns. A limit is what numpy alone takes for the same bytes: the copies
of an add, one `np.take` per column of a sample, a sum tree of two arrays without any buffer.

    python benchmarks/replay.py [--peers [PYTHON]] [--only add] [--json] [--save]

`make peers` installs the other libraries; each then runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import replay_limits as limits
import replay_processes as processes
from common import ONE_THREAD, finish, parser
from peers.replay import BATCH, FRAMES, Case, steps
from penstock.replay import Prioritized, Replay, Uniform
from replay_rates import rate_of

F32, ATARI = 1_000_000, 100_000
PEERS = ("sb3", "cpprb", "tianshou", "torchrl")
PEERS_PYTHON = Path(__file__).parents[1] / ".venv-peers/bin/python"
CASES = {
    "add 256": (Case("add", "f32", 256, F32), Case("add", "atari", 256, ATARI)),
    "add 64": (Case("add", "f32", 64, F32), None),
    "uniform": (Case("uniform", "f32", 64, F32), Case("uniform", "atari", 64, ATARI)),
    "uniform as frames": (None, Case("frames", "atari", 64, ATARI)),
    "prioritized": (Case("prioritized", "f32", 64, F32), Case("prioritized", "atari", 64, ATARI)),
    "prioritized as frames": (None, Case("prioritized frames", "atari", 64, ATARI)),
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--peers", nargs="?", const=str(PEERS_PYTHON), help="their Python")
    args.add_argument("--only", default="", help="operations whose name begins so")
    args.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args.add_argument("--atari-capacity", type=int, default=ATARI)
    options = args.parse_args()
    if options.peers and not Path(options.peers).exists():
        sys.exit(f"{options.peers} is not there; run `make peers`, or name a Python that has them")
    found: dict[str, dict[str, Any]] = {}
    for name, pair in CASES.items():
        if name.startswith(options.only):
            found[name] = measure_pair(pair, options)
    for name, measure in processes.CASES.items():
        if name.startswith(options.only):
            found[name] = measure(options.seconds)
    rows: list[list[Any]] = [["operation", "f32", "atari", "limit f32", "limit atari", "others"]]
    rows += [row(name, result) for name, result in found.items()]
    finish("replay", {"cases": found}, rows, options)


def row(name: str, result: dict[str, Any]) -> list[Any]:
    columns = ("f32", "atari", "limit", "limit_atari")
    rest = {key: value for key, value in result.items() if key not in (*columns, "peers")}
    others = ", ".join(f"{k} {v:,.4g}" for k, v in (rest | result.get("peers", {})).items())
    return [name, *(result.get(key, "") for key in columns), others]


def measure_pair(pair: tuple[Case | None, Case | None], options: Any) -> dict[str, Any]:
    """Ours, the limit and the peers for one operation, one after the other."""
    result: dict[str, Any] = {}
    peers: dict[str, float] = {}
    for case, ending in zip(pair, ("", "_atari"), strict=True):
        if case is None:
            continue
        if case.atari:
            case = case._replace(capacity=options.atari_capacity)
        result[case.kind] = ours(case, options.seconds)
        if (limit := limits.rate(case, options.seconds)) is not None:
            result["limit" + ending] = limit
        for peer in PEERS if options.peers else ():
            if (rate := peer_rate(options.peers, peer, case, options.seconds)) is not None:
                peers[peer + ending] = rate
    return result | {"peers": peers}


def ours(case: Case, seconds: float) -> float:
    """Transitions per second of penstock.replay."""
    columns = {
        "obs": (np.uint8, (FRAMES, 84, 84)) if case.atari else (np.float32, (4,)),
        "action": (np.int64, ()),
    }
    prioritized = case.operation.startswith("prioritized")
    replay = Replay(
        columns,
        case.capacity,
        envs=case.envs,
        frame_stack=FRAMES if case.atari else 1,
        sampler=Prioritized(0.6, 0.4) if prioritized else Uniform(),
        autoreset="none",
        seed=0,
    )
    made = steps(case, np.random.default_rng(0))
    for i in range(case.capacity // case.envs + 1):
        replay.add(**made[i % len(made)])
    rng = np.random.default_rng(1)
    stacked = not case.operation.endswith("frames")

    def sample() -> None:
        batch = replay.sample(BATCH, stacked=stacked)
        if prioritized:
            replay.update_priorities(batch.keys, rng.random(BATCH))

    if case.operation == "add":
        return rate_of([partial(replay.add, **step) for step in made], case.envs, seconds)
    return rate_of([sample], BATCH, seconds)


def peer_rate(python: str, peer: str, case: Case, seconds: float) -> float | None:
    """What a peer reaches, measured by its own process; None where it has no such operation."""
    if case.operation.endswith("frames"):
        return None
    envs = case.envs if case.operation == "add" else 16
    program = Path(__file__).parent / "peers/replay.py"
    command = [python, program, peer, case.operation, case.kind]
    command += ["--envs", envs, "--capacity", case.capacity, "--seconds", seconds]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=ONE_THREAD, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        print(f"{peer} failed: {done.stderr.splitlines()[-1:]}", file=sys.stderr)
        return None
    told = json.loads(lines[-1])
    if "error" in told:
        print(f"{peer} {case.operation} {case.kind}: {told['error']}", file=sys.stderr)
        return None
    return float(told["rate"])


if __name__ == "__main__":
    main()
