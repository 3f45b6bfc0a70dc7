"""Signals that end a run: who handles them during the run, and who after it."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HELD_UP_S = 1.0
"""A signal that the supervisor's loop has not read for so many seconds is never read."""
SignalHandler = Callable[[int, FrameType | None], object]


class SignalsAfterRun:
    """Handler of signals after the end of a run, while its command prints the last lines.

    The first signal has no effect, since it was meant for the run. It restores the handlers that
    were set when this object was made, which must be in the main thread.
    """

    def __init__(self) -> None:
        self.signalled = False
        self._original_handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.signalled = True
        self.restore()

    def restore(self) -> None:
        """Restore the original handlers, as a next run has to find them."""
        for signum, handler in self._original_handlers.items():
            if signal.getsignal(signum) is self:
                signal.signal(signum, handler)


@contextmanager
def handling_signals(
    handler: SignalHandler, handler_after: SignalHandler | None = None
) -> Iterator[None]:
    """Handle the signals of `SIGNALS` by ``handler`` while the ``with`` block runs.

    A signal that is ignored, as by nohup, stays ignored.

    Args:
        handler: as of `signal.signal`.
        handler_after: the handler after the block; None restores those from before it.
    """
    previous_handlers = {
        signum: signal.getsignal(signum)
        for signum in SIGNALS
        if signal.getsignal(signum) != signal.SIG_IGN
    }
    for signum in previous_handlers:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, previous in previous_handlers.items():
            signal.signal(signum, previous if handler_after is None else handler_after)


class HeldUpError(KeyboardInterrupt):
    """A signal arrived while the supervisor's loop was blocked for long.

    It is not an `Exception`, so that a callback does not catch it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class SignalInbox:
    """Signals as events that a loop reads, from a descriptor that they make readable.

    Only the main thread of a program may handle signals. In another thread the inbox stays empty,
    and the program's handlers are not changed.
    """

    def __init__(self) -> None:
        self._read_fd: int | None = None
        self._unread_since_s: float | None = None  # when the first unread signal came

    @contextmanager
    def open(self, handler_after: SignalHandler | None = None) -> Iterator[None]:
        """Receive signals while the ``with`` block runs.

        ``handler_after`` is as of `handling_signals`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._read_fd = read_fd
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            with handling_signals(self._on_signal, handler_after):
                yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            self._read_fd = None
            os.close(read_fd)
            os.close(write_fd)

    def filenos(self) -> list[int]:
        """The descriptor that is readable when a signal has arrived; none in another thread."""
        return [] if self._read_fd is None else [self._read_fd]

    def read(self) -> list[int]:
        """Returns the signals that have arrived since the last call. Call it when there are any."""
        assert self._read_fd is not None
        self._unread_since_s = None
        return [signum for signum in os.read(self._read_fd, 64) if signum in SIGNALS]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Interrupt the loop if it has not read the previous signal for `HELD_UP_S`, because a
        callback hangs."""
        now_s = time.monotonic()
        if self._unread_since_s is None:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s >= HELD_UP_S:
            # Only once, so that nothing disturbs the end of the run.
            self._unread_since_s = math.inf
            raise HeldUpError(signum)
