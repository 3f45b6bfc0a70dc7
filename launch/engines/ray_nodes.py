"""Nodes of a Ray cluster on which host agents do not start, such as those with another release.

After `MOST_FAILURES` failed starts no bundle is placed on a node. Ray gives a node that joins the
cluster again another id, so that it is tried anew.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

MOST_FAILURES = 3
NODE_LABEL = "ray.io/node-id"  # that Ray gives to every node


class RefusedNodes:
    """Counts failed starts by the id of the node; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()

    def failed(self, node: str, alive: Collection[str]) -> bool:
        """A host agent did not start on a node; returns whether that is given up now.

        Args:
            node: its id.
            alive: the ids of all nodes of the cluster; others are forgotten.
        """
        with self._lock:
            for gone in self._failures.keys() - set(alive):
                del self._failures[gone]
            if node not in alive:
                return False
            self._failures[node] += 1
            return self._failures[node] == MOST_FAILURES

    def selector(self) -> list[dict[str, str]] | None:
        """The label selector of a placement group of one bundle; None allows all nodes."""
        with self._lock:
            refused = sorted(n for n, count in self._failures.items() if count >= MOST_FAILURES)
        return [{NODE_LABEL: f"!in({','.join(refused)})"}] if refused else None
