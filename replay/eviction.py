"""Eviction of rows that are too old to learn from: whole slots, each with its reason.

"ttl": published longer ago than ``ttl_s`` seconds. "lag": played by a policy more than
``max_policy_lag`` versions behind. A slot that is still being written stays. The age of a slot
counts from its publication; its version is that of its first step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from penstock.replay.errors import ReplayError
from penstock.replay.table import Table


@dataclass(frozen=True)
class EvictionPolicy:
    """Limits on the age of rows; None: no limit.

    Args:
        ttl_s: seconds since publication.
        max_policy_lag: policy versions behind the acting one.
    """

    ttl_s: float | None = None
    max_policy_lag: int | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ReplayError(f"ttl_s {self.ttl_s} must be above 0 seconds; None keeps all")
        if self.max_policy_lag is not None and self.max_policy_lag < 0:
            raise ReplayError(
                f"max_policy_lag {self.max_policy_lag} must be at least 0 versions; None keeps all"
            )


class Evictor:
    """Applies an `EvictionPolicy` to a table, under the buffer's lock."""

    def __init__(self, cuts: EvictionPolicy, table: Table) -> None:
        self._cuts = cuts
        self._table = table
        self._headers = table.store.geometry.headers(table.store.arena)
        self._seen = (0, -1, 0)  # state at the last check of the lag

    def cut(self) -> int:
        """Evict slots that are too old now; returns how many."""
        cuts, before = self._cuts, self._table.closed
        if cuts.ttl_s is not None:
            self._cut_expired(time.monotonic() - cuts.ttl_s)
        if cuts.max_policy_lag is not None:
            self._cut_lagging(self._table.version - cuts.max_policy_lag)
        return before - self._table.closed

    def _cut_expired(self, oldest_s: float) -> None:
        """Slots are in the order of their publication, so only the oldest need a look."""
        table = self._table
        while table.closed and self._headers["published_s"][table.order[0]] < oldest_s:
            table.evict_oldest("ttl")

    def _cut_lagging(self, oldest: int) -> None:
        """Searches behind fresh slots too: a slow writer's slots are published after those of
        others.
        """
        table = self._table
        if not table.closed or (now := self._newest(oldest)) == self._seen:
            return
        kept = np.fromiter(table.order, np.int64, len(table.order))[: table.closed]
        for slot in kept[self._headers["version"][kept] < np.uint64(max(0, oldest))].tolist():
            table.order.remove(slot)
            table.order.appendleft(slot)
            table.evict_oldest("lag")
        self._seen = now

    def _newest(self, oldest: int) -> tuple[int, int, int]:
        """A value that changes whenever a slot may have become too old."""
        slot = self._table.order[self._table.closed - 1]
        return oldest, slot, int(self._table.generation[slot])
