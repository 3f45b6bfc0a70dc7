"""A `Link` within one process: the same store and lanes in private memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from penstock.core.interfaces import Welcome
from penstock.core.params import POLICY_ID, Float32, Stamp
from penstock.transport.shm.store import Slot, SlotStore
from penstock.transport.shm.weights_board import WeightsBoard, board_of


class InprocLink:
    """Joins a store and boards that live in this process, and belong to the caller."""

    fills_store = True

    def __init__(
        self, welcome: Welcome, store: SlotStore, boards: Sequence[WeightsBoard], want: int
    ) -> None:
        """Join with ``want`` slots at a time; ``boards[i]`` has the weights of policy i."""
        assert len(boards) == 1 + welcome.chairs
        self.welcome = welcome
        self._boards = boards
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
        return board_of(self._boards, policy_id).read(out, newer_than, policy_id)

    def close(self) -> None:
        """Does nothing: the store belongs to the caller."""
