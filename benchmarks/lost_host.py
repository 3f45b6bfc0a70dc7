"""How soon a run on a Ray cluster trains again after it has lost the host of a learner.

Four learners and eight actors on CartPole, on simulated nodes of three cores each that share the
cores of this machine; the head node has no roles. When all train, everything on the node of one
learner is killed; another node is free. Measured from the kill: until the learners that are left
have taken a step together, and until all four train again.

    python benchmarks/lost_host.py [--rounds 3] [--json] [--save]
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from common import compile_package, finish, parser
from penstock.bench.whole import FOREVER
from penstock.core.processes import python
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS

LEARNERS, ACTORS, NODES, CORES = 4, 8, 9, 3
LOST = "learner-2"
WAIT_S = 90.0
OPTIONS = (f"learner.count={LEARNERS}", f"actors.count={ACTORS}", "run.interval_s=0.2")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--rounds", type=int, default=3)
    options = args.parse_args()
    compile_package()
    rounds = [one() for _ in range(options.rounds)]
    again, whole = ([found[key] for found in rounds] for key in ("again_s", "whole_s"))
    result = {"rounds": rounds, "asked": {"again_s": 10, "whole_s": 30}}
    rows: list[list[Any]] = [["until", "median s", "slowest s"]]
    rows.append(["the others train again", statistics.median(again), max(again)])
    rows.append([f"all {LEARNERS} train", statistics.median(whole), max(whole)])
    finish("lost_host", result, rows, options)


def one() -> dict[str, Any]:
    """Seconds of one run."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=CORES)
        run_dir = Path(folder) / "run"
        flags = ["--engine", "ray", "--address", cluster.address, f"run.dir={run_dir}"]
        command = python("penstock", "train", "cartpole", *FOREVER, *OPTIONS, *flags)
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: last(run_dir).get("learners_alive") == LEARNERS)
            wait_until(lambda: last(run_dir)["trained_steps"] > 100_000)
            killed_s = time.time()
            kill_host(cluster)
            wait_until(lambda: last(run_dir)["learners_alive"] == LEARNERS - 1)
            steps = last(run_dir)["trained_steps"]
            wait_until(lambda: last(run_dir)["trained_steps"] > steps)
            again_s = time.time() - killed_s
            wait_until(lambda: last(run_dir)["learners_alive"] == LEARNERS)
            steps = last(run_dir)["trained_steps"]
            wait_until(lambda: last(run_dir)["trained_steps"] > steps)
            return {"again_s": again_s, "whole_s": time.time() - killed_s}
        finally:
            run.send_signal(signal.SIGTERM)  # in the background SIGINT may be ignored
            run.wait(60)
            cluster.shutdown()  # type: ignore[no-untyped-call]


def kill_host(cluster: Any) -> None:
    """Kill the node of the learner that is to be lost, with all that runs on it."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "penstock.launch.role" not in words or "-c" in words or LOST not in words:
            continue
        raylet = next(p for p in process.parents() if "raylet" in p.name())
        everything = raylet.children(recursive=True)
        for node in cluster.worker_nodes:
            pids = {p.process.pid for ps in node.all_processes.values() for p in ps}
            if raylet.pid in pids:
                for one_of_it in everything:
                    with suppress(psutil.NoSuchProcess):  # it has ended with another
                        one_of_it.kill()
                cluster.remove_node(node, allow_graceful=False)
                return
    sys.exit(f"{LOST} does not run")


def last(run_dir: Path) -> dict[str, Any]:
    found = lines(run_dir / METRICS) if (run_dir / METRICS).exists() else []
    return found[-1] if found else {"trained_steps": 0}


def wait_until(condition: Callable[[], object]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > ends_s:
            sys.exit("the run did not get there in time")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
