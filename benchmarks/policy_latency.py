"""How long an exported policy takes to load and to decide, for the agents of docs/agents.

    python benchmarks/policy_latency.py --save

Each agent is loaded in a process of its own by `penstock.load_policy`, and decides on sampled
observations: one at a time, and `BATCH` at a time. Numpy and torch compute with one thread. All
times are processor time, which is the latency where the process has a core of its own; those of
calls are medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import penstock
from common import compile_package, finish, parser

AGENTS = Path(__file__).parents[1] / "docs" / "agents"
NAMES = ("halfcheetah", "minatar_breakout", "pong", "car_racing")
BATCH = 64
CALLS, WARM_UP = 100, 10


def main() -> None:
    """Measure all agents, or in a child process the one named."""
    arguments = parser(__doc__)
    arguments.add_argument("--agent", choices=NAMES, help="measure this one here, print JSON")
    args = arguments.parse_args()
    if args.agent:
        print(json.dumps(measure(args.agent)))
        return

    compile_package()
    measured = {}
    for name in NAMES:
        command = [sys.executable, __file__, "--agent", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        measured[name] = json.loads(done.stdout)
    heading = ["agent", "torch", "load s", "one ms", f"{BATCH} ms", "MB"]
    rows = [
        [
            name,
            "yes" if agent["torch"] else "no",
            agent["load_s"],
            agent["one_ms"],
            agent["batch_ms"],
            agent["megabytes"],
        ]
        for name, agent in measured.items()
    ]
    finish("policy_latency", {"batch": BATCH, "agents": measured}, [heading, *rows], args)


def measure(name: str) -> dict[str, Any]:
    """Of one agent, in a process that has imported nothing of it yet."""
    began_s = time.process_time()
    policy = penstock.load_policy(AGENTS / f"{name}.safetensors")
    policy(policy.observation_space.sample())
    load_s = time.process_time() - began_s

    policy.observation_space.seed(0)
    observations = [policy.observation_space.sample() for _ in range(BATCH)]
    return {
        "torch": "torch" in sys.modules,
        "load_s": load_s,
        "one_ms": median_ms(policy, observations[0]),
        "batch_ms": median_ms(policy, np.stack(observations)),
        "megabytes": psutil.Process().memory_info().rss / 1e6,
    }


def median_ms(policy: penstock.LoadedPolicy, observations: Any) -> float:
    """Milliseconds of a call."""
    times_ns = []
    for number in range(WARM_UP + CALLS):
        began_ns = time.process_time_ns()
        policy(observations)
        if number >= WARM_UP:
            times_ns.append(time.process_time_ns() - began_ns)
    return float(np.median(times_ns)) / 1e6


if __name__ == "__main__":
    main()
