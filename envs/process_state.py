"""What the code of environments changes for its whole process; each side keeps its own state.

A module, a constructor, `reset` or `step` may set torch's defaults, numpy's handling of errors,
warnings that raise, or the current folder. The rest of the process relies on its own values, and
the environment on those that it has set. So its code runs inside `users_side`, with the values that
it left there; outside they are ours. Signals end a role, so their handlers are ours on both sides.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from penstock.core.processes import SHIM_DIED

# These tell a role to stop, or that its shim has died.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, SHIM_DIED)


class TorchDefaults(NamedTuple):
    """Settings of torch; those that torch begins with, if it has not been imported."""

    dtype: str = "float32"
    device: str = "cpu"
    computes_gradients: bool = True

    @classmethod
    def read(cls) -> TorchDefaults:
        """Returns the present settings, without importing torch."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls()
        return cls(
            dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            device=str(torch.get_default_device()),
            computes_gradients=torch.is_grad_enabled(),
        )

    def write(self) -> None:
        """Make these the settings of torch, which has been imported."""
        torch = sys.modules["torch"]
        torch.set_default_dtype(getattr(torch, self.dtype))
        torch.set_default_device(None if self.device == "cpu" else self.device)
        torch.set_grad_enabled(self.computes_gradients)


class ProcessState(NamedTuple):
    """The state of the process that each side has of its own."""

    folder: str | None
    """The current folder; None if the user has removed it."""
    numpy_errors: dict[str, Any]
    """How numpy handles errors, of `numpy.geterr`."""
    raising: list[Any]
    """The filters of warnings that raise; others only print."""
    torch: TorchDefaults

    @classmethod
    def read(cls) -> ProcessState:
        """Returns the present state."""
        folder: str | None = None
        with suppress(FileNotFoundError):
            folder = os.getcwd()

        return cls(
            folder=folder,
            numpy_errors={**np.geterr()},
            raising=[each for each in warnings.filters if each[0] == "error"],
            torch=TorchDefaults.read(),
        )

    def write(self) -> None:
        """Make this the state of the process."""
        present = self.read()

        if self.folder is not None and self.folder != present.folder:
            os.chdir(self.folder)
        np.seterr(**self.numpy_errors)

        if self.raising != present.raising:
            others = [each for each in warnings.filters if each[0] != "error"]
            warnings.filters = [*self.raising, *others]

        if self.torch != present.torch:
            self.torch.write()


class _Sides:
    """Which side of the process runs, and the state of the other one."""

    def __init__(self) -> None:
        self.users: ProcessState | None = None
        """The state of the user's side, where that differs from ours."""
        self.entered = False


_sides = _Sides()


def sides_differ() -> bool:
    """Returns whether the user's code has changed the process's state, and needs `users_side`."""
    return _sides.users is not None


@contextmanager
def users_side() -> Iterator[None]:
    """Run the user's code in the ``with`` block, with the state that it left the last time.

    After the block the process has our state again. A block within another one changes nothing.
    """
    if _sides.entered:
        yield
        return

    our_state = ProcessState.read()
    if _sides.users is not None:
        _sides.users.write()

    _sides.entered = True
    try:
        with _our_signals():
            yield
    finally:
        _sides.entered = False
        users_state = ProcessState.read()
        _sides.users = users_state if users_state != our_state else None
        our_state.write()


@contextmanager
def _our_signals() -> Iterator[None]:
    """Restore the handlers, the mask and the wake-up descriptor of signals after the block."""
    # Only the main thread can set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    # An empty set blocks nothing, and a call of `set_wakeup_fd` returns the descriptor before it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)

    try:
        yield
    finally:
        for signum, handler in handlers.items():
            # None stands for a handler of C, which Python cannot set.
            if handler is not None:
                signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
