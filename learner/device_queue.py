"""Keeps a GPU busy between batches: the host queues the next one while the GPU computes.

At most one batch is queued behind the computed one, so that reports, published weights and returned
batches stay current.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.core.notes import note_logger
from penstock.device.choice import device_of
from penstock.device.interface import DeviceEvent
from penstock.learner.proven_state import ProvenState
from penstock.learner.sync.gradient_sync import GroupLostError
from penstock.profiling.ledger import Part, TimeLedger

logger = note_logger(__name__)

POLL_S = 1e-4  # causes no delay: the next batch is on the stream already


class DeviceQueue:
    """The batches on the current stream of a GPU; on a CPU nothing waits.

    ``meanwhile`` is called repeatedly while the host waits, and may raise `GroupLostError`.
    """

    def __init__(self, device: torch.device, ledger: TimeLedger) -> None:
        """``ledger`` is the time ledger of the calling thread."""
        self._ledger = ledger
        self._device = used = device_of(device)
        self._ends = [used.make_event() for _ in range(2)] if used.runs_behind else []
        self._proven: ProvenState | None = None
        self._timeout_s = math.inf
        self.meanwhile: Callable[[], None] = _nothing

    def launched(self) -> None:
        """Note that a whole batch is on the stream; wait until the batch before it was computed.

        Raises GroupLostError in a group where that takes longer than its timeout.
        """
        if not self._ends:
            return
        if self._proven is not None:
            self._proven.add()
        self._ends.reverse()
        mine, before = self._ends
        mine.record()
        self._wait_for(before, self._timeout_s)

    def drain(self, timeout_s: float = math.inf) -> None:
        """Wait until all that is queued was computed.

        To be called before what waits for the device itself, such as `Tensor.cpu`, which would wait
        without end for a reduction whose member has died. Raises GroupLostError, as `launched`.
        """
        if not self._ends:
            return
        end = self._device.make_event()
        end.record()
        self._wait_for(end, min(timeout_s, self._timeout_s))

    def join_group(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """From now on reductions are queued, too, which may never end: keep copies of the state
        ``tensors``, and wait for at most ``timeout_s``."""
        if self._ends:
            self._proven, self._timeout_s = ProvenState(tensors), timeout_s

    @contextmanager
    def leave_group(self, settle_s: float) -> Iterator[None]:
        """Surrounds the end of a group, which aborts its reductions.

        Those that are queued have ``settle_s`` to complete. The state is taken back to that before
        the first of those that have not.
        """
        proven, self._proven = self._proven, None
        if proven is None:
            yield
            return
        try:
            self.drain(settle_s)
        except GroupLostError as error:
            logger.info("reductions are aborted: %s", error)
        self._timeout_s = math.inf
        good = proven.newest()
        yield
        if batches := proven.restore(good):
            logger.info("the last %d batches are taken back, whose reductions were lost", batches)

    def _wait_for(self, event: DeviceEvent, timeout_s: float) -> None:
        began_s = time.monotonic()
        self._ledger.switch(Part.DEVICE)
        while not event.query():
            self.meanwhile()
            if time.monotonic() - began_s > timeout_s:
                raise GroupLostError(f"a batch was not computed within {timeout_s:g} s")
            time.sleep(POLL_S)


def _nothing() -> None:
    pass
