"""When a GPU computed what: events on its stream, read once they are known to have passed.

Nothing here waits for the device. Marks lie in the stream between the kernels; `settle` turns those
that have passed into spans of a ledger, whose clock is the host's: each by the time since the mark
before it, since times over hours would lose digits (they come as 32-bit floats).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.profiling.ledger import Part, TimeLedger

if TYPE_CHECKING:
    import torch


class DeviceClock:
    """Marks on the current stream of ``device``, a CUDA device; spans go to ``ledger``."""

    def __init__(self, device: torch.device, ledger: TimeLedger) -> None:
        """Synchronises once, to know what the host's clock said at the first mark."""
        import torch

        self._ledger = ledger
        self._marks: deque[tuple[Part, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._last = _event()
        self._last.record(torch.cuda.current_stream(device))
        self._last.synchronize()
        self._last_ns = float(time.perf_counter_ns())

    def mark(self, part: Part) -> None:
        """What is put on the stream from now on belongs to ``part``; WAIT: nothing is put there."""
        event = self._spare.pop() if self._spare else _event()
        event.record()
        self._marks.append((part, event))

    def settle(self) -> None:
        """Write down the marks that have passed."""
        while self._marks and self._marks[0][1].query():
            part, event = self._marks.popleft()
            self._last_ns += self._last.elapsed_time(event) * 1e6
            self._ledger.switch_at(part, int(self._last_ns))
            self._spare.append(self._last)
            self._last = event


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)
