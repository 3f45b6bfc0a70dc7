"""Random kills of whatever a run on a Ray cluster consists of, and what must hold after each.

Each run trains CartPole on simulated nodes of this machine, with one or two learners in turn and
actors that come and go. A seed decides what is killed: a role, a host supervisor, a host agent, a
node with all that runs on it (another takes its place), or the driver, which is then restarted with
`--resume auto`. After each kill the run must train again within a bound. At the end the accounting
must balance, and no process may be left.

    python benchmarks/ray_kills.py [--runs 20] [--kills 10] [--seed 0] [--json] [--save]
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from common import compile_package, finish, parser
from faults.invariants import check_balance
from faults.program import Broken, Program
from penstock.bench.whole import FOREVER
from penstock.core.processes import python
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS

MARKER = "PENSTOCK_KILLS"  # in the environment of all that belongs to this program
NODES, CORES = 5, 3
AGAIN_S = 120.0  # bound until a run trains again; twice the longest back-off and a lost head start
END_S = 60.0
KINDS = {"role": 4, "supervisor": 1, "agent": 2, "node": 2, "driver": 1}
OPTIONS = ("checkpoint.every_s=2", "run.interval_s=0.5", "run.restarts=10", "actors.count=2..4")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--runs", type=int, default=20)
    args.add_argument("--kills", type=int, default=10, help="of each run")
    args.add_argument("--seed", type=int, default=0)
    options = args.parse_args()
    os.environ[MARKER] = secrets.token_hex(8)
    compile_package()
    again: dict[str, list[float]] = defaultdict(list)
    failures = []
    for number in range(options.runs):
        seed = options.seed + number
        try:
            for kind, seconds in one(seed, options.kills):
                again[kind].append(seconds)
        except Broken as error:
            failures.append({"seed": seed, "error": str(error)})
            print(f"run of seed {seed}: {error}", file=sys.stderr, flush=True)
    rows: list[list[Any]] = [["killed", "times", "median s until it trains", "slowest s"]]
    rows += [[k, len(s), statistics.median(s), max(s)] for k, s in sorted(again.items())]
    kills = Counter({kind: len(seconds) for kind, seconds in again.items()})
    result = {"again_s": again, "kills": sum(kills.values()), "failures": failures}
    finish("ray_kills", {"runs": options.runs, **result}, rows, options)
    print(f"{sum(kills.values())} kills in {options.runs} runs; {len(failures)} runs failed")
    sys.exit(1 if failures else 0)


def one(seed: int, kills: int) -> Iterator[tuple[str, float]]:
    """The kills of one run: what was killed, and the seconds until the run trained again."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, cluster() as made:
        folder = Path(name)
        run_dir = folder / "run"
        flags = ["--engine", "ray", "--address", made.address, f"run.dir={run_dir}", "--json"]
        learners = [f"learner.count={1 + seed % 2}"]
        command = python("penstock", "train", "cartpole", *FOREVER, *OPTIONS, *learners, *flags)
        run = Program("run", command, os.environ, folder, run_dir)
        try:
            run.start()
            wait_until(lambda: steps(run_dir) > 0, run)
            wait_until((run_dir / "checkpoints" / "last").exists, run)
            for _ in range(kills):
                kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
                kind, was = strike(kind, rng, made, run)
                struck_s, seen = time.monotonic(), len(lines(run_dir / METRICS))
                if kind == "driver":
                    wait_until(lambda: not roles(), run, ended=True)
                    run.start("--resume", "auto")
                    seen = min(seen, len(lines(run_dir / METRICS)))
                wait_until(partial(trains, run_dir, seen), run, what=was)
                took_s = time.monotonic() - struck_s
                print(f"seed {seed}: {was} was killed; {took_s:.1f} s", file=sys.stderr, flush=True)
                yield kind, took_s
                time.sleep(rng.uniform(0.5, 3.0))
            code = run.end(END_S)
            if code != 128 + signal.SIGTERM:
                raise Broken(f"exit code {code}: {run.said[-600:]}")
            check_balance(run.answer())
        finally:
            run.kill()
    wait_until(lambda: not ours(), ended=True)


