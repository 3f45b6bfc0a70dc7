"""A Ray cluster of several nodes on this machine, for tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import psutil

WAIT_S = 20.0


@contextlib.contextmanager
def cluster(nodes: int, cores: int = 2) -> Iterator[Any]:
    """``nodes`` nodes of ``cores`` each, the first of which is the head; nothing of it is left."""
    from ray.cluster_utils import Cluster

    before = set(psutil.Process().children(recursive=True))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": cores})
    try:
        for _ in range(nodes - 1):
            made.add_node(num_cpus=cores)
        yield made
    finally:
        new = [p for p in psutil.Process().children(recursive=True) if lives(p, before)]
        made.shutdown()  # type: ignore[no-untyped-call]
        for process in new:  # a node that has lost its head leaves some of its processes
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ends_s = time.monotonic() + WAIT_S
        while left := [p for p in psutil.Process().children(recursive=True) if lives(p, before)]:
            assert time.monotonic() < ends_s, left
            time.sleep(0.1)
        os.environ.pop("RAY_ADDRESS", None)


def lives(process: psutil.Process, before: set[psutil.Process]) -> bool:
    """Whether a process is new and runs; Ray does not wait for all of those that it has started."""
    try:
        return process not in before and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
