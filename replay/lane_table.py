"""What a writer that is not the owner sees of a table: the columns, and a lane of the store.

It stands where `Table` stands in the owner, under the same `StepWriter`. Rows are committed into
the slot itself, which travels with what its writer knows of them: `alive` says which rows count,
the header's `rows` how many were written, so that the owner has nothing to guess.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError
from penstock.replay.placement import frame_rows, place_columns
from penstock.replay.table import NONE
from penstock.replay.writer import Lane
from penstock.transport.shm.store import Slot

Array = npt.NDArray[Any]


class LaneTable:
    """``timeout_s`` bounds the wait for a slot; set it before each step."""

    def __init__(self, lane: Lane) -> None:
        spec = lane.spec
        self.spec, self.timeout_s = spec, 0.0
        self.rows_per_slot = spec.unroll * spec.envs
        self.records, self.columns, self.frames, self.sides = place_columns(spec, lane.blocks)
        self.frame_rows = frame_rows(spec)
        names = self.records.dtype.names or ()
        if "alive" not in names:
            raise ReplayError(
                "this buffer takes whole slots only: slot(); its rows have no column alive"
            )
        self._lane = lane
        slots = len(lane.blocks["records"])
        self.generation: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.length: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self._alive = self.records["alive"]
        self._priority = self.records["priority"] if "priority" in names else None

    def open_lane(self) -> tuple[int, LaneTable]:
        """This lane, which is its own writer."""
        return 0, self

    def close_lane(self, lane: int, slot: int) -> None:
        """What was begun without a row is not published."""

    def acquire(self, writer: LaneTable) -> Slot:
        """A lent slot. Raises TimeoutError, ConnectionError."""
        return self._lane.acquire(self.timeout_s)

    def open(self, slot: int, follows: int = NONE) -> None:
        self.generation[slot] += 1
        self.length[slot] = 0
        rows = slice(slot * self.rows_per_slot, (slot + 1) * self.rows_per_slot)
        self._alive[rows] = 1
        if self._priority is not None:
            self._priority[rows] = np.nan

    def commit(
        self,
        slot: int,
        t: int,
        counts: npt.NDArray[np.bool_] | None = None,
        priorities: Array | None = None,
    ) -> None:
        """Row ``t`` is written. ``counts`` [E]: which may be sampled; None: all."""
        start = slot * self.rows_per_slot + t * self.spec.envs
        if counts is not None:
            self._alive[start : start + self.spec.envs] = counts
        if priorities is not None:
            if self._priority is None:
                raise ReplayError("this buffer samples without priorities; leave priority out")
            self._priority[start : start + self.spec.envs] = priorities
        self.length[slot] = t + 1

    def publish(self, slot: Slot) -> None:
        """Send a slot with the rows that it has."""
        rows = int(self.length[slot.index])
        slot.columns["alive"][rows:] = 0
        slot.header["rows"] = rows
        slot.header["published_s"] = time.monotonic()
        self._lane.publish(slot)

    def commit_all(self, slot: int, t: int, rows: slice) -> None:
        """Row ``t`` is written, and all of it may be sampled."""
        self.commit(slot, t)

    def refuse(self, count: int, reason: str) -> None:
        """The owner counts what it is sent."""

    def collect(self) -> None:
        """The owner's to do."""
