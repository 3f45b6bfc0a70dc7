"""A `Link` within one process: the same store and lanes in private memory."""

from __future__ import annotations

from contextlib import AbstractContextManager

from penstock.core.interfaces import Welcome
from penstock.core.params import POLICY_ID, Float32, Stamp
from penstock.transport.shm.store import Slot, SlotStore
from penstock.transport.shm.weights_board import WeightsBoard


class InprocLink:
    """Joins a store and a board that live in this process, and belong to the caller."""

    fills_store = True

    def __init__(self, welcome: Welcome, store: SlotStore, board: WeightsBoard, want: int) -> None:
        self.welcome = welcome
        self._board = board
        self._writer = store.local_writer(store.open_lane(want))

    def slot(self, timeout_s: float) -> AbstractContextManager[Slot | None]:
        """Lend a slot, as `Link.slot`."""
        return self._writer.slot(timeout_s)

    def beat(self) -> None:
        """Does nothing: slots are taken back only after the confirmed death of a process."""

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = POLICY_ID
    ) -> Stamp | None:
        """Copy the newest weights, as `Link.read_weights`."""
        return self._board.read(out, newer_than, policy_id)

    def close(self) -> None:
        """Does nothing: the store belongs to the caller."""
