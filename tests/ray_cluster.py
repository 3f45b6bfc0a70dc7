"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.core.runtime_folder import sweep
from train_command import SMALL, Command, assert_balanced, json_lines, stop_commands

WAIT_S = 20.0
MARKER = "PENSTOCK_TEST"  # in the environment of all that a test starts, as `conftest` sets it


@contextlib.contextmanager
def cluster(nodes: int, cores: int = 2) -> Iterator[Any]:
    """Starts ``nodes`` nodes of ``cores`` each, the first as head, and removes all at the end."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False}
    )
    try:
        for _ in range(nodes - 1):
            made.add_node(num_cpus=cores)
        yield made
    finally:
        stop_commands()  # a run ends before its cluster does
        new = [p for p in psutil.Process().children(recursive=True) if lives(p, before)]
        made.shutdown()  # type: ignore[no-untyped-call]
        for process in new:  # a node that has lost its head leaves some of its processes
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ends_s = time.monotonic() + WAIT_S
        while left := [p for p in psutil.Process().children(recursive=True) if lives(p, before)]:
            assert time.monotonic() < ends_s, left
            time.sleep(0.1)
        # A Ray worker that has lost its node kills its children, so a host supervisor may leave its
        # folder; the next run on that host removes it.
        sweep(Path(tempfile.gettempdir()))
        os.environ.pop("RAY_ADDRESS", None)


def lives(process: psutil.Process, before: set[psutil.Process]) -> bool:
    """Whether a process is new and runs; Ray does not wait for all of those that it has started."""
    try:
        return process not in before and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def train(folder: Path, address: str, *more: str) -> Command:
    """Trains CartPole on a cluster, with 4 actors unless ``more`` names another number."""
    options = ("actors.count=4", "run.dir=run", *SMALL, "--engine", "ray", "--address", address)
    return Command(folder, "train", "cartpole", "--json", *options, *more)


def ended(command: Command) -> dict[str, Any]:
    """Asks a run to end and returns its summary."""
    command.process.send_signal(signal.SIGTERM)
    code, summary, err = command.end()
    assert (code, summary["exit_reason"]) == (143, "terminated"), err
    assert_balanced(summary)
    return summary


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a run so far."""
    return json_lines(run_dir / "logs" / "events.jsonl")


def ready(run_dir: Path, role: str) -> list[int]:
    """Returns the incarnations of a role that were ready."""
    return [e["incarnation"] for e in events(run_dir) if e["kind"] == "ready" and e["role"] == role]


def agents() -> dict[str, psutil.Process]:
    """Returns the host agents of this test, by the name of each role that they have started."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with contextlib.suppress(psutil.Error, StopIteration):  # it has ended meanwhile
            if "penstock.launch.role" not in words or "-c" in words:
                continue
            if process.environ().get(MARKER) == os.environ[MARKER]:
                agent = next(p for p in process.parents() if "HostAgent" in p.cmdline()[0])
                found[words[words.index("penstock.launch.role") + 1]] = agent
    return found


def remove_node(made: Any, agent: psutil.Process) -> None:
    """Kills all processes of an agent's node, as a power loss of the host does."""
    raylet = agent.parent()
    assert raylet is not None
    [node] = [
        node
        for node in made.worker_nodes
        if any(p.process.pid == raylet.pid for ps in node.all_processes.values() for p in ps)
    ]
    made.remove_node(node, allow_graceful=False)


def on_a_worker(made: Any, role: str) -> bool:
    """Returns whether a role is on another node than the head, which the cluster needs."""
    heads = {p.process.pid for ps in made.head_node.all_processes.values() for p in ps}
    agent = agents().get(role)
    return agent is not None and agent.ppid() not in heads


def drain(address: str, node: str, seconds: int = 60) -> None:
    """Announce that a node ends in ``seconds``, as a cloud does before it takes back a preemptible
    machine."""
    options = ["--node-id", node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    options += ["--reason-message", "test", "--deadline-remaining-seconds", str(seconds)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address]
    subprocess.run([*command, *options], check=True, timeout=60)
