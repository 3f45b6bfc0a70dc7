"""Contexts for the imports at the start of a process.

During them garbage collections are paused, which would find nothing and take a tenth of the time,
and an interrupt ends the process at once.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in the ``with`` block.

    At its end `gc.freeze` exempts all present objects of the process from later collections:
    modules stay until the process ends, and a full collection of torch's takes 0.1 s. Use it
    at the start of a process: present data in reference cycles would never be freed. If the
    collector is disabled already, as in a nested block, nothing happens.
    """
    if not gc.isenabled():
        yield
        return

    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process at once, with exit code 130, at a Ctrl-C in the ``with`` block.

    There is nothing to save yet, and a KeyboardInterrupt within an import may come out as another
    error: pydantic makes a SchemaError of it. Outside the main thread, or if another handler is
    set, nothing happens.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or handler is not signal.default_int_handler:
        yield
        return

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