@contextmanager
def cluster() -> Iterator[Any]:
    """A Ray cluster: a head node without cores, on which no role is placed, and `NODES` others."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(NODES):
            add_node(made)
        yield made
    finally:
        made.shutdown()  # type: ignore[no-untyped-call]
        for process in ours():  # of nodes that were killed
            if "ray" in process.name() or "ray" in " ".join(process.cmdline()[:3]):
                process.kill()


def add_node(made: Any) -> None:
    """Add a node; on a machine that is busy with other work Ray gives up too early."""
    for _ in range(3):
        with suppress(Exception):
            made.add_node(num_cpus=CORES)
            return
    raise Broken("Ray starts no node")


def strike(kind: str, rng: random.Random, made: Any, run: Program) -> tuple[str, str]:
    """Kill one of a kind; what was killed, and its name."""
    if kind == "driver":
        run.kill()
        return kind, "the driver"
    victims = roles()
    if not victims:
        raise Broken("no role runs")
    role, process = rng.choice(sorted(victims.items()))
    if kind == "role":
        process.kill()
        return kind, role
    above = process.parents()
    supervisor = next(p for p in above if "host_supervisor" in " ".join(p.cmdline()))
    if kind == "supervisor":
        supervisor.kill()
        return kind, f"the host supervisor of {role}"
    agent = next(p for p in above if "HostAgent" in " ".join(p.cmdline()))
    if kind == "agent":
        agent.kill()
        return kind, f"the host agent of {role}"
    kill_node(made, next(p for p in above if "raylet" in p.name()))
    add_node(made)
    return kind, f"the node of {role}"


def kill_node(made: Any, raylet: psutil.Process) -> None:
    """Kill a node with all that runs on it, as when a host loses its power."""
    everything = raylet.children(recursive=True)
    for node in made.worker_nodes:
        if raylet.pid in {p.process.pid for ps in node.all_processes.values() for p in ps}:
            for process in everything:
                with suppress(psutil.NoSuchProcess):  # it has ended with another
                    process.kill()
            made.remove_node(node, allow_graceful=False)
            return


def ours() -> list[psutil.Process]:
    """All processes that belong to this program, but itself."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lives = process.status() != psutil.STATUS_ZOMBIE
            marked = lives and process.environ().get(MARKER) == os.environ[MARKER]
            if marked and process.pid != os.getpid():
                found.append(process)
    return found


def roles() -> dict[str, psutil.Process]:
    """The processes of roles by their names."""
    found = {}
    for process in ours():
        with suppress(psutil.Error, ValueError):
            words = process.cmdline()
            if "penstock.launch.role" in words and "-c" not in words:
                found[words[words.index("penstock.launch.role") + 1]] = process
    return found


def steps(run_dir: Path) -> int:
    found = lines(run_dir / METRICS) if (run_dir / METRICS).exists() else []
    return int(found[-1]["trained_steps"]) if found else 0


def trains(run_dir: Path, seen: int) -> bool:
    """Whether the run has trained in two intervals after the lines of metrics that were ``seen``;
    a resumed one may be behind."""
    found = lines(run_dir / METRICS)[seen:]
    return len({line["trained_steps"] for line in found}) > 2


def wait_until(
    condition: Callable[[], object],
    run: Program | None = None,
    ended: bool = False,
    what: str = "its start",
) -> None:
    ends_s = time.monotonic() + AGAIN_S
    while not condition():
        if run is not None and not ended and not run.runs:
            raise Broken(f"the run has ended after {what}: {run.said[-600:]}")
        if time.monotonic() > ends_s:
            left = [" ".join(p.cmdline())[:120] for p in ours()] if ended else []
            said = run.said[-600:] if run is not None else ""
            raise Broken(f"not within {AGAIN_S:g} s after {what}: {left} {said}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
