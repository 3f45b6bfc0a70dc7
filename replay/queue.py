"""A first-in, first-out queue of slots over a store: each is consumed once, oldest first.

What is too old, or in the way of fresher slots when the user asked for `overflow="drop_stale"`, is
dropped by the reader, which counts the reason.
"""

from __future__ import annotations

from typing import Literal

from penstock.replay.accounting import Accounting
from penstock.transport.shm.store import Slot, SlotStore


class SlotQueue:
    """Used by the one thread that owns ``store``."""

    def __init__(
        self,
        store: SlotStore,
        accounting: Accounting,
        *,
        max_policy_lag: int,
        overflow: Literal["block", "drop_stale"] = "block",
        deep: bool = False,
    ) -> None:
        """``deep``: slots that wait here do not count against what their writer may hold."""
        self._store = store
        self._accounting = accounting
        self._max_policy_lag = max_policy_lag
        self._overflow = overflow
        self._deep = deep
        self._arrived: list[Slot] = []

    def take(self, count: int, version: int) -> list[Slot]:
        """The ``count`` oldest slots that a learner at ``version`` may train on, or none yet."""
        self.collect()
        self._drop_old(version)
        if self._overflow == "drop_stale" and (self._store.starved or self._store.wanting):
            while len(self._arrived) > count:
                self._drop("stale", self._arrived.pop(0))
        if len(self._arrived) < count:
            self._store.unstick()
            return []
        taken, self._arrived = self._arrived[:count], self._arrived[count:]
        return taken

    def in_flight_steps(self) -> int:
        """Agent steps that arrived and were neither taken nor dropped."""
        self.collect()
        return sum(int(slot.header["steps"]) for slot in self._arrived)

    def release(self, slots: list[Slot]) -> None:
        """Give back slots that were taken, once they are copied."""
        for slot in slots:
            self._store.release(slot.index)

    def collect(self) -> None:
        """Take in what was filled since; the accounting hears of it here."""
        self._store.collect()
        ready = self._store.ready
        while ready:
            slot = self._store.slots[ready.popleft()]
            if self._deep:
                self._store.keep(slot.index)
            self._accounting.arrived(slot.header)
            self._arrived.append(slot)
        if self._deep:
            self._store.lend()

    def _drop_old(self, version: int) -> None:
        """Also behind fresh slots: a suspended actor's come after those of the others."""
        old = [slot for slot in self._arrived if self._lag(slot, version) > self._max_policy_lag]
        for slot in old:
            self._arrived.remove(slot)
            self._drop("lag", slot)

    def _lag(self, slot: Slot, version: int) -> int:
        return version - int(slot.header["version"])

    def _drop(self, reason: str, slot: Slot) -> None:
        self._accounting.dropped[reason] += int(slot.header["steps"])
        self._store.release(slot.index)
