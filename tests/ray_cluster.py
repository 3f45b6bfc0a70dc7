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
        made.shutdown()  # type: ignore[no-untyped-call]
        ends_s = time.monotonic() + WAIT_S
        while left := set(psutil.Process().children(recursive=True)) - before:
            assert time.monotonic() < ends_s, left
            time.sleep(0.1)
        os.environ.pop("RAY_ADDRESS", None)
