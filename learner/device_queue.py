"""Keeps a GPU busy between batches: the host puts the next one on the stream while it computes.

At most one batch is queued behind the one that is computed, so that the host does not run away from
what it has to report, publish and give back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penstock.profiling.ledger import Part, TimeLedger

POLL_S = 1e-4  # nothing is late by it: the next batch is on the stream already


class DeviceQueue:
    """The batches on the current stream of a GPU; on a CPU nothing waits.

    ``meanwhile`` is called again and again while the host waits.
    """

    def __init__(self, device: torch.device, ledger: TimeLedger) -> None:
        """``ledger`` is that of the calling thread."""
        self._ledger = ledger
        self._ends = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []
        self.meanwhile: Callable[[], None] = _nothing

    def launched(self) -> None:
        """All of a batch is on the stream: wait until the batch before it has been computed."""
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
