"""CartPole by the Ray engine against the local one, in turns on this machine.

    local            roles of one supervisor, shared memory
    ray, one host    a cluster of this machine alone: the same roles, started by a host agent
    ray, three hosts simulated nodes of two cores each, on the cores of this machine: actors apart
                     from their learner, over ZeroMQ with keys

The cluster runs before the clock starts. Rates are trained agent steps per second after a quarter
of the run; the time to the first step is from the command until metrics show a learner step.

    python benchmarks/engines.py [--seconds 20] [--rounds 3] [--json] [--save]
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import compile_package, finish, parser
from penstock.bench.whole import FOREVER, WARM_UP, train, trained_rate
from penstock.core.processes import python
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS

CORES = 2
NODES = {"ray, one host": 1, "ray, three hosts": 3}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=20.0)
    args.add_argument("--rounds", type=int, default=3)
    options = args.parse_args()
    compile_package()
    rates: dict[str, list[float]] = {name: [] for name in ("local", *NODES)}
    first: dict[str, list[float]] = {name: [] for name in rates}
    for _ in range(options.rounds):
        for name in rates:
            with address(NODES.get(name)) as flags:
                rates[name].append(rate(options.seconds, flags))
                first[name].append(first_step_s(flags))
    result = {
        name: {
            "steps_per_s": statistics.median(rates[name]),
            "of_local": statistics.median(rates[name]) / statistics.median(rates["local"]),
            "first_step_s": statistics.median(first[name]),
            "rounds": rates[name],
        }
        for name in rates
    }
    rows: list[list[Any]] = [["engine", "steps/s", "of local", "first step s"]]
    rows += [[n, r["steps_per_s"], r["of_local"], r["first_step_s"]] for n, r in result.items()]
    finish("engines", {"engines": result, "asked": {"of_local": 0.9, "first_s": 8}}, rows, options)


@contextlib.contextmanager
def address(nodes: int | None) -> Iterator[list[str]]:
    """Flags of a run on a cluster of that many nodes; none for the local engine."""
    if nodes is None:
        yield []
        return
    from ray.cluster_utils import Cluster

    cores = max(CORES, os.cpu_count() or 1) if nodes == 1 else CORES
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cores})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=CORES)
        yield ["--engine", "ray", "--address", cluster.address]
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def rate(seconds: float, flags: list[str]) -> float:
    options = (*FOREVER, f"stop.minutes={seconds / 60}", "run.interval_s=0.5")
    return trained_rate(train("cartpole", *options, *flags), seconds * WARM_UP)


def first_step_s(flags: list[str]) -> float:
    """Seconds from the command until metrics show a learner step."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = python("penstock", "train", "cartpole", *FOREVER, f"run.dir={run_dir}", *flags)
        began_s = time.perf_counter()
        run = subprocess.Popen(
            [*command, "run.interval_s=0.02"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not has_trained(run_dir / METRICS):
                if run.poll() is not None:
                    sys.exit("the run ended before its first learner step")
                time.sleep(0.005)
            return time.perf_counter() - began_s
        finally:
            run.send_signal(signal.SIGTERM)  # in the background SIGINT may be ignored
            run.wait(60)


def has_trained(path: Path) -> bool:
    return path.exists() and any(m.get("learner_steps") for m in lines(path))


if __name__ == "__main__":
    main()
