"""Steps per second of four learners under each pace, with stalls at random and with a slow one.

A parameter server as it is in a run, and four worker processes that sleep in place of computing, so
that cores are not the limit. A step takes `STEP_S`; at random, one step in five takes a stall on
top, exponential with mean `STALL_S`. The slow one of the other scenario takes `SLOW` times as long,
always. The same seed gives the same stalls to every pace. Rates are gradients taken in a second
from all together, after a second to get under way; under backup, those discarded stand apart. `ssp
s=0` is the barrier of bsp.

That nobody goes on while more than s clocks ahead of the slowest is asserted from the workers' own
watches, not by what the server says of itself.

    python benchmarks/pacing.py [--seconds 12] [--json] [--save]
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from common import finish, parser
from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer

WORKERS = 4
SIZE = 10_000
REAL_SIZE = 1_700_000
STEP_S, STALL_CHANCE, STALL_S, SLOW = 0.02, 0.2, 0.1, 4.0
WARM_UP_S = 1.0
SEEDS = (1, 2, 3)
PACES: dict[str, dict[str, Any]] = {
    "ssp s=0 (bsp)": {"pace": "ssp", "staleness": 0},
    "ssp s=1": {"pace": "ssp", "staleness": 1},
    "ssp s=3": {"pace": "ssp", "staleness": 3},
    "ssp s=8": {"pace": "ssp", "staleness": 8},
    "tap": {"pace": "tap"},
    "backup 3 of 4": {"pace": "backup", "spare": 1},
}
HEADING = ["pace", "stalls: steps/s", "x bsp", "discarded/s", "lag mean", "max", "ahead"]
HEADING += ["slow one: steps/s", "x bsp"]
Events = list[tuple[float, str]]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]))
        return
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=12.0)
    options = args.parse_args()
    with fleet() as workers:
        stalls = {name: over_seeds(workers, name, options.seconds) for name in PACES}
        slow = {name: run(workers, name, 0, options.seconds, slow=True) for name in PACES}
    cycle_ms = full_size_ms()
    result = {
        "workers": WORKERS,
        "parameters": SIZE,
        "step_s": STEP_S,
        "stall": {"chance": STALL_CHANCE, "distribution": "exponential", "mean_s": STALL_S},
        "slow_factor": SLOW,
        "seeds": SEEDS,
        "stalls": stalls,
        "slow": slow,
        "ssp3_over_bsp": ratio(stalls, "ssp s=3"),
        "ssp3_over_bsp_by_seed": by_seed(stalls["ssp s=3"], stalls["ssp s=0 (bsp)"]),
        "ssp3_over_bsp_slow": ratio(slow, "ssp s=3"),
        "asked_ssp3_over_bsp": 1.3,
        "push_and_pull_ms": {str(REAL_SIZE): cycle_ms},
    }
    rows: list[list[Any]] = [HEADING]
    for name, one in stalls.items():
        figures = [one[key] for key in ("discarded_per_s", "lag_mean", "lag_max", "widest")]
        rates = [one["steps_per_s"], ratio(stalls, name)]
        rows.append([name, *rates, *figures, slow[name]["steps_per_s"], ratio(slow, name)])
    print(f"push and pull of {REAL_SIZE:,} parameters, one worker: {cycle_ms:.1f} ms\n")
    finish("pacing", result, rows, options)


def over_seeds(workers: Fleet, name: str, seconds: float) -> dict[str, Any]:
    """Medians of the rates over the seeds, lag and lead over all of them."""
    runs = [run(workers, name, seed, seconds, slow=False) for seed in SEEDS]
    return {
        "steps_per_s": statistics.median(one["steps_per_s"] for one in runs),
        "discarded_per_s": statistics.median(one["discarded_per_s"] for one in runs),
        "lag_mean": statistics.mean(one["lag_mean"] for one in runs),
        "lag_max": max(one["lag_max"] for one in runs),
        "widest": max(one["widest"] for one in runs),
        "by_seed": [one["steps_per_s"] for one in runs],
    }


def ratio(runs: dict[str, dict[str, Any]], name: str) -> float:
    return float(runs[name]["steps_per_s"] / runs["ssp s=0 (bsp)"]["steps_per_s"])


def by_seed(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    return [a / b for a, b in zip(one["by_seed"], other["by_seed"], strict=True)]


def config(name: str) -> LearnerConfig:
    settings = {"count": WORKERS, "optimizer": "sgd", "lr": 1e-3} | PACES[name]
    return LearnerConfig.model_validate(settings)


# ----------------------------------------------------------------------------------- one run


class Fleet:
    """Worker processes, each told what to do line by line."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--worker"]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORKERS)
        ]

    def tell(self, **order: Any) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()

    def hear(self) -> list[Any]:
        """One line from each."""
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        return [json.loads(line) for line in lines]


