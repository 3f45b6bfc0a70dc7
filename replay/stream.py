"""The slot that one writer of this process fills, and the previous one."""

from __future__ import annotations

from penstock.replay.errors import ReplayError
from penstock.replay.table import NONE, Table


class SlotStream:
    """A sequence of steps. Row ``t`` of ``slot`` is the next to be written."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._lane, self._writer = table.open_lane()
        self._unroll, self._envs = table.spec.unroll, table.spec.envs
        self._last = (NONE, 0)  # the previous slot, and its generation
        self.slot = NONE
        self.t = 0
        self.start = 0  # physical row of (t, environment 0)
        self._closed = False

    @property
    def previous(self) -> int:
        """The previous slot; NONE if there is none or it was evicted."""
        slot, generation = self._last
        return slot if slot != NONE and self._table.generation[slot] == generation else NONE

    def begin(self) -> None:
        """Open a slot; the oldest of the table is evicted for it."""
        if self._closed:
            raise ReplayError("this stream is closed; take another from writer()")
        self._lent = self._table.acquire(self._writer)
        self.slot = self._lent.index
        self._table.open(self.slot, self.previous)
        self._lent.header["steps"] = 0
        self.t = 0
        self.start = self.slot * self._table.rows_per_slot

    def advance(self) -> None:
        """Move to the next row."""
        self.t += 1
        self.start += self._envs
        if self.t == self._unroll:
            self.end()

    def end(self) -> None:
        """Publish the slot with its rows."""
        slot, self.slot = self.slot, NONE
        self._last = (slot, int(self._table.generation[slot]))
        self._writer.publish(self._lent)
        self._table.collect()

    def close(self) -> None:
        """Publish the written rows and free the lane."""
        if self._closed:
            return
        self._closed = True
        if self.slot != NONE and self.t:
            self.end()
        self._table.close_lane(self._lane, self.slot)
        self.slot = NONE
