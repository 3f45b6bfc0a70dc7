"""Keeps a GPU busy between batches: the host queues the next one while the GPU computes.

At most one batch is queued behind the computed one, so that reports, published weights and returned
batches stay current.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penstock.device.choice import device_of
from penstock.profiling.ledger import Part, TimeLedger

POLL_S = 1e-4  # causes no delay: the next batch is on the stream already


class DeviceQueue:
    """The batches on the current stream of a GPU; on a CPU nothing waits.

    ``meanwhile`` is called repeatedly while the host waits.
    """

    def __init__(self, device: torch.device, ledger: TimeLedger) -> None:
        """``ledger`` is the time ledger of the calling thread."""
        self._ledger = ledger
        used = device_of(device)
        self._ends = [used.make_event() for _ in range(2)] if used.runs_behind else []
        self.meanwhile: Callable[[], None] = _nothing

    def launched(self) -> None:
        """Note that a whole batch is on the stream; wait until the batch before it was computed."""
        if not self._ends:
            return
        self._ends.reverse()
        mine, before = self._ends
        mine.record()
        self._ledger.switch(Part.DEVICE)
        while not before.query():
            self.meanwhile()
            time.sleep(POLL_S)


def _nothing() -> None:
    pass