@contextmanager
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.communicate()


def run(workers: Fleet, name: str, seed: int, seconds: float, *, slow: bool) -> dict[str, Any]:
    """Let them all work for so long from a common start on."""
    cfg = config(name)
    with served(cfg) as (server, address):
        workers.tell(address=address, config=cfg.model_dump(mode="json"), seed=seed, slow=slow)
        workers.hear()
        begin_s = time.monotonic() + 0.1
        workers.tell(begin_s=begin_s, end_s=begin_s + seconds)
        events: list[Events] = workers.hear()
        figures = server.figures()
    widest = widest_lead(events)
    if cfg.pace == "ssp":
        assert max(widest, figures["widest"]) <= cfg.staleness, (name, widest, figures)
    lag = {int(k): n for k, n in figures["lag_histogram"].items()}
    applied, discarded = sum(lag.values()), sum(figures["late_histogram"].values())
    begun_s = begin_s + WARM_UP_S
    pushes = sum(what == "push" and at_s >= begun_s for mine in events for at_s, what in mine)
    rate, taken = pushes / (seconds - WARM_UP_S), applied / (applied + discarded)
    return {
        "steps_per_s": rate * taken,
        "discarded_per_s": rate * (1 - taken),
        "lag_mean": sum(k * n for k, n in lag.items()) / applied,
        "lag_max": max(lag),
        "widest": widest,
    }


@contextmanager
def served(cfg: LearnerConfig) -> Iterator[tuple[ParameterServer, str]]:
    """A server in a thread of this process."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/s"
        server = ParameterServer(cfg, address)

        def serve() -> None:
            while not stop.is_set():
                server.turn(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server, address
        finally:
            stop.set()
            thread.join()
            server.close()


def widest_lead(events: list[Events]) -> int:
    """The most clocks anyone was ahead of the slowest when it went, by the workers' watches.

    A push is noted before it is sent, a go after it came: so this is no more than the truth.
    """
    clocks, widest = [0] * WORKERS, 0
    merged = sorted((at_s, what, rank) for rank, mine in enumerate(events) for at_s, what in mine)
    for _, what, rank in merged:
        if what == "push":
            clocks[rank] += 1
        else:
            widest = max(widest, clocks[rank] - min(clocks))
    return widest


# ---------------------------------------------------------------------------------- a worker


def worker(rank: int) -> None:
    """Do what the lines on standard input say, and answer each with a line."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        client = connect(order["address"], rank, LearnerConfig.model_validate(order["config"]))
        slowness = SLOW if order["slow"] and rank == 0 else 1.0
        chance = 0.0 if order["slow"] else STALL_CHANCE
        print(json.dumps("ready"), flush=True)
        times = json.loads(sys.stdin.readline())
        stalls = random.Random(f"{order['seed']} {rank}")
        time.sleep(max(0.0, times["begin_s"] - time.monotonic()))
        events = work(client, stalls, chance, slowness, times["end_s"])
        print(json.dumps(events), flush=True)
        client.close()


def work(
    client: ServerClient, stalls: random.Random, chance: float, slowness: float, end_s: float
) -> Events:
    events: Events = []
    while time.monotonic() < end_s:
        if client.pull(0.05) is None:
            continue
        went_s = time.monotonic()
        if went_s >= end_s:  # then others may have left, and hold nobody up
            break
        events.append((went_s, "go"))
        stall_s = stalls.expovariate(1 / STALL_S) if stalls.random() < chance else 0.0
        time.sleep(slowness * STEP_S + stall_s)
        if time.monotonic() < end_s:
            events.append((time.monotonic(), "push"))
            client.push(1)
    return events


def connect(address: str, rank: int, cfg: LearnerConfig, size: int = SIZE) -> ServerClient:
    """A client that has its first parameters."""
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.zeros(size)))], cfg)
    client = ServerClient([address], rank, optimizer, cfg)
    while client.pull(1.0) is None:
        pass
    return client


def full_size_ms(times: int = 50) -> float:
    """Milliseconds of a push and the pull after it, with one worker and nothing else to do."""
    torch.set_num_threads(1)
    cfg = config("tap").model_copy(update={"optimizer": "adam"})
    with served(cfg) as (_, address):
        client = connect(address, 0, cfg, REAL_SIZE)
        took: list[float] = []
        for _ in range(times):
            began_s = time.perf_counter()
            client.push(1)
            while client.pull(1.0) is None:
                pass
            took.append(1000 * (time.perf_counter() - began_s))
        client.close()
    return statistics.median(took)


if __name__ == "__main__":
    main()
