"""The replay library against the limits of numpy, and against other libraries.

Rates are transitions per second, one thread, batches of 256, n_step 1. "f32" holds observations of
four floats, a million transitions, full; "atari" stacks of four frames, a hundred thousand. A limit
is what numpy alone takes for the same bytes: the copies of an add, one `np.take` per column of a
sample, a sum tree of two arrays without any buffer. It takes turns with ours.

    python benchmarks/replay.py [--peers [PYTHON]] [--reverb PYTHON] [--only add] [--json] [--save]

`make peers` installs the other libraries; each then runs in a process of its own. Reverb needs a
Python of its own: `pip install "dm-reverb[tensorflow]"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import replay_limits as limits
import replay_network as network
import replay_processes as processes
from common import ONE_THREAD, finish, parser
from peers.replay import BATCH, FRAMES, Case, steps
from penstock.replay import Prioritized, Replay, Uniform
from replay_rates import Calls, rates_of

F32, ATARI = 1_000_000, 100_000
PEERS = ("sb3", "cpprb", "tianshou", "torchrl")
PEERS_PYTHON = Path(__file__).parents[1] / ".venv-peers/bin/python"
CASES = {
    "add 256": (Case("add", "f32", 256, F32), Case("add", "atari", 256, ATARI)),
    "add 64": (Case("add", "f32", 64, F32), None),
    "uniform": (Case("uniform", "f32", 64, F32), Case("uniform", "atari", 64, ATARI)),
    "uniform as frames": (None, Case("frames", "atari", 64, ATARI)),
    "prioritized": (Case("prioritized", "f32", 64, F32), Case("prioritized", "atari", 64, ATARI)),
    "prioritized [fast]": (Case("prioritized fast", "f32", 64, F32), None),
    "prioritized as frames": (None, Case("prioritized frames", "atari", 64, ATARI)),
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--peers", nargs="?", const=str(PEERS_PYTHON), help="their Python")
    args.add_argument("--only", default="", help="operations whose name begins so")
    args.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    args.add_argument("--atari-capacity", type=int, default=ATARI)
    args.add_argument("--reverb", help="a Python that has Reverb, measured over the network")
    options = args.parse_args()
    if options.peers and not Path(options.peers).exists():
        sys.exit(f"{options.peers} is not there; run `make peers`, or name a Python that has them")
    found: dict[str, dict[str, Any]] = {}
    for name, pair in CASES.items():
        if name.startswith(options.only):
            found[name] = measure_pair(pair, options)
    over_the_network = partial(network.over_the_network, reverb=options.reverb)
    for name, measure in (processes.CASES | {"over the network": over_the_network}).items():
        if name.startswith(options.only):
            found[name] = measure(options.seconds)
    rows: list[list[Any]] = [["operation", "f32", "atari", "of limit", "", "others"]]
    rows += [row(name, result) for name, result in found.items()]
    finish("replay", {"cases": found}, rows, options)


def row(name: str, result: dict[str, Any]) -> list[Any]:
    columns = ("f32", "atari", "limit", "limit_atari", "peers")
    shares = [
        f"{result[kind] / result[limit]:.2f}" if kind in result and limit in result else ""
        for kind, limit in (("f32", "limit"), ("atari", "limit_atari"))
    ]
    rest = {key: value for key, value in result.items() if key not in columns}
    others = ", ".join(f"{k} {v:,.4g}" for k, v in (rest | result.get("peers", {})).items())
    return [name, result.get("f32", ""), result.get("atari", ""), *shares, others]


def measure_pair(pair: tuple[Case | None, Case | None], options: Any) -> dict[str, Any]:
    """Ours, the limit and the peers for one operation."""
    result: dict[str, Any] = {}
    peers: dict[str, float] = {}
    for case, ending in zip(pair, ("", "_atari"), strict=True):
        if case is None or (case.operation == "prioritized fast" and not has_numba()):
            continue
        if case.atari:
            case = case._replace(capacity=options.atari_capacity)
        rows = case.envs if case.operation == "add" else BATCH
        replay = filled(case)
        rates = rates_of(
            {"ours": ours(case, replay), "limit": limits.calls_of(case)}, rows, options.seconds
        )
        replay.close()
        result |= {case.kind: rates["ours"], "limit" + ending: rates["limit"]}
        for peer in PEERS if options.peers else ():
            if (rate := peer_rate(options.peers, peer, case, options.seconds)) is not None:
                peers[peer + ending] = rate
    return result | {"peers": peers}


def filled(case: Case) -> Replay:
    """A replay that has been full for a while: the oldest slots have made room for others."""
    columns = {
        "obs": (np.uint8, (FRAMES, 84, 84)) if case.atari else (np.float32, (4,)),
        "action": (np.int64, ()),
    }
    fast = case.operation.endswith("fast")
    sampler = Prioritized(0.6, 0.4, fast=fast) if prioritized(case) else Uniform()
    replay = Replay(
        columns,
        case.capacity,
        envs=case.envs,
        frame_stack=FRAMES if case.atari else 1,
        sampler=sampler,
        autoreset="none",
        seed=0,
    )
    made = steps(case, np.random.default_rng(0))
    for _ in range(case.capacity // case.envs // len(made) * 5 // 4 + 1):
        for step in made:
            replay.add(**step)
    return replay


def ours(case: Case, replay: Replay) -> Calls:
    """The operation, on penstock.replay."""
    if case.operation == "add":
        made = steps(case, np.random.default_rng(0))
        return [partial(replay.add, **step) for step in made]
    rng = np.random.default_rng(1)
    stacked = not case.operation.endswith("frames")
    updated = prioritized(case)

    def sample() -> None:
        batch = replay.sample(BATCH, stacked=stacked)
        if updated:
            replay.update_priorities(batch.keys, rng.random(BATCH))

    return [sample]


def prioritized(case: Case) -> bool:
    return case.operation.startswith("prioritized")


def has_numba() -> bool:
    if find_spec("numba") is None:
        print("numba is not installed: no rate with the extra [fast]", file=sys.stderr)
        return False
    return True


def peer_rate(python: str, peer: str, case: Case, seconds: float) -> float | None:
    """What a peer reaches, measured by its own process; None where it has no such operation."""
    if case.operation.endswith(("frames", "fast")):
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
