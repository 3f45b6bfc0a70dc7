"""Signals that end a run: who handles them during the run, and who after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SignalHandler = Callable[[int, FrameType | None], object]


class SignalsAfterRun:
    """Handler of signals after the end of a run, while its command prints the last lines.

    The first signal has no effect, since it was meant for the run. It restores the handlers that
    were set when this object was made, which must be in the main thread.
    """

    def __init__(self) -> None:
        self.signalled = False
        self._before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.signalled = True
        self.restore()

    def restore(self) -> None:
        """Restore the handlers from before, as a next run has to find them."""
        for signum, handler in self._before.items():
            if signal.getsignal(signum) is self:
                signal.signal(signum, handler)


@contextmanager
def handled(handler: SignalHandler, after: SignalHandler | None = None) -> Iterator[None]:
    """Handle the signals by ``handler`` while the ``with`` block runs; one that is ignored (nohup)
    stays ignored. ``after`` handles them from then on; with None the handlers from before do."""
    before = {s: signal.getsignal(s) for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier if after is None else after)
